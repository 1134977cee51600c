"""What a process holds on a GPU besides torch's memory: CUDA's context, and the buffers of each NCCL communicator.

Invariant: nothing here is fitted to runs. Which communicators a framework makes stands in machines.toml (`groups`); how
large one is follows from NCCL's code and from what others measured.
"""

from __future__ import annotations

from math import prod

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan

MIB = 2**20

CONTEXT = 512 * MIB
"""CUDA's context and kernels, about."""

PAIR, RING = 544 * MIB, 688 * MIB
"""Rings and trees of a communicator of two ranks, and of more: measured on A100 with NVLink (NVIDIA/nccl issue 964)."""

SWITCH = 2 * 16 * (4 + 2) * MIB
"""For each of its ranks in a node, where switches add (NVLink SHARP, since Hopper, from three ranks on): 16 channels,
two directions, a buffer of 4 MiB and 2 MiB of flags. NCCL 2.17 to 2.20, src/transport/nvls.cc; its log has the same
figure with 24 channels (vllm issue 9699). From 2.18 on between nodes too."""

INWARD = ("tp", "cp", "dp", "pp")
"""Ranks lie in this order: those of a tensor-parallel group are neighbours."""

USUAL = ("all", *INWARD)


def outside_bytes(plan: Plan, cluster: ClusterSpec, groups: tuple[str, ...] = USUAL) -> int:
    """`groups`: what a rank's communicators run along, "all" or names of axes; of equal ones but "all" there is one."""
    sizes, left, here = {axis: getattr(plan, axis) for axis in INWARD}, cluster.per_node, {}
    for axis, size in sizes.items():
        here[axis] = min(size, left)
        left = max(1, left // size)
    whole = [INWARD for group in groups if group == "all"]
    parts = {tuple(axis for axis in group.split() if sizes[axis] > 1) for group in groups if group != "all"}
    adds = cluster.device.capability >= (9, 0) and cluster.tiers[0].name == "nvlink"
    total = CONTEXT
    for axes in (*whole, *parts):
        ranks, near = prod(sizes[axis] for axis in axes), prod(here[axis] for axis in axes)
        total += (RING if ranks > 2 else PAIR if ranks > 1 else 0) + (SWITCH * near if adds and near > 2 else 0)
    return total
