"""A process of a run has one plan, and reads its config and its corpus once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL

from shardwise.config.load import load_config
from shardwise.errors import Exit
from shardwise.launch.planner import RunPlanner
from shardwise.launch.start import new_run, plan_run, start
from shardwise.run.guards import StopRequests
from shardwise.run.listener import Listener
from shardwise.run.loop import train
from shardwise.run.ranks import Ranks
from shardwise.run.session import Session
from shardwise.run.setup import Setup
from shardwise.spec.plan import Plan

WORDS = [*SMALL, "train.steps=2", "train.seq_len=40", "parallel.dp=1"]


def alive_plans(results: str) -> list[Plan]:
    """Of the run: no other test has two steps of 40 tokens. What blocks were timed with has one step."""
    gc.collect()
    plans = [thing for thing in gc.get_objects() if type(thing) is Plan]
    return [plan for plan in plans if (plan.num_steps, plan.seq_len, plan.results) == (2, 40, results)]


class Noted(Listener):
    """What the loop calls, in order, and the plans that are alive in its steps."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.plans: list[list[Plan]] = []

    def started(self, setup: Setup) -> None:
        self.setup = setup
        self.calls.append("started")

    def step_started(self, step: int) -> None:
        self.calls.append(f"step {step} started")
        self.plans.append(alive_plans(self.setup.session.plan.results))

    def step(self, finished: Any) -> None:
        self.calls.append(f"step {finished.step}")

    def evaluated(self, step: int, loss: float | None, own: Mapping[str, float]) -> None:
        self.calls.append(f"evaluated {step}")

    def sampled(self, text: str | None) -> None:
        self.calls.append("sampled")

    def saved(self, step: int) -> None:
        self.calls.append(f"saved {step}")

    def finished(self, ending: Any) -> None:
        self.calls.append("finished")


@pytest.mark.parametrize("results", ["at-once", "late"])
def test_one_plan_is_alive_and_listeners_hear_in_order(workdir: Path, results: str) -> None:
    planned = plan_run(load_config(None, [*WORDS, f"speed.results={results}"]), 1, progress=False)
    assert planned.config.train.micro_batch == "auto"
    planned.plan = replace(planned.plan, micro_batch=1)  # a planner that expects less than the search will find
    run, heard = new_run(planned), Noted()
    session = Session(run, planned, Ranks(), torch.device("cpu"), 2**34)
    planner = RunPlanner(planned.config, planned.spec, "cpu")
    with StopRequests(run, None, print) as stops:
        assert train(session, stops, planner, heard) == Exit.DONE
    engine = heard.setup.engine
    assert planned.plan.micro_batch == 8  # what the search found, for everybody
    assert planned.plan is session.plan is engine.plan is engine.mesh.plan is engine.pipeline.plan
    assert [[id(plan) for plan in alive] for alive in heard.plans] == [[id(planned.plan)]] * 2
    steps = ["step 1 started", "step 1", "step 2 started", "step 2"]
    if results == "late":  # the first step's results are read when the second has been started
        steps = ["step 1 started", "step 2 started", "step 1", "step 2"]
    assert heard.calls == ["started", *steps, "saved 2", "evaluated 2", "sampled", "finished"]


OPENED: list[str] = []
sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)


def test_a_run_of_one_process_reads_nothing_twice(workdir: Path) -> None:
    Path("run.toml").write_text('[run]\nname = "once"\n')

    def opened(name: str) -> int:
        return sum(Path(path).name == name for path in OPENED)

    loaded = load_config("run.toml", WORDS)
    plan_run(loaded, 1, progress=False)  # tokenises the text
    OPENED.clear()
    planned = plan_run(loaded, 1, progress=False)
    index = opened("index.json")
    assert index > 0
    assert start(new_run(planned), planned) == Exit.DONE
    assert opened("index.json") == index  # of the corpus, which the planner has opened
    assert opened("run.toml") == opened("config.toml") == 0


@pytest.mark.parametrize("words", [[], ["memory.limit=2GiB", "optimizer.betas=0.8,0.99", "checkpoint.every=10min"]])
def test_the_run_directory_says_what_was_resolved(workdir: Path, words: list[str]) -> None:
    """So ranks that read it have the config and the plan of the process that resolved them."""
    planned = plan_run(load_config(None, [*WORDS, *words]), 1, progress=False)
    run = new_run(planned)
    assert load_config(run.config).config == planned.config
    assert Plan.from_dict(run.read_plan()) == planned.plan
