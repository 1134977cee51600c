"""Stands in for the process groups of a rank that is alone: it records what would be sent, and sends nothing.

The program under rehearsal joins the backend `rehearsal` as it would join gloo, as any rank of any world, and calls it
through torch.distributed. Every collective, send and receive is noted with its group, op, dtype and number of elements
in program order, and so is the moment at which it is waited for. Tensors are left as they are. Invariant: a call that
is not known here fails; nothing goes by unrecorded. Read next: perform.py, program.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.pipeline.execute import AHEAD
from shardwise.rehearse.program import ROWS, Call, Channel, Event, Program, line_through

BACKEND = "rehearsal"
Parts = tuple[tuple[int, ...], tuple[int, ...]]  # of an exchange: elements to each rank of a group, and from each
NOT_RECORDED = (
    *("allreduce_coalesced", "reduce", "gather", "scatter", "reduce_scatter", "alltoall", "allgather_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_tensor_coalesced", "recv_anysource", "monitored_barrier"),
)
"""Calls of a process group that no program of this package makes."""


class Recorder:
    """Writes the program of the rank that is rehearsed. `during` is the action that is under way."""

    def __init__(self, program: Program):
        self.program, self.during, self.records = program, "", False
        self.flops = 0.0  # since the last event
        self.num_actions = 0  # that have ended
        self._left: list[int] = []  # calls whose end nobody asked for yet, though somebody waits for it
        self._num_of_line: dict[Any, int] = {}

    def channel(self, ranks: Sequence[int]) -> Channel:
        """Returns the channel of a new group of this rank."""
        line = line_through(ranks)
        if line is None or self.program.rank not in ranks:
            raise WrongGroup(self.program.rank, ranks)
        number = self._num_of_line.get(line, 0)
        self._num_of_line[line] = number + 1
        self.program.groups.append(Channel(line, number))
        return self.program.groups[-1]

    def begin(self, call: Call) -> int:
        """Notes that a call is begun and returns its number."""
        if not self.records:
            return -1
        self.computed()
        number = self.program.calls.append(call)
        self.program.events.append(Event("begin", number, during=self.during))
        return number

    def wait(self, number: int) -> None:
        """Notes that this rank waits for a call."""
        if number >= 0 and self.records:
            self.computed()
            self.program.events.append(Event("wait", number, during=self.during))

    def repeat(self, calls: Sequence[Call], events: Sequence[Event]) -> None:
        """Notes once more what was noted before. Calls are numbered from the first of these."""
        self.computed()
        first = len(self.program.calls)
        for call in calls:
            self.program.calls.append(call)
        for event in events:
            number = -1 if event.kind == "compute" else event.call + first
            self.program.events.append(event._replace(call=number, during=self.during))

    def leave(self, number: int) -> None:
        """Notes that somebody waits for a call at the end of the action that is under way."""
        self._left.append(number)

    def action_ends(self) -> None:
        """Notes the end of an action, and the waits that happen there."""
        self.num_actions += 1
        left, self._left = self._left, []
        for number in left:
            self.wait(number)
        self.computed()

    def add_flops(self, flops: float) -> None:
        """Adds the FLOPs of an operation."""
        self.flops += flops

    def computed(self) -> None:
        """Notes what was computed since the last event."""
        if self.flops and self.records:
            self.program.events.append(Event("compute", flops=self.flops, during=self.during))
        self.flops = 0.0


class WrongGroup(Exception):
    """Is raised when a program makes a group whose ranks are no line through its own rank."""

    def __init__(self, rank: int, ranks: Sequence[int]):
        super().__init__(f"rank {rank} is in the group {list(ranks)[:8]}")
        self.rank, self.ranks = rank, tuple(ranks)


class RecordedWork(dist.Work):
    """What a recorded call returns: waiting for it is noted and takes no time."""

    def __init__(self, recorder: Recorder, number: int, tensors: list[Tensor]):
        super().__init__()
        self.recorder, self.number, self.tensors = recorder, number, tensors
        self.arrives = recorder.num_actions + AHEAD

    def wait(self, timeout: Any = None) -> bool:
        self.recorder.wait(self.number)
        return True

    def is_completed(self) -> bool:
        return self.recorder.num_actions >= self.arrives  # a send's receive is posted so many actions ahead

    def get_future(self) -> Any:
        self.recorder.leave(self.number)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class RecordedGroup(dist.ProcessGroup):
    """A process group of the rank that is rehearsed, under the names by which torch calls one."""

    def __init__(self, options: Any, recorder: Recorder):
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._name, self.recorder = options.group_id, recorder
        self.channel = recorder.channel(list(options.global_ranks_in_group) or list(range(options.group_size)))

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        return self._name

    def _note(
        self,
        op: str,
        tensors: Sequence[Tensor],
        detail: str = "",
        peer: int = -1,
        tag: int = 0,
        parts: Parts = ((), ()),
    ) -> RecordedWork:
        first = tensors[0]
        elements, dtype = sum(tensor.numel() for tensor in tensors), str(first.dtype).removeprefix("torch.")
        call = Call(op, self.channel, elements, dtype, detail, peer, tag, first.element_size(), *parts)
        return RecordedWork(self.recorder, self.recorder.begin(call), list(tensors))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._note("all-reduce", tensors, _sum_word(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._note("broadcast", tensors, f"from place {0 if opts is None else opts.rootRank}")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._note("all-gather", outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RecordedWork:
        return self._note("all-gather", [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RecordedWork:
        return self._note("reduce-scatter", [input], _sum_word(opts))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> RecordedWork:
        larger = output if output.numel() >= input.numel() else input
        if not sent:
            return self._note("all-to-all", [larger])
        if sum(sent) != input.shape[0] or sum(received) != output.shape[0]:
            raise ValueError(f"rows {sent} of {input.shape[0]} are sent, {received} of {output.shape[0]} are received")
        width = input.shape[1:].numel()
        parts = tuple(rows * width for rows in sent), tuple(rows * width for rows in received)
        is_even = all(set(part) == {larger.numel() // len(part)} for part in parts)
        return self._note("all-to-all", [larger], ROWS, parts=((), ()) if is_even else parts)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> RecordedWork:
        return self._note("send", tensors, peer=to, tag=tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RecordedWork:
        return self._note("receive", tensors, peer=source, tag=tag)

    def barrier(self, opts: Any = None) -> RecordedWork:
        return self._note("barrier", [torch.empty(0)])

    # As 2.11 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _refuses(name: str) -> Any:
    """Returns a method for a collective that no program of this package uses so far."""

    def refuse(self: RecordedGroup, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not recorded: rehearse/stand_in.py has to learn it")

    return refuse


for _name in NOT_RECORDED:
    setattr(RecordedGroup, _name, _refuses(_name))


def _sum_word(opts: Any) -> str:
    return "sum" if opts is None else str(opts.reduceOp.op).rpartition(".")[2].lower()


@contextmanager
def alone_as(rank: int, world: int) -> Iterator[Recorder]:
    """Makes this process rank `rank` of `world` for torch.distributed, without the others, and yields what records."""
    program = Program(rank)
    recorder = Recorder(program)

    def create(options: Any, backend_options: Any) -> RecordedGroup:
        return RecordedGroup(options, recorder)

    assert not dist.is_initialized(), "a process is one rank at a time"
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield recorder
    finally:
        dist.destroy_process_group()
