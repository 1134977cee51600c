"""Hybrid sharding inside split-backward pipelines: every reduction has other parameters, so nothing may wait in a
flat buffer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides(
    {"num_layers": 4, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 44, "vocab": 67}
)
TRIAL = Trial(num_steps=2, global_batch=10, micro_batch=1)


truth = cache(train_plain)


def train(plan: Plan) -> Record:
    return train_in_layout(SPEC, plan, TRIAL, dist.get_rank(), torch.device("cpu"))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "stages"), [("zero-bubble", 1), ("zbv", 2)])
def test_replicas_of_shards_meet_exactly(ranks, zero: int, schedule: str, stages: int) -> None:
    split = (2, 2) if stages == 1 else (1, 1, 1, 1)
    layout = dict(dp=2, zero=zero, replicate=2, pp=2, schedule=schedule, virtual_stages=stages, split=split)
    record = ranks.run(train, 4, trial_plan(TRIAL, **layout))[0]
    differences, worst = compare(record, truth(SPEC, TRIAL))
    assert max(differences) < 1e-12, (differences, worst)


def test_two_replicas_of_two_shards_in_two_stages(ranks) -> None:
    layout = dict(dp=4, zero=3, replicate=2, pp=2, schedule="zero-bubble", split=(2, 2))
    record = ranks.run(train, 8, trial_plan(TRIAL, **layout))[0]
    differences, worst = compare(record, truth(SPEC, TRIAL))
    assert max(differences) < 1e-12, (differences, worst)
