"""Checks what all ranks together hold and read: every element of every parameter once, every row of a step once, and a
checkpoint that fits into all of it.

The two cuts of a parameter are asked of the functions that the runtime cuts by (`placement`, `row_range`), for every
place of the grid; what a rehearsed rank really held must be what they say of its place. Nothing is read of a
checkpoint but its list of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwise.checkpoint.store import Checkpoint
from shardwise.parallel.shards import row_range
from shardwise.rehearse.classes import Shapes
from shardwise.rehearse.fault import REPORT, Fault
from shardwise.rehearse.match import World
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES

MOST = 4  # faults of one kind that are shown


def check_shards(world: World, shapes: Shapes) -> list[Fault]:
    """Returns which parameters nobody holds, or several ranks hold as their own: those a checkpoint would lack, or have
    twice."""
    found = [*_stages(world, shapes), *_tiles(shapes)]
    return (found or list(_held(world, shapes)))[:MOST]


def _stages(world: World, shapes: Shapes) -> Iterator[Fault]:
    """Yields parameters that are on no stage, or on two."""
    plan = shapes.plan
    holders: dict[str, set[int]] = {name: set() for name in shapes.whole}
    for program, stage in zip(world.programs, world.stages, strict=True):
        for shard in program.shards:
            if shard.name in holders:
                holders[shard.name].add(stage)
    has_two = shapes.spec.tied and plan.pp > 1 and not SCHEDULES[plan.schedule].is_v
    for name, stages in holders.items():
        most = 2 if has_two and name == "embed.weight" else 1
        if len(stages) != most:
            where = f"stages {', '.join(map(str, sorted(stages)))} hold it" if stages else "no stage holds it"
            yield Fault("shard", f"{name} is held by {len(stages)} places of the pipeline, not {most}", where, REPORT)


def _tiles(shapes: Shapes) -> Iterator[Fault]:
    """Yields parameters whose slices or rows leave something out or lie on each other."""
    plan, seen = shapes.plan, set[object]()
    for name, shape in shapes.whole.items():
        is_expert = plan.ep > 1 and ".experts." in name
        places = [(0, ep) for ep in range(plan.ep)] if is_expert else [(tp, 0) for tp in range(plan.tp)]
        placed = [shapes.placed(name, *place) for place in places]
        parts = plan.expert_shards if is_expert else plan.state_shards
        cut = next((p.slice for p in placed if p.slice is not None), None)
        key = (shape, tuple(placed), parts)
        if key in seen:
            continue
        seen.add(key)
        if cut is not None:
            ranges = sorted({(p.slice.start, p.slice.stop) if p.slice else (0, shape[cut.dim]) for p in placed})
            if gap := _gap(ranges, shape[cut.dim]):
                what = f"{gap} along dimension {cut.dim} of {name}"
                yield Fault("shard", what, f"the tensor-parallel slices are {ranges[:6]}", REPORT)
        for part in {shapes.part(name, *place) for place in places}:
            if plan.zero:
                rows = [row_range(part[0], parts, index) for index in range(parts)]
                if gap := _gap([(start, stop) for start, stop in rows if stop > start], part[0]):
                    yield Fault("shard", f"{gap} of the rows of {name}", f"it has {part[0]} rows on {parts} ranks",
                                  REPORT)  # fmt: skip


def _gap(ranges: Iterable[tuple[int, int]], size: int) -> str:
    """Returns in words what ranges of [0, size) leave out or cover twice; nothing where they tile it."""
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            return f"nobody holds {end} to {start - 1}"
        if start < end:
            return f"two ranks hold {start} to {min(end, stop) - 1} as their own"
        end = stop
    return f"nobody holds {end} to {size - 1}" if end != size else ""


def _held(world: World, shapes: Shapes) -> Iterator[Fault]:
    """Yields ranks that hold something else than their place in the grid says."""
    plan = shapes.plan
    for program in world.programs:
        rank = program.rank
        at, ep = plan.coordinates(rank), rank % plan.ep
        for shard in program.shards:
            if shard.name not in shapes.whole:
                continue
            is_expert = plan.ep > 1 and ".experts." in shard.name
            part = list(shapes.part(shard.name, at.tp, ep))
            if plan.zero:
                index = rank % plan.stage_world // plan.ep % plan.expert_shards
                index, parts = (
                    (index, plan.expert_shards) if is_expert else (at.shard * plan.cp + at.cp, plan.state_shards)
                )
                start, stop = row_range(part[0], parts, index)
                part[0] = stop - start
            if tuple(part) != shard.shape:
                yield Fault(
                    "shard",
                    f"{world.name(rank)} holds {shard.name} as {list(shard.shape)}, its place in the grid has {part}",
                    "a checkpoint would put its elements in the wrong place",
                    REPORT,
                    (rank,),
                )
                break


def check_rows(plan: Plan) -> list[Fault]:
    """Returns which rows of a step no rank trains on, or two do."""
    end = 0
    for index in range(plan.dp):
        rows = plan.rows(index)
        if rows.start != end:
            before = rows.start < end
            what = f"row {min(rows.start, end)} of every step is trained on {'twice' if before else 'by nobody'}"
            taken = f"data-parallel index {index} takes rows {rows.start} to {rows.stop - 1}"
            why = f"{taken}, those before it end at {end - 1}"
            return [Fault("data", what, why, REPORT, (plan_rank(plan, index - 1), plan_rank(plan, index)))]
        if -(-len(rows) // plan.micro_batch) > plan.num_microbatches:
            what = f"data-parallel index {index} has {len(rows)} rows for {plan.num_microbatches} micro-batches of "
            return [Fault("data", f"{what}{plan.micro_batch}", "its last rows would not be trained on", REPORT)]
        end = rows.stop
    if end != plan.global_batch:
        what = f"rows {end} to {plan.global_batch - 1} of every step are trained on by nobody"
        return [Fault("data", what, f"the ranks' shares add up to {end} rows", REPORT)]
    return []


def plan_rank(plan: Plan, dp_index: int) -> int:
    """Returns the first rank of a data-parallel index."""
    return max(0, dp_index) * plan.cp * plan.tp


def check_resume(checkpoint: Checkpoint, shapes: Shapes, frozen: frozenset[str]) -> list[Fault]:
    """Returns why a checkpoint cannot be loaded into this model. `frozen`: parameters that checkpoints leave out."""
    stored = {name: tensor.shape for name, tensor in checkpoint.manifest().tensors("weights").items()}
    return [_resume_fault(checkpoint, *one) for one in _differing(stored, shapes.whole, frozen)][:MOST]


def _differing(
    stored: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]], frozen: frozenset[str]
) -> Iterator[tuple[str, str]]:
    for name, shape in needed.items():
        if name in frozen:
            continue
        if name not in stored:
            yield name, f"the model has {name}, the checkpoint does not"
        elif stored[name] != shape:
            yield name, f"{name} is {list(stored[name])} there and {list(shape)} here"


def _resume_fault(checkpoint: Checkpoint, name: str, why: str) -> Fault:
    fix = "the model that the checkpoint is of, or a run of another name: run.name=NEW"
    return Fault("resume", f"{checkpoint.path} cannot be loaded into this model", why, fix)
