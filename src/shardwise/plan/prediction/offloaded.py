"""What offloading leaves on the device, and what it puts into CPU memory and onto the disk. Bytes per rank, no torch.

Invariant: where the device is a CPU, nothing leaves its memory but what goes to a disk. Read next: memory.py, which
counts the rest.
"""

from __future__ import annotations

from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.rank_share import RankShare
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan

Parts = dict[str, int]


def offloaded(parts: Parts, share: RankShare, plan: Plan) -> tuple[Parts, Parts]:
    """`parts`: what a rank holds without offloading. Returns those of them that change, and what is elsewhere: `host`
    (CPU memory of a GPU's rank) and `disk`."""
    own, state = parts["weights"], parts["optimizer"]
    away, uses_disk = plan.device == "cuda", plan.offload_to == "nvme" and state > 0
    in_memory = min(plan.offload_buffer, state) if uses_disk else state
    here: Parts = {"optimizer": 0 if away else in_memory}
    leaves_at_once = plan.replicate == 1  # what replicas sum, FSDP2 and DDP hold until backward ends
    leaves_early = plan.num_microbatches == 1 and leaves_at_once
    host, disk = 0, state if uses_disk else 0
    if plan.offload == "all":
        here["gathered"] = two_blocks(share, parts["gathered"] or own * plan.state_shards)
        if uses_disk:
            disk = 2 * own + state
            here["gathered"] += two_blocks(share, own)  # as they were read
            here["gradients"] = two_blocks(share, own) if leaves_early else own
            # All weights are in memory once: when the run starts, before they are written.
            rest = sum((parts | here).values()) - own - parts["process"]
            here["weights"] = max(0, own - rest)
        elif away:
            here |= {"weights": 0, "gradients": two_blocks(share, own) if leaves_at_once else own}
            host = 2 * own + state
    elif away:
        host = in_memory if uses_disk else 2 * own + state  # masters, and gradients as they arrive
        if leaves_early and not uses_disk:
            here["gradients"] = two_blocks(share, own)
    return here, {"host": host, "disk": disk}


def pinned_share(share: RankShare, plan: Plan, column: int) -> float:
    """Returns the bytes of pinned CPU memory for each byte of activations that is offloaded. torch rounds every pinned
    tensor up to a power of two (ATen/core/CachingHostAllocator.h). With full recomputation only hidden states travel;
    else about two tensors of that width for each that is as wide as the feed-forward layer. `column`: bytes of a tensor
    that is one element wide."""
    hidden, ffn = share.spec.hidden * column, share.layers[0].ffn * column
    tensors = [hidden] if plan.recompute == "full" else [hidden, hidden, ffn]
    return sum(1 << (size - 1).bit_length() for size in tensors) / sum(tensors)


HOST_LINK = measured("offload_link")
DISK = measured("disk_rate")
CPU_MEMORY = measured("cpu_memory_rate")

TOUCHED = {"optimizer": 36 / 8, "all": 44 / 12}
"""Bytes of CPU memory that are read or written for each byte on the link: Adam's pass over four elements, and both
copies."""


def host_rate(cluster: ClusterSpec) -> float:
    """Bytes per second between one card and CPU memory while all cards of its node do the same."""
    return min(cluster.device.host, CPU_MEMORY / 2 / cluster.per_node)


def offload_seconds(num_parameters: float, plan: Plan, per_node: int = 1) -> float:
    """What offloading adds to a step of a rank with so many trained parameters (plan of the update: fp32 Adam).
    `optimizer`: gradients down, parameters up. `all`: parameters up for forward and for backward, gradients down. A
    disk: state read and written, with `all` the other two as well. On a CPU only a disk costs anything."""
    if plan.offload == "none":
        return 0.0
    if plan.offload_to == "nvme":
        return num_parameters * (40 if plan.offload == "all" else 16) / DISK
    moved = {"optimizer": 8, "all": 12 * plan.num_microbatches}[plan.offload]
    if plan.device == "cpu":
        return 0.0
    shared = CPU_MEMORY / (min(per_node, plan.world) * TOUCHED[plan.offload])
    return num_parameters * moved / min(HOST_LINK[plan.offload], shared)


def two_blocks(share: RankShare, all_bytes: int) -> int:
    """Of what all parameters of a rank take, the part of the two largest groups; a tied table is one of them, and
    stays."""
    groups = [*share.layer_parameters, share.embedding, share.head]
    return all_bytes * sum(sorted(groups)[-2:]) // max(1, share.num_parameters)
