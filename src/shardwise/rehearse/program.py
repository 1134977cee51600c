"""Defines what a rehearsed rank has done: its calls in program order, what it waited for and computed in between.

A `Program` is the record of one step of one rank. Calls name no ranks: a group is a *line*, `length` ranks that
stand `stride` apart (parallel/mesh.py makes no other groups), and a peer is a place in a line. So the record of one
rank is that of every rank that stands in the same way, and match.py reads it for all of them. No torch here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Line(NamedTuple):
    """A kind of process group: through every rank goes one such line of ranks."""

    length: int
    stride: int

    def first_of(self, rank: int) -> int:
        """Returns the first rank of the line through a rank."""
        return rank - rank // self.stride % self.length * self.stride

    def place_of(self, rank: int) -> int:
        """Returns the place of a rank in its line."""
        return rank // self.stride % self.length

    def ranks_through(self, rank: int) -> range:
        """Returns the ranks of the line through a rank."""
        first = self.first_of(rank)
        return range(first, first + self.length * self.stride, self.stride)


def line_through(ranks: Iterable[int]) -> Line | None:
    """Returns the line that these ranks are; None if they do not stand equally far apart."""
    found = list(ranks)
    stride = found[1] - found[0] if len(found) > 1 else 1
    is_line = stride > 0 and found == list(range(found[0], found[0] + len(found) * stride, stride))
    return Line(len(found), stride) if is_line else None


class Channel(NamedTuple):
    """A process group of a rank: its line, and which of the groups with this line it is."""

    line: Line
    number: int


class Call(NamedTuple):
    """One collective, send or receive, as this rank calls it."""

    op: str  # all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, barrier, send, receive
    channel: Channel
    elements: int  # of the whole buffer: what is summed, what is there after a gather
    dtype: str
    detail: str = ""  # of a collective: how it sums, or who has the values
    peer: int = -1  # of a send or receive: the other one's place in the line
    tag: int = 0  # likewise
    element_bytes: int = 0
    sent: tuple[int, ...] = ()  # of an exchange of rows: elements to each place of the line; equal ones are left out
    received: tuple[int, ...] = ()  # likewise: elements from each

    @property
    def is_p2p(self) -> bool:
        """Returns whether one rank sends and one receives."""
        return self.op in ("send", "receive")

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the buffer."""
        return self.elements * self.element_bytes

    @property
    def is_exchange(self) -> bool:
        """Returns whether this is an all-to-all in which every rank may send and receive another number of rows."""
        return self.detail == ROWS

    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the elements of an exchange to each place of the line, and those from each."""
        equal = (self.elements // self.channel.line.length,) * self.channel.line.length
        return self.sent or equal, self.received or equal


ROWS = "rows"  # the detail of an exchange


class Event(NamedTuple):
    """One moment of a program: a call is begun or waited for, or something is computed."""

    kind: str  # begin | wait | compute
    call: int = -1  # begun or waited for: its number in the program
    flops: float = 0.0  # computed
    during: str = ""  # the action in whose course it happened, such as `forward, micro-batch 3, stage 1`


KINDS = ("begin", "wait", "compute")


class Numbered(Generic[Item]):
    """Gives equal things one number: a program makes few different calls, each of them thousands of times."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._number: dict[Item, int] = {}

    def number(self, item: Item) -> int:
        """Returns the number of a thing, a new one if it was not seen before."""
        found = self._number.setdefault(item, len(self.items))
        if found == len(self.items):
            self.items.append(item)
        return found


class EventColumns:
    """The events of a program, in columns: millions of them fit into memory."""

    def __init__(self) -> None:
        self.kinds, self.calls, self.flops, self.actions = array("b"), array("i"), array("d"), array("i")
        self.names: Numbered[str] = Numbered()

    def append(self, event: Event) -> None:
        """Adds an event at the end."""
        self.kinds.append(KINDS.index(event.kind))
        self.calls.append(event.call)
        self.flops.append(event.flops)
        self.actions.append(self.names.number(event.during))

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> Event:
        during = self.names.items[self.actions[index]]
        return Event(KINDS[self.kinds[index]], self.calls[index], self.flops[index], during)

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self)))


class Calls(Sequence[Call]):
    """The calls of a program in order; equal ones are kept once."""

    def __init__(self) -> None:
        self.different: Numbered[Call] = Numbered()
        self.of = array("i")

    def append(self, call: Call) -> int:
        """Adds a call and returns its number."""
        self.of.append(self.different.number(call))
        return len(self.of) - 1

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: Any) -> Any:
        return self.different.items[self.of[index]]


class DiskUse(NamedTuple):
    """The bytes of a rank's offloaded states on its disk, and those that a step reads and writes."""

    space: int = 0
    read: int = 0
    written: int = 0

    def since(self, before: DiskUse) -> DiskUse:
        """Returns the same space, and what was read and written after `before`."""
        return self._replace(read=self.read - before.read, written=self.written - before.written)


NO_DISK = DiskUse()


@dataclass
class Program:
    """What one rank does in one step, and what it holds at its fullest moment."""

    rank: int
    calls: Calls = field(default_factory=Calls)
    events: EventColumns = field(default_factory=EventColumns)
    groups: list[Channel] = field(default_factory=list)
    """The process groups that this rank is in, in the order in which it makes them."""
    channels: dict[Channel, str] = field(default_factory=dict)
    """The axis of each group, in the mesh's words."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by category at the fullest moment."""
    moment: str = ""
    """The action in whose course that was."""
    shards: list[HeldShard] = field(default_factory=list)
    host: int = 0  # bytes in CPU memory beside a GPU
    disk: DiskUse = NO_DISK
    seconds: float = 0.0  # that the rehearsal of this rank took

    @property
    def peak(self) -> int:
        """Returns the bytes held at the fullest moment."""
        return sum(self.memory.values())

    @cached_property
    def by_channel(self) -> dict[Channel, list[int]]:
        """Returns the numbers of the collectives of each group, in program order."""
        found: dict[Channel, list[int]] = {}
        for number, call in enumerate(self.calls):
            if not call.is_p2p:
                found.setdefault(call.channel, []).append(number)
        return found

    @cached_property
    def by_peer(self) -> dict[tuple[Channel, str, int, int], list[int]]:
        """Returns the numbers of the sends and receives of each (group, op, peer, tag), in program order."""
        found: dict[tuple[Channel, str, int, int], list[int]] = {}
        for number, call in enumerate(self.calls):
            if call.is_p2p:
                found.setdefault((call.channel, call.op, call.peer, call.tag), []).append(number)
        return found

    def during(self) -> Iterator[tuple[Call, str]]:
        """Yields every call with the action in whose course it was begun."""
        for event in self.events:
            if event.kind == "begin":
                yield self.calls[event.call], event.during

    def counts(self) -> Counter[tuple[str, str]]:
        """Returns how many calls there are of each (axis, op)."""
        return Counter((self.channels.get(call.channel, "other"), call.op) for call in self.calls)


class HeldShard(NamedTuple):
    """What a rank holds of one parameter: enough to see whether all of it is held by somebody."""

    name: str
    shape: tuple[int, ...]  # of what this rank holds
    trained: bool
