"""What losses cannot see: how often parameters travel, how long full tensors live, how many bytes a rank holds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from observe import Observation, observe

from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.spec.actions import Action
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import schedule_actions, splits_backward, stage_owners
from shardwise.spec.split import even_split

SPEC = preset("tiny").with_overrides(
    {"num_layers": 4, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 64}
)
PIPELINES = [
    ("none", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zbv", 2),
]
TRIAL = Trial(global_batch=6, micro_batch=1, seq_len=8, precision="fp32")  # three micro-batches for each of two ranks
NUM_MICRO = 3


def spec_of(schedule: str, stages: int, tied: bool = False) -> ModelSpec:
    """Three blocks a stage, where never more than two are whole; two where a rank has two stages."""
    num_layers = SPEC.num_layers if schedule == "none" else {1: 6, 2: 8}[stages]
    return SPEC.with_overrides({"num_layers": num_layers, "tied": tied})


def make_plan(spec: ModelSpec, trial: Trial, zero: int, schedule: str, stages: int, dp: int = 2) -> Plan:
    if schedule == "none":
        return trial_plan(trial, dp=dp, zero=zero)
    split = even_split(spec.num_layers, 2 * stages)
    return trial_plan(trial, dp=dp, zero=zero, pp=2, schedule=schedule, virtual_stages=stages, split=split)


@pytest.fixture(scope="module")
def observed(ranks: Any) -> Any:
    """Each layout is run once for all tests of this file."""

    @cache
    def run(zero: int, schedule: str, stages: int, tied: bool = False) -> tuple[Plan, list[Observation]]:
        spec = spec_of(schedule, stages, tied)
        plan = make_plan(spec, TRIAL, zero, schedule, stages)
        return plan, ranks.run(observe, plan.world, spec, plan, TRIAL, timeout=120)

    return run


def stages_of(plan: Plan, rank: int) -> list[int]:
    owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
    return [stage for stage, owner in enumerate(owners) if owner == plan.coordinates(rank).pp]


def num_groups(plan: Plan, stage: int, tied: bool) -> int:
    """One for each block, one for each end; a tied model has its ends in one, on both of its ends."""
    layers = plan.split[stage] if plan.pp > 1 else SPEC.num_layers
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    return layers + (int(is_first or is_last) if tied else is_first + is_last)


# Messages ------------------------------------------------------------------------------------------------------------


TIED = [(zero, *PIPELINES[index], True) for zero, index in ((1, 2), (2, 6), (3, 0), (3, 1), (3, 6))]


@pytest.mark.parametrize(
    ("zero", "schedule", "stages", "tied"),
    [*((zero, *pipeline, False) for zero in range(4) for pipeline in PIPELINES), *TIED],
)
def test_messages_of_a_step(zero: int, schedule: str, stages: int, tied: bool, observed: Any) -> None:
    plan, ranks = observed(zero, schedule, stages, tied)
    for rank, found in enumerate(ranks):
        own = stages_of(plan, rank)
        groups = {stage: num_groups(plan, stage, tied) for stage in own}
        total = sum(groups.values())
        if zero == 0:
            assert (found.gathers, found.reductions) == (0, len(own))  # one bucket holds this model
            continue
        assert found.num_groups == groups
        assert found.reductions == sum(reductions(plan, rank, stage, tied) for stage in own)
        assert found.gathers == (
            total if zero < 3 else sum(gathers_of_zero_3(plan, rank, stage, tied) for stage in own)
        )


def reductions(plan: Plan, rank: int, stage: int, tied: bool) -> int:
    """Every group once a step, or with stages 2 and 3 once a micro-batch. Where backward is split, a micro-batch is
    reduced after its W; the embedding has its gradient after I, so a second W without an I in between finds nothing
    new there."""
    if plan.zero == 1:
        return num_groups(plan, stage, tied)
    if stage > 0 or plan.num_stages == 1 or not splits_backward(plan.schedule):
        return NUM_MICRO * num_groups(plan, stage, tied)
    count, is_new = NUM_MICRO * (num_groups(plan, stage, tied) - 1), False
    for action in actions_of(plan, rank, stage):
        if action.kind == "W":
            count += is_new
        is_new = action.kind == "I" or (is_new and action.kind == "F")
    return count


def actions_of(plan: Plan, rank: int, stage: int) -> list[Action]:
    table = schedule_actions(plan.schedule, plan.pp, plan.virtual_stages, NUM_MICRO)
    return [action for action in table[plan.coordinates(rank).pp] if action.stage == stage]


def gathers_of_zero_3(plan: Plan, rank: int, stage: int, tied: bool) -> int:
    """Blocks: once for each forward and once for each backward. What ends the model, and a tied model's ends, is kept
    from forward to backward and gathered only when it is not there; any backward of its stage drops it. So is the
    last block where there is no pipeline. The backward of an embedding needs no embedding."""
    keeps = stage == plan.num_stages - 1 or (tied and stage == 0)
    forward_only = (plan.pp == 1) + (stage == 0 and not tied)
    count, is_here = NUM_MICRO * (2 * (num_groups(plan, stage, tied) - keeps) - forward_only), False
    for action in actions_of(plan, rank, stage) if keeps else ():
        count += action.kind != "W" and not is_here
        is_here = action.kind == "F"
    return count


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_a_step(zero: int, observed: Any) -> None:
    """Sizes divide, so nothing is padded: P parameters of four bytes travel as often as collectives say."""
    _, ranks = observed(zero, "none", 1)
    size = 4 * SPEC.num_parameters
    # Gathered once for both passes: embedding, last block, last norm and head.
    once = 4 * (SPEC.num_parameters - sum_of_blocks(SPEC) * (SPEC.num_layers - 1) // SPEC.num_layers)
    gathered = size if zero < 3 else NUM_MICRO * (2 * size - once)
    reduced = size * (1 if zero == 1 else NUM_MICRO)
    assert [found.traffic_bytes for found in ranks] == [gathered + reduced] * 2


def sum_of_blocks(spec: ModelSpec) -> int:
    return spec.num_parameters - (2 * spec.vocab + 1) * spec.hidden  # all but embedding, head and last norm


# Full tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
def test_zero_1_keeps_full_gradients_until_the_end(schedule: str, stages: int, observed: Any) -> None:
    _, ranks = observed(1, schedule, stages)
    for found in ranks:
        for stage, size in found.num_parameters.items():
            looks = [look for look in found.looks if look.stage == stage]
            complete = [look for look in looks if look.when in ("after B", "after W")]
            assert [look.gradient_bytes for look in complete if not look.last] == [4 * size] * (NUM_MICRO - 1)
            assert max(look.gradient_bytes for look in looks) == 4 * size


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
@pytest.mark.parametrize("zero", [2, 3])
def test_zero_2_and_3_keep_no_full_gradient_beyond_its_backward(
    zero: int, schedule: str, stages: int, observed: Any
) -> None:
    _, ranks = observed(zero, schedule, stages)
    for found in ranks:
        if schedule != "none" and splits_backward(schedule):
            # Between I and W the vectors' gradients wait for the matrices': one micro-batch is reduced as a whole.
            ended = [look for look in found.looks if look.when == "after W" and not look.last]
            waiting = [look for look in found.looks if look.when == "after I"]
            assert len(waiting) == NUM_MICRO * len(found.num_parameters)
            assert not [name for look in waiting for name in look.gradients if not is_small(name)]
        else:
            ended = [look for look in found.looks if look.when == "after B"]
            running = [look for look in found.looks if look.when.startswith("B ")]
            assert running and max(look.gradient_bytes for look in running) <= 4 * found.largest_block
        assert ended and all(look.gradients == () for look in ended)


def is_small(name: str) -> bool:
    """Gradients that a split backward computes in its first half: of norms, and of the embedding, which is looked
    up."""
    return "norm" in name or name.startswith("embed")


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_gather_once_a_step(zero: int, schedule: str, stages: int, observed: Any) -> None:
    """All parameters of a stage from its second forward until it is done."""
    _, ranks = observed(zero, schedule, stages)
    for found in ranks:
        for stage, size in found.num_parameters.items():
            looks = [look for look in found.looks if look.stage == stage]
            first = next(index for index, look in enumerate(looks) if look.when == f"F {min_layer(looks)}")
            second = next(index for index in range(first + 1, len(looks)) if looks[index].when == looks[first].when)
            middle = [look for look in looks[second:] if not look.last and not is_in_last_backward(looks, look)]
            assert middle and {look.gathered_bytes for look in middle} == {4 * size}


def min_layer(looks: list[Any]) -> int:
    return min(int(look.when.split()[1]) for look in looks if look.when.startswith("F "))


def is_in_last_backward(looks: list[Any], look: Any) -> bool:
    """From the moment the last whole backward begins, blocks are let go one by one."""
    begins = [index for index, other in enumerate(looks) if other.when.startswith("B ")]
    last_pass = begins[-len({looks[index].when for index in begins}) :]
    return looks.index(look) >= last_pass[0]


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
def test_zero_3_never_holds_more_than_two_blocks(schedule: str, stages: int, observed: Any) -> None:
    plan, ranks = observed(3, schedule, stages)
    for rank, found in enumerate(ranks):
        for stage in stages_of(plan, rank):
            looks = [look for look in found.looks if look.stage == stage]
            blocks = [[name for name in look.gathered if name.startswith("layers.")] for look in looks]
            assert max(map(len, blocks)) == 2  # the one that runs, and the next one on its way
            ends = {name for look in looks for name in look.gathered} - {name for names in blocks for name in names}
            assert ends <= {"embed.weight", "norm.weight"}, ends


@pytest.mark.parametrize(("schedule", "stages"), PIPELINES)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_full_is_left_after_a_step(zero: int, schedule: str, stages: int, observed: Any) -> None:
    _, ranks = observed(zero, schedule, stages)
    for found in ranks:
        done = [look for look in found.looks if look.when == "done"]
        assert len(done) == len(found.num_parameters)
        assert all((look.gathered, look.gathered_bytes, look.gradients) == ((), 0, ()) for look in done)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_that_a_rank_holds(zero: int, precision: str, num_ranks: int, ranks: Any) -> None:
    """P parameters, N shards. Kept: 16 P / N. On top of it, at the fullest moment between backward passes:

    zero 1    all parameters and all gradients in full, but then the sharded gradients are not there yet
    zero 2    all parameters in full
    zero 3    the parameters of two blocks
    """
    trial = Trial(global_batch=2 * num_ranks, micro_batch=1, seq_len=4, precision=precision)
    plan = make_plan(SPEC, trial, zero, "none", 1, dp=num_ranks)
    size, shards = SPEC.num_parameters, num_ranks if zero else 1
    copy = 4 if precision == "fp32" else 2  # bytes of a gathered parameter
    for found in ranks.run(observe, num_ranks, SPEC, plan, trial, timeout=120):
        kept = {"parameters": 4 * size / shards, "gradients": 4 * size / shards, "optimizer": 8 * size / shards}
        assert found.local == pytest.approx(kept, rel=0.02)
        peak = {
            0: 16 * size + (copy * size if precision == "bf16" else 0),  # FSDP2 makes the bf16 copy, without shards
            1: 12 * size / shards + copy * size + 4 * size,
            2: 16 * size / shards + copy * size,
            3: 16 * size / shards + copy * 2 * found.largest_block,
        }[zero]
        assert found.peak("local_bytes", "gathered_bytes", "gradient_bytes") == pytest.approx(peak, rel=0.02)
