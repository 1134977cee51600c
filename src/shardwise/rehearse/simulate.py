"""Runs all ranks against each other, on a clock that is not one: who waits for whom, and when a step is through.

1. Ranks are coloured by their programs, and colours are refined until all ranks of one colour have peers of the same
   colours in every group and at every end of a send (colour refinement). Then ranks of one colour do the same at the
   same time, and one of each is enough.
2. Every colour goes through its events. A collective ends when all members of the group have begun it, and no sooner
   than the one before it in that group; a send or receive ends when both ends have begun it. Nothing else is assumed of
   the library beneath: what gets through here needs no buffer.
3. When nobody can go on and somebody has not finished, they wait for each other: a deadlock.

Prices come from outside (prices.py). Invariant: the result does not depend on the order in which colours are visited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwise.rehearse.fault import REPORT, Fault
from shardwise.rehearse.match import World
from shardwise.rehearse.program import Call, Channel, Event, Program


class Prices(NamedTuple):
    """The seconds of what ranks do."""

    call: Callable[[Call, int], float]  # takes a call and the number of ranks of its group
    compute: Callable[[Program, Event], float]


@dataclass
class Result:
    """What came of it."""

    seconds: float = 0.0  # until the last rank is through
    waiting: dict[int, float] = field(default_factory=dict)  # by class: seconds in which its slowest rank only waited
    fault: Fault | None = None


def colours(world: World) -> np.ndarray:
    """Returns the colour of each rank, (world,)."""
    colour = world.of_rank.copy()
    members = [(channel, *world.members(channel)) for channel in world.channels()]
    while True:
        features = [colour]
        for _, rows, is_in in members:
            found = np.full(world.size, -1)
            kinds = np.unique(np.sort(np.where(is_in, colour[np.where(is_in, rows, 0)], -1), axis=1), axis=0,
                              return_inverse=True)[1].reshape(-1)  # fmt: skip
            found[rows[is_in]] = np.broadcast_to(kinds[:, None], rows.shape)[is_in]
            features.append(found)
        features += _peer_colours(world, colour)
        refined = np.unique(np.stack(features, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        if refined.max() == colour.max() and len(np.unique(refined)) == len(np.unique(colour)):
            return refined
        colour = refined


def _peer_colours(world: World, colour: np.ndarray) -> list[np.ndarray]:
    """Returns, for every kind of peer that any class sends to or receives from, its colour on each rank."""
    kinds = sorted({(key[0], key[2]) for program in world.programs for key in program.by_peer})
    found = []
    for channel, peer in kinds:
        has = np.array([any((k[0], k[2]) == (channel, peer) for k in program.by_peer) for program in world.programs])
        ranks = np.flatnonzero(has[world.of_rank])
        length, stride = channel.line
        column = np.full(world.size, -1)
        column[ranks] = colour[ranks + (peer - ranks // stride % length) * stride]
        found.append(column)
    return found


class _Node:
    """All ranks of one colour."""

    def __init__(self, colour: int, rank: int, program: Program):
        self.colour, self.rank, self.program = colour, rank, program
        self.at, self.now, self.waited = 0, 0.0, 0.0
        self.collectives: dict[Channel, list[float]] = {}  # when each was begun
        self.ends: dict[Channel, list[float]] = {}
        self.p2p: dict[tuple[Channel, str, int, int], list[float]] = {}
        self.order: dict[int, int] = {}  # call -> which one of its group, or of its peer, it is

    @property
    def event(self) -> Event | None:
        """Returns what this node does next; None at the end."""
        return self.program.events[self.at] if self.at < len(self.program.events) else None


class Simulation:
    """The state of all colours while they run."""

    def __init__(self, world: World, prices: Prices):
        self.world, self.prices, self.colour = world, prices, colours(world)
        _, firsts = np.unique(self.colour, return_index=True)
        self.nodes = [_Node(c, int(rank), world.program_of(int(rank))) for c, rank in enumerate(firsts)]
        self.groups: dict[tuple[int, Channel], list[_Node]] = {}

    def run(self) -> Result:
        """Lets every colour go as far as it can, until nothing moves. Who cannot go on waits at one that has not begun
        what it needs, and is looked at again when that one has moved."""
        awake = deque(self.nodes)
        waiting_at: dict[int, list[_Node]] = {}
        while awake:
            node = awake.popleft()
            before = node.at
            self._advance(node)
            if node.event is not None:
                waiting_at.setdefault(self._late(node).colour, []).append(node)
            if node.at > before:
                awake.extend(waiting_at.pop(node.colour, ()))
        waiting: dict[int, float] = {}
        for node in self.nodes:
            number = int(self.world.of_rank[node.rank])
            waiting[number] = max(waiting.get(number, 0.0), node.waited)
        stuck = next((node for node in self.nodes if node.event is not None), None)
        fault = None if stuck is None else self._deadlock(stuck)
        return Result(max(node.now for node in self.nodes), waiting, fault)

    def _advance(self, node: _Node) -> None:
        while (event := node.event) is not None:
            if event.kind == "compute":
                node.now += self.prices.compute(node.program, event)
            elif event.kind == "begin":
                self._begin(node, event.call)
            else:
                end = self._end(node, event.call)
                if end is None:
                    return
                node.waited += max(0.0, end - node.now)
                node.now = max(node.now, end)
            node.at += 1

    def _begin(self, node: _Node, number: int) -> None:
        call = node.program.calls[number]
        if call.is_p2p:
            begun = node.p2p.setdefault((call.channel, call.op, call.peer, call.tag), [])
        else:
            begun = node.collectives.setdefault(call.channel, [])
        node.order[number] = len(begun)
        begun.append(node.now)

    def _late(self, node: _Node) -> _Node:
        """Returns a colour that has not begun what a node waits for."""
        assert node.event is not None
        number = node.event.call
        call, order = node.program.calls[number], node.order[number]
        if call.is_p2p:
            return self._peer(node, call)[0]
        return next(n for n in self.group(node, call.channel) if len(n.collectives.get(call.channel, ())) <= order)

    def _end(self, node: _Node, number: int) -> float | None:
        """Returns when a call that this node has begun ends; None while somebody has not begun it."""
        call, order = node.program.calls[number], node.order[number]
        if call.is_p2p:
            other, answer = self._peer(node, call)
            begun = other.p2p.get(answer, ())
            if len(begun) <= order:
                return None
            mine = node.p2p[call.channel, call.op, call.peer, call.tag][order]
            return max(mine, begun[order]) + self.prices.call(call, 2)
        ends = node.ends.setdefault(call.channel, [])
        group = self.group(node, call.channel)
        while len(ends) <= order:
            index = len(ends)
            if any(len(other.collectives.get(call.channel, ())) <= index for other in group):
                return None
            begun_at = max(other.collectives[call.channel][index] for other in group)
            own = node.program.calls[node.program.by_channel[call.channel][index]]
            start = max(begun_at, ends[-1]) if ends else begun_at
            ends.append(start + self.prices.call(own, call.channel.line.length))
        return ends[order]

    def _peer(self, node: _Node, call: Call) -> tuple[_Node, tuple[Channel, str, int, int]]:
        line = call.channel.line
        place = line.place_of(node.rank)
        other = self.nodes[self.colour[node.rank + (call.peer - place) * line.stride]]
        return other, (call.channel, "receive" if call.op == "send" else "send", place, call.tag)

    def group(self, node: _Node, channel: Channel) -> list[_Node]:
        """Returns the colours in the group of a node."""
        found = self.groups.get((node.colour, channel))
        if found is None:
            ranks = np.array(channel.line.ranks_through(node.rank))
            found = [self.nodes[colour] for colour in np.unique(self.colour[ranks[ranks < self.world.size]])]
            self.groups[node.colour, channel] = found
        return found

    # Deadlocks -------------------------------------------------------------------------------------------------------

    def _deadlock(self, node: _Node) -> Fault:
        """Returns the circle of ranks that wait for each other, or the rank that never comes."""
        chain: list[tuple[int, _Node, Call, str]] = []
        rank, seen = node.rank, dict[int, int]()
        while node.colour not in seen:
            event = node.event
            if event is None:
                break
            seen[node.colour] = len(chain)
            call = node.program.calls[event.call]
            chain.append((rank, node, call, event.during))
            node, rank = self._missing(node, rank, event.call)
        circle = chain[seen[node.colour] :] if node.event is not None else chain[-1:]
        first, *rest = [
            f"{self.world.name(rank)} waits in {during or 'the step'} for the {call.op} of its "
            f"{self.world.axis(call.channel)} group"
            for rank, _, call, during in circle
        ]
        if node.event is None:
            ending = f"{self.world.name(rank)} ends its step without it"
        else:
            ending = "; ".join(rest) + (", and so on round" if rest else "it waits for itself")
        return Fault("deadlock", f"{first}, which never ends", ending, REPORT, tuple(r for r, *_ in circle))

    def _missing(self, node: _Node, rank: int, number: int) -> tuple[_Node, int]:
        """Returns who has not begun what this node waits for: its colour, and the rank in the group of `rank`."""
        call, order = node.program.calls[number], node.order[number]
        line = call.channel.line
        if call.is_p2p:
            other = rank + (call.peer - line.place_of(rank)) * line.stride
            return self.nodes[self.colour[other]], other
        for other in line.ranks_through(rank):
            found = self.nodes[self.colour[other]]
            if len(found.collectives.get(call.channel, ())) <= order:
                return found, other
        return node, rank
