"""What offloading leaves on the device, and what it puts into CPU memory and onto the disk. Bytes per rank, no torch.

Invariant: where the device is a CPU, nothing leaves its memory but what goes to a disk. Read next: predict.py, which counts the rest.
"""

from __future__ import annotations

from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare

Parts = dict[str, int]


def offloaded(parts: Parts, share: RankShare, plan: Plan) -> tuple[Parts, Parts]:
    """`parts`: weights, gathered, gradients and optimizer as they would be without offloading. Returns those of them that change,
    and what is elsewhere: `host` (CPU memory of a GPU's rank) and `disk`."""
    own, state = parts["weights"], parts["optimizer"]
    on_disk = state if plan.offload_to == "nvme" else 0
    buffer = min(plan.offload_buffer, state) if on_disk else 0
    away = plan.device == "cuda"
    here: Parts = {"optimizer": 0 if away else buffer if on_disk else state}
    host = 0
    if plan.offload == "all":
        here["gathered"] = two_blocks(share, parts["gathered"] or own * plan.state_shards)
        if away:
            here |= {"weights": 0, "gradients": two_blocks(share, own)}
            host = 2 * own + (buffer if on_disk else state)
    elif away and on_disk:
        host = buffer  # gradients wait on the device for their group's turn
    elif away:
        host = 2 * own + state  # masters, and gradients as they arrive
        if plan.num_microbatches == 1 and (plan.dp * plan.cp == 1 or plan.zero or plan.is_mixed):
            here["gradients"] = two_blocks(share, own)  # each leaves when it is complete
    return here, {"host": host, "disk": on_disk}


def two_blocks(share: RankShare, all_bytes: int) -> int:
    """Of what all parameters of a rank take, the part of the two largest groups; a tied table is one of them, and stays."""
    groups = [*share.layer_parameters, share.embedding, share.head]
    return all_bytes * sum(sorted(groups)[-2:]) // max(1, share.num_parameters)
