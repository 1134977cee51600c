"""Compares what replicas hold, bit by bit: silent corruption shows in ranks that hold the same elements and differ.

Every rank sums up the bits of its parameters and of the optimizer's states, one number for each set of ranks that hold
the same elements. The numbers travel in the all-reduce that ends a step anyway, each rank's in a place of its own: no
rank sends anything more, and nothing waits. Where they differ, all ranks look closer together: the tensors are named,
and a minority takes the bits of the majority. With two that differ, or no majority, nobody knows who is right: the run
goes back to a checkpoint from before (going_back.py). Invariant: a single bit that differs is always seen, and ranks
that all hold the same bits are never doubted. Compared are tensors that lie in memory; one rank alone compares nothing.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.collect import exchange
from shardwise.parallel.engine import Engine
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.shards import Shard
from shardwise.run.going_back import Trouble

EXACT = 2**52 - 1  # bits of a whole number that fp64 keeps, in a sum with zeros
MOST_NAMED = 3  # tensors in one line

Named = tuple[str, Tensor]
Members = tuple[int, ...]
"""The ranks that hold the same elements, in order."""


@dataclass(frozen=True)
class Repair:
    """Bits that a minority took over from the majority."""

    step: int
    rank: int
    host: str
    tensors: tuple[str, ...]
    source: int  # the rank that they are from

    def __str__(self) -> str:
        what = f"rank {self.rank} ({self.host}) held other bits of {_named(self.tensors)} than most replicas"
        return f"{what}; restored from rank {self.source}"


class ReplicaCheck:
    """Compares this rank's tensors with those of the ranks that hold the same. Collective: every rank makes one."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, every: int, done: int):
        """`every`: steps between comparisons, 0 for none. `done`: the step whose state was loaded."""
        self.engine, self.optimizer, self.every = engine, optimizer, every
        self.mesh, self.clean = engine.mesh, done  # the last step whose state was the same on all replicas
        self._held = self._by_identity() if every and not self.mesh.is_alone else {}
        self._members = self._find_members()
        self._sets: list[Members] = sorted(set(self._members.values()))
        self._width = max((sum(rank in one for one in self._sets) for rank in range(self.mesh.plan.world)), default=0)

    def is_due(self, step: int, saved: int) -> bool:
        """Returns whether replicas are compared in a step: every few, and where its state was just `saved`, so that
        each checkpoint is known to be good or bad a step later."""
        return bool(self._sets) and (step % self.every == 0 or self.clean < saved == step - 1)

    def digests(self) -> Tensor:
        """Returns one number for each place of `look`: this rank's are filled in, the others are 0."""
        found = [self._digest_of_set(members) for members in self._sets if self.mesh.rank in members]
        places = torch.zeros(self.mesh.plan.world, self._width, dtype=torch.float64, device=self.mesh.device)
        if found:
            places[self.mesh.rank, : len(found)] = torch.stack(found).double()
        return places.flatten()

    def look(self, step: int, sums: Sequence[float]) -> tuple[Trouble | None, list[Repair]]:
        """Collective where replicas differ. Returns what that means for the run, from the digests of a step, added up
        over all ranks: nothing, repairs that were made, or trouble that only going back mends."""
        differing = [members for members in self._sets if len({self._at(rank, members, sums) for rank in members}) > 1]
        if not differing:
            self.clean = step - 1
            return None, []
        return self._look_closer(step, differing)

    def _at(self, rank: int, members: Members, sums: Sequence[float]) -> float:
        return sums[rank * self._width + [one for one in self._sets if rank in one].index(members)]

    # What is held ------------------------------------------------------------------------------------------------

    def _by_identity(self) -> dict[int, Callable[[], list[Named]]]:
        """Returns functions that give the tensors this rank holds, by a number that says which elements they have: a
        parameter with its states, or a buffer."""
        seen: Counter[str] = Counter()
        found: dict[int, Callable[[], list[Named]]] = {}
        for shard in self.engine.shards:
            if not shard.local.numel() or shard.elsewhere.read is not None:
                continue
            # Where tensor-parallel ranks compute the same gradient each for itself, a GPU may round it differently.
            differs = shard.slice_replicas > 1 and shard.sum_over is None and self.mesh.device.type == "cuda"
            about = f"{shard.name} {shard.slice} {shard.rows} {self.mesh.at.tp if differs else ''}"
            seen[about] += 1  # both ends of a tied weight may be on one rank
            found[_identity(f"{about} {seen[about]}")] = partial(self._tensors_of, shard)
        for name, buffer in self.engine.buffers().items():
            found[_identity(f"buffer {name}")] = partial(list, [(name, buffer)])
        return found

    def _tensors_of(self, shard: Shard) -> list[Named]:
        held: list[Named] = [(shard.name, shard.local)]
        if shard.low_precision is not None:
            held.append((f"{shard.name} in low precision", shard.low_precision))
        if not isinstance(self.optimizer, OffloadedOptimizer):
            states = self.optimizer.state.get(shard.local, {})
            held += [(f"{key} of {shard.name}", value) for key, value in sorted(states.items()) if _is_plain(value)]
        return held

    def _find_members(self) -> dict[int, Members]:
        """Collective. Returns which ranks hold what this rank and others hold: identities that two or more have."""
        if not self.every or self.mesh.is_alone:
            return {}
        holders: dict[int, list[int]] = {}
        for rank, theirs in enumerate(exchange([*self._held], self.mesh)):
            for identity in theirs:
                holders.setdefault(identity, []).append(rank)
        return {identity: tuple(ranks) for identity, ranks in holders.items() if len(ranks) > 1}

    def _tensors(self, members: Members) -> list[Named]:
        """Returns the tensors that these ranks hold, in one order on all of them."""
        identities = sorted(one for one, ranks in self._members.items() if ranks == members)
        return [named for one in identities for named in self._held[one]()]

    def _digest_of_set(self, members: Members) -> Tensor:
        found = torch.stack([bits_of(tensor).to(self.mesh.device) for _, tensor in self._tensors(members)])
        odd = torch.arange(1, 2 * len(found), 2, dtype=torch.int64, device=found.device)
        return _folded((found * odd).sum())

    # Where replicas differ ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _look_closer(self, step: int, differing: list[Members]) -> tuple[Trouble | None, list[Repair]]:
        """Collective. Gives a minority the majority's bits, and returns which, or the trouble without one."""
        found = [one for members in differing for one in self._settle(members)]
        said = exchange([socket.gethostname(), found], self.mesh)
        hosts = [host for host, _ in said]
        settled = [_Settled(*fields) for _, theirs in said for fields in theirs]
        doubtful = [one for one in settled if one.source is None]
        if doubtful:
            ranks = " and ".join(f"{rank} ({hosts[rank]})" for rank in doubtful[0].ranks[:MOST_NAMED])
            why = f"ranks {ranks} should hold the same bits of {_named([one.name for one in doubtful])}, and do not"
            return Trouble(step, f"{why}; no majority says which", self.clean), []
        repairs: dict[tuple[int, int], list[str]] = {}
        for one in settled:
            for rank in one.ranks:
                repairs.setdefault((rank, one.source or 0), []).append(one.name)
        return None, [
            Repair(step, rank, hosts[rank], tuple(names), source) for (rank, source), names in sorted(repairs.items())
        ]

    def _settle(self, members: Members) -> list[_Settled]:
        """Collective. Compares tensor by tensor what these ranks hold, and copies what a majority agrees on. Returns
        what became of those that differ, on one of the ranks that hold them."""
        mesh, settled = self.mesh, []
        tensors = self._tensors(members) if mesh.rank in members else []
        theirs = exchange([int(_folded(bits_of(tensor))) for _, tensor in tensors], mesh)
        for number in range(len(theirs[members[0]])):
            (digest, count), *others = Counter(theirs[rank][number] for rank in members).most_common()
            if not others:
                continue
            source = next(rank for rank in members if theirs[rank][number] == digest)
            wrong = [rank for rank in members if theirs[rank][number] != digest]
            is_settled = 2 * count > len(members)
            for rank in wrong if is_settled else ():
                if mesh.rank in (rank, source):
                    _send(tensors[number][1], source, rank, mesh)
            if mesh.rank == source:
                name = tensors[number][0]
                settled.append(_Settled(name, wrong, source) if is_settled else _Settled(name, [*members], None))
        return settled


class _Settled(NamedTuple):
    """What became of a tensor that was not the same everywhere."""

    name: str
    ranks: list[int]  # that took over the bits of `source`; or all that hold it
    source: int | None  # None: there was no majority


def bits_of(tensor: Tensor) -> Tensor:
    """Returns a number (int64, a scalar) that changes with every single bit of a tensor: the sum of its bits, eight
    bytes at a time."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    rest = data[whole:]
    return total + F.pad(rest, (0, 8 - len(rest))).view(torch.int64)[0] if len(rest) else total


def _folded(number: Tensor) -> Tensor:
    """Returns an int64 as one of 52 bits, which fp64 adds to zeros exactly. What differs in one bit still differs."""
    return (number & EXACT) ^ ((number >> 40) & 0xFFFFFF)


def _identity(about: str) -> int:
    return int.from_bytes(blake2b(about.encode(), digest_size=7).digest(), "big") + 1


def _is_plain(value: object) -> bool:
    return type(value) is Tensor


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more tensors" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _send(tensor: Tensor, source: int, rank: int, mesh: Mesh) -> None:
    """Copies a tensor from one rank to another; both call this."""
    if mesh.rank == source:
        dist.send(tensor.detach().contiguous().to(mesh.device), rank)
    else:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
        dist.recv(received, source)
        tensor.copy_(received)
