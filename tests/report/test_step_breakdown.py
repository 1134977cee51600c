"""What `watch` draws of a step: only what the events really say, and only of steps that are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.report.step_breakdown import bar, measured_pipeline
from shardwise.run.rundir import RunDir, create_run_dir
from shardwise.spec.actions import NAMES
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import schedule_actions

PLAN = Plan(
    device="cpu",
    precision="fp32",
    seq_len=8,
    global_batch=2,
    micro_batch=1,
    num_steps=9,
    threads_per_rank=1,
    reason="a test",
    pp=2,
    schedule="gpipe",
    split=(1, 1),
    tp=2,
)
ACTIONS = schedule_actions("gpipe", 2, 1, 2)
STARTS = [
    [0, 1, 6, 8],
    [1, 2, 3, 5],
]  # F0 F1 B0 B1, in tenths of a second; rank 1 waits for rank 0 and the other way round


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create_run_dir(tmp_path, "drawn", "tiny")
    made.events.mkdir(exist_ok=True)
    prediction = {"step": {"compute": 3.0, "bubble": 1.0}}
    made.plan.write_text(json.dumps(PLAN.to_dict() | {"prediction": prediction}))
    return made


def write(run: RunDir, step: int, num_actions: int = 4, at: float = 1000.0) -> None:
    for pp, rank in enumerate((0, 2)):  # tensor-parallel neighbours are ranks 1 and 3
        lines: list[dict[str, Any]] = [
            {"name": NAMES[a.kind], "stage": a.stage, "microbatch": a.microbatch, "step": step, "t": at + start / 10,
             "dur_us": 100_000 * (1 + (a.kind == "B"))}
            for a, start in list(zip(ACTIONS[pp], STARTS[pp], strict=True))[:num_actions]
        ]  # fmt: skip
        lines.insert(1, {"name": "all-reduce", "stage": pp, "microbatch": 0, "step": step, "t": at, "dur_us": 7})
        with open(run.events / f"rank{rank}.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_newest_complete_step_is_drawn(run: RunDir) -> None:
    assert measured_pipeline(run) is None
    write(run, 10)
    write(run, 20)
    write(run, 30, num_actions=3)  # a step that is just being written, and a line that ends too early
    with open(run.events / "rank0.jsonl", "a") as file:
        file.write('{"name": "forward", "sta')
    found = measured_pipeline(run)
    assert found is not None and found.step == 20
    assert found.timeline.total == pytest.approx(1.0)
    assert found.timeline.busy == pytest.approx((0.6, 0.6))
    assert found.text(10).splitlines() == [
        "pipeline step 20 as it ran: 1000 ms, idle 40 % (predicted 25 %)",
        "rank 0 |01....aabb|",
        "rank 1 |.01aabb...|",
    ]


def test_after_a_resume_the_later_events_of_a_step_count(run: RunDir) -> None:
    write(run, 10)
    write(run, 10, at=2000.0)
    found = measured_pipeline(run)
    assert found is not None and found.timeline.total == pytest.approx(1.0)


def test_the_bar_has_every_part_in_its_share() -> None:
    where = {
        "compute_s": 5.0,
        "comm_exposed_s": 2.0,
        "bubble_s": 1.0,
        "optimizer_s": 1.0,
        "data_wait_s": 0.0,
        "other_s": 1.0,
        "step_s": 10.0,
    }
    assert bar(where, 10) == (
        "|█████▒▒.▓ |  █ compute 50 %, ▒ waiting for ranks 20 %, . waiting for stages 10 %, ▓ "
        "optimizer 10 %, other 10 %"
    )
