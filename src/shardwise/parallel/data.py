"""Data parallelism: replicas whose gradients are summed (never averaged) while backward still runs.

torch's DistributedDataParallel does the bucketing and the overlap. Its communication hook is replaced: the loss is already
divided by the step's global target-token count, so the sum over ranks is the gradient. The hook also notes when the last
bucket left, which is the moment from which backward only waits: the exposed part of the communication.
"""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 25 * 2**20}
"""How much gradient leaves at a time. Small buckets start to travel while backward still runs; on GPUs, where a launch costs
more than a message, fewer and larger ones should win (torch's default; not measured here). On two CPU ranks 4 MiB beat 25 in both
of two noisy rounds with `tiny`: docs/log.md has them."""


class Replicas:
    """A model with its data-parallel wrapper, or just the model when it is not distributed."""

    def __init__(self, model: nn.Module, bucket_bytes: int, *, distributed: bool):
        self.model = model
        self.last_bucket_at: float | None = None
        self.reduced_bytes = 0
        if not distributed:
            self.forward: nn.Module = model
            return
        with warnings.catch_warnings():
            # torch 2.13 wants `forward_sync_buffers` instead, which 2.11 does not know. Router counts must stay local.
            warnings.simplefilter("ignore", FutureWarning)
            self.forward = DistributedDataParallel(
                model,
                bucket_cap_mb=bucket_bytes / 2**20,
                gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
                broadcast_buffers=False,
                init_sync=False,  # every rank has drawn or loaded the same weights already
            )
        self.forward.register_comm_hook(None, self._sum)

    @property
    def is_distributed(self) -> bool:
        return self.forward is not self.model

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients of all micro-batches but the last stay local."""
        if last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()

    def _sum(self, state, bucket):  # torch inspects annotations and refuses strings
        self.last_bucket_at = time.perf_counter()
        self.reduced_bytes += bucket.buffer().nbytes
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def exposed_seconds(self, backward_end: float) -> float:
        """How long the last backward waited for the network after its own work was done; resets the note."""
        if self.last_bucket_at is None:
            return 0.0
        waited, self.last_bucket_at = backward_end - self.last_bucket_at, None
        return waited

    def take_bytes(self) -> int:
        """Gradient bytes reduced since the last call."""
        taken, self.reduced_bytes = self.reduced_bytes, 0
        return taken
