"""Mistakes that a launch can make, each made on purpose: every one of them is found, and said with a rank.

Two kinds. Some ranks run another plan than the others, as when nodes read different files (`two_plans`). Or the
runtime itself is wrong: an action list, a group, a shard, the rows of a step (`broken`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_perform import MOE, SIZES, job_for

from shardwise.checkpoint import store
from shardwise.optim.offload import nvme
from shardwise.parallel import mesh, shards
from shardwise.parallel.expert import dispatch
from shardwise.parallel.pipeline import execute
from shardwise.parallel.tensor import slices
from shardwise.rehearse import classes, coverage
from shardwise.rehearse.classes import Shapes
from shardwise.rehearse.coverage import check_resume
from shardwise.rehearse.fault import Fault
from shardwise.rehearse.match import World, match
from shardwise.rehearse.perform import RehearsedJob, perform
from shardwise.rehearse.rehearsal import rehearse
from shardwise.rehearse.simulate import Prices, Simulation
from shardwise.spec.actions import Action
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

FREE = Prices(lambda call, ranks: 0.0, lambda program, event: 0.0)
SHARDED = {"dp": 2, "zero": 2, "replicate": 1, "global_batch": 4}
SLICED = {"tp": 2, "sequence": True, "global_batch": 2}
PIPED = {"pp": 2, "split": (1, 1), "global_batch": 4, "micro_batch": 1}
CONTEXT = {"cp": 2, "dp": 2, "global_batch": 2, "micro_batch": 1}
SPREAD = {"spec": MOE, "dp": 2, "ep": 2, "global_batch": 4}
UNEVEN = SPREAD | {"spec": MOE.with_overrides({"num_experts": 6}), "seq_len": 62}
PAIRS = SPREAD | {"dp": 4, "global_batch": 8}
ON_DISK = SHARDED | {"offload": "optimizer", "offload_to": "nvme"}
WHO_CUTS = (shards, classes, coverage)
LIMIT = 2**33


# Some ranks run another plan ------------------------------------------------------------------------------------------

TWO_PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another sequence length": (SLICED, {"seq_len": 128}),
    "another micro-batch": (PIPED, {"micro_batch": 2}),
    "another precision": (SHARDED, {"precision": "bf16"}),
    "another ZeRO stage": (SHARDED, {"zero": 3}),
    "another format of sums": (SHARDED | {"precision": "bf16"}, {"reduce_dtype": "bf16"}),
    "another bucket": ({"dp": 2, "global_batch": 4}, {"bucket": 2**14}),
    "without sequence parallelism": (SLICED, {"sequence": False}),
    "another number of micro-batches": (PIPED, {"global_batch": 6}),
    "another way of context": ({"cp": 2, "global_batch": 2}, {"cp_kind": "ulysses"}),
    "recomputation on one side": (SLICED, {"recompute": "full"}),
    "another number of ranks per expert": (SPREAD, {"ep": 1}),
    "another sequence length with experts": (SPREAD, {"seq_len": 128}),
    "another model of transformers": (SHARDED | {"model": "gpt_neox"}, {"model": "opt"}),
}


def faults_of_two(one: RehearsedJob, other: RehearsedJob) -> list[Fault]:
    """What is found when the second half of two ranks runs another job than the first."""
    programs = [perform(one, 0), perform(other, 1)]
    world = World(programs, np.array([0, 1]), [one.plan.coordinates(rank).pp for rank in (0, 1)])
    found = match(world)
    result = None if found else Simulation(world, FREE).run().fault
    return found or ([result] if result else [])


@pytest.mark.parametrize("name", TWO_PLANS)
def test_ranks_that_run_different_plans_are_found(name):
    layout, changed = TWO_PLANS[name]
    found = faults_of_two(job_for(**layout), job_for(**(layout | changed)))
    assert found and found[0].kind in ("call", "group", "deadlock") and set(found[0].ranks) <= {0, 1}, found


MODELS = {
    "another width": {"hidden": 128, "head_dim": 32},
    "another vocabulary": {"vocab": 320},
    "another feed-forward width": {"ffn": 352},
    "another number of layers": {"num_layers": 3},
    "experts on one side": {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 64},
}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_train_different_models_are_found(name):
    other = preset("tiny").with_overrides(SIZES | {"num_layers": 2} | MODELS[name])
    assert faults_of_two(job_for(**SHARDED), job_for(other, **SHARDED))


# The runtime is wrong -------------------------------------------------------------------------------------------------

Breaks = Callable[[pytest.MonkeyPatch], None]


def changed_lists(change: Callable[[list[list[Action]]], Any]) -> Breaks:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        right = execute.schedule_actions

        def wrong(*about: Any) -> Any:
            lists = [list(actions) for actions in right(*about)]
            if max(action.microbatch for actions in lists for action in actions) > 0:
                change(lists)
            return tuple(map(tuple, lists))

        patch.setattr(execute, "schedule_actions", wrong)

    return breaks


def swap(rank: int, one: int, other: int) -> Callable[[list[list[Action]]], None]:
    def change(lists: list[list[Action]]) -> None:
        mine = lists[rank]
        mine[one], mine[other] = mine[other], mine[one]

    return change


def cross(lists: list[list[Action]]) -> None:
    """The first rank waits for a gradient before its second forward, the last one for that forward."""
    forward, backward = (next(a for a in lists[0] if a == Action(kind, 0, int(kind == "F"))) for kind in "FB")
    lists[0].remove(backward)
    lists[0].insert(lists[0].index(forward), backward)
    forward, backward = (next(a for a in lists[1] if a == Action(kind, 1, int(kind == "F"))) for kind in "FB")
    lists[1].remove(forward)
    lists[1].insert(lists[1].index(backward), forward)


def patched(owner: Any, name: str, wrong: Callable[..., Any]) -> Breaks:
    """Replaces a function by one that is given the right one first."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, name)
        patch.setattr(owner, name, lambda *about, **more: wrong(right, *about, **more))

    return breaks


def everywhere(name: str, wrong: Callable[..., Any], *owners: Any) -> Breaks:
    def breaks(patch: pytest.MonkeyPatch) -> None:
        for owner in owners:
            patched(owner, name, wrong)(patch)

    return breaks


def rows_but_the_last(right: Any, num_rows: int, parts: int, index: int) -> tuple[int, int]:
    start, stop = right(num_rows, parts, index)
    return (start, stop - 1) if index == parts - 1 and stop > start else (start, stop)


def rows_twice(right: Any, num_rows: int, parts: int, index: int) -> tuple[int, int]:
    start, stop = right(num_rows, parts, index)
    return (start - 1, stop) if index == 1 and start else (start, stop)


def one_line(right: Any, world: int, length: int, stride: int) -> list[list[int]]:
    return right(world, length, world // length)


def foreign_member(right: Any, *about: int) -> list[list[int]]:
    lines = right(*about)
    lines[0][0], lines[1][0] = lines[1][0], lines[0][0]
    return [sorted(line) for line in lines]


def half_of_the_slice(right: Any, *about: Any, **more: Any) -> Any:
    found = right(*about, **more)
    cut = found.slice
    return found if cut is None else found._replace(slice=replace(cut, stop=cut.stop - (cut.stop - cut.start) // 2))


def one_less(right: Any, *about: int) -> tuple[int, int]:
    start, stop = right(*about)
    return start, stop - 1


def the_first(right: Any, num: int, parts: int, index: int) -> tuple[int, int]:
    return right(num, parts, 0)


def the_other_way(right: Any, *about: Any) -> Any:
    trip = right(*about)
    return trip._replace(sent=trip.received, received=trip.sent)


def more_to_the_first(right: Any, x: Any, received: list[int], sent: list[int], group: Any, *rest: Any) -> Any:
    if group.rank() == 1:
        sent, x = [sent[0] + 1, *sent[1:]], torch.cat([x, x[:1]])
    return right(x, received, sent, group, *rest)


def rows(wrong: Callable[[range], range]) -> Breaks:
    return patched(Plan, "rows", lambda right, plan, index: wrong(right(plan, index)) if index else right(plan, index))


BROKEN: dict[str, tuple[str, dict[str, Any], Breaks]] = {
    "two actions swapped: backward first": ("program", PIPED, changed_lists(swap(1, 0, 1))),
    "two lists that wait for each other": ("deadlock", PIPED, changed_lists(cross)),
    "an action that is missing": ("program", PIPED, changed_lists(lambda lists: lists[1].pop())),
    "an action twice": ("program", PIPED, changed_lists(lambda lists: lists[1].append(lists[1][-1]))),
    "a stage that sends too little": ("program", PIPED, changed_lists(lambda lists: lists[0].pop(1))),
    "context groups along the wrong axis": ("group", CONTEXT, patched(mesh, "_lines", one_line)),
    "a wrong member in a group": ("group", CONTEXT, patched(mesh, "_lines", foreign_member)),
    "a row that nobody holds": ("shard", SHARDED, everywhere("row_range", rows_but_the_last, *WHO_CUTS)),
    "a row that two hold": ("shard", SHARDED, everywhere("row_range", rows_twice, *WHO_CUTS)),
    "half of a slice": ("shard", SLICED, everywhere("placement", half_of_the_slice, shards, classes)),
    "an expert that nobody holds": ("program", SPREAD, patched(dispatch, "share", one_less)),
    "experts that two hold": ("shard", SPREAD, everywhere("share", the_first, dispatch, slices)),
    "rows that are sent where others come from": ("program", UNEVEN, patched(dispatch, "plan_trip", the_other_way)),
    "more rows than the other one expects": ("call", UNEVEN, patched(dispatch, "all_to_all_rows", more_to_the_first)),
    "expert groups along the wrong axis": ("group", PAIRS, patched(mesh, "_lines", one_line)),
    "states at odd places of the file": ("program", ON_DISK, patched(nvme, "_padded", lambda _, count, unit: count)),
    "states beyond the end of the file": ("program", ON_DISK, patched(nvme, "aligned", lambda _, count: 2 * count)),
    "overlapping rows of a step": ("data", SHARDED, rows(lambda right: range(right.start - 1, right.stop))),
    "a row of a step left out": ("data", SHARDED, rows(lambda right: range(right.start + 1, right.stop))),
    "the last row of a step left out": ("data", SHARDED, rows(lambda right: range(right.start, right.stop - 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_runtime_that_is_wrong_is_found(name, monkeypatch):
    kind, layout, breaks = BROKEN[name]
    job = job_for(**layout)
    breaks(monkeypatch)
    found = rehearse(job, LIMIT)
    assert kind in {fault.kind for fault in found.faults}, found.faults
    assert all(fault.what and fault.why and fault.fix for fault in found.faults)


# What a person can mend ----------------------------------------------------------------------------------------------

TOO_LARGE = {
    "a stage that is too large": {"pp": 2, "split": (1, 5), "global_batch": 4, "micro_batch": 1},
    "a micro-batch that is too large": {"dp": 2, "global_batch": 32, "micro_batch": 16},
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_does_not_fit_is_named(name):
    job = job_for(**TOO_LARGE[name])
    peaks = {program.rank: program.peak for program in rehearse(job, LIMIT).programs}
    found = rehearse(job, max(peaks.values()) - 1).faults
    assert [fault.kind for fault in found] == ["memory"] and max(peaks, key=lambda r: peaks[r]) in found[0].ranks


def test_a_disk_that_is_too_small_is_named():
    job = job_for(**ON_DISK)
    enough = rehearse(job, LIMIT, room=LIMIT)
    assert enough.holds
    needed = sum(program.disk.space for program in enough.programs) * 2
    assert [fault.kind for fault in rehearse(job, LIMIT, room=needed - 1).faults] == ["disk"]


CHECKPOINTS = {
    "a checkpoint of another width": lambda weights: {n: torch.empty(w.shape[0] + 1) for n, w in weights.items()},
    "a checkpoint without a layer": lambda weights: {n: w for n, w in weights.items() if not n.startswith("layers.1.")},
    "a checkpoint of another vocabulary": lambda weights: weights | {"embed.weight": torch.empty(9, 64)},
}  # fmt: skip


def test_a_resume_that_cannot_load_is_found(tmp_path):
    job = job_for(**SHARDED)
    shapes = Shapes(job.spec, job.plan)
    weights = {name: torch.empty(shape) for name, shape in shapes.whole.items()}

    def stored(step: int, tensors: dict[str, torch.Tensor]) -> store.Checkpoint:
        return store.write(tmp_path / f"step-{step}", step, {"weights": tensors}, {})

    for step, (name, change) in enumerate(CHECKPOINTS.items(), 2):
        wrong = stored(step, change(weights))
        assert {fault.kind for fault in check_resume(wrong, shapes, frozenset())} == {"resume"}, name
    assert {fault.kind for fault in rehearse(job, LIMIT, checkpoint=wrong).faults} == {"resume"}
    assert check_resume(stored(1, weights), shapes, frozenset()) == []
