"""Recompute: the same bits in one process, the same training in every layout, no more collectives than it says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.memory.recompute import apply_recompute
from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import IGNORE, Decoder
from shardwise.model.experts import moe_layers
from shardwise.model.initialize import initialize
from shardwise.parallel.pipeline.split_backward import Todo, deferring, finish
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.shrink import shrink_spec
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.recompute import segments

CPU = torch.device("cpu")
MODES = ("full", "selective", "sqrt", "every-2")
TRIAL = Trial(num_steps=2, global_batch=3, micro_batch=1, documents=True)
FAMILIES = ("tiny", "gpt2", "qwen3-0.6b", "gemma2-2b", "mixtral-8x7b", "deepseek-v3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "zero=2": {"dp": 2, "zero": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2, "split": (2, 3)},
    "pp=2 zero=3 zbv": {"pp": 2, "zero": 3, "schedule": "zbv", "virtual_stages": 2, "split": (1, 2, 1, 1)},
    "cp=2": {"cp": 2},
}
MOE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "zero=3 ep=2": {"dp": 2, "zero": 3, "ep": 2},
    "tp=2 sp ep=2": {"tp": 2, "sequence": True, "ep": 2},
    "cp=2 ulysses": {"cp": 2, "cp_kind": "ulysses"},
    "pp=2 zero-bubble": {"pp": 2, "schedule": "zero-bubble", "split": (2, 3)},
}


def small(name: str, num_layers: int = 5) -> ModelSpec:
    return shrink_spec(preset(name), trial_plan(TRIAL)).with_overrides({"num_layers": num_layers})


def blocks_of(model: Decoder) -> list[nn.Module]:
    return list(model.layers.values())


# One process ---------------------------------------------------------------------------------------------------------


def learn(spec: ModelSpec, mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses, gradients and router counts of two micro-batches, the second with documents of their own."""
    model = Decoder(spec).to(dtype)
    initialize(model, 0)
    apply_recompute(blocks_of(model), mode)
    found: dict[str, Tensor] = {}
    for step, trial in enumerate((TRIAL, Trial(global_batch=2))):
        batch = trial.batch(spec, step)
        losses = model(batch.tokens, batch.targets, documents_BT=batch.documents)
        sum(losses).backward()
        found[f"losses {step}"] = torch.stack(losses).detach()
    counts = {f"counts {number}": layer.tokens_per_expert for number, layer in enumerate(moe_layers(model))}
    return found | counts | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(name: str) -> list[str]:
    """Tensors that any mode changes by as much as a bit."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        truth = learn(small(name), "none", dtype)
        for mode in MODES:
            mine = learn(small(name), mode, dtype)
            wrong = [key for key in truth if key not in mine or not torch.equal(mine[key], truth[key])]
            found += [f"{mode} {dtype}: {key}" for key in wrong]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_has_the_same_bits(ranks: Any, name: str) -> None:
    assert ranks.run(differences, 1, name) == [[]]


class RandomFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + 1  # the loop is not ours: between the blocks it does something of its own
        return x


@pytest.mark.parametrize("is_cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("mode", MODES)
def test_chance_and_autocast_repeat_themselves(mode: str, is_cast: bool) -> None:
    def gradients(mode: str) -> list[Tensor]:
        torch.manual_seed(3)
        module = RandomFactor()
        apply_recompute(list(module.layers), mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = module(torch.ones(4, 8)).float().square().sum()
        loss.backward()
        return [parameter.grad for parameter in module.parameters()] + [torch.rand(1)]

    assert all(torch.equal(a, b) for a, b in zip(gradients(mode), gradients("none"), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_through_one_graph(mode: str) -> None:
    model = Decoder(small("tiny"))
    initialize(model, 0)
    apply_recompute(blocks_of(model), mode)
    tokens = torch.arange(12).view(1, 12)
    loss = model(tokens, tokens).cross_entropy
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_changed_input_is_found_out(mode: str) -> None:
    block = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    apply_recompute([block], mode)
    x = torch.ones(2, 8, requires_grad=True) * 2
    out = block(x)
    x.mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_weight_gradients_can_still_wait(mode: str) -> None:
    """Zero-bubble schedules: each projection leaves its pair for W once, also where its forward was repeated."""
    found: dict[str, tuple[int, list[Tensor]]] = {}
    for name in ("none", mode):
        model = Decoder(small("tiny")).double()
        initialize(model, 0)
        apply_recompute(blocks_of(model), name)
        todo: Todo = []
        tokens = torch.arange(12).view(1, 12)
        with deferring(todo):
            loss = model(tokens, tokens).cross_entropy
        loss.backward()
        waiting = len(todo)
        assert all(block.attention.q.weight.grad is None for block in model.layers.values())
        finish(todo)
        found[name] = waiting, [parameter.grad for parameter in model.parameters()]
    assert found[mode][0] == found["none"][0] == 5 * 7 + 1
    assert all(torch.equal(a, b) for a, b in zip(found[mode][1], found["none"][1], strict=True))


@pytest.mark.parametrize("name", ["tiny", "gemma2-2b", "mixtral-8x7b"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_a_step(mode: str, name: str) -> None:
    """Circles of references would hold activations until the garbage collector comes, or, through the graph, for
    ever."""
    model = Decoder(small(name))
    initialize(model, 0)
    apply_recompute(blocks_of(model), mode)
    tokens = torch.arange(24).view(2, 12) % 7
    sum(model(tokens, tokens)).backward()  # what torch and python make once
    model.zero_grad()
    gc.disable()
    gc.freeze()  # what is there already is not listed
    try:
        sum(model(tokens, tokens)).backward()
        model.zero_grad()
        left = [tuple(x.shape) for x in gc.get_objects() if type(x) is Tensor]
    finally:
        gc.unfreeze()
        gc.enable()
    assert left == []


def test_segments() -> None:
    assert segments("none", range(4)) == segments("selective", range(4)) == ()
    assert segments("full", range(2, 4)) == (range(2, 3), range(3, 4))
    assert segments("every-3", range(2, 8)) == (range(3, 4), range(6, 7))
    assert segments("sqrt", range(6)) == (range(0, 3), range(3, 6))
    assert [len(part) for part in segments("sqrt", range(10, 20))] == [3, 3, 4]
    assert segments("sqrt", range(5, 6)) == (range(5, 6),)


def test_what_is_kept_shrinks() -> None:
    """A mixture of experts, plain attention and a dense model: none > selective > full > sqrt."""
    for name in ("tiny", "gemma2-2b", "mixtral-8x7b"):
        sizes = []
        for mode in ("none", "selective", "full", "sqrt"):
            model = Decoder(small(name, 9))
            initialize(model, 0)
            apply_recompute(blocks_of(model), mode)
            tokens = torch.zeros(1, 32, dtype=torch.long)
            sizes.append(saved_bytes(model, tokens, torch.full_like(tokens, IGNORE)))
        assert sizes == sorted(sizes, reverse=True) and sizes[1] < 0.7 * sizes[0] and sizes[2] < 0.5 * sizes[1], sizes


# Layouts -------------------------------------------------------------------------------------------------------------


def train_all(spec: ModelSpec, modes: tuple[str, ...], layouts: dict[str, dict[str, Any]]) -> dict[str, Record]:
    rank = dist.get_rank()
    return {
        f"{layout}, {mode}": train_in_layout(spec, trial_plan(TRIAL, recompute=mode, **degrees), TRIAL, rank, CPU)
        for layout, degrees in layouts.items()
        for mode in modes
        if degrees or rank == 0
    }


@pytest.mark.parametrize(("name", "layouts"), [("tiny", LAYOUTS), ("tiny-moe", MOE_LAYOUTS)], ids=["dense", "experts"])
def test_every_layout_trains_as_one_process_does(ranks: Any, name: str, layouts: dict[str, dict[str, Any]]) -> None:
    """Within 1e-9 of one process in fp64; and the bits of the same layout without recomputation."""
    spec = small(name)
    truth = train_plain(spec, TRIAL)
    records = ranks.run(train_all, 2, spec, ("none", *MODES[:3]), layouts, timeout=240)[0]
    for case, record in records.items():
        assert max(compare(record, truth)[0]) < 1e-9, case
        without = records[f"{case.split(',')[0]}, none"]
        assert record.losses == without.losses and record.norms == without.norms, case
        for kind in ("gradients", "parameters"):
            mine, theirs = getattr(record, kind), getattr(without, kind)
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs), (case, kind)
