"""Going on with another layout: what the planner chose is chosen anew, what people said stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cluster.describe.machine import Machine
from shardwise.config.load import load_config
from shardwise.config.reopen import PLANNER, reopen, written_origins
from shardwise.config.write import write_config
from shardwise.errors import UserError
from shardwise.plan.resolve.resolve import Resolved, resolve
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

MACHINE = Machine(4, 16 * 2**30, (), "linux")


def settle(loaded, nproc: int | None, path: Path) -> Resolved:
    """Resolve, and write config.toml as a run does."""
    result = resolve(loaded.config, preset("tiny"), MACHINE, nproc, 1000, loaded.origins)
    write_config(result.config, loaded.origins | dict.fromkeys(result.chosen, PLANNER), path)
    return result


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "config.toml"


@pytest.mark.parametrize(
    ("first", "then", "nproc", "layout"),
    [
        ([], [], None, "dp=4"),
        ([], [], 2, "dp=2"),
        (["parallel.dp=2"], [], 4, "dp=4"),  # a number of processes always decides about dp
        ([], ["parallel.tp=2"], None, "dp=2 tp=2 sp"),
        ([], ["parallel.layout=tp=2 pp=2"], None, "dp=1 tp=2 sp pp=2 schedule=1f1b"),
        (["parallel.tp=2"], ["parallel.tp=1"], None, "dp=4"),
        (["parallel.tp=2"], [], 2, "dp=1 tp=2 sp"),
        (["parallel.zero=3"], ["parallel.zero=0"], None, "dp=4"),
        (["parallel.layout=dp=4 zero=3"], ["parallel.pp=2", "parallel.dp=2"], None, "dp=2 zero=3 pp=2 schedule=1f1b"),
        (["parallel.pp=2"], ["parallel.schedule=zbv"], None, "dp=2 pp=2 schedule=zbv"),
        (["parallel.layout=pp=2 schedule=zbv"], ["parallel.schedule=1f1b"], None, "dp=2 pp=2 schedule=1f1b"),
        (["parallel.layout=pp=2 split=5,1"], ["parallel.tp=2"], None, "dp=1 tp=2 sp pp=2 schedule=1f1b split=5,1"),
        (["parallel.layout=tp=2 sp"], ["memory.precision=bf16"], None, "dp=2 tp=2 sp"),
    ],
)
def test_another_layout(path, first, then, nproc, layout):
    settle(load_config(None, first), None, path)
    assert settle(reopen(path, then, nproc), nproc, path).plan.layout == layout


def test_without_new_words_nothing_is_chosen_anew(path):
    before = settle(load_config(None, ["parallel.tp=2"]), None, path)
    settle(reopen(path, []), None, path)
    smaller = Machine(1, 16 * 2**30, (), "linux")  # would now choose dp=1
    loaded = reopen(path, ["checkpoint.keep=3"])
    again = resolve(loaded.config, preset("tiny"), smaller, None, 1000, loaded.origins).plan
    assert again.layout == before.plan.layout == "dp=2 tp=2 sp"


def test_values_keep_their_first_origin(path):
    settle(load_config(None, ["train.steps=7", "parallel.tp=2"]), None, path)
    for words in ([], ["train.seed=3"], ["parallel.pp=2"]):
        settle(reopen(path, words), None, path)
    origins = written_origins(path.read_text())
    assert origins["train.steps"] == origins["parallel.tp"] == origins["train.seed"] == "command line"
    assert origins["parallel.dp"] == origins["parallel.sequence"] == PLANNER
    assert origins["optimizer.lr"] == "default"


def test_mistakes_are_refused_as_ever(path):
    settle(load_config(None, []), None, path)
    with pytest.raises(UserError, match="unknown key"):
        reopen(path, ["parallel.tpp=2"])
    with pytest.raises(UserError, match="has no `=`"):
        reopen(path, ["parallel.tp"])
    with pytest.raises(UserError, match="no value"):
        reopen(path, ["parallel.layout="])
    with pytest.raises(UserError, match="without a pipeline"):
        reopen(path, ["parallel.schedule=zbv"])
    path.write_text("[parallel\n")
    with pytest.raises(UserError, match="not valid TOML"):
        reopen(path, [])


def test_the_plan_of_an_old_run_can_be_reopened(path):
    """A config.toml from before layouts: `virtual_stages` was a number, and nothing says who chose it."""
    path.write_text('[parallel]\ndp = 2  # planner\nzero = 0  # planner\ntp = 1\nvirtual_stages = 1\nsplit = "auto"\n')
    assert isinstance(settle(reopen(path, ["parallel.zero=1"]), None, path).plan, Plan)


def test_a_layout_string_replaces_the_whole_layout(tmp_path: Path) -> None:
    """`parallel.layout=dp=2` after a run with a pipeline means dp=2 and nothing else."""
    path = tmp_path / "config.toml"
    loaded = load_config(None, ["parallel.layout=dp=1 pp=2 zero=0 schedule=zbv", "run.name=x"])
    write_config(loaded.config, loaded.origins, path)
    parallel = reopen(path, ["parallel.layout=dp=2 zero=1"]).config.parallel
    assert (parallel.dp, parallel.zero, parallel.pp, parallel.schedule) == (2, 1, "auto", "1f1b")
    kept = reopen(path, ["parallel.dp=2"]).config.parallel
    assert (kept.dp, kept.pp, kept.schedule) == (2, 2, "zbv")
