"""How one model becomes many: the transforms, in the order they apply. One file per axis.

    data.py    replicas with summed gradients

Every transform takes the plain single-device module of `model/` and leaves it computing the same numbers.
"""

from __future__ import annotations

from torch import nn

from shardwise.config.schema import CommConfig
from shardwise.parallel.data import BUCKET_BYTES, Replicas
from shardwise.plan.plan import Plan


def parallelize_decoder(model: nn.Module, plan: Plan, comm: CommConfig) -> Replicas:
    return Replicas(model, bucket_bytes(plan, comm), distributed=plan.dp > 1)


def bucket_bytes(plan: Plan, comm: CommConfig) -> int:
    return BUCKET_BYTES[plan.device] if comm.bucket == "auto" else int(comm.bucket)
