"""The fused loss in layouts: whole steps of the engine whose logits go in chunks, against one process whose logits
fit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_families import FAMILIES, alone, batch, check_same, learn, make_parallel
from torch import Tensor

from shardwise.model import loss as loss_module
from shardwise.parallel.pipeline.split_backward import deferring, finish
from shardwise.parallel.tensor import vocabulary as vocab_module
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
SPECS = {
    "untied": preset("tiny").with_overrides(SMALL),
    "tied": preset("tiny").with_overrides(SMALL | {"tied": True, "logit_softcap": 3.0}),
}
TRIAL = Trial(num_steps=2, global_batch=5, micro_batch=1, seq_len=12, documents=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone recompute=full": {"recompute": "full"},
    "dp=2": {"dp": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "tp=2": {"tp": 2},
    "tp=2 sp recompute=selective": {"tp": 2, "sequence": True, "recompute": "selective"},
    "pp=2 gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp=2 zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "dp=2 zero=2 pp=2 interleaved": {"dp": 2, "zero": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp=2 zero=3 pp=2 zero-bubble": {"dp": 2, "zero": 3, "pp": 2, "schedule": "zero-bubble"},
    "tp=2 sp pp=2 zero-bubble": {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero-bubble"},
}


def plan_of(layout: str) -> Plan:
    fields = dict(LAYOUTS[layout])
    if fields.get("pp", 1) > 1:
        fields["split"] = even_split(SMALL["num_layers"], fields["pp"] * fields.get("virtual_stages", 1))
    return trial_plan(TRIAL, **fields)


@cache
def truth(model: str) -> Record:
    return train_plain(SPECS[model], TRIAL)


def in_chunks(limit: int, function: Any, *arguments: Any) -> Any:
    before = loss_module.MAX_LOGITS_BYTES
    loss_module.MAX_LOGITS_BYTES = limit
    try:
        return function(*arguments)
    finally:
        loss_module.MAX_LOGITS_BYTES = before


def train_in_chunks(spec: ModelSpec, plan: Plan) -> tuple[Record, int]:
    """Also how often a head's fused loss ran, forward."""
    calls = 0
    plain = vocab_module.FusedHead.fused_loss

    def counted(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(*arguments)

    vocab_module.FusedHead.fused_loss = counted  # type: ignore[method-assign]
    try:
        # Five rows of twelve tokens, or seven of them where a rank has half of the words.
        return in_chunks(4 * 53 * 5, train_in_layout, spec, plan, TRIAL, dist.get_rank(), CPU), calls
    finally:
        vocab_module.FusedHead.fused_loss = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_chunks_is_the_step_of_one_process(layout: str, model: str, ranks: Any) -> None:
    plan = plan_of(layout)
    found = ranks.run(train_in_chunks, plan.world, SPECS[model], plan)
    differences, worst = compare(found[0][0], truth(model))
    assert max(differences) <= 1e-11, (differences, worst)
    assert max(calls for _, calls in found) == TRIAL.num_steps * plan.num_microbatches


def train_both_ways(spec: ModelSpec, plans: list[Plan], trial: Trial) -> list[Record]:
    """By the engine, then by one process."""
    found = [in_chunks(4 * 53 * 5, train_in_layout, spec, plan, trial, dist.get_rank(), CPU) for plan in plans]
    return [*found, in_chunks(4 * 53 * 5, train_plain, spec, trial)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", SPECS)
def test_mixed_precision_rounds_as_one_process_does(model: str, precision: str, ranks: Any) -> None:
    """FSDP2 hands the head a 16-bit weight; its gradient comes back in 16 bits and is summed in fp32. fp16 has a loss
    scale of 65,536, which multiplies what is there already: no probability has to be as small as 1 / targets."""
    trial = Trial(num_steps=2, global_batch=4, micro_batch=4, seq_len=12, precision=precision, clip=0.0)
    plans = [trial_plan(trial), trial_plan(trial, loss="recompute")]
    fused, again, plain = ranks.run(train_both_ways, 1, SPECS[model], plans, trial)[0]
    for record, most_losses, most_gradients in ((fused, 1e-6, 1e-6), (again, 2e-3, 2e-2)):
        (losses, _, gradients, _), worst = compare(record, plain)
        assert losses <= most_losses and gradients <= most_gradients, (losses, gradients, worst)


# A vocabulary over ranks ---------------------------------------------------------------------------------------------


def learn_in_halves(spec: ModelSpec, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """As zero-bubble schedules do."""
    model, todo = make_parallel(spec, False), list[Any]()
    with deferring(todo):
        losses = model(**inputs)
    (losses.cross_entropy + 2 * losses.aux + 3 * losses.z).backward()
    finish(todo)
    return {
        "losses": [loss.detach() for loss in losses],
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "counts": [],
    }


def learn_in_chunks_and_halves(spec: ModelSpec, inputs: dict[str, Tensor], limit: int) -> dict[str, Any]:
    return in_chunks(limit, learn_in_halves, spec, inputs)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_backward_in_two_halves_has_all_gradients(family: str, ranks: Any) -> None:
    spec = FAMILIES[family]
    check_same(spec, ranks.run(learn_in_chunks_and_halves, 2, spec, batch(), 4 * 34 * 7), alone(family), False)


def collectives(spec: ModelSpec, inputs: dict[str, Tensor], limit: int) -> list[list[tuple[str, int]]]:
    """Of the head, forward and backward."""
    model = make_parallel(spec, False)
    seen: list[tuple[str, int]] = []

    def wait(name: str, num_bytes: int) -> Any:
        seen.append((name, num_bytes))
        return nullcontext()

    head: Any = model.head
    head.tp.wait = wait
    x_BTD = torch.ones(2, 12, 24, dtype=torch.float64, requires_grad=True)
    tied = model.embed.weight if spec.tied else None  # type: ignore[union-attr]
    loss = in_chunks(limit, head, x_BTD, inputs["targets_BT"], tied)
    forward = seen.copy()
    loss.backward()
    return [forward, seen[len(forward) :]]


def test_ranks_meet_once_per_chunk_and_in_backward_only_for_the_input(ranks: Any) -> None:
    """Two numbers per token of each rank, in fp64 here."""
    for forward, backward in ranks.run(collectives, 2, FAMILIES["llama"], batch(), 4 * 34 * 7):
        assert forward == [("all-gather", 2 * 2 * 6 * 8)] * 4
        assert backward == [("all-reduce", 24 * 24 * 8)]


def strange_targets(spec: ModelSpec, value: int, limit: int) -> str:
    inputs = batch()
    inputs["targets_BT"][0, 5] = value
    try:
        in_chunks(limit, learn, make_parallel(spec, False), inputs)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("value", [67, -1])
def test_targets_outside_the_vocabulary_fail_on_every_rank(value: int, ranks: Any) -> None:
    for message in ranks.run(strange_targets, 2, FAMILIES["llama"], value, 4 * 34 * 7):
        assert "out of bounds" in message
