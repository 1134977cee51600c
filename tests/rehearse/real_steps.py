"""The same two steps on real ranks with real tensors, for comparison with what a rehearsal records of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.data.loader import StepBatch, TensorBatch, cut_microbatches, number_rows
from shardwise.memory.account import Account
from shardwise.model.initialize import initialize
from shardwise.parallel.apply import parallelize_decoder
from shardwise.rehearse.perform import NUM_ANSWERS, NUM_STEPS, RehearsedJob
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


def real_step(job: RehearsedJob) -> tuple[Counter[tuple[str, int, str]], dict[str, int]]:
    """Collective. Returns what this rank's second step has called, and the bytes by category at its fullest moment:
    those of the second or third step, whichever are fewer. A thread of gloo may let go of a sent tensor a little later,
    which only ever adds."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    engine = parallelize_decoder(
        job.spec, job.plan, rank, torch.device("cpu"), job.attention,
        lambda model: initialize(model, job.seed), adapter=job.adapter, seed=job.seed,
    )  # fmt: skip
    optimizer, clock, calls = engine.optimizer(job.optimizer), Clock(torch.device("cpu")), CountedCalls()
    account = Account(torch.device("cpu"), owners_of(engine, optimizer), clock)
    plan, rows = job.plan, job.plan.rows(engine.mesh.at.dp)
    counts, peaks = Counter[tuple[str, int, str]](), []
    for step in range(1, NUM_STEPS + 2):
        tokens = torch.randint(0, job.spec.vocab, (len(rows), plan.seq_len))
        documents = torch.zeros(len(rows), plan.seq_len, dtype=torch.int32) if job.documents else None
        whole = TensorBatch(tokens, tokens.roll(-1, 1), documents, number_rows(step, rows))
        micro = cut_microbatches(whole, plan.micro_batch, plan.num_microbatches, plan.pp > 1)
        calls.counts = Counter()
        account.label(everything=True)
        account.begin()
        with account, calls:
            start_step(
                engine, optimizer, StepBatch(step, micro, 1), num_targets=plan.tokens_per_step,
                lr=job.optimizer.peak_lr, clip=job.clip, clock=clock, ask=lambda: [0] * NUM_ANSWERS,
            )  # fmt: skip
        if step == NUM_STEPS:
            counts = calls.counts
        if step >= NUM_STEPS:
            peaks.append(account.peak)
    return counts, min(peaks, key=lambda peak: peak.total).by_category()
