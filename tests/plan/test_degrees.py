"""Degrees: what is filled in, what is refused, and that every fix which is printed is then accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.plan.resolve.degrees import Degrees, choose_degrees, tensor_degrees
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.usual import plan_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split

MOE = preset("tiny-moe")  # 8 experts
TINY = preset("tiny")  # 6 layers, 8 heads, 4 key-value heads, ffn 704, vocabulary 256


def cpu(cores: int = 2) -> Machine:
    return Machine(cores, 16 * 2**30, (), "linux")


def gpus(count: int) -> Machine:
    return Machine(4 * count, 512 * 2**30, (Gpu("H100", 80 * 2**30, (9, 0)),) * count, "linux")


def degrees(*words: str, spec: ModelSpec = TINY, machine: Machine | None = None, nproc: int | None = None) -> Degrees:
    loaded = load_config(None, words)
    return choose_degrees(Asked(loaded.config, spec, machine or cpu(), nproc), loaded.origins)


def split_of(*words: str, spec: ModelSpec = TINY, machine: Machine | None = None, nproc: int | None = None):
    loaded = load_config(None, words)
    return plan_of(Asked(loaded.config, spec, machine or cpu(), nproc), 1000, loaded.origins).split


def refusal(*words: str, **where) -> UserError:
    with pytest.raises(UserError) as caught:
        degrees(*words, **where)
    assert caught.value.code == Exit.USER_MISTAKE
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


# Filling --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "where", "world", "dp", "reason"),
    [
        ([], {"machine": cpu(1)}, 1, 1, "one device: nothing to split"),
        ([], {"machine": cpu(2)}, 2, 2, "one replica per core, 2 in all"),
        (["train.global_batch=7"], {"machine": cpu(2)}, 1, 1, "one process, as a batch of 7 does not divide by 2"),
        ([], {"machine": cpu(64)}, 4, 4, "one replica per core, 4 in all"),
        (
            ["train.global_batch=6"],
            {"machine": cpu(4)},
            3,
            3,
            "one replica per core, 3 in all, as a batch of 6 does not divide by 4",
        ),
        ([], {"machine": gpus(8)}, 8, 8, "one replica per GPU, 8 in all"),
        ([], {"nproc": 4}, 4, 4, "as asked"),
        (["parallel.dp=3"], {}, 3, 3, "as asked"),
        (["parallel.tp=2"], {"machine": gpus(8)}, 8, 4, "one replica per 2 GPUs, 4 in all"),
        (["parallel.tp=2", "parallel.pp=2"], {"machine": gpus(8)}, 8, 2, "one replica per 4 GPUs, 2 in all"),
        (["parallel.tp=4"], {"machine": gpus(6)}, 4, 1, "one replica per 4 GPUs, 1 in all"),
        (["parallel.tp=2"], {"machine": cpu(4)}, 4, 2, "one replica per 2 cores, 2 in all"),
        (["parallel.tp=2"], {"machine": cpu(2)}, 2, 1, "one replica per 2 cores, 1 in all"),
        (
            ["parallel.tp=2", "parallel.pp=2"],
            {"machine": cpu(2)},
            4,
            1,
            "the degrees need 4 processes, which share 2 cores",
        ),
        (["parallel.tp=2"], {"machine": cpu(1)}, 2, 1, "the degrees need 2 processes, which share 1 core"),
        (["parallel.tp=2"], {"nproc": 8}, 8, 4, "as asked"),
        (["parallel.layout=dp=2 tp=2 pp=2"], {"nproc": 8}, 8, 2, "as asked"),
        (["parallel.layout=dp=2 tp=2 pp=2"], {"machine": gpus(8)}, 8, 2, "as asked"),
        (["parallel.replicate=2"], {"machine": gpus(8)}, 8, 8, "one replica per GPU, 8 in all"),
        (
            ["parallel.replicate=3", "train.global_batch=12"],
            {"machine": gpus(8)},
            6,
            6,
            "one replica per GPU, 6 in all",
        ),
        (["parallel.replicate=4"], {"machine": cpu(2)}, 4, 4, "the degrees need 4 processes, which share 2 cores"),
        (["parallel.replicate=2", "parallel.zero=0"], {"machine": gpus(8)}, 2, 2, "one replica per GPU, 2 in all"),
    ],
)
def test_data_parallelism_takes_what_the_other_degrees_leave(words, where, world, dp, reason):
    found = degrees(*words, **where)
    assert (found.grid.gpus, found.grid.dp, found.reason) == (world, dp, reason)


@pytest.mark.parametrize(
    ("words", "sequence"),
    [
        ([], False),
        (["parallel.tp=2"], True),
        (["parallel.tp=2", "parallel.sequence=false"], False),
        (["parallel.tp=4", "train.seq_len=126"], False),
        (["parallel.tp=4", "parallel.sp=true"], True),
    ],
)
def test_sequence_parallelism_comes_with_tensor_parallelism_when_lengths_allow(words, sequence):
    assert degrees(*words).grid.sequence is sequence


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ([], ()),
        (["parallel.pp=2"], (3, 3)),
        (["parallel.pp=4"], (2, 2, 1, 1)),
        (["parallel.pp=2", "parallel.schedule=zbv"], (2, 2, 1, 1)),
        (["parallel.pp=2", "parallel.split=5,1"], (5, 1)),
        (["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=3"], (1,) * 6),
    ],
)
def test_the_split_is_filled(words, split):
    assert split_of(*words) == split


def test_auto_gives_a_heavy_head_fewer_layers_and_even_does_not():
    spec = preset("llama3-8b")
    auto = split_of("parallel.pp=4", spec=spec)
    even = split_of("parallel.pp=4", "parallel.split=even", spec=spec)
    assert auto[-1] < auto[0] and sum(auto) == spec.num_layers
    assert even == even_split(32, 4) == (8, 8, 8, 8)


def test_a_batch_that_does_not_divide_is_fine():
    assert degrees("train.global_batch=7", "parallel.dp=3").grid.dp == 3


# What the model can be cut into ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("tiny", {}, [1, 2, 4, 8]),  # 8: each key-value head on two ranks
        ("tiny", {"num_kv_heads": 1}, [1, 2, 4, 8]),
        ("tiny", {"num_heads": 12, "num_kv_heads": 4, "head_dim": 8}, [1, 2, 4, 12]),  # 3 and 6 would cut heads of 4
        ("tiny", {"num_heads": 12, "num_kv_heads": 6, "head_dim": 8}, [1, 2, 3, 6, 12]),
        ("tiny", {"ffn": 3}, [1, 2]),
        ("tiny", {"vocab": 5}, [1, 2, 4]),
        ("tiny", {"ffn": 707}, [1, 2, 4, 8]),  # widths need not divide
        ("tiny-moe", {"expert_ffn": 3}, [1, 2]),
        ("llama3-70b", {}, [1, 2, 4, 8, 16, 32, 64]),
        ("gpt2", {}, [1, 2, 3, 4, 6, 12]),
        ("deepseek-v3", {}, [1, 2, 4, 8, 16, 32, 64, 128]),
        ("deepseek-v3", {"num_heads": 12, "num_kv_heads": 12}, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_tensor_degrees_of_models(name, changes, found):
    assert tensor_degrees(preset(name).with_overrides(changes)) == found


# Refusals -------------------------------------------------------------------------------------------------------------

SHARED = preset("tiny-moe").with_overrides({"expert_ffn": 2, "num_shared_experts": 1, "num_kv_heads": 8})

# words, where it runs -> what, part of why, the fix, where it was written
REFUSED = {
    "heads": (
        ["parallel.tp=3"],
        {},
        "tiny cannot be cut over tp=3",
        "8 heads do not divide by 3",
        "parallel.tp=2 or parallel.tp=4",
        "command line",
    ),
    "more ranks than heads": (
        ["parallel.tp=16"],
        {},
        "tiny cannot be cut over tp=16",
        "8 heads do not divide by 16",
        "parallel.tp=8 or parallel.tp=4",
        "command line",
    ),
    "key-value heads": (
        ["parallel.tp=6"],
        {"spec": TINY.with_overrides({"num_heads": 12, "head_dim": 8})},
        "tiny cannot be cut over tp=6",
        "4 of them neither divide by 6 nor go into it evenly",
        "parallel.tp=4 or parallel.tp=2",
        "command line",
    ),
    "narrow ffn": (
        ["parallel.tp=4"],
        {"spec": TINY.with_overrides({"ffn": 3})},
        "tiny cannot be cut over tp=4",
        "the feed-forward width is only 3",
        "parallel.tp=2 or parallel.tp=1",
        "command line",
    ),
    "few words": (
        ["parallel.tp=8"],
        {"spec": TINY.with_overrides({"vocab": 5})},
        "tiny cannot be cut over tp=8",
        "the vocabulary is only 5",
        "parallel.tp=4 or parallel.tp=2",
        "command line",
    ),
    "narrow experts": (
        ["parallel.tp=4"],
        {"spec": SHARED},
        "tiny-moe cannot be cut over tp=4",
        "the expert width is only 2",
        "parallel.tp=2 or parallel.tp=1",
        "command line",
    ),
    "latent heads": (
        ["parallel.tp=3"],
        {"spec": preset("deepseek-v3")},
        "deepseek-v3 cannot be cut over tp=3",
        "128 heads do not divide by 3",
        "parallel.tp=2 or parallel.tp=4",
        "command line",
    ),
    "heads, with processes": (
        ["parallel.tp=3"],
        {"nproc": 3},
        "tiny cannot be cut over tp=3",
        "",
        "parallel.tp=2 --nproc 2 or parallel.tp=4 --nproc 4",
        "command line",
    ),
    "heads, processes that fit": (
        ["parallel.tp=3"],
        {"nproc": 6},
        "tiny cannot be cut over tp=3",
        "",
        "parallel.tp=2 or parallel.tp=4 --nproc 4",
        "command line",
    ),
    "ulysses": (
        ["parallel.cp=3", "parallel.cp_kind=ulysses", "train.seq_len=126"],
        {},
        "tiny cannot be shared by cp=3 ranks the way of Ulysses",
        "which do not divide by 3",
        "parallel.cp_kind=ring or parallel.cp=2",
        "command line",
    ),
    "ulysses, more ranks than heads": (
        ["parallel.cp=16", "parallel.cp_kind=ulysses"],
        {"nproc": 16},
        "tiny cannot be shared by cp=16 ranks the way of Ulysses",
        "which do not divide by 16",
        "parallel.cp_kind=ring or parallel.cp=8",
        "command line",
    ),
    "heads, sequence parallel": (
        ["parallel.tp=3", "parallel.sp=true", "train.seq_len=126"],
        {},
        "tiny cannot be cut over tp=3",
        "",
        "parallel.tp=2",
        "command line",
    ),
    "stages": (
        ["parallel.pp=8"],
        {},
        "pp=8 makes more stages than tiny has layers",
        "8 stages of at least one layer each, 6 layers",
        "parallel.pp=6 or parallel.pp=5",
        "command line",
    ),
    "virtual stages": (
        ["parallel.layout=pp=4 schedule=interleaved"],
        {},
        "pp=4 virtual_stages=2 makes more stages than tiny has layers",
        "8 stages",
        "parallel.pp=3 or parallel.pp=2",
        "command line",
    ),
    "fewer virtual stages": (
        ["parallel.layout=pp=2 schedule=interleaved virtual_stages=4"],
        {},
        "pp=2 virtual_stages=4 makes more stages than tiny has layers",
        "8 stages",
        "parallel.virtual_stages=3 or parallel.virtual_stages=2",
        "command line",
    ),
    "a V too long": (
        ["parallel.layout=pp=4 schedule=zbv"],
        {"nproc": 4},
        "pp=4 virtual_stages=2 makes more stages than tiny has layers",
        "",
        "parallel.pp=3 --nproc 3 or parallel.pp=2",
        "command line",
    ),
    "one layer": (
        ["parallel.layout=dp=1 pp=2 schedule=zbv"],
        {"spec": TINY.with_overrides({"num_layers": 1}), "nproc": 2},
        "pp=2 virtual_stages=2 makes more stages than tiny has layers",
        "each, 1 layer",
        "parallel.pp=1 parallel.schedule=1f1b --nproc 1",
        "command line",
    ),
    "split": (
        ["parallel.pp=2", "parallel.split=4,4"],
        {},
        "`parallel.split = [4, 4]` splits 8 layers, tiny has 6",
        "every layer",
        "parallel.split=3,3 or parallel.split=auto",
        "command line",
    ),
    "world": (
        ["parallel.layout=dp=2 tp=2"],
        {"nproc": 6},
        "the layout needs 4 processes, there are 6",
        "dp=2 x tp=2 = 4",
        "--nproc 4 or parallel.dp=3",
        "command line",
    ),
    "world with an open dp": (
        ["parallel.layout=tp=2 pp=2"],
        {"nproc": 6},
        "the layout needs a multiple of 4 processes, there are 6",
        "tp=2 x pp=2 = 4",
        "--nproc 4 or --nproc 8",
        "command line",
    ),
    "plain dp": (
        ["parallel.dp=3"],
        {"nproc": 2},
        "the layout needs 3 processes, there are 2",
        "dp=3; dp x cp x tp x pp must be",
        "--nproc 3 or parallel.dp=2",
        "command line",
    ),
    "GPUs": (
        ["parallel.dp=8"],
        {"machine": gpus(4)},
        "dp=8 needs 8 GPUs, this machine has 4",
        "a GPU of its own",
        "parallel.dp=4 or parallel.dp=3",
        "command line",
    ),
    "GPUs by nproc": (
        [],
        {"machine": gpus(2), "nproc": 4},
        "dp=4 needs 4 GPUs, this machine has 2",
        "",
        "--nproc 2 or --nproc 1",
        None,
    ),
    "GPUs by tp": (
        ["parallel.tp=8"],
        {"machine": gpus(4)},
        "tp=8 needs 8 GPUs, this machine has 4",
        "",
        "parallel.tp=4 or parallel.tp=2",
        "command line",
    ),
    "GPUs by tp and pp": (
        ["parallel.layout=tp=4 pp=2 schedule=zbv"],
        {"machine": gpus(4)},
        "tp=4 pp=2 needs 8 GPUs, this machine has 4",
        "",
        "parallel.tp=2 or parallel.pp=1 parallel.schedule=1f1b",
        "command line",
    ),
    "GPUs by pp": (
        ["parallel.layout=pp=6 schedule=gpipe split=1,1,1,1,1,1"],
        {"machine": gpus(4)},
        "pp=6 needs 6 GPUs, this machine has 4",
        "",
        "parallel.pp=4 parallel.split=auto or parallel.pp=3 parallel.split=auto",
        "command line",
    ),
    "GPUs by everything": (
        ["parallel.layout=dp=2 tp=2 pp=2"],
        {"machine": gpus(4), "nproc": 8},
        "dp=2 tp=2 pp=2 needs 8 GPUs, this machine has 4",
        "",
        "parallel.dp=1 --nproc 4 or parallel.tp=1 --nproc 4",
        "command line",
    ),
    "batch": (
        ["parallel.dp=4", "train.global_batch=3"],
        {},
        "a global batch of 3 is smaller than dp=4",
        "at least one sequence",
        "train.global_batch=4 or parallel.dp=3",
        "command line",
    ),
    "batch in tokens": (
        ["train.global_batch_tokens=256"],
        {"nproc": 4},
        "a global batch of 2 is smaller than dp=4",
        "",
        "train.global_batch_tokens=512 or --nproc 2",
        "command line",
    ),
    "batch and tp": (
        ["parallel.layout=dp=4 tp=2", "train.global_batch=2"],
        {"nproc": 8},
        "a global batch of 2 is smaller than dp=4",
        "",
        "train.global_batch=4 or parallel.dp=2 --nproc 4",
        "command line",
    ),
    "batch and replicas": (
        ["parallel.replicate=4", "train.global_batch=3"],
        {},
        "a global batch of 3 is smaller than dp=4",
        "",
        "train.global_batch=4",
        "command line",
    ),
    "experts": (
        ["parallel.layout=dp=3 ep=3"],
        {"spec": MOE},
        "the 8 experts of tiny-moe cannot be shared out over ep=3 ranks",
        "8 does not divide by 3",
        "parallel.ep=1",
        "command line",
    ),
    "ranks for experts": (
        ["parallel.layout=dp=2 tp=3 ep=4", "train.seq_len=126"],
        {"spec": MOE.with_overrides({"num_heads": 6, "num_kv_heads": 6})},
        "ep=4 does not divide the 6 ranks of dp=2 tp=3",
        "the same number in every group",
        "parallel.ep=2 or parallel.ep=1",
        "command line",
    ),
    "more experts than ranks": (
        ["parallel.layout=dp=2 ep=4"],
        {"spec": MOE},
        "ep=4 does not divide the 2 ranks of dp=2",
        "",
        "parallel.ep=2 or parallel.ep=1",
        "command line",
    ),
    "no experts": (
        ["parallel.layout=dp=2 ep=2"],
        {},
        "ep=2 needs experts, and tiny has none",
        "shares out the experts",
        "parallel.ep=1",
        "command line",
    ),
    "replicas of an open dp": (
        ["parallel.replicate=3"],
        {"nproc": 4},
        "`parallel.replicate = 3` does not divide dp=4",
        "dp = replicas x shards",
        "parallel.replicate=2 or parallel.replicate=4",
        "command line",
    ),
    "shards of an open dp": (
        ["parallel.replicate=2", "parallel.zero=0"],
        {"nproc": 4},
        "`parallel.replicate = 2` leaves shards, but `parallel.zero = 0` shards nothing",
        "",
        "parallel.zero=1 or parallel.replicate=4",
        "command line",
    ),
}


def typed(words: list[str], fix: str, nproc: int | None) -> tuple[list[str], int | None]:
    """The command line after somebody has followed a fix."""
    parts = fix.split()
    if "--nproc" in parts:
        at = parts.index("--nproc")
        nproc = int(parts[at + 1])
        parts = parts[:at] + parts[at + 2 :]
    plain: list[str] = []
    for word in words:
        name, value = word.split("=", 1)
        plain += [f"parallel.{part}" for part in value.split()] if name == "parallel.layout" else [word]
    fixed = {part.split("=")[0] for part in parts}
    return [word for word in plain if word.split("=")[0] not in fixed] + parts, nproc


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_and_every_fix_works(name):
    words, where, what, why, fix, origin = REFUSED[name]
    error = refusal(*words, **where)
    assert error.what == what
    assert why in error.why
    assert error.fix == fix
    assert error.where == origin
    for alternative in fix.split(" or "):
        fixed, nproc = typed(words, alternative, where.get("nproc"))
        degrees(*fixed, **{**where, "nproc": nproc})


def test_a_refusal_points_at_the_line_that_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[parallel]\ndp = 1\ntp = 3\n")
    loaded = load_config("run.toml")
    with pytest.raises(UserError) as caught:
        choose_degrees(Asked(loaded.config, TINY, cpu(), None), loaded.origins)
    assert caught.value.where == "run.toml:3"


def test_two_mistakes_at_once_are_reported_one_after_the_other():
    """No change of tp alone helps when pp is too long as well; the first fix then leads to the second refusal."""
    error = refusal("parallel.tp=3", "parallel.pp=9")
    assert (error.what, error.fix) == ("tiny cannot be cut over tp=3", "parallel.tp=2 or parallel.tp=4")
    assert refusal("parallel.tp=2", "parallel.pp=9").fix == "parallel.pp=6 or parallel.pp=5"


@settings(max_examples=200)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dp": st.integers(1, 9),
            "tp": st.integers(1, 9),
            "pp": st.integers(1, 9),
            "replicate": st.integers(1, 4),
            "zero": st.integers(0, 3),
            "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]),
        },
    ),
    st.integers(1, 12),
    st.integers(1, 12) | st.none(),
    st.booleans(),
)
def test_whatever_is_asked_gets_degrees_that_hold_or_three_lines(layout, global_batch, nproc, has_gpus):
    words = [f"parallel.{name}={value}" for name, value in layout.items()] + [f"train.global_batch={global_batch}"]
    machine = gpus(4) if has_gpus else cpu(2)
    try:
        found = degrees(*words, machine=machine, nproc=nproc).grid
    except UserError as error:
        assert error.fix and error.why and error.code == Exit.USER_MISTAKE
        return
    assert nproc in (None, found.gpus)
    assert found.gpus <= 4 or not has_gpus
    assert found.dp <= global_batch
    for name in ("dp", "tp", "pp"):
        assert layout.get(name, getattr(found, name)) == getattr(found, name)
    assert TINY.num_heads % found.tp == 0
    assert found.dp % layout.get("replicate", 1) == 0
    split = split_of(*words, machine=machine, nproc=nproc)
    assert sum(split) == (TINY.num_layers if found.pp > 1 else 0)
