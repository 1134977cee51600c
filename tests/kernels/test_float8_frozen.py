"""fp8 beside adapters: frozen weights are quantized once, only what flows through them at every step. CUDA:
tests/adapters/test_adapters_cuda.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.dropout import apply_dropout
from shardwise.adapters.lora import AdaptedLinear, adapt, decoder_adapters
from shardwise.checkpoint import store
from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.table import known_cluster
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.kernels.float8 import apply_float8, apply_float8_head, why_not
from shardwise.kernels.float8_matmul import float8_linear, frozen_linear, quantize_weight
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.parallel.any_module.parallelize import parallelize
from shardwise.parallel.engine import Engine
from shardwise.plan.answer.question import ask
from shardwise.plan.prediction.predict import predict
from shardwise.plan.resolve.resolve import resolve
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import compare
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import kept_bytes
from shardwise.run.saving import Saver
from shardwise.run.state import held_slices, restore_state
from shardwise.run.step import run_step
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

SHAPE = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny").with_overrides(SHAPE)
LORA = AdapterConfig(kind="lora", rank=4, targets=("q", "v", "down"), dropout=0.1)  # k, o, gate and up are only frozen
RECIPES = ("rowwise", "tensorwise")
CPU = torch.device("cpu")


# The matmul --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_quantized_before_gives_the_same_matmul(recipe: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(48, 32, generator=draw).bfloat16()
    results = []
    for matmul, factor in (
        (float8_linear(recipe), weight_OI),
        (frozen_linear(recipe), quantize_weight(weight_OI, recipe)),
    ):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = matmul(x, factor)
        (y.float() ** 3).sum().backward()
        results.append((y.detach(), x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_bytes_per_weight_and_nothing_of_x_is_kept(recipe: str) -> None:
    quantized, kept = quantize_weight(torch.randn(48, 32), recipe), []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        frozen_linear(recipe)(torch.randn(16, 32, requires_grad=True), quantized)
    assert sum(part.nbytes for part in quantized) == 2 * 48 * 32 + 4 * ((48 + 32) if recipe == "rowwise" else 2)
    assert {part.data_ptr() for part in kept} == {quantized.columns_IO.data_ptr(), quantized.columns_scale.data_ptr()}


def test_a_frozen_matrix_gains_sooner() -> None:
    assert why_not(1024, 4096, "rowwise", together=1024) == "1024 x 4096 is too small to gain"
    assert why_not(1024, 4096, "rowwise", together=1024, is_frozen=True) is None
    assert why_not(512, 4096, "rowwise", together=512, is_frozen=True) == "512 x 4096 is too small to gain"


# A model against its definition -------------------------------------------------------------------------------------


def by_definition(x: Tensor, kind: torch.dtype, recipe: str) -> Tensor:
    """The values that fp8 leaves, written another way: in fp64, divided by the scale."""
    largest = x.double().abs().amax(-1, keepdim=True) if recipe == "rowwise" else x.double().abs().amax()
    scale = largest.clamp(min=1e-30) / torch.finfo(kind).max
    if recipe == "rowwise":
        scale = 2.0 ** scale.log2().ceil()  # a power of two that the largest number bears
    return (x.double() / scale).to(kind).double() * scale


class Defined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_OI: Tensor, columns_OI: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(columns_OI)
        ctx.recipe = recipe
        return (
            (by_definition(x.flatten(0, -2), torch.float8_e4m3fn, recipe) @ rows_OI.t()).view(*x.shape[:-1], -1).to(x)
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        kind = torch.float8_e4m3fn if ctx.recipe == "rowwise" else torch.float8_e5m2
        return (
            (by_definition(g.flatten(0, -2), kind, ctx.recipe) @ ctx.saved_tensors[0]).view(*g.shape[:-1], -1).to(g),
            None,
            None,
            None,
        )


class DefinedLinear(nn.Module):
    """The base of an adapted layer or a plain one, its weight quantized before: along rows for forward, along columns
    for backward."""

    def __init__(self, layer: Any, recipe: str):
        super().__init__()
        self.layer, self.recipe, weight_OI = layer, recipe, layer.weight.detach()
        self.rows_OI = by_definition(weight_OI, torch.float8_e4m3fn, recipe)
        self.columns_OI = by_definition(weight_OI.t(), torch.float8_e4m3fn, recipe).t()

    def forward(self, x: Tensor) -> Tensor:
        y = Defined.apply(x, self.rows_OI, self.columns_OI, self.recipe)
        if not isinstance(self.layer, AdaptedLinear):
            return y
        kept = self.layer.dropout.drop(x, self.layer.salt, 0)
        return y + F.linear(F.linear(kept, self.layer.lora_a), self.layer.lora_b) * self.layer.scale


def adapted() -> Decoder:
    model = Decoder(SPEC, "math")
    initialize(model, 0)
    apply_dropout(model.layers.values(), adapt(model, decoder_adapters(SPEC, LORA, 0, "fp32")))
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def gradients_of(model: Decoder) -> dict[str, Tensor]:
    tokens_BT = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2))
    losses = model(tokens_BT, tokens_BT.roll(-1, 1), None, None, None, None, torch.tensor([5, 9]))
    losses.cross_entropy.backward()
    found = {name.replace("layer.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": losses.cross_entropy.detach()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_computes_with_its_base_rounded_before_and_its_states_rounded_on_the_way(recipe: str) -> None:
    model, defined, plain = adapted(), adapted(), adapted()
    found = apply_float8(model, model.layers.values(), recipe, emulate=True)
    found.quantize_frozen()
    assert (found.num_converted, found.num_frozen, found.waiting) == (14, 14, [])
    assert str(found).startswith(
        f"14 matrices (14 of them frozen, quantized once) in fp8, {recipe} scales; in bf16: head, "
    )
    assert not [name for name, p in model.named_parameters() if p.ndim == 2 and "lora" not in name and "layers" in name]
    for block in defined.layers.values():
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, DefinedLinear(child, recipe))
    results, truths, wide = (gradients_of(one) for one in (model, defined, plain))
    assert results.keys() == truths.keys() == wide.keys() and len(results) == 1 + 2 * 2 * 3
    for name, truth in truths.items():
        size = float(truth.abs().max())
        assert float((results[name] - truth).abs().max()) < 1e-5 * size, name
        assert 1e-6 * size < float((wide[name] - truth).abs().max()) < 0.3 * size, name  # and it is not the plain model


# Layouts ------------------------------------------------------------------------------------------------------------


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "copies": {"copies": True},
    "copies, selective": {"copies": True, "recompute": "selective"},
    "copies, full": {"copies": True, "recompute": "full"},
    "copies, fused": {"copies": True, "fuse": True},
    "dp=2": {"dp": 2, "replicate": 2},
    "pp=2": {"pp": 2, "split": (1, 1)},
    "tp=2": {"tp": 2},
}


def trained(spec: ModelSpec, rows: list[tuple[Trial, Plan]]) -> list[Record]:
    return [train_in_layout(spec, plan, trial, dist.get_rank(), CPU) for trial, plan in rows]


def truths_of(spec: ModelSpec, trials: list[Trial]) -> list[Record]:
    return [train_plain(spec, trial) for trial in trials]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layout_trains_what_one_process_trains(recipe: str, ranks: Any) -> None:
    trial = Trial(precision="fp8", clip=0.0, fp8_recipe=recipe, adapter=LORA)
    [(truth, bf16)] = ranks.run(truths_of, 1, SPEC, [trial, replace(trial, precision="bf16")])
    plans = {name: trial_plan(trial, **layout) for name, layout in LAYOUTS.items()}
    found = {}
    for world in (1, 2):
        mine = {name: plan for name, plan in plans.items() if plan.world == world}
        found |= zip(mine, ranks.run(trained, world, SPEC, [(trial, plan) for plan in mine.values()])[0], strict=True)
    for name, record in found.items():
        (losses, _, gradients, _), worst = compare(record, truth)
        # As in test_precision.py: slices have scales of their own.
        most = (5e-3, 4 * 2**-4) if name == "tp=2" else (1e-6, 1e-6)
        assert losses <= most[0] and gradients <= most[1], (name, worst)
    assert 0 < max(abs(one - other) for one, other in zip(truth.losses, bf16.losses, strict=True)) < 5e-3


TIED = SPEC.with_overrides({"tied": True})


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_frozen_head_is_quantized_once_too(recipe: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a head that rounds at every step, at once and chunk by chunk; on a CPU one divides by a scale where the other
    multiplies by its inverse."""
    monkeypatch.setattr("shardwise.model.loss.MAX_LOGITS_BYTES", 4 * 128 * 10 if is_fused else 2**20)
    results = []
    for rounds in (False, True):
        model = adapted()
        found = apply_float8(model, model.layers.values(), recipe, emulate=True)
        apply_float8_head(model, found, compiled=False)
        weight = model.head.weight if model.head is not None else None
        if not rounds:
            assert found.waiting.pop() is model.head
            model.head.matmul = float8_linear(recipe)  # type: ignore[union-attr]
        found.quantize_frozen()
        assert weight is not None and (getattr(model.head, "weight", None) is None) == rounds
        results.append(gradients_of(model))
    assert results[0].keys() == results[1].keys() and len(results[0]) == 1 + 2 * 2 * 3
    for name, truth in results[0].items():
        assert float((results[1][name] - truth).abs().max()) <= 1e-5 * float(truth.abs().max()), name


def test_every_layout_trains_what_one_process_trains_with_such_a_head(ranks: Any) -> None:
    trial = Trial(precision="fp8", clip=0.0, fp8_recipe="tensorwise", adapter=LORA, fp8_head=True)
    [(truth, without)] = ranks.run(truths_of, 1, SPEC, [trial, replace(trial, fp8_head=False)])
    assert truth.losses != without.losses
    for world, names in ((1, ("one process", "copies")), (2, ("dp=2", "pp=2", "tp=2"))):
        rows = [(trial, trial_plan(trial, **LAYOUTS[name])) for name in names]
        for name, record in zip(names, ranks.run(trained, world, SPEC, rows)[0], strict=True):
            (losses, _, gradients, _), worst = compare(record, truth)
            most = (5e-3, 4 * 2**-4) if name == "tp=2" else (1e-6, 1e-6)  # slices have scales of their own
            assert losses <= most[0] and gradients <= most[1], (name, worst)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["apart", "tied"])
def test_memory_with_a_head_in_fp8_is_that_without(spec: ModelSpec, ranks: Any) -> None:
    """Two times one byte for two. A tied one is the embedding too, and stays what it is."""
    trial = Trial(precision="fp8", adapter=LORA, fp8_recipe="tensorwise")
    [(plain, _)] = ranks.run(held, 1, spec, trial)
    [(quantized, saved)] = ranks.run(held, 1, spec, replace(trial, fp8_head=True))
    assert quantized == plain and "head.weight" not in saved


def held(spec: ModelSpec, trial: Trial) -> tuple[int, set[str]]:
    engine = build_trial(spec, trial_plan(trial, copies=True), trial, 0, CPU)
    optimizer = engine.optimizer(trial.optimizer)
    return kept_bytes(engine, optimizer)["parameters"], {
        one.name for one in held_slices(engine, optimizer) if one.group == "weights"
    }


def test_the_base_takes_as_much_memory_as_in_bf16_and_no_checkpoint_has_it(ranks: Any) -> None:
    trial = Trial(precision="fp8", adapter=LORA)
    [(fp8, saved)] = ranks.run(held, 1, SPEC, trial)
    [(bf16, same)] = ranks.run(held, 1, SPEC, replace(trial, precision="bf16"))
    sides = {
        "q": (64, 64),
        "k": (32, 64),
        "v": (32, 64),
        "o": (64, 64),
        "gate": (128, 64),
        "up": (128, 64),
        "down": (64, 128),
    }
    assert fp8 - bf16 == 2 * 4 * sum(outputs + inputs for outputs, inputs in sides.values())  # the scales
    assert saved == same and all(name.rpartition(".")[2] in ("lora_a", "lora_b") for name in saved)


def goes_on(spec: ModelSpec, trial: Trial, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of the third and fourth step, straight on and from a checkpoint of the second."""
    plan = trial_plan(trial, copies=True)

    def build() -> tuple[Engine, torch.optim.Optimizer]:
        engine = build_trial(spec, plan, trial, 0, CPU)
        return engine, engine.optimizer(trial.optimizer)

    def steps(engine: Engine, optimizer: torch.optim.Optimizer, numbers: tuple[int, ...]) -> list[float]:
        losses = []
        for step in numbers:
            batch, num_targets = trial_batch(spec, plan, trial, step, 0)
            done = run_step(engine, optimizer, batch, num_targets=num_targets, lr=1e-2, clip=0.5, clock=Clock(CPU))
            losses.append(done.loss)
        return losses

    straight, again = build(), build()
    steps(*straight, (1, 2))
    Saver(folder, *straight).save(2, dict)
    restore_state(*again, store.Checkpoint(folder / "step-2", 2))
    return steps(*straight, (3, 4)), steps(*again, (3, 4))


def test_a_checkpoint_of_the_adapters_goes_on_beside_a_base_that_is_rounded_again(ranks: Any, tmp_path: Path) -> None:
    [(straight, again)] = ranks.run(goes_on, 1, SPEC, Trial(precision="fp8", adapter=LORA), tmp_path)
    assert straight == again


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train_body(layout: str, precision: str) -> list[float]:
    torch.manual_seed(0)
    adapter = AdapterConfig(kind="lora", rank=4, targets=("all-linear",))
    split = parallelize(Body(), Plan.from_layout(layout, precision=precision), "blocks", adapter=adapter)
    optimizer = torch.optim.AdamW([p for p in split.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)).chunk(split.world)[split.rank]
    losses = []
    for _ in range(3):
        losses.append(
            split.gradients(list(x.split(2)), lambda model, x: (model(x).float().square().sum(), len(x))).loss
        )
        optimizer.step()
    return losses


def test_modules_of_others_multiply_by_frozen_weights_in_fp8(ranks: Any) -> None:
    [truth], [bf16] = ranks.run(train_body, 1, "dp=1", "fp8"), ranks.run(train_body, 1, "dp=1", "bf16")
    assert ranks.run(train_body, 2, "dp=2", "fp8")[0] == pytest.approx(truth, rel=1e-5)
    assert truth != bf16 and truth == pytest.approx(bf16, rel=2e-2) and truth[0] > truth[-1]


# The plan -----------------------------------------------------------------------------------------------------------


def plan_on(num_gpus: int, *words: str) -> Plan:
    loaded = load_config(None, ["memory.precision=fp8", "adapter.kind=lora", "train.global_batch=8", *words])
    here = Machine(8, 64 * 2**30, (Gpu("H200", 140 * 2**30, (9, 0)),) * num_gpus, "linux")
    return resolve(loaded.config, preset("tiny"), here, num_gpus, 1000, loaded.origins).plan


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["adapter.kind=qlora"], "adapter.kind = qlora does not work", "memory.precision=bf16"),
        (["adapter.kind=qlora"], "adapter.kind = qlora does not work", "adapter.kind=lora"),
        (["parallel.zero=3"], "parallel.zero = 3 does not work", "parallel.zero=0"),
        (["parallel.zero=3"], "parallel.zero = 3 does not work", "memory.precision=bf16"),
        (["memory.offload=all"], "memory.offload = all does not work", "memory.offload=none"),
    ],
)
def test_what_would_cut_or_move_the_base_is_refused(words: list[str], what: str, fix: str) -> None:
    assert plan_on(2).zero == 0 and plan_on(1).copies
    with pytest.raises(UserError) as caught:
        plan_on(2, *words)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and what in lines[0] and fix in lines[2]
    plan_on(2, *words, fix)
    if "memory.offload=all" not in words:
        with pytest.raises(UserError, match=what):
            ask("llama3-8b", "h200", words=["memory.precision=fp8", "adapter.kind=lora", *words])


def test_modules_of_others_are_refused_alike() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(16, 16)])})
    plan = replace(trial_plan(Trial(precision="fp8"), dp=1), zero=0)
    with pytest.raises(UserError, match=r"adapter\.kind = qlora does not work"):
        parallelize(module, plan, "blocks", adapter=AdapterConfig(kind="qlora", rank=2, targets=("all-linear",)))


def test_the_planner_predicts_the_memory_of_bf16_and_less_time() -> None:
    spec, adapter = preset("llama3-8b"), AdapterConfig(kind="lora", rank=16, targets=("all-linear",))
    found = {}
    for name, precision in {"bf16": "bf16", "tensorwise": "fp8", "rowwise": "fp8"}.items():
        recipe = name if precision == "fp8" else "rowwise"
        trial = Trial(precision=precision, global_batch=4, micro_batch=4, seq_len=2048, fp8_recipe=recipe)
        plan = replace(trial_plan(trial, compile="blocks", copies=True), device="cuda")
        job = Job(2048, 4, None, precision, "adamw", adapter)
        found[name] = predict(spec, known_cluster("h200", 1, 1), job, plan)
    assert found["rowwise"].memory_bytes == found["tensorwise"].memory_bytes == found["bf16"].memory_bytes
    assert 0.5 < found["tensorwise"].step_s / found["bf16"].step_s < 0.8
    assert found["tensorwise"].step_s < found["rowwise"].step_s < found["bf16"].step_s
