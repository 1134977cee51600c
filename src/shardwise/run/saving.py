"""Saves a run's state: every rank writes its share, the first one commits.

What is held by several ranks is written by one of them (checkpoint/share_out.py). Ranks on nodes that do not see the
run's directory send their slices, one after the other, to one that does. With `background` the step is blocked only
while the slices are copied to buffers in host memory, which are used again; a thread writes them. That thread calls no
collective: the first rank sees by the records in the scratch directory when all have written, and commits from its own
thread. Invariant: whatever fails, the checkpoints that are committed stay as they are.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import store
from shardwise.checkpoint.part_file import TORCH, SliceSource
from shardwise.checkpoint.share_out import HeldSlice, SharedOut, share_out
from shardwise.files import cannot_write
from shardwise.parallel.collect import exchange
from shardwise.parallel.engine import Engine
from shardwise.parallel.mesh import Mesh
from shardwise.run.rundir import MIRROR_SIGN
from shardwise.run.state import GROUPS, Held, held_slices

PATIENCE_S = 3600.0  # seconds in which the other ranks' writing must end, once this one's has
SEE_S = 5.0  # seconds in which a network file system shows another node's file


class Saver:
    """Commits checkpoints of one run. Every rank has one; `save` and `finish` are collective."""

    def __init__(
        self,
        parent: Path,  # the directory of checkpoints
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int = 1,
        background: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.parent, self.engine, self.optimizer, self.keep, self.say = parent, engine, optimizer, keep, say
        self.mesh = engine.mesh
        self.sees = ranks_that_see(parent, self.mesh)
        self.stall_s = 0.0  # how long the last save has kept the step waiting
        self._known: tuple[list[HeldSlice], SharedOut] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._job: tuple[int, Future[None]] | None = None
        self._buffers: dict[HeldSlice, Tensor] = {}
        self._done: list[int] = []
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends the writing in the background; what is not committed by then is left behind."""
        self._closing.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, step: int, state: Callable[[], dict[str, Any]], *, wait: bool = False) -> bool:
        """Collective. Saves a step, and returns whether it did: in the background a save is left out, with a line,
        while the one before is still being written. With `wait` it waits for that one instead. `state` is asked on the
        first rank for what the manifest is to say."""
        began = time.monotonic()
        self._check()
        is_first = self.mesh.rank == 0
        name = ""
        if is_first:
            if wait:
                self._wait()
            if self._job is None or self._job[1].done():
                try:
                    name = store.begin(self.parent, step).name
                except OSError as error:
                    raise cannot_write(self.parent, error) from None
        name = exchange(name, self.mesh)[0]
        if not name:
            assert self._job is not None or not is_first
            self.say(f"save     left out at step {step}: the checkpoint before is still being written")
            return False
        shared, held = self._share_out()
        scratch = self.parent / name
        found = state() if is_first else {}
        if self._thread is None:
            self._write(scratch, step, found, shared, self._sources(shared, held), self._all_have_written)
            self._done.append(step)
        else:
            self._wait()
            sources = self._copied(self._sources(shared, held))
            job = self._thread.submit(self._write, scratch, step, found, shared, sources, lambda: None)
            self._job = (step, job)
        self.stall_s = time.monotonic() - began
        return True

    def committed(self) -> list[int]:
        """Returns the steps that this rank has handed in since the last call, of those the first rank has committed
        them. Raises what the writing in the background has failed with."""
        self._check()
        steps, self._done = self._done, []
        return steps

    def _check(self) -> None:
        if self._job is not None and self._job[1].done():
            (step, job), self._job = self._job, None
            job.result()
            self._done.append(step)

    def finish(self) -> None:
        """Collective. Waits until what is being written is committed."""
        if self._thread is not None:
            self._wait()
            exchange("", self.mesh)

    def _wait(self) -> None:
        if self._job is not None:
            self._job[1].exception()  # waits
            self._check()

    def _all_have_written(self) -> None:
        exchange("", self.mesh)

    def _share_out(self) -> tuple[SharedOut, Held]:
        """Collective. Returns who writes what, and what this rank holds. It changes only when the optimizer gets
        states, so ranks tell each other only then what they hold."""
        held = held_slices(self.engine, self.optimizer)
        mine = list(held)
        is_known = self._known is not None and self._known[0] == mine
        if not all(exchange(int(is_known), self.mesh)):
            everybody = [[_slice(one) for one in slices] for slices in exchange(mine, self.mesh)]
            self._known = (mine, share_out(everybody, self.sees))
            self._buffers.clear()
        assert self._known is not None
        return self._known[1], held

    def _sources(self, shared: SharedOut, held: Held) -> list[SliceSource]:
        """Returns what this rank writes. Slices that travel are sent here, one after the other, or received when it is
        their turn to be written."""
        rank, sources = self.mesh.rank, []
        for one, writer, sender in shared.tasks:
            if writer == rank:
                whole = shared.shapes[one.group, one.name]
                read = held[one] if sender == rank else _Received(one, sender, self.mesh)
                sources.append(SliceSource(one, whole, read))
            elif sender == rank:
                dist.send(held[one]().to(self.mesh.device).contiguous(), writer)
        return sources

    @torch.no_grad()
    def _copied(self, sources: list[SliceSource]) -> list[SliceSource]:
        """Returns the same with the slices in host memory, in buffers of the save before."""
        on_cuda = self.mesh.device.type == "cuda"
        for one, _, read in sources:
            if one not in self._buffers:
                self._buffers[one] = torch.empty(one.shape, dtype=TORCH[one.dtype], pin_memory=on_cuda)
            self._buffers[one].copy_(read(), non_blocking=on_cuda)
        if on_cuda:
            torch.cuda.current_stream(self.mesh.device).synchronize()
        return [SliceSource(one, whole, self._buffers[one].detach) for one, whole, _ in sources]

    def _write(
        self,
        scratch: Path,
        step: int,
        state: dict[str, Any],
        shared: SharedOut,
        sources: list[SliceSource],
        have_written: Callable[[], None],
    ) -> None:
        """Writes this rank's part; the first rank then commits."""
        final = self.parent / f"step-{step}"
        rank = self.mesh.rank
        try:
            if sources:
                store.write_part(scratch, rank, shared, sources)
            have_written()
            if rank == 0:
                writers, seconds = shared.all_writers(), PATIENCE_S if self._thread else store.SEEN_S
                store.commit(scratch, final, step, state, writers, GROUPS, self._goes_on, seconds)
                store.keep_newest(self.parent, self.keep)
        except OSError as error:
            raise cannot_write(final, error) from None

    def _goes_on(self) -> bool:
        return not self._closing.is_set()


class _Received:
    """A slice that another rank sends when this one asks for its elements."""

    def __init__(self, one: HeldSlice, sender: int, mesh: Mesh):
        self.one, self.sender, self.mesh = one, sender, mesh

    def __call__(self) -> Tensor:
        value = torch.empty(self.one.shape, dtype=TORCH[self.one.dtype], device=self.mesh.device)
        dist.recv(value, self.sender)
        return value


def _slice(found: list[Any]) -> HeldSlice:
    group, name, dtype, offsets, shape = found
    return HeldSlice(group, name, dtype, tuple(offsets), tuple(shape))


def ranks_that_see(parent: Path, mesh: Mesh) -> list[bool]:
    """Collective. Returns of each rank whether it sees the first one's directory: there it finds a file with a random
    name that the first one has just made."""
    if mesh.is_alone:
        return [True]
    sign = f".seen-{secrets.token_hex(8)}"
    if mesh.rank == 0:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for old in parent.glob(".seen-*"):  # of a start that was killed
                old.unlink(missing_ok=True)
            (parent / sign).touch()
        except OSError as error:
            raise cannot_write(parent, error) from None
    sign = exchange(sign, mesh)[0]
    seen = exchange(int(_sees(parent, sign)), mesh)
    if mesh.rank == 0:
        (parent / sign).unlink(missing_ok=True)
    return [bool(one) for one in seen]


def _sees(parent: Path, sign: str) -> bool:
    deadline = time.monotonic() + SEE_S
    while not (parent.parent / MIRROR_SIGN).exists():
        if (parent / sign).exists():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return False
