"""Makes long steps and long pipelines cheap to rehearse: what a rank does again and again is done once.

A step of 64 micro-batches runs the same forward pass 64 times, and the stages in the middle of a pipeline are alike.
So an action is really run only where it may differ from those before: the first micro-batches of a stage, one in the
middle, the last. The others repeat its record: the same calls in the same order, the same bytes held and freed. The
list of actions itself, and every send and receive between stages, is gone through by the runtime's own code, for every
micro-batch and for every place in the pipeline.

    key of an action    its kind; first, second or later of its stage; whether it is the last; with parameters that are
                        dropped between passes also what the stage did before
    moved               a rank at another place of the pipeline whose stages are alike: its list of actions over the
                        records of this one, and what comes before and after the pipeline as it is here

Invariant: programs and bytes are those of a rehearsal without repeats (tests/rehearse/test_repeats.py). What cannot be
repeated raises `NotRepeatable`, and the rank is rehearsed in full.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.memory.account import Account
from shardwise.memory.points import Point
from shardwise.parallel.data.replicas import DataParallelWrapper
from shardwise.parallel.engine import Engine
from shardwise.parallel.pipeline.execute import Pipeline, Stage
from shardwise.parallel.traffic import Traffic
from shardwise.rehearse.classes import layers_of_rank
from shardwise.rehearse.no_disk import NoDisk
from shardwise.rehearse.program import NO_DISK, Call, DiskUse, Event, Program
from shardwise.rehearse.spans import describe
from shardwise.rehearse.stand_in import Recorder
from shardwise.run.clock import Clock
from shardwise.spec.actions import Action

FINISH = "finish"  # the key of what completes a stage's gradients


class NotRepeatable(Exception):
    """Is raised when an action has no record, or one that does not stand alone."""


Name = tuple[int, Hashable]
"""An action's stage, as the place among those of its rank, and its key."""


@dataclass
class ActionRecord:
    """What one action did: its calls, and the bytes it took."""

    calls: list[Call]
    events: list[Event]  # calls are numbered from the action's first
    earlier: dict[int, tuple[Name, int]]  # events that wait for a call of an earlier action: which one of it
    rise: int  # bytes at its fullest moment, over those before it
    kept: int  # bytes that it left, or freed if negative
    handed_on: tuple[torch.Size, torch.dtype] | None = None
    is_forward: bool = False  # then what it hands on is kept for backward
    freed: int = 0  # bytes among those freed that an earlier action of the pass has received or handed on
    disk: DiskUse = NO_DISK
    keeps: bool = False  # what it has received, until the next action of the same pass is through


class Repeats:
    """The records of one rank's actions, and who repeats them. Made when the step that is recorded is about to
    begin."""

    def __init__(self, engine: Engine, recorder: Recorder, account: Account, clock: Clock, disk: NoDisk):
        self.engine, self.recorder, self.account, self.clock, self.disk = engine, recorder, account, clock, disk
        self.records: dict[Name, ActionRecord] = {}
        self.kept: dict[tuple[int, int], Tensor] = {}  # memory of what is under way, by stage and micro-batch
        self.passing: dict[tuple[int, int], list[Tensor]] = {}  # likewise: received or handed on, and kept till later
        self.first_call: dict[Name, int] = {}  # of the last action with this name
        self.watched: dict[tuple[int, int], list[tuple[int, weakref.ref[Any]]]] = {}  # what the last action passed
        self.looks: tuple[ActionRecord, weakref.ref[Any]] | None = None  # does the last one keep what it received?
        pipeline = engine.pipeline
        self.places, self.keys = place_of_stages(pipeline), action_keys(pipeline)
        self.repeated = repeated_passes(self.keys)
        self.run_action, self.run_pipeline = pipeline.perform, pipeline.train
        pipeline.perform = self.perform  # type: ignore[method-assign]
        pipeline.train = self.train  # type: ignore[assignment, method-assign]
        for stage in engine.stages:
            stage.wrapper.finish = self._recorded(stage)  # type: ignore[method-assign]
        self.bounds: list[tuple[int, int]] = []  # events and calls, before the pipeline and after it
        self.held_before = 0  # bytes
        self.disk_inside = NO_DISK  # of the pipeline, in a step
        self.inside = self.outside = account.peak  # the fullest moments of the pipeline, and of the rest of the step

    @property
    def peak(self) -> Point:
        """Returns the fullest moment of the whole step."""
        return max(self.inside, self.account.peak, key=lambda point: point.total)

    def train(self, *args: Any) -> Tensor:
        """Runs the pipeline as `Pipeline.train`, and notes where its events begin and end, and what it holds."""
        program, account = self.recorder.program, self.account
        self.recorder.computed()
        self.bounds = [(len(program.events), len(program.calls))]
        before, account.peak = account.peak, account.settled()
        self.held_before, disk = account.peak.total, self.disk.use
        sums = self.run_pipeline(*args)
        self.recorder.computed()
        self.bounds.append((len(program.events), len(program.calls)))
        self.inside, self.disk_inside = account.peak, self.disk.use.since(disk)
        account.peak = max(account.settled(), before, key=lambda point: point.total)
        return sums

    def perform(
        self, action: Action, micro: Any, received: Tensor | None, passes: Any, sums: Tensor, num_targets: int
    ) -> Tensor | None:
        """Runs an action, or repeats one that was recorded; as `Pipeline.perform`."""
        name, of = (self.places[action.stage], self.keys[action]), (action.stage, action.microbatch)
        self._look()
        if of in self.repeated:
            return self.repeat(name, of, received)
        recording = _Recording(self, name)
        handed_on = self.run_action(action, micro, received, passes, sums, num_targets)
        record = recording.record()
        if handed_on is not None:
            record.handed_on = handed_on.shape, handed_on.dtype
        record.is_forward = action.kind == "F"
        record.freed = sum(size for size, storage in self.watched.pop(of, []) if storage() is None)
        if received is not None:
            self.looks = record, weakref.ref(received.untyped_storage())
        self.watched[of] = [
            (tensor.untyped_storage().nbytes(), weakref.ref(tensor.untyped_storage()))
            for tensor in (received, handed_on if record.is_forward else None)
            if tensor is not None
        ]
        self.records.setdefault(name, record)
        return handed_on

    def _look(self) -> None:
        """Sees whether the action before this one has kept what it received: by now nobody else holds it."""
        if self.looks is not None:
            record, storage = self.looks
            record.keeps, self.looks = storage() is not None, None

    def repeat(self, name: Name, of: tuple[int, int], received: Tensor | None = None) -> Tensor | None:
        """Repeats the record of an action for the pass `of` a micro-batch through a stage; returns what it hands on."""
        record = self.records.get(name)
        if record is None:
            raise NotRepeatable(f"no record of {name}")
        self._note(name, record)
        before, passing = self.kept.pop(of, None), self.passing.pop(of, [])
        if record.rise > 0:
            torch.empty(record.rise, dtype=torch.uint8)  # its fullest moment
        held = (0 if before is None else before.numel()) + record.kept
        handed_on = None
        if record.handed_on is not None:
            shape, dtype = record.handed_on
            handed_on = torch.empty(shape, dtype=dtype)
            held -= handed_on.numel() * handed_on.element_size()
        held += record.freed  # of what was received or handed on before, which is no part of `kept` here
        del before, passing
        self._keep(of, held)
        self.passing[of] = [handed_on] if record.is_forward and handed_on is not None else []
        self.passing[of] += [received] if record.keeps and received is not None else []
        return handed_on

    def _keep(self, of: tuple[int, int], held: int) -> None:
        """Holds bytes for a pass; where there are fewer than none, others of its stage hold less."""
        with self.clock.span("other", "forward"):  # what waits for backward is counted as activations
            self._keep_bytes(of, held)

    def _keep_bytes(self, of: tuple[int, int], held: int) -> None:
        if held > 0:
            self.kept[of] = torch.empty(held, dtype=torch.uint8)
            return
        for other in [one for one in self.kept if one[0] == of[0]]:
            if held == 0:
                return
            total = self.kept.pop(other).numel() + held
            held = min(0, total)
            if total > 0:
                self.kept[other] = torch.empty(total, dtype=torch.uint8)

    def _note(self, name: Name, record: ActionRecord) -> None:
        """Adds a record's calls to the program that is written."""
        first = len(self.recorder.program.calls)
        events = list(record.events)
        for index, (earlier, number) in record.earlier.items():
            if earlier not in self.first_call:
                raise NotRepeatable(f"{name} waits for {earlier}, which has not been")
            events[index] = events[index]._replace(call=self.first_call[earlier] + number - first)
        self.first_call[name] = first
        self.recorder.repeat(record.calls, events)
        self.disk.add(record.disk.read, record.disk.written)

    def _recorded(self, stage: Stage) -> Callable[[], None]:
        """Returns the `finish` of a stage's wrapper, recorded."""
        finish = stage.wrapper.finish

        def recorded() -> None:
            name = self.places[stage.index], FINISH
            self._look()
            recording = _Recording(self, name)
            finish()
            self.records[name] = recording.record()

        return recorded

    # The same at another place of the pipeline -----------------------------------------------------------------------

    def moved(self, program: Program, rank: int) -> Program:
        """Returns the program of a rank whose stages are like those of this one, whose `program` is complete."""
        plan, engine, other = self.engine.plan, self.engine, Program(rank)
        other.groups, other.channels = program.groups, program.channels
        other.shards = [shard._replace(name=self._renamed(shard.name, rank)) for shard in program.shards]
        mesh = replace(engine.mesh, rank=rank, at=plan.coordinates(rank))
        indices = [index for index, owner in enumerate(engine.pipeline.owners) if owner == mesh.at.pp]
        wrappers = [_RepeatedWrapper(self, place, index) for place, index in enumerate(indices)]
        stages = [
            Stage(wrapper.index, stage.model, cast(DataParallelWrapper, wrapper))
            for wrapper, stage in zip(wrappers, engine.stages, strict=True)
        ]
        pipeline = Pipeline(stages, mesh, engine.pipeline.dtype, Traffic())
        places, keys = place_of_stages(pipeline), action_keys(pipeline)

        def perform(action: Action, *rest: Any) -> Tensor | None:
            _, received, *_ = rest
            return self.repeat((places[action.stage], keys[action]), (action.stage, action.microbatch), received)

        pipeline.perform = perform  # type: ignore[assignment, method-assign]
        (begin, _), (end, last) = self.bounds
        copy_events(program, other, range(begin), 0)
        held = self._train_moved(pipeline, other)
        copy_events(program, other, range(end, len(program.events)), len(other.calls) - last)
        inside = sum(held.values())
        other.memory = held if inside > self.outside.total else self.outside.by_category()
        other.moment = self.moment if inside > self.outside.total else program.moment
        return other

    def _renamed(self, name: str, rank: int) -> str:
        """Returns the name of a parameter in the stage of another rank: that of the layer at the same place."""
        head, number, tail = _layer_of(name)
        if not number:
            return name
        mine, theirs = (layers_of_rank(self.engine.plan, at) for at in (self.engine.mesh.rank, rank))
        return f"{head}{theirs[mine.index(int(number))]}{tail}"

    def _train_moved(self, pipeline: Pipeline, program: Program) -> dict[str, int]:
        """Goes through the list of actions of another place; returns the bytes at its fullest moment, by category."""
        plan, mine, account = self.engine.plan, self.recorder.program, self.account
        self.recorder.program = program
        self._forget()
        account.begin()
        start, disk = account.settled().total, self.disk.use
        with account:
            micro = _Shape(torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.int64))
            pipeline.train([micro] * plan.num_microbatches, 1, self.clock)
        self.recorder.computed()
        self._forget()
        self.recorder.program = mine
        inside = self.disk.use.since(disk)
        beside = mine.disk.since(self.disk_inside)
        program.disk = mine.disk._replace(read=beside.read + inside.read, written=beside.written + inside.written)
        held = account.peak.by_category()
        self.moment = "" if account.peak.during is None else describe(account.peak.during)
        return held | {"temporary": held["temporary"] + self.held_before - start}

    def _forget(self) -> None:
        self.kept.clear()
        self.passing.clear()
        self.first_call.clear()


@dataclass
class _Shape:
    """A micro-batch of which only the shape is looked at."""

    tokens: Tensor


class _RepeatedWrapper:
    """The data-parallel wrapper of a stage that is only repeated."""

    def __init__(self, repeats: Repeats, place: int, index: int):
        self.repeats, self.place, self.index = repeats, place, index

    def finish(self) -> None:
        """Repeats what completes the gradients, which lie with the first micro-batch."""
        self.repeats.repeat((self.place, FINISH), (self.index, 0))


class _Recording:
    """Notes what happens from here on, until `record`."""

    def __init__(self, repeats: Repeats, name: Name):
        self.repeats, recorder, account = repeats, repeats.recorder, repeats.account
        recorder.computed()
        self.events, self.calls = len(recorder.program.events), len(recorder.program.calls)
        repeats.first_call[name] = self.calls
        self.before, account.peak = account.peak, account.settled()
        self.start, self.disk = account.peak.total, repeats.disk.use

    def record(self) -> ActionRecord:
        """Returns the record of what happened since."""
        recorder, account, program = self.repeats.recorder, self.repeats.account, self.repeats.recorder.program
        recorder.computed()
        end, peak = account.settled(), account.peak
        account.peak = max(self.before, peak, key=lambda point: point.total)
        events = [program.events[index] for index in range(self.events, len(program.events))]
        earlier = {i: self._owner(e.call) for i, e in enumerate(events) if 0 <= e.call < self.calls}
        relative = [e if e.call < 0 else e._replace(call=e.call - self.calls) for e in events]
        calls = [program.calls[index] for index in range(self.calls, len(program.calls))]
        rise, kept = peak.total - self.start, end.total - self.start
        return ActionRecord(calls, relative, earlier, rise, kept, disk=self.repeats.disk.use.since(self.disk))

    def _owner(self, call: int) -> tuple[Name, int]:
        """Returns the action that has begun a call, and which one of its calls it is."""
        repeats = self.repeats
        for name, first in sorted(repeats.first_call.items(), key=lambda one: -one[1]):
            record = repeats.records.get(name)
            if record is not None and first <= call < first + len(record.calls):
                return name, call - first
        raise NotRepeatable("an action waits for a call that no action has begun")


def copy_events(source: Program, target: Program, events: range, shift: int) -> None:
    """Copies events with the calls that they begin. `shift` is how much later calls are numbered there."""
    for index in events:
        event = source.events[index]
        if event.kind == "begin":
            number = target.calls.append(source.calls[event.call])
            assert number == event.call + shift, (number, event, shift)
        if event.call >= 0:
            event = event._replace(call=event.call + shift)
        target.events.append(event)


def _layer_of(name: str) -> tuple[str, str, str]:
    """Returns a parameter's name as what stands before its layer's number, the number and what follows; the number is
    empty for what belongs to no layer."""
    match = re.fullmatch(r"(layers\.)(\d+)(\..*)", name)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def place_of_stages(pipeline: Pipeline) -> dict[int, int]:
    """Returns the place of each stage among those of its rank: 0 is the first in model order."""
    return {index: place for place, index in enumerate(sorted(pipeline.stages))}


def action_keys(pipeline: Pipeline) -> dict[Action, Hashable]:
    """Returns what tells an action of this rank from others of its stage: actions of equal keys do the same."""
    drops = pipeline.plan.stage.drops_parameters or pipeline.plan.offload == "all"
    done: dict[int, list[str]] = {}
    found: dict[Action, Hashable] = {}
    for action in pipeline.actions:
        before = done.setdefault(action.stage, [])
        most = 1 if action.kind == "F" else 2  # the second backward may complete what the first has begun
        count = min(most, sum(kind == action.kind or (kind in "BI" and action.kind in "BI") for kind in before))
        is_last = action == pipeline.stages[action.stage].last_backward or action.microbatch == pipeline.last_microbatch
        found[action] = (action.kind, count, is_last, tuple(before[-2:]) if drops else ())
        before.append(action.kind)
    return found


def repeated_passes(keys: Mapping[Action, Hashable]) -> set[tuple[int, int]]:
    """Returns the (stage, micro-batch) whose actions all do what those of an earlier one have done."""
    signatures: dict[tuple[int, int], list[Hashable]] = {}
    for action, key in keys.items():
        signatures.setdefault((action.stage, action.microbatch), []).append(key)
    first: dict[Hashable, tuple[int, int]] = {}
    return {one for one, mine in signatures.items() if first.setdefault((one[0], *mine), one) != one}
