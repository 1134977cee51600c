"""Values, precedence and the origin of every value."""

import subprocess
import sys

import pytest

from shardwise.config.keys import all_keys
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.spec.schema import Config, ParallelConfig


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "run.toml").write_text(text, encoding="utf-8")
        return "run.toml"

    return write


def test_nothing_given_is_the_defaults():
    loaded = load_config(None)
    assert loaded.config == Config()
    assert set(loaded.origins) == set(all_keys())
    assert set(loaded.origins.values()) == {"default"}


def test_file_then_command_line_each_with_its_origin(config_file):
    path = config_file('[train]\nsteps = 10\nseq_len = "8k"\n\n[optimizer]\nlr = 1\n')
    loaded = load_config(path, ["train.steps=20", "train.steps=30"])
    assert (loaded.config.train.steps, loaded.config.train.seq_len, loaded.config.optimizer.lr) == (30, 8192, 1.0)
    assert isinstance(loaded.config.optimizer.lr, float)
    assert loaded.origins["train.steps"] == "command line"
    assert loaded.origins["train.seq_len"] == "run.toml:3"
    assert loaded.origins["optimizer.lr"] == "run.toml:6"
    assert loaded.origins["train.seed"] == "default"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("memory.limit=6GiB", 6 * 2**30),
        ("train.seq_len=8k", 8192),
        ("train.tokens=1.5M", 1_500_000),
        ("train.time_limit=1h30m", 5400.0),
        ("data.source=a.txt,b.txt", ("a.txt", "b.txt")),
        ('data.source=["a", "b"]', ("a", "b")),
        ("data.source=2024-01-01", "2024-01-01"),
        ("optimizer.betas=0.9,0.99", (0.9, 0.99)),
        ("optimizer.lr=3e-4", 3e-4),
        ("train.deterministic=True", True),
        ("parallel.sp=false", False),
        ("parallel.zero=3", 3),
        ("parallel.virtual_stages=auto", "auto"),
        ("memory.precision=bf16-mixed", "bf16"),
        ("run.name=123", "123"),
        ("run.name=true", "true"),
        ('run.name="quoted"', "quoted"),
        ("run.loggers=jsonl", ("jsonl",)),
        ("run.loggers=jsonl,tensorboard", ("jsonl", "tensorboard")),
        ("train.clip=none", None),
        ("train.micro_batch=auto", "auto"),
        ("train.steps=1e3", 1000),
        ("checkpoint.every=5m", "5m"),
        ("checkpoint.every=50", 50),
        ("comm.bucket=25MB", 25_000_000),
        ("--train.seed=4", 4),
        ("memory.precision=bfloat16", "bf16-true"),
        ("memory.precision=32-true", "fp32"),
        ("memory.precision=32", "fp32"),
        ("memory.precision=no", "fp32"),
        ("optimizer.name=adamw_torch", "adamw"),
    ],
)
def test_command_line_values(word, value):
    name = word.partition("=")[0].lstrip("-").replace("parallel.sp", "parallel.sequence")
    section, _, key = name.partition(".")
    got = getattr(getattr(load_config(None, [word]).config, section), key)
    assert (got, type(got)) == (value, type(value))


def test_the_value_may_hold_an_equals_sign():
    assert load_config(None, ["train.sample_prompt=a = b"]).config.train.sample_prompt == "a = b"


def test_model_spec_fields_become_overrides(config_file):
    loaded = load_config(config_file("[model]\nnum_layers = 4\n"), ["model.tied=true"])
    assert loaded.config.model.overrides == (("num_layers", 4), ("tied", True))
    assert loaded.origins["model.num_layers"] == "run.toml:2"


def test_dotted_and_inline_tables_have_lines(config_file):
    loaded = load_config(
        config_file('train.steps = 5\noptimizer = { lr = 0.1 }\n[data]\nsource = [\n  "a",\n  "b",\n]\n')
    )
    assert loaded.config.data.source == ("a", "b")
    assert loaded.origins["train.steps"] == "run.toml:1"
    assert loaded.origins["optimizer.lr"] == "run.toml:2"
    assert loaded.origins["data.source"] == "run.toml:4"


@pytest.mark.parametrize(
    ("text", "word", "left"),
    [
        ("[train]\nsteps = 5\n", "train.tokens=1M", ("train", "steps")),
        ("[train]\nglobal_batch = 5\n", "train.global_batch_tokens=2k", ("train", "global_batch")),
        ('[model]\npath = "dir"\n', "model.preset=gpt2", ("model", "path")),
    ],
)
def test_command_line_displaces_the_rival_key_of_the_file(config_file, text, word, left):
    section, name = left
    assert getattr(getattr(load_config(config_file(text), [word]).config, section), name) is None


def test_layout_string_sets_the_keys_it_stands_for(config_file):
    loaded = load_config(config_file('[parallel]\nlayout = "dp=2 zero=0 fp32"\n'))
    assert (loaded.config.parallel.dp, loaded.config.parallel.zero, loaded.config.parallel.layout) == (2, 0, None)
    assert loaded.config.memory.precision == "fp32"
    assert loaded.origins["parallel.dp"] == "run.toml:2"


def test_a_layout_string_sets_every_axis():
    text = "dp=2 zero=3 replicate=1 tp=2 sp pp=2 schedule=interleaved virtual_stages=3 split=1,1,1,1,1,1 bf16"
    config = load_config(None, [f"parallel.layout={text}"]).config
    assert config.parallel == ParallelConfig(
        dp=2, zero=3, replicate=1, tp=2, sequence=True, pp=2, schedule="interleaved", virtual_stages=3, split=(1,) * 6
    )
    assert config.memory.precision == "bf16"


def test_command_line_beats_the_layout_of_the_file(config_file):
    assert load_config(config_file('[parallel]\nlayout = "dp=2"\n'), ["parallel.dp=4"]).config.parallel.dp == 4
    assert load_config(config_file("[parallel]\ndp = 2\n"), ["parallel.layout=dp=4"]).config.parallel.dp == 4


def test_layout_and_key_of_one_level_may_agree_but_not_differ(config_file):
    assert load_config(config_file('[parallel]\nlayout = "dp=2"\ndp = 2\n')).config.parallel.dp == 2
    with pytest.raises(UserError, match=r"`parallel.layout` and `parallel.dp` disagree"):
        load_config(config_file('[parallel]\nlayout = "dp=2"\ndp = 3\n'))


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    loaded = load_config(path)
    assert loaded.config.train.steps == 7
    assert loaded.origins["train.steps"].endswith("run.toml:2")


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from shardwise.config.load import load_config; import shardwise.cluster.describe.machine as m;"
        "load_config(None, ['model.num_layers=2']); m.this_machine(); import shardwise.explain.pages as p; "
        "p.preset_rows();"
        "bad = {'torch', 'numpy', 'rich'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
