"""`--what-if`: one thing changes, the rest stays."""

from __future__ import annotations

import pytest

from shardwise.errors import UserError
from shardwise.plan.answer.question import Question, ask
from shardwise.plan.answer.what_if import change, what_if


@pytest.fixture(scope="module")
def base() -> Question:
    return ask("llama3.2-1b", "2x4xh100", seq="2k", batch="256k", tokens="1B")


def test_hardware_changes(base):
    assert change(base, "nic=10GB/s").cluster.tiers[-1].bandwidth == 10e9
    assert change(base, "nvlink=100GB/s").cluster.tiers[0].bandwidth == 100e9
    assert change(base, "memory=40GB").cluster.device.memory == 40e9
    assert change(base, "nodes=4").cluster.world == 16
    assert [change(base, f"gpus={n}").cluster.world for n in (1, 2, 4, 16)] == [1, 2, 4, 16]


def test_job_changes(base):
    assert change(base, "seq=4k").job.tokens_per_step == base.job.tokens_per_step
    assert change(base, "batch=512k").job.global_batch == 2 * base.job.global_batch
    assert change(base, "price=3").price == 3 and change(base, "tokens=2B").job.tokens == 2 * 10**9
    assert dict(change(base, "parallel.tp=2").job.constraints) == {"parallel.tp": 2}
    assert change(base, "memory.precision=fp8").job.precision == "fp8"
    assert change(base, "optimizer.name=sgd").job.optimizer == "sgd"


def test_what_does_not_fit_is_no_row(base):
    assert what_if(base, "memory=128MB").row is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nic", "changes nothing"),
        ("nick=5GB/s", "did you mean `nic`"),
        ("nic=fast", "nic"),
        ("nic=5PB/s", "out of range"),
        ("gpus=6", "whole number of nodes"),
        ("gpus=0", "must be above 0"),
        ("seq=3000", "whole number of sequences"),
        ("parallel.tpp=3", "unknown key"),
    ],
)
def test_mistakes(base, text, said):
    with pytest.raises(UserError) as problem:
        change(base, text)
    assert said in str(problem.value)
