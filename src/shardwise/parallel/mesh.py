"""The mesh: where this rank stands in the grid of ranks, and the process groups along its lines.

Ranks are numbered with tensor parallelism innermost, so that its many small collectives stay on the fastest links,
then context parallelism, shards, replicas and pipeline stages (`Plan.coordinates`). Experts are a second view of the
ranks of a stage: `ep` neighbours share them out, and those at the same place of each such row hold the same ones.
Built once from the plan; its layout never changes afterwards. A line of length one has no group: nothing is sent there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.parallel.fsdp2 import as_one_group, check_torch
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Coordinates, Plan
from shardwise.spec.schedules import SCHEDULES

Group = Any  # a torch.distributed.ProcessGroup; None where a line has one rank


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks of a stage as its experts see them."""

    group: Group  # who has the other experts
    index: int
    replicas: Group  # who has the same ones: their gradients are summed
    fsdp: DeviceMesh | None
    shard: Group  # who shares the states of the same experts, by ZeRO
    num_shards: int
    shard_index: int


@dataclass(eq=False)
class Mesh:
    """One rank's place, and the group along each line through it; None where the line has one rank."""

    plan: Plan  # the one of this process; `Engine.follow` puts another cut of the batch in its place
    rank: int
    at: Coordinates
    device: torch.device
    dp: Group = None  # replicas, shards and context together: whose gradients are summed
    shard: Group = None  # who shares a replica's states: shards and context
    cp: Group = None
    tp: Group = None
    tokens: Group = None  # context and tensor parallelism together: who works on the same sequences
    expert: ExpertMesh | None = None  # with ep > 1
    pp: Group = None
    same_kv: Group = None  # tensor-parallel ranks that hold the same key-value heads
    ends: Group = None  # first and last stage, when a tied embedding lives on both
    fsdp: DeviceMesh | None = None  # (replicate, shard) for FSDP2
    lanes: tuple[Group, ...] = ()  # CUDA: one pipeline group per kind and direction, see pipeline/send_receive.py

    @property
    def is_alone(self) -> bool:
        """Returns whether the job has one rank."""
        return self.plan.world == 1

    @property
    def counts_loss(self) -> bool:
        """Returns whether this rank reports its losses: tensor-parallel ranks compute the same ones, so one of them
        does."""
        return self.at.tp == 0

    @property
    def counts_targets(self) -> bool:
        """Returns whether this rank counts its rows' targets: of the ranks that work on the same rows, one does."""
        return self.at.tp == self.at.cp == self.at.pp == 0

    @property
    def state_index(self) -> int:
        """Returns the index of this rank among those that share a replica's states by ZeRO."""
        return self.at.shard * self.plan.cp + self.at.cp

    def agree(self, value: int) -> int:
        """Collective. Returns rank 0's value on every rank."""
        if self.plan.world == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        dist.broadcast(tensor, 0)
        return int(tensor)

    def stage_rank(self, pp: int) -> int:
        """Returns the global rank at another place of this rank's pipeline."""
        return self.plan.rank_at(Coordinates(pp, self.at.replicate, self.at.shard, self.at.cp, self.at.tp))


def build_mesh(plan: Plan, spec: ModelSpec | None, rank: int, device: torch.device, *, fsdp: bool) -> Mesh:
    """Collective. Returns this rank's mesh; every rank of the job calls it at the same time. With `fsdp` it has the
    mesh that FSDP2 needs. `spec` is None for a module that is not cut, only replicated and sharded."""
    check_torch()
    at = plan.coordinates(rank)
    if plan.world == 1 and not fsdp:
        return Mesh(plan, rank, at, device)
    _start_alone(plan, device)
    shards = plan.shard * plan.cp  # context-parallel ranks see the same parameters: ZeRO spreads states over them too
    shape = (plan.pp, plan.replicate, shards, plan.tp)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    assert spec is not None or plan.world == plan.dp, plan.layout
    kv_replicas = 1 if spec is None else max(1, plan.tp // spec.num_kv_heads)
    # For replicas FSDP2 holds what it summed until backward ends: not where gradients are to leave at once.
    has_replicas = plan.replicate > 1 or (shards == 1 and plan.offload == "none")
    is_v = plan.pp > 1 and SCHEDULES[plan.schedule].is_v  # its first and last stage are on the same rank
    return Mesh(
        plan,
        rank,
        at,
        device,
        dp=as_one_group(grid["replicate", "shard"], "dp") if plan.dp * plan.cp > 1 else None,
        shard=grid["shard"].get_group() if shards > 1 else None,
        cp=own_group(_lines(plan.world, plan.cp, plan.tp), rank) if plan.cp > 1 else None,
        tp=grid["tp"].get_group() if plan.tp > 1 else None,
        tokens=own_group(_lines(plan.world, plan.cp * plan.tp, 1), rank) if plan.cp * plan.tp > 1 else None,
        expert=_expert_mesh(plan, rank, device, fsdp) if plan.ep > 1 else None,
        pp=grid["pp"].get_group() if plan.pp > 1 else None,
        same_kv=own_group(_lines(plan.world, kv_replicas, 1), rank) if kv_replicas > 1 else None,
        ends=own_group(_pipeline_ends(plan), rank)
        if spec is not None and spec.tied and plan.pp > 1 and not is_v
        else None,
        fsdp=(grid["replicate", "shard"] if has_replicas else grid["shard"]) if fsdp else None,
        lanes=_lanes(plan, rank) if device.type == "cuda" and plan.pp > 1 else (),
    )


def _start_alone(plan: Plan, device: torch.device) -> None:
    """Starts a process group of one process, without a port: FSDP2 needs one even there."""
    if plan.world == 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def own_group(members: list[list[int]], rank: int) -> Group:
    """Collective. Returns the group that has this rank, or None. All ranks make all groups, in the same order."""
    made = [(ranks, dist.new_group(ranks)) for ranks in members]
    return next((group for ranks, group in made if rank in ranks), None)


def _lines(world: int, length: int, stride: int) -> list[list[int]]:
    """Returns all lines of `length` ranks that stand `stride` apart; the axes inside of them have `stride` ranks."""
    block = length * stride
    return [
        list(range(first + offset, first + offset + block, stride))
        for first in range(0, world, block)
        for offset in range(stride)
    ]


def _expert_mesh(plan: Plan, rank: int, device: torch.device, fsdp: bool) -> ExpertMesh:
    replicate = plan.expert_replicas
    num_shards = plan.expert_copies // replicate
    group = own_group(_lines(plan.world, plan.ep, 1), rank)
    replicas = own_group(_lines(plan.world, plan.expert_copies, plan.ep), rank)
    states = shard = None
    if fsdp:
        grid = torch.arange(plan.world).reshape(plan.pp, replicate, num_shards, plan.ep)
        whole = DeviceMesh(device.type, grid, mesh_dim_names=("pp", "replicate", "shard", "ep"))
        states = whole["replicate", "shard"] if replicate > 1 or num_shards == 1 else whole["shard"]
        shard = whole["shard"].get_group() if num_shards > 1 else None
    place = rank % plan.stage_world // plan.ep
    return ExpertMesh(group, rank % plan.ep, replicas, states, shard, num_shards, place % num_shards)


def _pipeline_ends(plan: Plan) -> list[list[int]]:
    lines = range(plan.world // plan.pp)  # the pipeline is the outermost axis
    return [[line, line + (plan.pp - 1) * len(lines)] for line in lines]


def _lanes(plan: Plan, rank: int) -> tuple[Group, ...]:
    size = plan.world // plan.pp
    pipelines = [[line + stage * size for stage in range(plan.pp)] for line in range(size)]
    return tuple(own_group(pipelines, rank) for _ in range(4))
