"""Keys of [parallel] that contradict each other are refused, and the fix that is printed works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwise.config.check_layout import check_world, stages_per_rank
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.spec.schema import Config, ParallelConfig


def config(**parallel):
    return replace(Config(), parallel=ParallelConfig(**parallel))


# Degrees and processes ------------------------------------------------------------------------------------------------


def test_degrees_that_multiply_to_the_world_pass():
    check_world(config(dp=4), 4, {})
    check_world(config(dp=2), 4, {})
    check_world(config(dp=2, tp=2, cp=1, pp=1), 4, {})
    check_world(config(tp=2, cp=1, pp=3), 12, {})
    check_world(config(), 3, {})


@pytest.mark.parametrize(
    ("parallel", "world", "needed", "fix"),
    [
        ({"dp": 3}, 4, "a multiple of 3", "--nproc 3 or --nproc 6 or parallel.dp=4"),
        ({"dp": 8}, 4, "a multiple of 8", "--nproc 8 or parallel.dp=4"),
        ({"dp": 2, "tp": 1, "cp": 1, "pp": 1}, 4, "2", "--nproc 2 or parallel.dp=4"),
        ({"dp": 2, "tp": 2, "cp": 1, "pp": 1}, 6, "4", "--nproc 4 or parallel.dp=3"),
        ({"dp": 2, "tp": 3, "cp": 1, "pp": 1}, 4, "6", "--nproc 6"),
        ({"tp": 2, "cp": 1, "pp": 2}, 6, "a multiple of 4", "--nproc 4 or --nproc 8"),
        ({"tp": 2, "cp": 1, "pp": 2}, 2, "a multiple of 4", "--nproc 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(parallel, world, needed, fix):
    with pytest.raises(UserError) as caught:
        check_world(config(**parallel), world, {"parallel.dp": "run.toml:3"})
    assert caught.value.what == f"the layout needs {needed} processes, there are {world}"
    assert caught.value.fix == fix
    assert caught.value.where == ("run.toml:3" if "dp" in parallel else None)
    for words in fix.split(" or "):
        kind, number = re.split("[ =]", words)
        fixed = {"dp": int(number)} if kind == "parallel.dp" else {}
        check_world(config(**parallel | fixed), world if fixed else int(number), {})


# Keys among themselves ------------------------------------------------------------------------------------------------

# words -> what, part of why, fix
CASES = {
    "nothing to fill": (
        ["parallel.fill_bubbles=eval"],
        '`parallel.fill_bubbles = "eval"` without a pipeline',
        "pp is 1",
        "parallel.fill_bubbles=none",
    ),
    "another job to fill": (
        ["parallel.pp=2", "parallel.fill_bubbles=jobs/other.toml"],
        'a second job in idle pipeline slots (`parallel.fill_bubbles = "jobs/other.toml"`) is not available yet',
        "only side work",
        "parallel.fill_bubbles=eval",
    ),
    "replicas do not divide": (
        ["parallel.dp=8", "parallel.replicate=3"],
        "`parallel.replicate = 3` does not divide dp=8",
        "dp = replicas x shards",
        "parallel.replicate=2 or parallel.replicate=4",
    ),
    "more replicas than ranks": (
        ["parallel.dp=2", "parallel.replicate=4", "parallel.zero=2"],
        "`parallel.replicate = 4` does not divide dp=2",
        "",
        "parallel.replicate=2",
    ),
    "replicas without zero": (
        ["parallel.dp=8", "parallel.replicate=3", "parallel.zero=0"],
        "`parallel.replicate = 3` does not divide dp=8",
        "",
        "parallel.replicate=8",
    ),
    "shards of nothing": (
        ["parallel.layout=dp=4 replicate=2 zero=0"],
        "`parallel.replicate = 2` leaves shards, but `parallel.zero = 0` shards nothing",
        "dp=4 over 2 replicas makes 2 shards",
        "parallel.zero=1 or parallel.replicate=4",
    ),
    "sp alone": (
        ["parallel.sp=true"],
        "`parallel.sequence = true` without tensor parallelism",
        "tp is 1",
        "parallel.sequence=auto",
    ),
    "sp and tp=1": (
        ["parallel.layout=dp=2 tp=1 sp"],
        "`parallel.sequence = true` without tensor parallelism",
        "",
        "parallel.sequence=auto",
    ),
    "sp and length": (
        ["parallel.layout=tp=4 sp", "train.seq_len=126"],
        "`parallel.sequence = true` cannot cut 126 tokens into 4 equal parts",
        "train.seq_len / tp",
        "parallel.sequence=false or train.seq_len=124 or train.seq_len=128",
    ),
    "ring and length": (
        ["parallel.layout=cp=4", "train.seq_len=100"],
        "`train.seq_len = 100` cannot be shared by cp=4 ranks (ring)",
        "8 equal pieces",
        "train.seq_len=96 or train.seq_len=104",
    ),
    "ulysses and length": (
        ["parallel.layout=cp=4 cp_kind=ulysses", "train.seq_len=102"],
        "`train.seq_len = 102` cannot be shared by cp=4 ranks (ulysses)",
        "train.seq_len / cp tokens",
        "train.seq_len=100 or train.seq_len=104",
    ),
    "ring and a short length": (
        ["parallel.layout=cp=4", "train.seq_len=4"],
        "`train.seq_len = 4` cannot be shared by cp=4 ranks (ring)",
        "",
        "train.seq_len=8",
    ),
    "sp and a short length": (
        ["parallel.layout=tp=8 sp", "train.seq_len=4"],
        "`parallel.sequence = true` cannot cut 4 tokens into 8 equal parts",
        "",
        "parallel.sequence=false or train.seq_len=8",
    ),
    "experts over slices": (
        ["parallel.layout=tp=2 ep=2", "parallel.sequence=false"],
        "ep=2 with tp=2 needs sequence parallelism",
        "must share the tokens",
        "parallel.sequence=auto or parallel.ep=1",
    ),
    "experts over slices, length": (
        ["parallel.layout=tp=4 ep=2", "train.seq_len=126"],
        "ep=2 with tp=4 needs sequence parallelism",
        "",
        "train.seq_len=128 or parallel.ep=1",
    ),
    "schedule without pipeline": (
        ["parallel.schedule=zbv"],
        '`parallel.schedule = "zbv"` without a pipeline',
        "pp is 1",
        "parallel.schedule=1f1b",
    ),
    "all without pipeline": (
        ["parallel.pp=1", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.split=even"],
        '`parallel.schedule = "interleaved"` without a pipeline',
        "",
        "parallel.schedule=1f1b parallel.virtual_stages=auto parallel.split=auto",
    ),
    "split without pipeline": (
        ["parallel.split=3,3"],
        "`parallel.split = [3, 3]` without a pipeline",
        "",
        "parallel.split=auto",
    ),
    "1f1b over stages": (
        ["parallel.pp=2", "parallel.virtual_stages=3"],
        '`parallel.schedule = "1f1b"` does not work with `parallel.virtual_stages = 3`',
        "one stage per rank",
        "parallel.virtual_stages=1 or parallel.schedule=interleaved",
    ),
    "gpipe over stages": (
        ["parallel.layout=pp=2 schedule=gpipe virtual_stages=2"],
        '`parallel.schedule = "gpipe"` does not work with `parallel.virtual_stages = 2`',
        "",
        "parallel.virtual_stages=1 or parallel.schedule=interleaved",
    ),
    "interleaved over nothing": (
        ["parallel.layout=pp=2 schedule=interleaved virtual_stages=1"],
        '`parallel.schedule = "interleaved"` does not work with `parallel.virtual_stages = 1`',
        "takes turns",
        "parallel.virtual_stages=2 or parallel.schedule=1f1b",
    ),
    "zbv of one": (
        ["parallel.layout=pp=2 schedule=zbv virtual_stages=1"],
        '`parallel.schedule = "zbv"` does not work with `parallel.virtual_stages = 1`',
        "two stages on each",
        "parallel.virtual_stages=2",
    ),
    "zbv of three": (
        ["parallel.layout=pp=2 schedule=zbv virtual_stages=3"],
        '`parallel.schedule = "zbv"` does not work with `parallel.virtual_stages = 3`',
        "",
        "parallel.virtual_stages=2",
    ),
    "split too long": (
        ["parallel.pp=2", "parallel.split=2,2,2"],
        "`parallel.split = [2, 2, 2]` has 3 entries for 2 stages",
        "pp=2 of them",
        "parallel.split=auto or parallel.split=even",
    ),
    "split per rank": (
        ["parallel.layout=pp=2 schedule=zbv split=3,3"],
        "`parallel.split = [3, 3]` has 2 entries for 4 stages",
        "pp=2 x virtual_stages=2",
        "parallel.split=auto or parallel.split=even",
    ),
    "empty split": (
        ["parallel.pp=2", "parallel.split=[]"],
        "`parallel.split = []` has 0 entries for 2 stages",
        "",
        "parallel.split=auto or parallel.split=even",
    ),
}


def apply(words: list[str], fix: str) -> list[str]:
    """The command line with a printed fix typed into it: its keys replace those that
    were there, in a layout string too."""
    fixed = dict(word.split("=", 1) for word in fix.split())
    plain = []
    for word in words:
        name, value = word.split("=", 1)
        if name == "parallel.layout":
            inside = [part if "=" in part else f"{part}=true" for part in value.split()]
            plain += [f"parallel.{part}" for part in inside]
        else:
            plain.append(word)
    names = {"parallel.sp": "parallel.sequence"}
    kept = [word for word in plain if names.get(word.split("=")[0], word.split("=")[0]) not in fixed]
    return [*kept, *(f"{name}={value}" for name, value in fixed.items())]


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_refused_and_their_fixes_work(name):
    words, what, why, fix = CASES[name]
    with pytest.raises(UserError) as caught:
        load_config(None, words)
    error = caught.value
    assert error.what == what
    assert why in error.why
    assert error.fix.split(", or set")[0] == fix
    assert error.where == "command line"
    for alternative in fix.split(" or "):
        load_config(None, apply(words, alternative))


def test_the_error_points_at_the_line_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[parallel]\npp = 2\n\nschedule = "zbv"\nvirtual_stages = 3\n')
    with pytest.raises(UserError) as caught:
        load_config("run.toml")
    assert caught.value.where == "run.toml:5"


@pytest.mark.parametrize(
    "words",
    [
        [
            "parallel.schedule=1f1b",
            "parallel.virtual_stages=1",
            "parallel.split=auto",
        ],  # the defaults, without pipeline
        ["parallel.sequence=false"],
        ["parallel.layout=dp=4 zero=3 replicate=4"],
        ["parallel.layout=dp=2 zero=0 replicate=2"],
        ["parallel.layout=tp=2 sp pp=2 schedule=zero-bubble virtual_stages=3"],
        ["parallel.layout=pp=2 schedule=zero-bubble"],
        ["parallel.layout=pp=2 split=4,2"],
        ["parallel.replicate=3"],  # dp is still open
    ],
    ids=str,
)
def test_what_goes_together_passes(words):
    load_config(None, words)


@pytest.mark.parametrize(
    ("parallel", "stages"),
    [
        ({}, 1),
        ({"schedule": "interleaved"}, 1),  # refused elsewhere: there is no pipeline
        ({"pp": 2}, 1),
        ({"pp": 2, "schedule": "gpipe"}, 1),
        ({"pp": 2, "schedule": "zero-bubble"}, 1),
        ({"pp": 2, "schedule": "interleaved"}, 2),
        ({"pp": 2, "schedule": "zbv"}, 2),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 3}, 3),
    ],
)
def test_stages_per_rank_follow_the_schedule(parallel, stages):
    assert stages_per_rank(ParallelConfig(**parallel)) == stages
