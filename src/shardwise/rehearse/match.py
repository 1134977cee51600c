"""Matches the calls of all ranks: every group has the same members on each of them, a group's collectives are the
same in the same order on every member, and every send meets its receive.

The programs are those of the classes; which rank sends to which follows from coordinates, for all ranks of the world
at once (numpy). Nothing is compared twice: a sequence of calls is one number, and the numbers of a group's members
must be equal. Invariant: whatever is wrong is said with real ranks of the job. Read next: simulate.py, for what
sequences alone cannot show.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.rehearse.fault import REPORT, Fault
from shardwise.rehearse.program import Call, Channel, Line, Program
from shardwise.spec.plan import Plan

MOST_SENDS = 4  # pairs of ranks that are named


@dataclass(frozen=True)
class World:
    """All ranks of a job: the program of each class, and the class of each rank."""

    programs: Sequence[Program]
    of_rank: np.ndarray
    stages: Sequence[int]  # by class: the place in the pipeline, for calls to people

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return len(self.of_rank)

    def first_ranks(self, number: int) -> tuple[int, ...]:
        """Returns the first few ranks of a class."""
        return tuple(int(rank) for rank in np.flatnonzero(self.of_rank == number)[:4])

    def program_of(self, rank: int) -> Program:
        """Returns the program that a rank runs."""
        return self.programs[self.of_rank[rank]]

    def name(self, rank: int) -> str:
        """Returns a rank with its place in the pipeline, in words."""
        return f"rank {rank} (stage {self.stages[self.of_rank[rank]]})" if max(self.stages) else f"rank {rank}"

    def axis(self, channel: Channel) -> str:
        """Returns the axis of a group, in words."""
        if channel.line.length == self.size:
            return "world"
        return next((p.channels[channel] for p in self.programs if channel in p.channels), f"group {channel.number}")

    def channels(self) -> list[Channel]:
        """Returns the groups that any rank has."""
        return sorted({channel for program in self.programs for channel in program.groups})

    def members(self, channel: Channel) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each group of this kind that some rank is in, one row of ranks; and which of them exist and are
        in it by their own account, as an array of the same shape."""
        has = np.array([channel in set(program.groups) for program in self.programs])[self.of_rank]
        ranks, (length, stride) = np.flatnonzero(has), channel.line
        firsts = np.unique(ranks - ranks // stride % length * stride)
        rows = firsts[:, None] + np.arange(length) * stride
        exists = rows < self.size
        return rows, exists & has[np.where(exists, rows, 0)]


def match(world: World) -> list[Fault]:
    """Returns what does not match, at most one fault per kind of group."""
    channels = world.channels()
    found = [fault for channel in channels if (fault := _groups(world, channel))]
    if found:  # who is in a group without knowing it makes no call there
        return found
    found = [fault for channel in channels if (fault := _collectives(world, channel) or _exchanges(world, channel))]
    return [*found, *list(_sends(world))[:MOST_SENDS]]


def check_axes(world: World, plan: Plan) -> list[Fault]:
    """Returns the groups whose ranks do not stand along the axis that they are for: their calls may match all the same,
    and sum up what does not belong together."""
    state = plan.shard * plan.cp
    right = {
        "tp": Line(plan.tp, 1),
        "cp": Line(plan.cp, plan.tp),
        "tokens": Line(plan.cp * plan.tp, 1),
        "shard": Line(state, plan.tp),
        "replicate": Line(plan.replicate, state * plan.tp),
        "dp": Line(plan.dp * plan.cp, plan.tp),
        "pp": Line(plan.pp, plan.stage_world),
        "ends": Line(2, (plan.pp - 1) * plan.stage_world),
        "ep": Line(plan.ep, 1),
        "expert-dp": Line(plan.expert_copies, plan.ep),
        "expert-shard": Line(plan.expert_shards, plan.ep),
    }
    found = []
    for axis, channel in sorted({(axis, c) for program in world.programs for c, axis in program.channels.items()}):
        line, wanted = channel.line, right.get(axis, channel.line)
        if line != wanted and wanted.length > 1:
            what = f"the {axis} group of rank 0 is ranks {_some(np.array(line.ranks_through(0)))}"
            why = f"{plan.layout} puts ranks {_some(np.array(wanted.ranks_through(0)))} on that axis"
            found.append(Fault("group", what, why, REPORT, tuple(line.ranks_through(0))[:4]))
    return found


def _groups(world: World, channel: Channel) -> Fault | None:
    rows, is_in = world.members(channel)
    wrong = np.flatnonzero(~is_in.all(axis=1))
    if not len(wrong):
        return None
    row, members = rows[wrong[0]], is_in[wrong[0]]
    there, missing = int(row[members][0]), int(row[~members][0])
    absent = world.name(missing) if missing < world.size else f"rank {missing}, which does not exist,"
    return Fault(
        "group",
        f"{world.name(there)} makes a group ({world.axis(channel)}) with {absent} in it, who does not",
        f"the group is ranks {_some(row)}, {channel.line.stride} apart; it would be waited for when it is made",
        REPORT,
        (there, missing),
    )


def _collectives(world: World, channel: Channel) -> Fault | None:
    numbers: dict[Hashable, int] = {}
    sequences = [
        tuple(_call(program.calls[number]) for number in program.by_channel.get(channel, ()))
        for program in world.programs
    ]
    of_class = np.array([numbers.setdefault(sequence, len(numbers)) for sequence in sequences])
    if len(numbers) == 1:
        return None
    rows, _ = world.members(channel)
    found = of_class[world.of_rank][rows]
    wrong = np.flatnonzero((found != found[:, :1]).any(axis=1))
    if not len(wrong):
        return None
    row = rows[wrong[0]]
    place = int(np.flatnonzero(found[wrong[0]] != found[wrong[0], 0])[0])
    return _first_difference(world, channel, int(row[0]), int(row[place]))


def _exchanges(world: World, channel: Channel) -> Fault | None:
    """Returns the first exchange of rows in which one rank sends another number than the other one expects."""
    calls = [
        [program.calls[number] for number in program.by_channel.get(channel, ()) if program.calls[number].is_exchange]
        for program in world.programs
    ]
    if not any(calls):
        return None
    rows, _ = world.members(channel)
    seen = set[tuple[Call, ...]]()
    for index in np.unique(world.of_rank[rows], axis=0, return_index=True)[1]:
        classes, places = np.unique(world.of_rank[rows[index]], return_inverse=True)
        for number, together in enumerate(zip(*(calls[one] for one in classes), strict=True)):
            if together not in seen:
                parts = [together[place].parts() for place in places]
                sent, received = (np.array(side) for side in zip(*parts, strict=True))
                for sender, receiver in np.argwhere(sent != received.T)[:1]:
                    one, other = int(rows[index][sender]), int(rows[index][receiver])
                    return Fault(
                        "call",
                        f"{world.name(one)} sends other rows than {world.name(other)} expects",
                        f"exchange {number + 1} of their {world.axis(channel)} group: {sent[sender, receiver]:,} "
                        f"elements are sent, {received[receiver, sender]:,} are waited for",
                        REPORT,
                        (one, other),
                    )
            if len(classes) == 1:  # else the same calls may stand in other places
                seen.add(together)
    return None


def _first_difference(world: World, channel: Channel, one: int, other: int) -> Fault:
    mine, theirs = (list(_calls(world.program_of(rank), channel)) for rank in (one, other))
    index = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if _call(a[0]) != _call(b[0])),
        min(len(mine), len(theirs)),
    )

    def said(calls: list[tuple[Call, str]]) -> str:
        return f"{_words(calls[index][0])} in {calls[index][1] or 'the step'}" if index < len(calls) else "nothing more"

    return Fault(
        "call",
        f"{world.name(one)} and {world.name(other)} do not make the same calls in their {world.axis(channel)} group",
        f"call {index + 1} of {max(len(mine), len(theirs))}: rank {one} {said(mine)}, rank {other} {said(theirs)}",
        REPORT,
        (one, other),
    )


def _calls(program: Program, channel: Channel) -> Iterator[tuple[Call, str]]:
    for call, during in program.during():
        if call.channel == channel and not call.is_p2p:
            yield call, during


def _call(call: Call) -> Hashable:
    return call.op, -1 if call.is_exchange else call.elements, call.dtype, call.detail


def _words(call: Call) -> str:
    return f"{call.op} of {call.elements:,} {call.dtype}"


def _some(ranks: np.ndarray) -> str:
    shown = [str(rank) for rank in ranks[:4]]
    return ", ".join([*shown, *(["..."] if len(ranks) > 5 else []), *[str(rank) for rank in ranks[4:][-1:]]])


def _sends(world: World) -> Iterator[Fault]:
    """Yields a fault for every pair of classes whose sends and receives do not meet."""
    for number, program in enumerate(world.programs):
        ranks = np.flatnonzero(world.of_rank == number)
        for (channel, op, peer, tag), numbers in program.by_peer.items():
            length, stride = channel.line
            places = ranks // stride % length
            others = ranks + (peer - places) * stride
            pairs = np.stack((world.of_rank[others], places), axis=1)
            for index in np.unique(pairs, axis=0, return_index=True)[1]:
                rank, other, place = int(ranks[index]), int(others[index]), int(places[index])
                theirs = world.program_of(other)
                answer = theirs.by_peer.get((channel, "receive" if op == "send" else "send", place, tag), [])
                mine = [_size(program.calls[i]) for i in numbers]
                if mine != [_size(theirs.calls[i]) for i in answer] and (op == "send" or not answer):
                    yield _unmet(world, rank, other, op, [program.calls[i] for i in numbers], theirs, answer)


def _size(call: Call) -> tuple[int, str]:
    return call.elements, call.dtype


def _unmet(
    world: World, rank: int, other: int, op: str, mine: list[Call], program: Program, answer: list[int]
) -> Fault:
    theirs = [program.calls[number] for number in answer]
    index = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if _size(a) != _size(b)),
        min(len(mine), len(theirs)),
    )
    verb, opposite = ("sends", "receives") if op == "send" else ("receives", "sends")
    first = f"{mine[index].elements:,} {mine[index].dtype}" if index < len(mine) else "nothing more"
    second = f"{theirs[index].elements:,} {theirs[index].dtype}" if index < len(theirs) else "nothing more"
    return Fault(
        "call",
        f"{world.name(rank)} {verb} {len(mine)} tensors where {world.name(other)} {opposite} {len(theirs)}",
        f"number {index + 1}: rank {rank} {verb} {first}, rank {other} {opposite} {second}",
        REPORT,
        (rank, other),
    )
