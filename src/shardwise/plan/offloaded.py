"""What offloading leaves on the device, and what it puts into CPU memory and onto the disk. Bytes per rank, no torch.

Invariant: where the device is a CPU, nothing leaves its memory but what goes to a disk. Read next: predict.py, which counts the rest.
"""

from __future__ import annotations

from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare

Parts = dict[str, int]


def offloaded(parts: Parts, share: RankShare, plan: Plan) -> tuple[Parts, Parts]:
    """`parts`: what a rank holds without offloading. Returns those of them that change, and what is elsewhere: `host` (CPU memory of
    a GPU's rank) and `disk`."""
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


def two_blocks(share: RankShare, all_bytes: int) -> int:
    """Of what all parameters of a rank take, the part of the two largest groups; a tied table is one of them, and stays."""
    groups = [*share.layer_parameters, share.embedding, share.head]
    return all_bytes * sum(sorted(groups)[-2:]) // max(1, share.num_parameters)
