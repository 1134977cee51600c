"""What this rank holds of every parameter: the table that weights, gradients, optimizer and checkpoints go through.

A parameter of the model may be cut twice: tensor parallelism keeps a slice of one dimension, FSDP2 then keeps rows of
that slice. `Shard` knows both cuts, so the rest of the program works with plain local tensors and global names.
Invariant: `local` shares its memory with the module's parameter; whoever updates one updates the other. Only where
the module computes with low-precision weights (data/low_precision_weights.py) it is the fp32 master weight of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.optim.gradient_norm import squared_norms
from shardwise.optim.offload.optimizer import OffloadedParts
from shardwise.parallel.fsdp2 import local_rows
from shardwise.parallel.mesh import Group, Mesh
from shardwise.parallel.tensor.slices import Placement, Slice, placement, take
from shardwise.parallel.traffic import Wait, unseen
from shardwise.spec.model import ModelSpec


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter."""

    name: str
    parameter: nn.Parameter  # as the module has it: plain, or FSDP2's DTensor
    local: nn.Parameter  # this rank's elements as a plain tensor: what the optimizer sees
    slice: Slice | None  # tensor parallelism's part of the full tensor
    rows: tuple[int, int] | None  # FSDP2's rows of that part
    replicas: int  # ranks of the job that hold these same elements
    sum_over: Group  # ranks whose gradients are parts of this one's, or None
    cut_over: Group  # ranks that have the other slices, or None
    slice_replicas: int  # neighbours among them with the same slice
    spread_over: Group  # ranks that have the other rows, or None
    elsewhere: OffloadedParts = field(default_factory=OffloadedParts)  # what has left the device

    @property
    def gradient(self) -> Tensor | None:
        """Returns the gradient of this rank's elements, read from wherever it is; None where there is none."""
        fetch = self.elsewhere.gradient
        return self.gradient_here if fetch is None else fetch()

    @property
    def gradient_here(self) -> Tensor | None:
        """Returns the gradient of this rank's elements if it has not left the device, else None."""
        gradient = _plain(self.parameter.grad)
        return self.local.grad if gradient is None else gradient

    @property
    def low_precision(self) -> nn.Parameter | None:
        """Returns the 16-bit weight that the module computes with, where `local` is its master weight; else None."""
        return None if self.rows is not None or self.local is self.parameter else self.parameter

    def forget_gradient(self) -> None:
        """Drops the gradient, wherever it is."""
        self.local.grad = self.parameter.grad = None
        self.elsewhere.gradient = self.elsewhere.squared_norm = None

    @property
    def value(self) -> Tensor:
        """Returns this rank's elements, read from wherever they are."""
        return self.local.detach() if self.elsewhere.read is None else self.elsewhere.read()

    def take(self, full: Tensor) -> Tensor:
        """Returns this rank's part of a full tensor, as a view of it."""
        part = take(full, self.slice)
        return part if self.rows is None else part[self.rows[0] : self.rows[1]]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Returns where this rank's elements begin in the full tensor, along each dimension."""
        found = [0] * self.local.ndim
        if self.slice is not None:
            found[self.slice.dim] = self.slice.start
        if self.rows is not None:
            found[0] += self.rows[0]
        return tuple(found)

    def put(self, full: Tensor) -> None:
        """Writes this rank's part of a full tensor to where its elements are, and to the low-precision weight."""
        self.put_own(self.take(full))

    @torch.no_grad()
    def put_own(self, part: Tensor) -> None:
        """Writes this rank's part to where its elements are, and to the low-precision weight."""
        if self.elsewhere.write is not None:
            self.elsewhere.write(part)
        else:
            self.local.copy_(part)
        self.update_low_precision()

    @torch.no_grad()
    def update_low_precision(self) -> None:
        """Makes the low-precision weight, if there is one, that of `local`."""
        if self.low_precision is not None:
            self.low_precision.copy_(self.local)


def shards_of(model: nn.Module, mesh: Mesh, spec: ModelSpec | None) -> list[Shard]:
    """Returns the shards of a model that has memory, frozen parameters included. `spec` is None for a module that is
    not cut."""
    return [_shard(name, parameter, mesh, spec) for name, parameter in model.named_parameters()]


def _shard(name: str, parameter: nn.Parameter, mesh: Mesh, spec: ModelSpec | None) -> Shard:
    plan = mesh.plan
    placed, tied_replicas = Placement(None, 1, False), 1
    if spec is not None:
        expert_index = mesh.expert.index if mesh.expert else 0
        placed = placement(spec, name, plan.tp, mesh.at.tp, plan.sequence, plan.ep, expert_index)
        tied_replicas = 2 if spec.tied and name == "embed.weight" and plan.pp > 1 else 1
    experts = mesh.expert if ".experts." in name else None
    states = mesh.shard if experts is None else experts.shard
    parts, index = (
        (plan.shard * plan.cp, mesh.state_index) if experts is None else (experts.num_shards, experts.shard_index)
    )
    rows, local = None, getattr(parameter, "master", parameter)
    if isinstance(parameter, DTensor):
        rows = row_range(parameter.shape[0], parts, index)
        local = nn.Parameter(local_rows(parameter), requires_grad=parameter.requires_grad)
    same = plan.dp * plan.cp if experts is None else plan.expert_copies
    group = None
    if placed.partial:
        group = mesh.tp if placed.replicas == plan.tp else mesh.same_kv
    return Shard(
        name=name,
        parameter=parameter,
        local=local,
        slice=placed.slice,
        rows=rows,
        replicas=(same if rows is None else same // parts) * placed.replicas * tied_replicas,
        sum_over=group,
        cut_over=mesh.tp if experts is None else experts.group,
        slice_replicas=placed.replicas,
        spread_over=states if rows is not None else None,
    )


def row_range(num_rows: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the rows (start, stop) of part `index` by FSDP2's rule: equal parts, the last ones short or empty."""
    size = -(-num_rows // parts)
    return min(index * size, num_rows), min((index + 1) * size, num_rows)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return local_rows(tensor) if isinstance(tensor, DTensor) else tensor


# Sums and norms over ranks -------------------------------------------------------------------------------------------


@torch.no_grad()
def sum_tensors(
    tensors: Iterable[Tensor],
    group: Group,
    bucket_bytes: int,
    wait: Wait = unseen,
    device: torch.device | None = None,
) -> int:
    """Collective. Sums each tensor over the group, in place, many tensors per all-reduce of at least `bucket_bytes`,
    and returns the bytes of all buffers. `device` is where the all-reduce runs, if the tensors may be elsewhere."""
    buckets: list[list[Tensor]] = []
    size = bucket_bytes
    for tensor in tensors:
        if size >= bucket_bytes or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.nbytes
    flat = [torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device) for bucket in buckets]
    works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in flat]
    for bucket, buffer, work in zip(buckets, flat, works, strict=True):
        with wait("all-reduce", buffer.nbytes):
            work.wait()
        parts = buffer.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])
    return sum(buffer.nbytes for buffer in flat)


@torch.no_grad()
def squared_norm(shards: Iterable[Shard]) -> Tensor:
    """Returns this rank's share of the squared gradient norm (`grad_norm`), a scalar in fp64: elements that several
    ranks hold count once in the sum over all ranks."""
    held = list(shards)
    # Of gradients that have left the device, the squared norm was taken there.
    away = [shard.elsewhere.squared_norm / shard.replicas for shard in held if shard.elsewhere.squared_norm is not None]
    found = [(shard.gradient, shard.replicas) for shard in held if shard.elsewhere.squared_norm is None]
    gradients = [gradient for gradient, _ in found if gradient is not None and gradient.numel()]
    replicas = [count for gradient, count in found if gradient is not None and gradient.numel()]
    total = torch.stack(away).sum() if away else torch.zeros((), dtype=torch.float64)
    if not gradients:
        return total
    found_norms = squared_norms(gradients)
    if any(count != 1 for count in replicas):
        counts = torch.tensor(replicas, dtype=torch.float64, pin_memory=found_norms.is_cuda)
        found_norms /= counts.to(found_norms.device, non_blocking=True)
    return found_norms.sum() + total  # a scalar on the CPU needs no copy, which a GPU would be waited for


# Whole tensors -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather(shard: Shard, local: Tensor, mesh: Mesh) -> Tensor:
    """Collective. Returns the full tensor, put together from all ranks' parts, on every rank that has one of them."""
    full = local.detach().to(mesh.device)  # what is offloaded travels from the device
    if shard.spread_over is not None:
        size = -(-shard.parameter.shape[0] // shard.spread_over.size())
        full = torch.cat(_all_gather(_pad(full, 0, size), shard.spread_over))[: shard.parameter.shape[0]]
    group = shard.cut_over
    if shard.slice is None or group is None:
        return full
    dim = shard.slice.dim
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=full.device)
    sizes[group.rank()] = full.shape[dim]
    dist.all_reduce(sizes, group=group)
    pieces = _all_gather(_pad(full, dim, int(sizes.max())), group)
    firsts = range(0, group.size(), shard.slice_replicas)
    return torch.cat([pieces[i].narrow(dim, 0, int(sizes[i])) for i in firsts], dim)


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    pieces = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(pieces, tensor, group=group)
    return pieces
