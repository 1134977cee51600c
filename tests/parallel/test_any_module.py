"""`parallelize`: modules that are not ours, in every layout that does not look inside, against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import any_models
import pytest
import torch
import torch.distributed as dist
from any_models import CLIP, LR, STEPS, batch, build, held_out, loss_sum
from foreign_models import MODULES
from torch import Tensor, nn

import shardwise
from shardwise import Plan, UserError, parallelize
from shardwise.parallel.any_module.split_module import SplitModule
from shardwise.parallel.collect import collect

LAYOUTS = [
    "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=2 zero=3 replicate=2",
    "dp=4", "dp=4 zero=3", "dp=4 zero=1 replicate=2", "dp=4 zero=2 replicate=2", "dp=4 zero=3 replicate=2",
]  # fmt: skip
ROWS = [(name, layout) for name in ("tied", "neox") for layout in LAYOUTS] + [
    ("untied", "dp=2"),
    ("untied", "dp=4 zero=3"),
]
truth = cache(any_models.train_plain)


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: Any) -> None:
    ranks.preload(*MODULES)


def train(name: str, layout: str, dtype: torch.dtype, micro: int, clip: float | None = CLIP) -> dict[str, Any]:
    """The same training through `parallelize`. Rank 0 begins with the right weights, the others take them from it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    split = parallelize(build(name, dtype, seed=rank), layout, blocks=any_models.MODELS[name][1])
    optimizer = torch.optim.AdamW([p for p in split.parameters() if p.requires_grad], lr=LR)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        done = split.gradients(own_rows(split, batch(step), micro), loss_sum, clip=clip)
        found["losses"].append(done.loss)
        found["norms"].append(done.norm)
        if step == 0:
            found["gradients"] = collect(split, lambda s: {} if s.gradient is None else {s.name: s.gradient.clone()})
        held_out(split.module)  # a look in between leaves parameters gathered, which the update makes old
        optimizer.step()
    found["eval"] = split.evaluate(own_rows(split, batch(99), 3), loss_sum)
    found["state"] = split.state_dict()
    found["held"] = sum(p.numel() for p in split.parameters())
    return found


def own_rows(split: SplitModule, rows: Tensor, micro: int) -> list[Tensor]:
    """This rank's rows in micro-batches. With four ranks the last have fewer of them."""
    size = -(-rows.shape[1] // split.world)
    size += split.world == 4  # three, three, two and none: the last one repeats the last row, without targets
    mine = rows[:, split.rank * size : (split.rank + 1) * size]
    if not mine.shape[1]:
        mine = rows[:, -1:].clone()
        mine[1] = any_models.IGNORE
    return list(mine.split(micro, 1))


def check(found: list[dict[str, Any]], name: str, dtype: torch.dtype, limit: float) -> None:
    right = truth(name, dtype)
    for one in found:
        for key in ("losses", "norms", "eval"):
            assert one[key] == pytest.approx(right[key], rel=limit, abs=limit), key
    first = found[0]
    scale = min(1.0, CLIP / (right["norms"][0] + 1e-6))
    assert first["gradients"].keys() == right["gradients"].keys()
    for tensor, gradient in right["gradients"].items():
        largest = float(gradient.abs().max())
        assert float((first["gradients"][tensor] - gradient * scale).abs().max()) <= limit * max(largest, 1e-3), tensor
    assert first["state"].keys() == right["state"].keys()
    for tensor, value in right["state"].items():
        # In fp32 Adam's first steps divide noise by noise where a gradient is nearly zero.
        assert torch.allclose(first["state"][tensor], value, rtol=0, atol=limit if dtype == torch.float64 else 1e-4), (
            tensor
        )
    assert all(one["state"] == {} for one in found[1:])


@pytest.mark.parametrize(("name", "layout"), ROWS)
def test_same_as_a_plain_loop_in_fp64(layout: str, name: str, ranks: Any) -> None:
    world = int(layout[3])
    found = ranks.run(train, world, name, layout, torch.float64, 1)
    check(found, name, torch.float64, 1e-9)
    total = sum(value.numel() for value in build(name, torch.float64).parameters())
    if "zero" in layout:
        shards = world // (2 if "replicate" in layout else 1)
        assert sum(one["held"] for one in found) == total * world // shards
        most = sum(-(-p.shape[0] // shards) * p[0].numel() for p in build(name, torch.float64).parameters())
        assert max(one["held"] for one in found) == most, "nobody holds more than its rows"
    else:
        assert [one["held"] for one in found] == [total] * world


@pytest.mark.parametrize("name", ["tied", "neox"])
@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 zero=3 replicate=2"])
def test_same_as_a_plain_loop_in_fp32(layout: str, name: str, ranks: Any) -> None:
    check(ranks.run(train, int(layout[3]), name, layout, torch.float32, 2), name, torch.float32, 1e-5)


@pytest.mark.parametrize("layout", ["dp=1", "zero=3"])
def test_one_process_without_a_group(layout: str, ranks: Any) -> None:
    check(ranks.run(train_alone, 1, layout), "tied", torch.float64, 1e-9)


def train_alone(layout: str) -> dict[str, Any]:
    dist.destroy_process_group()
    return train("tied", layout, torch.float64, 3)


def traffic(layout: str) -> tuple[int, int, int]:
    split = parallelize(build("tied", torch.float64), layout, blocks="body.blocks")
    split.gradients(own_rows(split, batch(0), 2), loss_sum)
    return split.traffic.gathers, split.traffic.reductions, sum(p.numel() for p in split.parameters())


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"),
    [(1, 4, 4), (2, 4, 2 * 4), (3, 2 * (4 + 2), 2 * 4)],
)
def test_what_is_sent(zero: int, gathers: int, reductions: int, ranks: Any) -> None:
    """Three blocks and the rest are four groups, two micro-batches. ZeRO 3 gathers for forward and again for
    backward, but for the last block and the rest, which stay."""
    found = ranks.run(traffic, 2, f"dp=2 zero={zero}")
    assert [one[:2] for one in found] == [(gathers, reductions)] * 2
    assert sum(one[2] for one in found) == sum(p.numel() for p in build("tied", torch.float64).parameters())


def test_clipping_is_at_work_and_can_be_off(ranks: Any) -> None:
    right = truth("tied", torch.float64)
    assert min(right["norms"]) > CLIP
    free = truth("tied", torch.float64, None)
    found = ranks.run(train, 2, "tied", "dp=2 zero=2", torch.float64, 2, clip=None)
    assert found[0]["norms"] == pytest.approx(free["norms"], rel=1e-9) != right["norms"]


def mixed(name: str, layout: str) -> tuple[float, float, dict[str, Tensor]]:
    split = parallelize(build(name, torch.float32), layout, blocks=any_models.MODELS[name][1])
    done = split.gradients(own_rows(split, batch(0), 8), loss_sum)
    return done.loss, done.norm, {name: value.dtype for name, value in split.state_dict().items()}  # type: ignore[misc]


def mixed_plain(name: str) -> tuple[float, float]:
    """By definition: a forward pass over bf16 copies of fp32 weights, whose gradients arrive in fp32."""
    model = build(name, torch.float32)
    copies = {name: p.bfloat16() for name, p in model.named_parameters()}
    total, count = loss_sum(lambda tokens: torch.func.functional_call(model, copies, (tokens,)), batch(0))
    (total / count).backward()
    return float(total / count), float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def test_bf16_computes_in_copies(ranks: Any) -> None:
    loss, norm = ranks.run(mixed_plain, 1, "neox")[0]  # on a rank: pytest's own process may have no bf16 units
    found = [ranks.run(mixed, 2, "neox", f"dp=2 {zero} bf16")[0] for zero in ("", "zero=1", "zero=3")]
    for one in found:
        assert one[0] == pytest.approx(loss, abs=1e-5)
        assert one[1] == pytest.approx(norm, rel=1e-2)
        assert set(one[2].values()) == {torch.float32}
    assert abs(found[0][0] - truth("neox", torch.float32)["losses"][0]) > 1e-6, "it is not fp32"


# Whole states --------------------------------------------------------------------------------------------------------


def restored(layout: str) -> tuple[float, float, bool]:
    """Another module takes the state of the first, on rank 0 only; others hand in nothing."""
    split = parallelize(build("tied", torch.float64), layout, blocks="body.blocks")
    before = split.evaluate(own_rows(split, batch(99), 2), loss_sum)
    state = split.state_dict()
    other = parallelize(build("tied", torch.float64, seed=5), layout, blocks="body.blocks")
    assert other.evaluate(own_rows(other, batch(99), 2), loss_sum) != before
    other.load_state_dict(state)
    after = other.evaluate(own_rows(other, batch(99), 2), loss_sum)
    try:
        other.load_state_dict({**state, "more": torch.zeros(1)})
    except UserError:
        return before, after, True
    return before, after, False


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=3"])
def test_a_state_goes_out_and_in(layout: str, ranks: Any) -> None:
    right = held_out(build("tied", torch.float64))
    for before, after, refused in ranks.run(restored, 2, layout):
        assert (before, after, refused) == (pytest.approx(right), before, True)


def moved(first: str, second: str) -> dict[str, Tensor]:
    """All steps but the last in one layout, the last one by another module in another layout."""
    state: dict[str, Tensor] = {}
    averages: dict[str, Tensor] = {}
    for layout, steps in ((first, range(STEPS - 1)), (second, range(STEPS - 1, STEPS))):
        split = parallelize(build("tied", torch.float64, seed=steps.start), layout, blocks="body.blocks")
        optimizer = torch.optim.AdamW([p for p in split.parameters() if p.requires_grad], lr=LR)
        if steps.start:
            split.load_state_dict(state)
            split.load_optimizer_state(optimizer, averages)
        for step in steps:
            split.gradients(own_rows(split, batch(step), 2), loss_sum, clip=CLIP)
            optimizer.step()
        state, averages = split.state_dict(), split.optimizer_state(optimizer)
    return state


@pytest.mark.parametrize(("first", "second"), [("dp=2", "dp=2 zero=3"), ("dp=2 zero=2", "dp=2")])
def test_training_goes_on_in_another_layout(first: str, second: str, ranks: Any) -> None:
    state = ranks.run(moved, 2, first, second)[0]
    for name, value in truth("tied", torch.float64)["state"].items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-9), name


# What cannot work ----------------------------------------------------------------------------------------------------


def test_no_torch_before_it_is_used() -> None:
    assert "parallelize" in shardwise.__all__ and shardwise.parallelize is parallelize


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("model.layers", ["'body.blocks' (3)", "blocks='body.blocks'"]),
        ("embed", ["'body.blocks' (3)"]),
        ("body", ["'body' (1)"]),
    ],
)  # fmt: skip
def test_blocks_that_are_not_there(blocks: str, words: list[str]) -> None:
    module = any_models.Handmade()
    if blocks == "body":
        module.body = nn.ModuleDict({"blocks": nn.ModuleList([])})
        blocks = "body.blocks"
        words = ["'body' (1)"]
    with pytest.raises(UserError) as error:
        parallelize(module, "dp=1", blocks=blocks)
    assert all(word in str(error.value) for word in words), error.value


def test_a_module_without_lists() -> None:
    with pytest.raises(UserError, match="no list of blocks") as error:
        parallelize(nn.Linear(2, 2), "dp=1", blocks="layers")
    assert "nn.ModuleList" in error.value.fix


@pytest.mark.parametrize("layout", ["dp=2 tp=2", "pp=2", "cp=2", "ep=2", "tp=2 sp"])
def test_axes_that_cut_inside_are_refused(layout: str) -> None:
    with pytest.raises(UserError, match="not possible for a module that is not ours") as error:
        parallelize(any_models.Handmade(), layout, blocks="body.blocks")
    assert "nobody here knows" in error.value.why and "zero=3" in error.value.fix


def test_a_plan_that_cuts_inside_is_refused() -> None:
    plan = Plan(
        device="cpu",
        precision="fp32",
        seq_len=8,
        global_batch=2,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        tp=2,
    )
    with pytest.raises(UserError, match="tp=2"):
        parallelize(any_models.Handmade(), plan, blocks="body.blocks")


@pytest.mark.parametrize("plan", ["dp=2 zero=3", Plan.from_layout("dp=4 zero=3 replicate=2")])
def test_another_number_of_processes_is_refused(plan: Plan | str) -> None:
    with pytest.raises(UserError, match="this job has 1 process") as error:
        parallelize(any_models.Handmade(), plan, blocks="body.blocks")
    assert "torchrun --nproc-per-node=" in error.value.fix


def test_modules_on_meta_are_refused() -> None:
    with torch.device("meta"):
        module = any_models.Handmade()
    with pytest.raises(UserError, match="has no weights"):
        parallelize(module, "dp=1", blocks="body.blocks")


def test_another_number_format_is_refused() -> None:
    with pytest.raises(UserError, match="weights are float64, bf16 keeps float32"):
        parallelize(any_models.Handmade().double(), "dp=1 bf16", blocks="body.blocks")


def test_weights_tied_across_blocks_are_refused() -> None:
    module = any_models.Handmade()
    module.body["blocks"][1].mix.weight = module.body["blocks"][0].mix.weight
    with pytest.raises(UserError, match="tied to a weight of another block"):
        parallelize(module, "zero=3", blocks="body.blocks")


def test_single_numbers_are_refused_where_rows_are_held() -> None:
    module = any_models.Handmade()
    module.body["blocks"][0].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="without a dimension"):
        parallelize(module, "zero=1", blocks="body.blocks")


def test_a_loss_without_its_count_is_refused() -> None:
    split = parallelize(any_models.Handmade(), "dp=1", blocks="body.blocks")
    with pytest.raises(UserError, match="not \\(sum, count\\)"):
        split.gradients([batch(0)], lambda model, rows: loss_sum(model, rows)[0])  # type: ignore[arg-type,return-value]


def misused(kind: str) -> str:
    module = build("tied", torch.float64)
    if kind == "unused":
        module.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    split = parallelize(module, "dp=2", blocks="body.blocks")
    model = module if kind == "around" else None
    rows = [] if kind == "nothing" and split.rank else [batch(0)]
    try:
        split.gradients(rows, lambda given, rows: loss_sum(model or given, rows))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("around", "must call `model`"),
        ("unused", "without one are extra"),
        ("nothing", "a rank has no micro-batch in this step"),
    ],
)
def test_misuse_is_noticed(kind: str, words: str, ranks: Any) -> None:
    for said in ranks.run(misused, 2, kind):
        assert words in said


def test_plans_from_layouts() -> None:
    plan = Plan.from_layout("dp=4 zero=3 replicate=2 bf16")
    assert (plan.world, plan.shard, plan.precision, plan.layout) == (4, 2, "bf16", "dp=4 zero=3 replicate=2")
    assert Plan.from_layout("zero=1", world=3).dp == 3
    for layout in ("tp=2", "dp=3 zero=1 replicate=2", "dp=4 replicate=2", "zero=7"):
        with pytest.raises(UserError):
            Plan.from_layout(layout)
