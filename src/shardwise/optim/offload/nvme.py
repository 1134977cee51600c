"""NVMe offload: the optimizer's state lies on a disk, a bounded buffer of it in memory, everything else in one scratch
file per rank (ZeRO-Infinity).

All elements of a rank stand in one long row, cut into groups of one size. In the file a group is one stretch: each
state of its elements after the other. A step goes through the groups: while one is updated, the next two are read and
the one before is written. Invariant: memory holds `NUM_BUFFERS` groups of state, never more, however large the model
is; every transfer is aligned.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from shardwise.optim.offload.buffer import Buffer, Disk
from shardwise.optim.offload.disk import ALIGNMENT, NOTHING, aligned, new_buffer
from shardwise.optim.offload.optimizer import Build, HeldParameter, OffloadedOptimizer, Piece, UpdateGroup

NUM_BUFFERS = 4  # groups in memory: two that are read, one that is updated, one that is written
READ_AHEAD = 2


class NvmeOptimizer(OffloadedOptimizer):
    """Leaves parameters where they are; state is in a file on a disk. On a GPU gradients stay there until their
    group's turn."""

    more_rows = 0  # rows of memory beside the buffers

    def __init__(
        self, shards: Iterable[HeldParameter], build: Build, device: torch.device, disk: Disk, buffer_bytes: int
    ):
        self.disk, self.device, self.buffer_bytes = disk, device, buffer_bytes
        held = list(shards)
        self.dtype = next((shard.local.dtype for shard in held if shard.local.requires_grad), torch.float32)
        self.names, self.counts = state_names(build, self.dtype)
        self.rows = self._rows()
        self._counters: dict[int, dict[str, Tensor]] = {}  # step counters stay in memory, by piece
        super().__init__(held, build)
        self.file = disk.new_file(len(self.groups) * self.group_bytes)
        self._buffers = [
            Buffer(disk, self.group_bytes, self.scratch_bytes, device, self.dtype) for _ in range(self._num_buffers())
        ]

    def _rows(self) -> list[str]:
        """Returns the names of what each element has in the file, in this order."""
        return self.names

    def _make_groups(self, build: Build) -> Iterator[UpdateGroup]:
        """Yields the groups. Each shard begins at an aligned place, so any piece of it can be read alone."""
        others = {shard.name: shard.local.dtype for shard in self.shards if shard.local.dtype != self.dtype}
        assert not others, f"trained parameters are {self.dtype}, but {others}"
        size = self.dtype.itemsize
        unit = ALIGNMENT // size
        total = sum(_padded(shard.local.numel(), unit) for shard in self.shards)
        in_memory = NUM_BUFFERS * (len(self.rows) + 2 * self._is_away) + self.more_rows
        fits = self.buffer_bytes // (in_memory * size) // unit * unit
        self.num_elements = max(unit, min(fits, _padded(-(-total // NUM_BUFFERS), unit)))
        self.row_bytes = self.num_elements * size
        self.group_bytes = len(self.rows) * self.row_bytes
        self.scratch_bytes = 2 * self.row_bytes * self._is_away  # what comes from a GPU and goes back
        self._places: dict[int, int] = {}  # by piece: where it begins in its group
        pieces: list[Piece] = []
        place = 0
        for shard in self.shards:
            start, count = 0, shard.local.numel()
            while start < count or count == 0:
                stop = min(count, start + self.num_elements - place)
                piece = Piece(shard, start, stop, self._master(shard.local, start, stop))
                self._places[id(piece)] = place
                pieces.append(piece)
                place += _padded(stop - start, unit)
                start = stop
                if place >= self.num_elements:
                    yield self._group(pieces, build)
                    pieces, place = [], 0
                if not count:  # a rank without rows keeps counters for it, as others do
                    break
        if pieces:
            yield self._group(pieces, build)

    def _group(self, pieces: list[Piece], build: Build) -> UpdateGroup:
        optimizer = build(piece.master for piece in pieces)
        for piece in pieces:
            state = optimizer.state.pop(piece.master, {})
            self._counters[id(piece)] = {k: v for k, v in state.items() if isinstance(v, Tensor) and not v.ndim}
        return UpdateGroup(pieces, optimizer)

    @property
    def _is_away(self) -> bool:
        return self.device.type != "cpu"

    def _num_buffers(self) -> int:
        return min(NUM_BUFFERS, len(self.groups))

    def _master(self, local: nn.Parameter, start: int, stop: int) -> nn.Parameter:
        """Returns a stretch of the parameter itself; a matrix stays one to those who count dimensions."""
        shape = (1, stop - start) if local.ndim > 1 else (stop - start,)
        if self._is_away:
            return nn.Parameter(torch.empty(0, dtype=local.dtype).view((1, 0) if local.ndim > 1 else (0,)))
        return nn.Parameter(local.detach().view(-1)[start:stop].view(shape))

    # One step -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        self._read_from = 0

    def _fetch(self, number: int) -> None:
        while self._read_from < min(len(self.groups), number + 1 + READ_AHEAD):
            self._start_reading(self._read_from)
            self._read_from += 1
        group, buffer = self.groups[number], self._buffer(number)
        buffer.under_way.wait()
        for piece in group.pieces:
            self._show(group, piece, buffer)
        buffer.wait_for_device()

    def _end(self) -> None:
        for buffer in self._buffers:
            if buffer.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(buffer.stream)

    def _start_reading(self, number: int) -> None:
        buffer = self._buffer(number)
        buffer.under_way.wait()  # its last group is written
        buffer.under_way = self.file.read(number * self.group_bytes, buffer.view)
        if self._is_away:
            for piece in self.groups[number].pieces:
                gradient = piece.shard.gradient
                if gradient is not None:
                    buffer.take(self._scratch(buffer, piece, 0), piece.shard.local, piece)
                    buffer.take(self._scratch(buffer, piece, 1), gradient, piece)

    def _bind(self, piece: Piece, buffer: Buffer) -> None:
        """Gives the inner optimizer the master and its gradient, as views of this buffer or of the shard."""
        gradient = piece.shard.gradient
        if gradient is None:
            piece.master.grad = None
        elif self._is_away:
            piece.master.data = self._scratch(buffer, piece, 0).view(flat_shape(piece))
            piece.master.grad = self._scratch(buffer, piece, 1).view(flat_shape(piece))
        else:
            piece.master.grad = gradient.reshape(-1)[piece.start : piece.stop].view_as(piece.master)

    def _show(self, group: UpdateGroup, piece: Piece, buffer: Buffer) -> None:
        """Makes the inner optimizer's entry for a piece: views of the buffer."""
        self._bind(piece, buffer)
        if piece.master.grad is None:
            return
        if self.counts and not self._counters[id(piece)]:
            return  # the first step: torch makes this group's state, `_give_back` takes it over
        state = group.optimizer.state[piece.master]
        state |= self._counters[id(piece)]
        state |= {name: self._row(buffer, piece, name).view_as(piece.master) for name in self.names}

    def _give_back(self, number: int) -> None:
        group, buffer = self.groups[number], self._buffer(number)
        for piece in group.pieces:
            state = group.optimizer.state.pop(piece.master, {})
            self._counters[id(piece)] = {k: v for k, v in state.items() if isinstance(v, Tensor) and not v.ndim}
            for name in self.names:
                row = self._row(buffer, piece, name)
                if name in state and state[name].untyped_storage()._cdata != row.untyped_storage()._cdata:
                    row.copy_(state[name].view(-1))  # the optimizer made a new tensor
            if self._is_away and piece.master.grad is not None:
                buffer.bring_back(piece.shard.local, piece.master, piece)
            piece.master.grad = None
        buffer.under_way = self.file.write(number * self.group_bytes, buffer.view[: self.written_bytes])

    # Rows of elements ------------------------------------------------------------------------------------------------

    def _buffer(self, number: int) -> Buffer:
        return self._buffers[number % len(self._buffers)]

    def buffers(self) -> list[Buffer]:
        """Returns the memory that it has for good."""
        return self._buffers

    @property
    def written_bytes(self) -> int:
        """The bytes of a group that are written after its update."""
        return self.group_bytes

    def _row(self, buffer: Buffer, piece: Piece, name: str) -> Tensor:
        return buffer.elements(self.rows.index(name) * self.row_bytes, self._places[id(piece)], piece)

    def _scratch(self, buffer: Buffer, piece: Piece, row: int) -> Tensor:
        return buffer.elements(self.group_bytes + row * self.row_bytes, self._places[id(piece)], piece)

    # State by parameter ---------------------------------------------------------------------------------------------

    def state_of(self, local: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state of one parameter, read from the file piece by piece."""
        pieces = self.pieces[local]
        found = {key: value.clone() for key, value in self._counters[id(pieces[0][1])].items()}
        if self.counts and not found:
            return {}  # no step yet
        return found | {name: self.read_row(local, name) for name in self.names}

    def state_shapes(self, local: nn.Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        counters = self._counters[id(self.pieces[local][0][1])]
        if self.counts and not counters:
            return {}  # no step yet
        found = {name: (value.shape, value.dtype) for name, value in counters.items()}
        return found | dict.fromkeys(self.names, (local.shape, local.dtype))

    def one_state(self, local: nn.Parameter, name: str) -> Tensor:
        if name in self.names:
            return self.read_row(local, name)
        return self._counters[id(self.pieces[local][0][1])][name].clone()

    def put_state(self, local: nn.Parameter, key: str, value: Tensor) -> None:
        """Writes one state of a checkpoint, already cut to this rank's share."""
        if key in self.names:
            self.write_row(local, key, value)
            return
        for _, piece in self.pieces[local]:
            self._counters[id(piece)][key] = value.detach().clone().cpu()

    def read_row(self, local: nn.Parameter, name: str) -> Tensor:
        """Returns one row of a parameter (a state, or itself) from the file, as a new tensor of its shape. It has
        memory of its own on the way: somebody may ask in the midst of an update, when the buffers are in use."""
        whole = torch.empty(local.shape, dtype=local.dtype)
        for group, piece in self.pieces[local]:
            place, view = self.place(group, piece, name)
            landing = new_buffer(len(view))
            self.file.read(place, memoryview(landing)[: len(view)]).wait()
            found = self.disk.tensor(landing).view(local.dtype)
            whole.view(-1)[piece.start : piece.stop] = found[: piece.stop - piece.start]
        return whole

    def write_row(self, local: nn.Parameter, name: str, value: Tensor) -> None:
        """Writes one row of a parameter into the file."""
        for group, piece in self.pieces[local]:
            place, view = self.place(group, piece, name)
            self._row(self._buffers[0], piece, name).copy_(value.reshape(-1)[piece.start : piece.stop])
            self.file.write(place, view).wait()

    def place(self, group: UpdateGroup, piece: Piece, name: str) -> tuple[int, memoryview]:
        """Returns the offset of a piece's row in the file, in bytes, and its part of the first buffer, which nobody
        uses: all transfers are done by then."""
        for buffer in self._buffers:
            buffer.under_way.wait()
            buffer.under_way = NOTHING
        first = self.rows.index(name) * self.row_bytes + self._places[id(piece)] * self.dtype.itemsize
        length = aligned((piece.stop - piece.start) * self.dtype.itemsize)
        return group.number * self.group_bytes + first, self._buffers[0].view[first : first + length]

    def about(self) -> str:
        size, memory = self.file.num_bytes, len(self._buffers) * (self.group_bytes + self.scratch_bytes)
        way = (
            "direct"
            if self.file.is_direct
            else "through the page cache, because this filesystem has no direct transfers"
        )
        return f"offload  {size / 2**30:.2g} GiB per rank on the disk, {way}; {memory / 2**20:.0f} MiB of buffers"

    def close(self) -> None:
        """Frees the space on the disk."""
        self.file.close()


def state_names(build: Build, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Returns the names of what an optimizer keeps for a parameter: states of its shape, and counters. They are found
    by a step on a small one."""
    probe = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    optimizer = build([probe])
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    tensors = {name: value for name, value in optimizer.state[probe].items() if isinstance(value, Tensor)}
    return [n for n, v in tensors.items() if v.ndim], [n for n, v in tensors.items() if not v.ndim]


def _padded(count: int, unit: int) -> int:
    """Returns a count rounded up to a whole number of units."""
    return -(-count // unit) * unit


def on_disk_copy(value: Tensor, directory: str) -> Tensor:
    """Returns a copy of a whole state on its way to a checkpoint, in memory behind which a nameless file stands: the
    system may take it back."""
    value = value.detach()
    if not value.nbytes:
        return value.cpu()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(value.nbytes)
        copy = torch.frombuffer(mmap.mmap(file.fileno(), value.nbytes), dtype=value.dtype).view(value.shape)
    return copy.copy_(value)


def flat_shape(piece: Piece) -> tuple[int, ...]:
    """Returns the shape of a piece's master: one row, or a vector where the parameter is one."""
    count = piece.stop - piece.start
    return (1, count) if piece.shard.local.ndim > 1 else (count,)
