"""The same two steps on real ranks with real tensors, for comparison with what a rehearsal records of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.data.loader import StepBatch, TensorBatch, cut_microbatches, number_rows
from shardwise.memory.account import Account, OwnedTensor
from shardwise.model.experts import Choice, Router, moe_layers
from shardwise.model.initialize import initialize
from shardwise.optim.offload.buffer import Disk
from shardwise.optim.offload.disk import ScratchFile
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.engine import Engine
from shardwise.rehearse.perform import NUM_ANSWERS, NUM_STEPS, RehearsedJob
from shardwise.rehearse.program import DiskUse
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import owners_of
from shardwise.run.step import start_step

OPS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
}


class CountedCalls(TorchDispatchMode):
    """Counts every call of a process group by (op, elements, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            buffers = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
            elements = sum(buffer.numel() for buffer in buffers)
            if name == "alltoall_base_":
                elements = max(elements, args[1].numel())
            self.counts[OPS[name], elements, str(buffers[0].dtype).removeprefix("torch.")] += 1
        return func(*args, **(kwargs or {}))


def route_evenly(engine: Engine) -> None:
    """Gives every expert as many tokens, whatever their values: what a rehearsal takes for granted."""
    for layer in (layer for model in engine.models for layer in moe_layers(model)):

        def even(router: Router, args: Any, choice: Choice) -> None:
            experts = choice.experts_NK.data  # the tensor that backward has, which need not know
            experts.copy_(torch.arange(experts.numel()).view_as(experts) % router.weight.shape[0])

        layer.router.register_forward_hook(even)


class SeenDisk(Disk):
    """A real disk, and what is read from it and written to it."""

    file: ScratchFile | None = None

    def new_file(self, num_bytes: int) -> ScratchFile:
        self.file = super().new_file(num_bytes)
        return self.file

    @property
    def use(self) -> DiskUse:
        file = self.file
        return DiskUse() if file is None else DiskUse(file.num_bytes, file.num_read, file.num_written)


def real_step(job: RehearsedJob) -> tuple[Counter[tuple[str, int, str]], dict[str, int], DiskUse]:
    """Collective. Returns what this rank's second step has called, the bytes by category at its fullest moment, and
    what it has read from a disk and written to it. The bytes are those of the second or third step, whichever are
    fewer: a thread of gloo may let go of a sent tensor a little later, which only ever adds."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    engine = parallelize_decoder(
        job.spec, job.plan, rank, torch.device("cpu"), job.attention,
        (lambda model: initialize(model, job.seed)) if job.spec.is_ours else None, adapter=job.adapter, seed=job.seed,
    )  # fmt: skip
    if job.spec.is_moe:
        route_evenly(engine)
    disk, clock, calls = SeenDisk(Path(job.plan.offload_dir)), Clock(torch.device("cpu")), CountedCalls()
    optimizer = engine.optimizer(job.optimizer, disk=disk)
    account, owners, asked = (
        Account(torch.device("cpu"), lambda everything: (), clock),
        owners_of(engine, optimizer),
        [0],
    )

    def held(everything: bool) -> Iterator[OwnedTensor]:
        before = disk.use.read
        yield from owners(everything)
        asked[0] += disk.use.read - before  # only to say whose memory is whose

    account.owners = held
    plan, rows = job.plan, job.plan.rows(engine.mesh.at.dp)
    counts, peaks, used = Counter[tuple[str, int, str]](), [], DiskUse()
    for step in range(1, NUM_STEPS + 2):
        tokens = torch.randint(0, job.spec.vocab, (len(rows), plan.seq_len))
        documents = torch.zeros(len(rows), plan.seq_len, dtype=torch.int32) if job.documents else None
        whole = TensorBatch(tokens, tokens.roll(-1, 1), documents, number_rows(step, rows))
        micro = cut_microbatches(whole, plan.micro_batch, plan.num_microbatches, plan.pp > 1)
        calls.counts = Counter()
        account.label(everything=True)
        account.begin()
        with account, calls:
            before, asked[0] = disk.use, 0
            start_step(
                engine, optimizer, StepBatch(step, micro, 1), num_targets=plan.tokens_per_step,
                lr=job.optimizer.peak_lr, clip=job.clip, clock=clock, ask=lambda: [0] * NUM_ANSWERS,
            )  # fmt: skip
            if step == NUM_STEPS:
                counts, used = calls.counts, disk.use.since(before)
                used = used._replace(read=used.read - asked[0])
        if step >= NUM_STEPS:
            peaks.append(account.peak)
    return counts, min(peaks, key=lambda peak: peak.total).by_category(), used
