"""Damaged files, and files that were made to do harm: each is refused in three lines, or the run goes on from the
checkpoint before."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import SMALL, losses_of

from shardwise.cli.main import main
from shardwise.data.chat import open_template
from shardwise.data.tokenizer import ByteTokenizer, open_tokenizer
from shardwise.errors import Exit, UserError
from shardwise.foreign_json import BYTES, parse_json, read_object
from shardwise.interop.huggingface.weights import list_files

DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000
WRONG = {
    "deep": DEEP,
    "list": "[1, 2]",
    "text": '"x"',
    "cut": '{"a": ',
    "empty": "",
    "number": "1e400",
    "utf16": "\x00",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of four steps with a checkpoint after each second one, and its export."""
    root = tmp_path_factory.mktemp("trained")
    words = [*SMALL, "train.steps=4", "checkpoint.every=2", f"run.dir={root}", "run.name=run"]
    assert main(["train", "--nproc", "1", *words]) == Exit.DONE
    assert main(["export", str(root / "run"), "--no-verify", "--out", str(root / "hf")]) == Exit.DONE
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def refused(run_here, capsys) -> Callable[..., str]:
    """Run a verb that must be refused with exactly three lines on stderr; returns them."""

    def check(*words: object) -> str:
        capsys.readouterr()
        code = run_here(*words)
        error = capsys.readouterr().err
        assert code == Exit.USER_MISTAKE, error
        lines = [line for line in error.splitlines() if not line.endswith(" ...")]  # what a busy machine is at
        assert [line[:7] for line in lines] == ["error: ", "  why  ", "  fix  "], error
        return error

    return check


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["eval", "generate", "export", "convert"])
def test_weights_with_a_flipped_bit_are_not_used(run, refused, tmp_path, verb):
    flip_a_bit(run / "checkpoints/step-4/weights.safetensors")
    extra = {
        "eval": [], "generate": ["--prompt", "a"], "export": ["--out", tmp_path / "out"],
        "convert": ["--to", "hf", "--out", tmp_path / "out"],
    }  # fmt: skip
    assert "its digest does not match the manifest" in refused(verb, run, *extra[verb])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", WRONG)
def test_a_damaged_manifest_is_refused_by_eval_and_passed_over_by_resume(run, refused, run_here, capsys, kind):
    (run / "checkpoints/step-4/manifest.json").write_text(WRONG[kind])
    assert "manifest.json is damaged" in refused("eval", run)
    assert run_here("resume", run, "train.steps=5", "--allow", "train.steps") == Exit.DONE
    assert "passing over step-4" in capsys.readouterr().out
    assert max(losses_of(run)) == 5


@pytest.mark.parametrize(
    "change", [{"files": []}, {"files": {"../x": {"bytes": 1, "sha256": ""}}}, {"state": 1}, {"step": True}]
)
def test_a_manifest_of_wrong_types_is_refused(run, refused, change):
    file = run / "checkpoints/step-4/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert "manifest.json is damaged" in refused("eval", run)


def test_a_manifest_that_describes_no_model_is_refused(run, refused):
    file = run / "checkpoints/step-4/manifest.json"
    manifest = json.loads(file.read_text())
    for model in (None, [], {"hidden": []}, {"num_heads": 0}, {"nonsense": 1}):
        file.write_text(json.dumps(manifest | {"state": {"model": model}}))
        refused("eval", run)


def test_a_renamed_checkpoint_is_not_believed(run, refused, run_here, capsys):
    os.rename(run / "checkpoints/step-4", run / "checkpoints/step-6")
    assert "it is of step 4, its directory is called step-6" in refused("eval", run)
    assert run_here("resume", run, "train.steps=7", "--allow", "train.steps") == Exit.DONE
    assert "passing over step-6" in capsys.readouterr().out


def test_another_model_s_checkpoint_is_refused_by_the_fields_that_differ(run, refused, trained, tmp_path):
    words = [*SMALL, "model.hidden=48", "model.num_layers=1", "train.steps=5", f"run.dir={tmp_path}", "run.name=other"]
    assert main(["train", "--nproc", "1", *words]) == Exit.DONE
    shutil.copytree(tmp_path / "other/checkpoints/step-5", run / "checkpoints/step-5")
    error = refused("resume", run, "train.steps=6", "--allow", "train.steps")
    assert "is of another model" in error and "hidden 48 there" in error and "num_layers 1 there" in error


def test_the_states_of_another_optimizer_are_refused(run, refused):
    words = ["--allow", "optimizer.name", "--allow", "train.steps", "optimizer.name=rmsprop", "train.steps=6"]
    error = refused("resume", run, *words)
    assert "has the states of adamw, this run's optimizer is rmsprop" in error


# Model directories ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "hf", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_of_a_model_that_is_no_object_of_json_is_refused(model, refused, name, kind):
    (model / name).write_text(WRONG[kind])
    assert name in refused("generate", model, "--prompt", "a")


@pytest.mark.parametrize("kind", WRONG)
def test_a_tokenizer_config_that_is_no_object_of_json_is_refused_where_it_is_needed(tmp_path, kind):
    """It names the template of conversations, and the token that ends a document."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(WRONG[kind])
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json"):
        open_template(None, tmp_path, ByteTokenizer())
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json"):
        open_tokenizer("auto", tmp_path)


HOSTILE_VALUES = [None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "x", [], [[]], {}, {"a": {}}, ["x"]]


FIELDS = """model_type hidden_size num_attention_heads num_hidden_layers vocab_size num_key_value_heads head_dim
intermediate_size rms_norm_eps hidden_act rope_parameters rope_scaling rope_theta layer_types _name_or_path
tie_word_embeddings max_position_embeddings sliding_window"""


@pytest.mark.parametrize("field", FIELDS.split())
def test_no_value_in_a_config_ends_in_a_traceback(model, field):
    from shardwise.interop.huggingface.load_save import read_spec

    config = json.loads((model / "config.json").read_text())
    for value in HOSTILE_VALUES:
        (model / "config.json").write_text(json.dumps(config | {field: value}))
        with contextlib.suppress(UserError):
            read_spec(model)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"], ids=["ours", "transformers"])
def test_layers_without_number_are_refused_before_one_is_built(model, refused, kind):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": kind, "num_hidden_layers": 10**9}))
    assert "1000000000 is more than 10000" in refused("generate", model, "--prompt", "a")


@pytest.mark.parametrize("text", ["a." * 2000 + "b = 1", "[" + '"a" . ' * 2000 + "b]", "x = " + "[" * 100_000])
def test_a_config_or_cluster_file_that_nests_without_end_is_refused(workdir, refused, text):
    """Two thousand are harmless; a hundred thousand, in 200 kB, took all memory."""
    Path("odd.toml").write_text(text)
    assert "nests too deeply" in refused("train", "odd.toml")
    assert "is no TOML file" in refused("plan", "tiny", "--cluster", "odd.toml", "--seq", 128, "--batch", 1024)


@pytest.mark.parametrize("name", ["/etc/passwd", "../hf/model.safetensors", "a/../../x", "", 3, None, ["x"]])
def test_an_index_names_files_of_its_directory_only(model, name):
    index = {"weight_map": {"model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"cannot read .*index.json"):
        list_files(model)


def test_a_link_out_of_the_directory_is_refused_but_the_hub_s_cache_is_made_of_links(model, tmp_path):
    outside = tmp_path / "models--a--b/blobs/0123"
    outside.parent.mkdir(parents=True)
    os.rename(model / "model.safetensors", outside)
    (model / "model.safetensors").symlink_to(outside)
    with pytest.raises(UserError, match="leads out of the model's directory"):
        list_files(model)
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert list_files(snapshot) == [snapshot / "model.safetensors"]


def test_a_pipe_in_place_of_weights_or_config_is_refused_at_once(model, refused):
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refused("generate", model, "--prompt", "a")


@pytest.mark.parametrize("kind", [*WRONG, "types"])
def test_a_damaged_adapter_config_is_refused(workdir, refused, kind, tmp_path):
    from safetensors.numpy import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({}, adapter / "adapter_model.safetensors")
    odd = json.dumps({"peft_type": [], "r": 1, "lora_alpha": 1, "target_modules": {"a": 3}, "bias": {}})
    (adapter / "adapter_config.json").write_text(WRONG.get(kind, odd))
    error = refused("train", "--nproc", "1", *SMALL, "train.steps=1", "adapter.kind=lora", f"adapter.path={adapter}")
    assert "adapter" in error


# JSON ----------------------------------------------------------------------------------------------------------------


def test_json_has_limits_of_depth_and_size(tmp_path):
    assert parse_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for depth in (100, 10_000, 1_000_000):
        with pytest.raises(ValueError, match="more than 64 levels deep"):
            parse_json(b"[" * depth + b"]" * depth)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(BYTES + 1)
    with pytest.raises(ValueError, match="more than 32 MiB"):
        read_object(tmp_path / "large.json")
    with pytest.raises(OSError, match="it is a device"):
        read_object(Path("/dev/zero"))
