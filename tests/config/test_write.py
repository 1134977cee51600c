"""What is written reads back as the same config, and says where each value came from."""

import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.check import LEAST_LIMIT
from shardwise.config.keys import Key, all_keys, keys_of, section_classes
from shardwise.config.load import load_config
from shardwise.config.write import commented_config, is_built, resolved_text, write_config
from shardwise.errors import UserError
from shardwise.files import write_atomically
from shardwise.spec.schema import Config, ModelConfig, TrainConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)

# Keys that other keys restrict are held at values that go together; test_errors.py has the rules themselves.
HELD = {
    "train.tokens": None,
    "train.epochs": None,
    "train.global_batch_tokens": None,
    "train.micro_batch": "auto",
    "optimizer.betas": (0.9, 0.95),
    "optimizer.warmup": 10.0,
    "optimizer.lr_scaling": "none",
    "data.source": ("a", 'b"\\\n\x7f'),
    "data.mix": (1.0, 2.5e-7),
    "data.streaming": True,
    "adapter.kind": "lora",
    "data.validation_fraction": 0.01,
    "checkpoint.every": "5m",
    "run.name": "x",
    "run.profile": "10:13",
    "speed.results": "auto",
    "speed.kernels": "torch",
    "parallel.layout": None,
    "train.seq_len": 256,
    "memory.offload": "none",
    "memory.offload_to": "cpu",
}
LAYOUTS = [
    {},
    {"dp": 4, "zero": 3, "replicate": 2},
    {"dp": 2, "zero": 0, "replicate": 2},
    {"tp": 4, "sequence": True},
    {"dp": 3, "tp": 2, "sequence": False, "pp": 2, "split": (4, 2)},
    {"pp": 3, "schedule": "zbv", "virtual_stages": 2, "split": "even"},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 3, "split": (1, 1, 1, 1, 1, 1)},
    {"pp": 2, "schedule": "zero-bubble"},
]


def value_of(key: Key) -> st.SearchStrategy:
    """Any value that schema.py allows for this key today."""
    if key.later:
        return st.just(key.default)
    if key.available is not None:
        return st.sampled_from(key.available)
    low = key.low if key.low is not None else key.above
    scalars = {
        int: st.integers(int(low or 0), int(key.high or 2**40)),
        float: st.floats(low or 0.0, key.high or 1e9, exclude_min=key.above is not None),
        bool: st.booleans(),
        str: st.sampled_from([c.replace("-K", "-3") for c in key.choices]) if key.choices else TEXT,
    }
    options = [st.just(key.default), *(scalars[kind] for kind in sorted(key.kinds, key=str))]
    if key.optional:
        options.append(st.none())
    if key.item is not None:
        options.append(st.lists(scalars[key.item], min_size=key.length or 0, max_size=key.length or 4).map(tuple))
    return st.one_of(options)


@st.composite
def configs(draw):
    sections = {}
    for section, cls in section_classes().items():
        if section == "parallel":
            sections[section] = cls(**draw(st.sampled_from(LAYOUTS)))
            continue
        values = {key.name: HELD[key.dotted] if key.dotted in HELD else draw(value_of(key)) for key in keys_of(section)}
        if section == "model":
            if values["path"] is not None:
                values["preset"] = "tiny"
            shapes = draw(st.dictionaries(st.sampled_from(["num_layers", "hidden", "ffn"]), st.integers(1, 99)))
            values["overrides"] = tuple(sorted(shapes.items()))
        if section == "memory":  # rules between keys; a limit of a few bytes is one whose unit was forgotten
            values["limit"] = max(values["limit"], LEAST_LIMIT) if isinstance(values["limit"], int) else values["limit"]
            values["precision"] = "fp32" if sections["optimizer"].name == "adamw8bit" else values["precision"]
            values["loss_scale"] = values["loss_scale"] if values["precision"].startswith("fp16") else "auto"
        sections[section] = cls(**values)
    return Config(**sections)


@settings(max_examples=60)
@given(configs(), TEXT)
def test_any_config_reads_back_equal(config, origin):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        write_config(config, {"train.seed": origin}, path)
        assert load_config(path).config == config


def test_each_line_ends_in_its_origin():
    loaded = load_config(None, ["train.steps=5", "model.num_layers=2"])
    text = resolved_text(loaded.config, loaded.origins)
    lines = {line.split(" = ")[0]: line for line in text.splitlines() if " = " in line}
    assert lines["steps"].startswith("steps = 5 ") and lines["steps"].endswith("# command line")
    assert lines["num_layers"].endswith("# command line")
    assert lines["seed"].endswith("# default")
    keyed = [line for line in text.splitlines()[1:] if line and not line.startswith("[")]
    assert len(keyed) == len(all_keys()) + 1
    assert all("  # " in line for line in keyed)


def test_unset_keys_stand_as_comments():
    text = resolved_text(Config(), {})
    assert "\n# steps = " in text
    assert "steps" not in tomllib.loads(text)["train"]


def test_unset_where_the_default_is_a_value(tmp_path):
    config = replace(Config(), train=TrainConfig(clip=None))
    write_config(config, {}, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml").config.train.clip is None


def test_a_path_reads_back_although_the_preset_has_a_default(tmp_path):
    config = replace(Config(), model=ModelConfig(path="models/x"))
    write_config(config, {}, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml").config == config


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    write_atomically(tmp_path / "a.toml", "long " * 1000)
    write_atomically(tmp_path / "a.toml", "short")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.toml", "short")]


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_atomically(tmp_path / "file" / "config.toml", "")


def test_the_commented_config_is_the_defaults(tmp_path):
    path = tmp_path / "shardwise.toml"
    path.write_text(commented_config())
    assert load_config(path).config == Config()


def test_the_commented_config_has_every_key_that_works_with_its_help():
    text = commented_config()
    for key in all_keys().values():
        assert (f"# {key.help}\n" in text) == is_built(key), key.dotted
        assert (f" {key.dotted}" in text.partition("# Not available yet")[2]) == (not is_built(key)), key.dotted


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        ("memory.limit", "6GiB"),
        ("memory.limit", "1500MB"),
        ("memory.limit", "80GB"),
        ("comm.bucket", "25MiB"),
        ("train.time_limit", "90s"),
        ("train.time_limit", "5m"),
        ("train.time_limit", "2h"),
        ("comm.timeout", "2d"),
    ],
)
def test_sizes_and_times_are_written_in_the_unit_they_were_typed_in(key, typed):
    loaded = load_config(None, [f"{key}={typed}"])
    name = key.partition(".")[2]
    assert f'{name} = "{typed}" ' in resolved_text(loaded.config, loaded.origins)
    assert f'{name} = "{typed}"\n' in commented_config(loaded.config)


def test_half_a_second_is_a_number():
    loaded = load_config(None, ["comm.timeout=0.5"])
    assert "timeout = 0.5 " in resolved_text(loaded.config, loaded.origins)
