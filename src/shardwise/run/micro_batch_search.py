"""The micro-batch search (`micro_batch = "auto"`) finds the largest micro-batch that fits, on every layout: small ones
go through the real engine, and what they take is counted.

Tokens without targets cost what real ones cost and leave no trace: no gradient, no router count, nothing for DDP to
reduce. All ranks take part in every pass and take the smallest answer. Blocks that are to be compiled run as they are
written: they keep more than compiled ones, and are not compiled for sizes that nobody trains with. Read next:
memory/micro_batch.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.data.loader import TensorBatch
from shardwise.data.sequences import IGNORE
from shardwise.memory.account import Account
from shardwise.memory.micro_batch import MemoryGrowth, MicroBatchMemory, largest_that_fits
from shardwise.parallel.engine import Engine
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import owners_of
from shardwise.run.planner import Planner


def search_micro_batch(engine: Engine, planner: Planner, limit: int) -> int:
    """Collective. Returns the largest micro-batch, in sequences, that fits on every rank."""
    plan, sizes = engine.plan, planner.micro_batch_sizes(engine.plan)
    if sizes == [1]:
        return 1

    def needed_bytes(size: int, taken: MicroBatchMemory) -> int:
        return planner.needed_bytes(replace(plan, micro_batch=size), taken, engine.mesh.at.pp)

    def choose(growth: MemoryGrowth, among: list[int]) -> int:
        return _smallest(largest_that_fits(among, needed_bytes, growth, limit), engine)

    one = MemoryGrowth(_taken(engine, 1))
    if choose(one, [2]) < 2:  # by twice the first, some rank would not have room for a second
        return choose(one, sizes)
    return choose(MemoryGrowth(one.one, _taken(engine, 2)), sizes)


def _taken(engine: Engine, size: int) -> MicroBatchMemory:
    """Collective. Returns the bytes that one micro-batch takes on this rank beyond parameters, their low-precision
    weights and gradients."""
    device = engine.mesh.device
    tokens = torch.zeros(size, engine.plan.seq_len, dtype=torch.long, device=device)
    micro = TensorBatch(tokens, torch.full_like(tokens, IGNORE), None)
    clock = Clock(device)
    account = Account(device, owners_of(engine, None), clock, records=True)
    with engine.as_written(), account:
        account.begin()
        before = _allocated(device)
        engine.probe(micro, clock)
    activations = max(point.by_category()["activations"] for point in account.points)
    working = max(p.by_category()["activations"] + p.by_category()["temporary"] for p in account.points)
    unseen = 0
    if device.type == "cuda":  # what kernels take for themselves, the allocator knows
        counted = account.peak.total - account.first.total
        unseen = max(0, torch.cuda.max_memory_allocated(device) - before - counted)
    return MicroBatchMemory(activations, working - activations + unseen)


def _allocated(device: torch.device) -> int:
    """Returns the bytes that torch's CUDA allocator has given out, and starts its peak anew; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _smallest(value: int, engine: Engine) -> int:
    """Collective. Returns the smallest of all ranks' values."""
    if engine.plan.world == 1:
        return value
    tensor = torch.tensor(value, device=engine.mesh.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor)
