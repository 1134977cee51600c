"""The account of a step: it changes no bit, it agrees with the formulas of every ZeRO stage, and its curve is one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from accounted import Seen, three_steps, watch_layouts

from shardwise.kernels.compiled import apply_compile
from shardwise.memory.account import Account, OwnedTensor
from shardwise.memory.points import CATEGORIES, OverLimit, Point, thinned
from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.plan.prediction.memory import predict_memory
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.run.clock import Clock
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides(
    {"num_layers": 4, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 64}
)
TRIAL = Trial(global_batch=4, micro_batch=1, seq_len=16, precision="fp32")
STAGES: list[dict[str, Any]] = [{"dp": 2, "zero": zero} for zero in range(4)]
OTHERS: list[dict[str, Any]] = [
    {"tp": 2, "sequence": True},
    {"pp": 2, "split": (2, 2)},
    {"pp": 2, "split": (1, 1, 1, 1), "schedule": "zbv", "virtual_stages": 2},
]
# Its watcher once read gradients from the disk in the midst of an update, into memory that was in use.
ON_DISK: dict[str, Any] = {
    "dp": 2,
    "zero": 3,
    "offload": "all",
    "offload_to": "nvme",
    "offload_dir": ".",
    "offload_buffer": 2**16,
}
LAYOUTS = [*STAGES, *OTHERS, ON_DISK]


@pytest.fixture(scope="module")
def seen(ranks: Any) -> list[list[list[Seen]]]:
    """By rank, layout, and whether it was watched."""
    return ranks.run(watch_layouts, 2, SPEC, TRIAL, LAYOUTS, timeout=120)


def of(seen: Any, layout: dict[str, Any]) -> list[Seen]:
    """What both ranks saw."""
    return [rank[LAYOUTS.index(layout)][1] for rank in seen]


def test_watching_changes_no_bit(seen: Any) -> None:
    for rank in seen:
        for plain, watched in rank:
            assert (plain.losses, plain.parameters) == (watched.losses, watched.parameters)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_stage_holds_what_its_formula_says(zero: int, seen: Any) -> None:
    """P parameters in fp32 on two ranks, two micro-batches. Full gradients accumulate at stage 1, and at stage 0
    twice: where they were made, and in the buckets they leave in."""
    size, shards = SPEC.num_parameters, 2 if zero else 1
    for found in of(seen, STAGES[zero]):
        full = found.fullest
        assert full["parameters"] == pytest.approx(4 * size / shards, rel=0.02)
        assert full["optimizer"] == pytest.approx(8 * size / shards, rel=0.02)
        gathered = {0: 0, 1: 4 * size, 2: 4 * size, 3: 2 * 4 * found.largest_block}[zero]
        assert full["buffers"] == pytest.approx(gathered, rel=0.02)
        kept = {0: 8 * size, 1: 4 * size, 2: 2 * size, 3: 2 * size}[zero]
        passing = 4 * found.largest_block if zero >= 2 else 0  # one block's gradients, until they are reduced
        assert kept * 0.98 <= full["gradients"] <= (kept + passing) * 1.02


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_other_layouts_hold_what_is_predicted(layout: dict[str, Any], seen: Any) -> None:
    predicted = predict_memory(SPEC, trial_plan(TRIAL, **layout), "adamw")
    fullest = max(of(seen, layout), key=lambda found: sum(found.peak.values()))
    for category, part in (("parameters", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer")):
        assert fullest.fullest[category] == pytest.approx(predicted[part], rel=0.06 if "pp" in layout else 0.02)
    activations = max(found.fullest["activations"] for found in of(seen, layout))
    assert activations == pytest.approx(predicted["activations"], rel=0.15)


def test_a_step_ends_where_it_began(seen: Any) -> None:
    """All states are there before the second step. DDP's new buckets, 4 P, take the place of its first ones."""
    for layout in (*STAGES, *OTHERS):
        for found in of(seen, layout):
            assert found.last == pytest.approx(found.first, rel=0.001, abs=2048), layout


def test_the_peak_is_the_largest_point(seen: Any) -> None:
    for layout in LAYOUTS:
        for found in of(seen, layout):
            totals = [sum(held.values()) for _, held in found.points]
            assert max(totals) == sum(found.peak.values())
            assert [at for at, _ in found.points] == sorted(at for at, _ in found.points)
            assert min(size for _, held in found.points for size in held.values()) >= 0


def test_copies_of_weights_have_an_owner(ranks: Any) -> None:
    """fp32 weights and bf16 copies are parameters; four micro-batches add up in fp32, beside one block's own
    gradients at the most."""
    [[[plain, watched]]] = ranks.run(watch_layouts, 1, SPEC, replace(TRIAL, precision="bf16"), [{"copies": True}])
    assert (plain.losses, plain.parameters) == (watched.losses, watched.parameters)
    size = SPEC.num_parameters
    assert watched.fullest["parameters"] == watched.last["parameters"] == 6 * size
    assert watched.fullest["optimizer"] == pytest.approx(8 * size, rel=0.001)
    assert 4 * size <= watched.fullest["gradients"] <= 4 * size + 2 * watched.largest_block
    assert watched.fullest["buffers"] < 0.001 * size and watched.last == pytest.approx(watched.first, abs=2048)


def points(*totals: int) -> list[Point]:
    return [Point(float(at), (total, *(0,) * (len(CATEGORIES) - 1)), None) for at, total in enumerate(totals)]


def test_a_thinned_curve_keeps_its_ends_and_its_peak() -> None:
    curve = points(*range(500), *range(900, 0, -1))
    few = thinned(curve, 300)
    assert len(few) <= 300 and (few[0], few[-1]) == (curve[0], curve[-1])
    assert max(point.total for point in few) == 900
    assert thinned(curve[:10], 300) == curve[:10]


def test_views_count_once_and_what_is_gone_is_gone() -> None:
    account = Account(torch.device("cpu"), lambda everything: (), Clock(torch.device("cpu")))
    with account:
        whole = torch.zeros(1000)
        part = whole[10:20].view(2, 5)
        assert account.held["temporary"] == 4000
        del whole
        beside = torch.zeros(1)
        assert account.held["temporary"] == 4000 + 4  # the part keeps all of it
        part.untyped_storage().resize_(400)
        assert account.held["temporary"] == 400 + 4
        del part
        beside.add_(1)
        assert account.held["temporary"] == 4


def test_the_limit_is_kept_by_counting() -> None:
    account = Account(torch.device("cpu"), lambda everything: (), Clock(torch.device("cpu")), limit=5000)
    with account:
        torch.zeros(1200)
    kept = []
    with pytest.raises(OverLimit) as caught, account:
        kept.append(torch.zeros(1000))
        kept.append(torch.ones(30, 10))
    assert (caught.value.needed, caught.value.limit, len(kept)) == (5200, 5000, 1)
    assert caught.value.largest[0] == ("temporary [1000]", 4000)


LARGER = {"hidden": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "ffn": 2816, "vocab": 4096}


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_account_sees_what_the_allocator_sees(precision: str) -> None:
    """Backward runs in a thread of its own there. Attention by definition: fused kernels take workspaces that no
    tensor shows. 5 %: so does cuBLAS, and the allocator rounds up. Beside the sums in fp32, FSDP2 has one group's
    gradients in bf16."""
    spec = SPEC.with_overrides(LARGER)
    trial = Trial(global_batch=4, micro_batch=2, seq_len=512, precision=precision, attention="math")
    plain = three_steps(spec, trial, {}, False, "cuda")
    gc.collect()  # FSDP2's modules know each other: what they held would go some time during the next run
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    watched = three_steps(spec, trial, {}, True, "cuda")
    assert plain.losses[0] == watched.losses[0] and plain.losses == pytest.approx(watched.losses, rel=1e-3)
    one_group = 2 * spec.num_parameters // spec.num_layers if precision == "bf16" else 0
    sums = 4 * spec.num_parameters
    assert 0.98 * sums <= watched.fullest["gradients"] <= 1.02 * sums + one_group
    assert sum(watched.peak.values()) == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.05)


def test_what_compiled_blocks_keep_is_counted_and_nothing_compiles_anew() -> None:
    torch._dynamo.reset()
    model, device = Decoder(SPEC), torch.device("cpu")
    initialize(model, 0)
    apply_compile(model.layers.values(), "trace", selective=False, whole=True)
    owners = [OwnedTensor("parameters", name, parameter) for name, parameter in model.named_parameters()]
    account = Account(device, lambda _everything: owners, Clock(device))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with account.of_saved():
        losses = model(tokens, tokens)
    assert (
        account.peak.by_category()["activations"] == account.held["activations"] == saved_bytes(model, tokens, tokens)
    )
    losses.cross_entropy.backward()
    account.label()
    assert account.held["activations"] == tokens.nbytes  # which the embedding kept, and which are still here
    with torch.compiler.set_stance("fail_on_recompile"):
        model(tokens, tokens)
