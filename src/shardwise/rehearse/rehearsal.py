"""Rehearses a whole job: one rank of every class runs its program, and all ranks' calls are matched.

1. classes.py    which ranks run the same program
2. perform.py    one rank of each, in as many processes as there are cores
3. match.py      groups, collectives, sends and receives of all ranks
4. simulate.py   who waits for whom, and how long a step takes
5. coverage.py   parameters, rows of data, a checkpoint to go on from
6. the fullest rank of each class against its device

Whatever goes wrong is a `Fault`; a program that raises is one too. Read next: cli/rehearse.py, which prints it.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.store import Checkpoint
from shardwise.config.units import format_bytes
from shardwise.errors import UserError
from shardwise.rehearse.classes import RankClasses, Shapes, families, rank_classes
from shardwise.rehearse.coverage import check_resume, check_rows, check_shards
from shardwise.rehearse.fault import REPORT, Fault
from shardwise.rehearse.match import World, check_axes, match
from shardwise.rehearse.perform import RehearsedJob, perform_alike
from shardwise.rehearse.program import Program
from shardwise.rehearse.simulate import Prices, Simulation
from shardwise.rehearse.stand_in import WrongGroup

LEAST_FOR_PROCESSES = 4  # families: fewer are done before processes have been started
PARTS = 2  # per process, of all classes: so many jobs at least


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found."""

    job: RehearsedJob
    classes: RankClasses
    programs: Sequence[Program]
    faults: list[Fault]
    step_s: float = 0.0  # on the simulated clock, without what a simulation does not see
    waiting: dict[int, float] = field(default_factory=dict)  # by class, in seconds
    seconds: float = 0.0  # that the rehearsal took
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # of all ranks in a step, by axis and op
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes of their buffers

    @property
    def holds(self) -> bool:
        """Returns whether nothing was found."""
        return not self.faults

    @property
    def fullest(self) -> int:
        """Returns the class whose rank holds most."""
        return max(range(len(self.programs)), key=lambda number: self.programs[number].peak)


def rehearse(
    job: RehearsedJob,
    limit: int | None,
    prices: Prices | None = None,
    checkpoint: Checkpoint | None = None,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    room: int | None = None,
) -> Rehearsal:
    """Returns what was found. `limit`: the bytes of a device; `room`: those that are free on the disk that all ranks
    share. Without `prices` the clock stands still. `progress` is told how many classes are done, of how many."""
    began, plan = time.perf_counter(), job.plan
    faults = check_rows(plan)
    if faults:  # nobody could run it
        return Rehearsal(job, RankClasses(np.zeros(plan.world, dtype=np.int64), (0,)), (), faults)
    shapes = Shapes(job.spec, plan)
    classes = rank_classes(job.spec, plan)
    by_class: dict[int, Program] = {}
    for done in _perform_all(job, classes, processes):
        if isinstance(done, Fault):
            return Rehearsal(job, classes, (), [done], seconds=time.perf_counter() - began)
        by_class |= done
        progress(len(by_class), len(classes.first))
    programs = [by_class[number] for number in range(len(classes.first))]
    world = World(programs, classes.of_rank, [plan.coordinates(rank).pp for rank in classes.first])
    faults += [*check_axes(world, plan), *match(world)]
    step_s, waiting = 0.0, dict[int, float]()
    if not faults:  # else somebody waits for something that never comes, and it is said why
        result = Simulation(world, prices or Prices(lambda call, ranks: 0.0, lambda program, event: 0.0)).run()
        step_s, waiting = result.seconds, result.waiting
        faults += [result.fault] if result.fault else []
    faults += check_shards(world, shapes)
    faults += [] if limit is None else _too_large(world, limit)
    faults += [] if room is None else _no_room(world, room)
    if checkpoint is not None:
        faults += check_resume(checkpoint, shapes, _frozen(programs))
    calls, sent = _totals(world)
    seconds = time.perf_counter() - began
    return Rehearsal(job, classes, programs, faults, step_s, waiting, seconds, calls, sent)


def _perform_all(job: RehearsedJob, classes: RankClasses, processes: int) -> Iterator[dict[int, Program] | Fault]:
    """Yields the programs of all classes by their numbers, a family at a time; a fault in the place of those that
    cannot be performed."""
    found = sorted(families(job.spec, job.plan, classes), key=len, reverse=True)
    # A family in parts, so that no process is left with the longest one.
    size = max(1, -(-len(classes.first) // (PARTS * processes)))
    parts = [family[start : start + size] for family in found for start in range(0, len(family), size)]
    tasks = [(job, classes, tuple(part)) for part in parts]
    if processes == 1 or len(tasks) < LEAST_FOR_PROCESSES or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(_perform, tasks)
        return
    with multiprocessing.get_context("fork").Pool(min(processes, len(tasks)), _is_worker) as pool:
        yield from pool.imap_unordered(_perform, tasks)


def _is_worker() -> None:
    """Leaves signals to the process that has started this one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _perform(task: tuple[RehearsedJob, RankClasses, tuple[int, ...]]) -> dict[int, Program] | Fault:
    job, classes, numbers = task
    rank = classes.first[numbers[0]]
    try:
        ranks = [classes.first[number] for number in numbers]
        return dict(zip(numbers, perform_alike(job, ranks), strict=True))
    except WrongGroup as error:
        why = f"its members are {list(error.ranks)[:8]}: not the ranks of a line through rank {rank}"
        return Fault("group", f"rank {rank} makes a group that it should not be in", why, REPORT, (rank,))
    except (UserError, NotImplementedError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["without a word"]
        if not job.spec.is_ours and type(error).__module__ == FakeTensorMode.__module__:
            raise UserError(
                f"{job.spec.name} cannot be rehearsed",
                why=f"transformers' own code of it computes as many values as others say: {lines[0][:200]}",
                fix="`shardwise verify` proves the layout, and `shardwise plan` predicts its memory",
            ) from error
        stage = job.plan.coordinates(rank).pp
        what = f"the program of rank {rank} (stage {stage}) ends with {type(error).__name__}"
        return Fault("program", what, lines[0][:300], REPORT, (rank,))


def _too_large(world: World, limit: int) -> list[Fault]:
    """Returns the stages that do not fit, the fullest first."""
    found: dict[int, int] = {}
    for number, (program, stage) in enumerate(zip(world.programs, world.stages, strict=True)):
        if program.peak > limit and program.peak > world.programs[found.get(stage, number)].peak - 1:
            found[stage] = number
    faults = []
    for stage, number in sorted(found.items(), key=lambda one: -world.programs[one[1]].peak):
        program = world.programs[number]
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in program.memory.items() if size)
        faults.append(
            Fault(
                "memory",
                f"stage {stage} does not fit: {format_bytes(program.peak)} of {format_bytes(limit)} on rank "
                f"{program.rank}, in {program.moment or 'the step'}",
                held,
                "fewer layers on this stage (parallel.split), memory.recompute=full, or train.micro_batch=1",
                world.first_ranks(number),
            )
        )
    return faults


def _no_room(world: World, room: int) -> list[Fault]:
    """Returns that the disk is too small, if it is."""
    needed = sum(world.program_of(rank).disk.space for rank in range(world.size))
    if needed <= room:
        return []
    what = f"the offloaded states of {world.size} ranks do not fit on the disk"
    why = f"they take {format_bytes(needed)}, {format_bytes(room)} are free"
    return [Fault("disk", what, why, "memory.offload_dir=DIR on a larger disk, or more ranks with parallel.zero=1")]


def _frozen(programs: Sequence[Program]) -> frozenset[str]:
    return frozenset(shard.name for program in programs for shard in program.shards if not shard.trained)


def _totals(world: World) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Returns the calls of all ranks in a step and their bytes, by axis and op."""
    calls, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for number, program in enumerate(world.programs):
        ranks = int((world.of_rank == number).sum())
        for call in program.calls:
            if call.channel.line.length == 1:  # a group of one sends nothing
                continue
            key = (world.axis(call.channel), call.op)
            calls[key] += ranks
            sent[key] += ranks * call.num_bytes
    return calls, sent


def summary(rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns what programs read of a rehearsal."""
    plan, programs = rehearsal.job.plan, rehearsal.programs
    return {
        "layout": plan.layout,
        "world": plan.world,
        "holds": rehearsal.holds,
        "faults": [fault.to_dict() for fault in rehearsal.faults],
        "classes": [
            {
                "first_rank": program.rank,
                "ranks": len(rehearsal.classes.ranks(number)),
                "stage": plan.coordinates(program.rank).pp,
                "calls": len(program.calls),
                "peak_memory_bytes": program.peak,
                "memory": program.memory,
                "moment": program.moment,
                "host_bytes": program.host,
                "disk": program.disk._asdict(),
                "waiting_s": rehearsal.waiting.get(number, 0.0),
            }
            for number, program in enumerate(programs)
        ],
        "calls": [
            {"axis": axis, "op": op, "calls": calls, "bytes": rehearsal.sent[axis, op]}
            for (axis, op), calls in sorted(rehearsal.calls.items())
        ],
        "simulated_s": rehearsal.step_s,
        "seconds": rehearsal.seconds,
    }
