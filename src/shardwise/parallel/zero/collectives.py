"""FSDP2's collectives as this package runs them: counted, timed, and on gloo exact.

On gloo the reduce-scatter is an all-to-all and a local sum in rank order: exact, and a fraction of the time of gloo's
own, which is an all-reduce and a slice. On CUDA the collectives are NCCL's; only the waits for them are timed. Read
next: sharding.py, traffic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.fsdp2 import ParameterGroup, all_gather_single
from shardwise.parallel.traffic import Traffic


def time_waits(group: ParameterGroup, traffic: Traffic, reduction: ExactReduceScatter | None) -> None:
    """Makes the waits inside of FSDP2 into spans, where no line of this package stands around them: each place waits
    here first, inside of a span, and FSDP2 then finds nothing left to wait for.

    `reduction` is this package's reduce-scatter, which times its own waits; None where FSDP2's is used."""

    def gathered(wait_for_unshard: Callable[[], None]) -> Callable[[], None]:
        def wait() -> None:
            buffer = group.gather_buffer
            if buffer is not None and buffer.numel():  # a group of one rank gathers nothing
                with traffic.wait("all-gather", "shard", buffer.nbytes):
                    group.wait_for_gather()
            wait_for_unshard()

        return wait

    def reduced(finalize_backward: Callable[[], None]) -> Callable[[], None]:
        def wait() -> None:
            with traffic.wait("reduce-scatter", "shard", 0):
                finalize_backward()

        return wait

    group.replace_wait(gathered)
    if reduction is None:
        group.replace_last_wait(reduced)
    elif group.has_replicas:  # else the hook would be called after other things
        group.call_after_all_reduce(reduction.replicas_met)


class _Buffers:
    """Allocates the memory that a custom collective writes into, as FSDP2 asks for it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Buffers):
    """FSDP2's all-gather, with its calls and bytes counted."""

    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.traffic.gathers += 1
        self.traffic.num_bytes += output_tensor.nbytes
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ExactReduceScatter(_Buffers):
    """The reduce-scatter for gloo: every rank adds the parts in rank order, so the sum does not depend on timing or
    ring position.

    With `overlaps` the exchange goes on while backward computes the next block, and is completed when that one comes
    to be reduced: one block's gradients are under way at a time.
    """

    def __init__(self, traffic: Traffic):
        self.traffic, self.overlaps = traffic, False
        self._pending: tuple[Any, Tensor, Tensor, Tensor] | None = None
        self._ready: Any = None  # the moment at which replicas could begin to meet

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ready = self.traffic.moment()  # with one shard, nothing else of this class is called
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are only ever summed, not {op}"
        self.complete()
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        self._pending = (work, parts.view(dist.get_world_size(group), -1), input_tensor, output_tensor)
        self.traffic.reductions += 1
        self.traffic.num_bytes += input_tensor.nbytes
        if not self.overlaps:
            self.complete()

    def complete(self) -> None:
        """Waits for the exchange that is under way and adds its parts up."""
        if self._pending is None:
            return
        work, parts, _, output = self._pending
        self._pending = None
        with self.traffic.wait("reduce-scatter", "shard", parts.nbytes):
            work.wait()
        torch.sum(parts, 0, out=output)
        self._ready = self.traffic.moment()

    def replicas_met(self, output: Tensor) -> None:
        """Records the wait for the all-reduce of a hybrid's replicas, right after which FSDP2 calls it."""
        self.traffic.waited("all-reduce", "replicate", output.nbytes, self._ready, self.traffic.moment())
