"""`micro_batch = "auto"`: the arithmetic, and real runs under a tight limit in every kind of layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import SMALL

from shardwise.config.load import load_config
from shardwise.launch.start import new_run, plan_run
from shardwise.launch.worker import run_worker
from shardwise.memory.micro_batch import FRAGMENTS, MemoryGrowth, MicroBatchMemory, largest_that_fits
from shardwise.plan.prediction.lifetimes import PROCESS_BYTES
from shardwise.plan.prediction.memory import measured_need
from shardwise.plan.resolve.fit import needed_memory
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir
from shardwise.spec.cluster import HEADROOM
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

PLAN = Plan(
    device="cpu",
    precision="fp32",
    seq_len=64,
    global_batch=8,
    micro_batch=1,
    num_steps=1,
    threads_per_rank=1,
    reason="a test",
)
WORDS = [*SMALL, "train.seq_len=512", "train.steps=3", "train.sample_tokens=0", "train.eval_batches=1"]


def found(room: float, growth: MemoryGrowth, plan: Plan = PLAN, pp_rank: int = 0) -> int:
    limit = int((1000 + room) * (1 + FRAGMENTS) / HEADROOM) + 2

    def needed_bytes(size: int, taken: MicroBatchMemory) -> int:
        cut = replace(plan, micro_batch=size)
        return measured_need(preset("tiny"), cut, 1000, taken.activations, taken.temporary, pp_rank)

    return largest_that_fits([8, 4, 2, 1], needed_bytes, growth, limit)


def test_two_measured_sizes_make_a_line() -> None:
    growth = MemoryGrowth(MicroBatchMemory(100, 60), MicroBatchMemory(180, 60))  # 20 + 80 n, and 60 at any size
    assert growth.taken(4) == MicroBatchMemory(340, 60)
    one = MemoryGrowth(MicroBatchMemory(100, 10))
    assert one.taken(4) == MicroBatchMemory(400, 40)
    needed = 660 + int(0.45 * 660)
    assert [found(needed, growth), found(needed - 9, growth), found(160, growth), found(1, growth)] == [8, 4, 1, 1]


def test_a_pipeline_holds_several_micro_batches() -> None:
    """1f1b on four ranks: the first one has four under way, the last one only one."""
    pipeline = replace(PLAN, global_batch=32, pp=4, split=(2, 2, 1, 1))
    growth = MemoryGrowth(MicroBatchMemory(100, 0))
    assert [found(4 * 290, growth, pipeline, rank) for rank in (0, 1, 3)] == [2, 2, 8]


def train_rank(path: str) -> int:
    """Runs on ranks: the run as the launcher would start it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return run_worker(RunDir(Path(path)), Ranks(rank, world, rank, world), verify=False)


@pytest.mark.parametrize(
    ("layout", "global_batch", "size"),
    [("dp=2", 16, 4), ("dp=2 zero=3", 16, 4), ("tp=2", 8, 4), ("pp=2", 32, 2)],
)
def test_the_largest_that_fits_is_taken_and_the_run_stays_below(
    layout: str, global_batch: int, size: int, ranks: Any, workdir: Path
) -> None:
    """Room for half of the way from this size to twice as many sequences."""
    words = [*WORDS, f"train.global_batch={global_batch}", f"parallel.layout={layout}", "run.name=fit"]
    job = plan_run(load_config(None, words), 2, progress=False)
    spec, config = job.spec, job.config
    fits, more = (needed_memory(spec, replace(job.plan, micro_batch=n), config) for n in (size, 2 * size))
    limit = int((fits + more) / 2 * (1 + FRAGMENTS) / HEADROOM)
    run = new_run(plan_run(load_config(None, [*words, f"memory.limit={limit}"]), 2, progress=False))
    assert ranks.run(train_rank, 2, str(run.path.resolve()), timeout=120) == [0, 0]
    assert json.loads(run.plan.read_text())["micro_batch"] == size
    event = run.last_event()
    assert event is not None and event["event"] == "finished"
    tensors = [
        sum(values[row] for row in values if row not in ("reserved", "peak")) for values in event["memory"]["ranks"]
    ]
    assert max(tensors) + PROCESS_BYTES["cpu"] < limit
