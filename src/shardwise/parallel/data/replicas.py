"""Data parallelism without sharding: whole replicas whose gradients are summed, never averaged.

    split    the batch, by rows
    held     all parameters, gradients and optimizer state on every rank
    sent     one all-reduce of all gradients per step, in buckets

The loss is already divided by the step's global target-token count, so the sum over ranks is the gradient. Outside
pipelines torch's DistributedDataParallel does the bucketing and the overlap with backward; its communication hook is
replaced by one that sums. Inside a pipeline, where DDP asserts as soon as a rank has two stages, the gradients are
summed in buckets after the last micro-batch; so are those of experts that are spread over ranks, which have fewer
replicas. All data-parallel wrappers have the same four moments, which the pipeline calls. ZeRO is in
zero/sharding.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.parallel.fsdp2 import leave_out
from shardwise.parallel.mesh import Group
from shardwise.parallel.shards import sum_tensors
from shardwise.parallel.traffic import Traffic

BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 25 * 2**20}
"""Bytes of gradients per all-reduce. Small buckets start to travel while backward still runs; on GPUs, where a launch
costs more than sending, fewer and larger ones should win (torch's default; not measured here). On two CPU ranks 4 MiB
beat 25 in both of two noisy rounds with `tiny`: docs/log.md has them."""


AtEnd = tuple[Group, list[nn.Parameter]]
"""(group, parameters): their gradients are summed over the group's ranks after the last micro-batch."""


class DataParallelWrapper:
    """Runs a stage's model and completes its gradients over data-parallel ranks. This one has no peers and nothing to
    do."""

    completes_in_backward = True  # a gradient that the last backward has accumulated is final, but for other axes

    def __init__(self, model: nn.Module):
        self.model = model
        self.forward: nn.Module = model  # what the pipeline calls

    def before_forward(self, *, last: bool) -> None:
        """Prepares a forward pass. `last` is whether it is that of this stage's last micro-batch of the step."""

    def before_backward(self, kind: str, *, last: bool) -> None:
        """Prepares a backward pass. `kind` is the action: B the whole backward, I only towards the inputs; `last` is
        whether gradients are complete after it."""

    def after_backward(self, kind: str, *, last: bool) -> None:
        """Finishes a backward pass. `kind` is B or I, or W for the gradients of the weights that an I has left out."""

    def finish(self) -> None:
        """Completes gradients over data-parallel ranks, after the stage's last action of a step."""


class SummedAtEnd(DataParallelWrapper):
    """The wrapper of plain replicas inside a pipeline, and of those of experts: it sums in buckets what all
    micro-batches have accumulated."""

    completes_in_backward = False

    def __init__(self, model: nn.Module, at_end: Sequence[AtEnd], bucket_bytes: int, traffic: Traffic):
        super().__init__(model)
        self.at_end, self.bucket_bytes, self.traffic = at_end, bucket_bytes, traffic

    def finish(self) -> None:
        for group, parameters in self.at_end:
            gradients = [p.grad for p in parameters if p.grad is not None]
            self.traffic.reductions += 1
            self.traffic.num_bytes += sum_tensors(gradients, group, self.bucket_bytes, self.traffic.on("dp"))


@dataclass
class _Bucket:
    num_bytes: int
    left: Any  # the moment
    arrived_s: float = 0.0  # CPU: when its sum was there


class Replicated(SummedAtEnd):
    """The wrapper of replicas outside pipelines, by torch's DDP: buckets are reduced while backward still runs. DDP
    leaves out the parameters with the names `apart`."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        bucket_bytes: int,
        traffic: Traffic,
        apart: Sequence[str] = (),
        at_end: Sequence[AtEnd] = (),
    ):
        super().__init__(model, at_end, bucket_bytes, traffic)
        self.group = group
        self.buckets: list[_Bucket] = []  # that left in this backward
        with warnings.catch_warnings():
            # torch 2.13 wants `forward_sync_buffers` instead, which 2.11 does not know. Router counts must stay local.
            warnings.simplefilter("ignore", FutureWarning)
            if apart:
                leave_out(model, list(apart))
            self.ddp = DistributedDataParallel(
                model,
                process_group=group,
                bucket_cap_mb=bucket_bytes / 2**20,
                gradient_as_bucket_view=True,  # gradients live in the buckets: no second copy
                broadcast_buffers=False,
                init_sync=False,  # every rank has drawn or loaded the same weights already
            )
        self.forward = self.ddp
        self.ddp.register_comm_hook(None, self._sum)

    def before_forward(self, *, last: bool) -> None:
        self.ddp.require_backward_grad_sync = last  # gradients of all micro-batches but the last stay local

    def after_backward(self, kind: str, *, last: bool) -> None:
        """Records the waits for the buckets of this backward pass. From the moment the last bucket left, backward only
        waited: for each bucket that was not there yet, in turn."""
        if not self.buckets:
            return
        since = self.buckets[-1].left
        for bucket in self.buckets[:-1]:
            until = since if since is None else since._replace(at_s=max(since.at_s, bucket.arrived_s))
            self.traffic.waited("all-reduce", "dp", bucket.num_bytes, since, until)
            since = until
        self.traffic.waited("all-reduce", "dp", self.buckets[-1].num_bytes, since, self.traffic.moment())
        self.buckets.clear()

    def _sum(self, state, bucket):  # torch inspects annotations and refuses strings
        buffer = bucket.buffer()
        self.traffic.reductions += 1
        self.traffic.num_bytes += buffer.nbytes
        noted = _Bucket(buffer.nbytes, self.traffic.moment())
        self.buckets.append(noted)

        def arrived(future):
            noted.arrived_s = 0.0 if buffer.is_cuda else time.perf_counter()
            return future.value()[0]

        work = self.group.allreduce([buffer])  # dist.all_reduce without its checks, which cost a share of a bucket
        return work.get_future().then(arrived)
