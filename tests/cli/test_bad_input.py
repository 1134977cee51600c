"""Every bad input a person can give, through the command itself: three lines and exit code 2, or a clean stop."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import SMALL, STORIES, finish, losses_of, run_command, start_command, warm_command
from safetensors.torch import load_file, save_file

from shardwise.cli.main import main
from shardwise.errors import Exit
from shardwise.run.rundir import RunDir

MODEL = [word for word in SMALL if not word.startswith("data.")]
"""A tiny model without its data."""


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


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    """A small Hugging Face directory, written by `export` from a run of one step."""
    root = tmp_path_factory.mktemp("model")
    words = [*SMALL, "train.steps=1", f"run.dir={root}", "run.name=run"]
    assert main(["train", "--nproc", "1", *words]) == Exit.DONE
    assert main(["export", str(root / "run"), "--no-verify", "--out", str(root / "hf")]) == Exit.DONE
    return root / "hf"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to make any file larger than this: a full disk without a disk to fill."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def nothing_half_written(folder: Path) -> bool:
    return not [path for path in folder.rglob(".*") if "partial" in path.name or "replaced" in path.name]


# Files and data ------------------------------------------------------------------------------------------------------


def test_a_missing_file(refused):
    assert "no such data: absent.txt" in refused("train", *MODEL, "data.source=absent.txt")
    assert "no config file absent.toml" in refused("train", "absent.toml")


def test_a_directory_where_a_file_is_expected(refused, workdir):
    (workdir / "folder").mkdir()
    assert "is a directory" in refused("train", "folder")
    assert "nothing to read in folder" in refused("train", *MODEL, "data.source=folder")


def test_a_file_that_nobody_may_read(refused, workdir):
    locked = workdir / "locked.jsonl"
    locked.write_text(STORIES.read_text())
    locked.chmod(0)
    if os.access(locked, os.R_OK):
        locked.unlink()
        locked.symlink_to("/proc/self/mem")  # root reads everything but this
    if not locked.exists():
        pytest.skip("this system has no file that this user may not read")
    assert "cannot read" in refused("train", *MODEL, "data.source=locked.jsonl")


@pytest.mark.parametrize("text", ["", " \n\n", '{"text": ""}\n'])
def test_an_empty_corpus(refused, workdir, text):
    (workdir / "empty.jsonl").write_text(text)
    assert "no text in empty.jsonl" in refused("train", *MODEL, "data.source=empty.jsonl")


def test_a_corpus_shorter_than_a_sequence(refused, workdir):
    (workdir / "short.txt").write_text("too short")
    assert "shorter than one sequence" in refused("train", *MODEL, "data.source=short.txt")


def test_invalid_utf8(refused, workdir):
    (workdir / "bad.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "not \xff fine"}\n')
    assert "bad.jsonl:2" in refused("train", *MODEL, "data.source=bad.jsonl")


def test_a_damaged_gzip_file(refused, workdir):
    (workdir / "bad.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(range(200)))
    assert "is damaged" in refused("data", "prepare", "bad.jsonl.gz", "--out", "tokens")


# Token shards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(run_here, workdir) -> Path:
    assert run_here("data", "prepare", STORIES, "--out", "tokens") == Exit.DONE
    return workdir / "tokens"


def test_a_truncated_token_shard(refused, tokens):
    os.truncate(tokens / "train-00000.tokens", 100)
    assert "is truncated" in refused("train", *MODEL, "data.source=tokens")
    assert "is truncated" in refused("data", "show", "tokens")


def test_a_token_id_beyond_the_vocabulary(refused, tokens):
    assert "beyond the model's vocabulary" in refused("train", *MODEL, "data.source=tokens", "model.vocab=100")


def test_a_shard_that_holds_ids_its_index_denies(refused, tokens):
    shard = tokens / "train-00000.tokens"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    words = [*MODEL, "data.source=tokens", "model.vocab=200", "train.steps=1"]
    assert "are damaged" in refused("train", "--nproc", 1, *words)
    assert "is damaged" in refused("data", "show", "tokens", "--verify")


@pytest.mark.parametrize("key", ["dtype", "splits", "max_token", "schema"])
def test_an_index_that_describes_nothing(refused, tokens, key):
    index = json.loads((tokens / "index.json").read_text())
    (tokens / "index.json").write_text(json.dumps(index | {key: "nonsense"}))
    refused("data", "show", "tokens")


# Models --------------------------------------------------------------------------------------------------------------


def test_an_unknown_preset(refused):
    assert "did you mean `llama3-8b`" in refused("train", "model.preset=lama3-8b")


@pytest.mark.parametrize("config", [{"model_type": "t5"}, {"model_type": "never-heard-of"}, {}])
def test_an_unsupported_architecture(refused, workdir, config):
    (workdir / "model").mkdir()
    (workdir / "model/config.json").write_text(json.dumps(config))
    assert "is not supported" in refused("train", "model.path=model", f"data.source={STORIES}")
    assert "is not supported" in refused("generate", "model", "--prompt", "x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "missing"),
        (lambda tensors: tensors.update(another=torch.zeros(2)), "unexpected"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), "wrongly shaped"),
    ],
    ids=["missing", "extra", "shape"],
)
@pytest.mark.parametrize("verb", ["train", "generate", "convert"])
def test_weights_that_do_not_fit(refused, workdir, model_directory, change, said, verb):
    shutil.copytree(model_directory, workdir / "model")
    tensors = load_file(workdir / "model/model.safetensors")
    change(tensors)
    save_file(tensors, workdir / "model/model.safetensors")
    words = {
        "train": ["train", "--nproc", 1, "model.path=model", f"data.source={STORIES}", "train.seq_len=32"],
        "generate": ["generate", "model", "--prompt", "x"],
        "convert": ["convert", "model", "--to", "shardwise", "--out", "converted"],
    }
    assert f"1 {said} tensor" in refused(*words[verb])
    assert not (workdir / "converted").exists()


@pytest.mark.parametrize("size", [0, 1000])
def test_truncated_weights(refused, workdir, model_directory, size):
    shutil.copytree(model_directory, workdir / "model")
    os.truncate(workdir / "model/model.safetensors", size)
    assert "damaged" in refused("generate", "model", "--prompt", "x")
    assert "damaged" in refused("convert", "model", "--to", "hf", "--out", "converted")


def test_a_directory_without_weights(refused, workdir, model_directory):
    shutil.copytree(model_directory, workdir / "model")
    (workdir / "model/model.safetensors").unlink()
    assert "no weights in model" in refused("convert", "model", "--to", "hf", "--out", "converted")


# Disks and run directories -------------------------------------------------------------------------------------------


def test_no_disk_space_for_a_checkpoint(run_here, capsys, workdir):
    words = ["--nproc", 1, *SMALL, "run.name=full", "checkpoint.every=2", "train.steps=4"]
    with files_of_at_most(100_000):  # room for the data, not for the weights; a child inherits the limit
        result = run_command("train", *words, cwd=workdir)
    assert result.returncode == Exit.USER_MISTAKE and "Traceback" not in result.stdout, result.stdout
    assert "error: no room to write" in result.stdout.splitlines()[-3]
    assert nothing_half_written(workdir) and not list((workdir / "runs/full/checkpoints").iterdir())
    assert run_here("resume", "full") == Exit.DONE, capsys.readouterr()
    assert max(losses_of(workdir / "runs/full")) == 4


def test_no_disk_space_for_a_new_run(refused, workdir):
    with files_of_at_most(1000):
        assert "no room to write" in refused("train", *SMALL, "run.name=full")
    assert not (workdir / "runs/full").exists() and nothing_half_written(workdir)


def test_no_disk_space_for_results(refused, workdir, model_directory):
    run = model_directory.parent / "run"
    with files_of_at_most(20_000):
        assert "no room to write" in refused("data", "prepare", STORIES, "--out", "tokens")
        assert "no room to write" in refused("convert", run, "--to", "shardwise", "--out", "converted")
        assert "no room to write" in refused("export", run, "--out", "exported")
    assert not list(workdir.iterdir())


def test_a_place_that_cannot_be_written(refused, workdir, model_directory):
    (workdir / "file").write_text("not a directory")
    run = model_directory.parent / "run"
    assert "cannot write" in refused("train", *SMALL, "run.dir=file/runs")
    assert "cannot write" in refused("data", "prepare", STORIES, "--out", "file/tokens")
    assert "cannot write" in refused("export", run, "--out", "file/exported")
    assert "cannot write" in refused("init", "file/config.toml")


def test_a_run_directory_already_in_use(refused, run_here, workdir):
    words = [*SMALL, "run.name=taken", "train.steps=1"]
    assert run_here("train", "--nproc", 1, *words) == Exit.DONE
    assert "already in use" in refused("train", "--nproc", 1, *words)
    with RunDir(workdir / "runs/taken").lock():
        assert f"process {os.getpid()}" in refused("resume", "taken")


def test_a_run_cannot_go_on_with_another_model(refused, model_directory):
    run = model_directory.parent / "run"
    assert "another model" in refused("resume", run, "--allow", "model.hidden", "model.hidden=64")
    assert "changes what this run computes" in refused("resume", run, "train.seed=5")
    assert "no checkpoint of step 7" in refused("resume", run, "--from", 7)


def test_a_damaged_run_does_not_hide_the_others(run_here, capsys, workdir, model_directory):
    shutil.copytree(model_directory.parent / "run", workdir / "runs/good")
    shutil.copytree(model_directory.parent / "run", workdir / "runs/bad")
    (workdir / "runs/bad/plan.json").write_text("{oops")
    (workdir / "runs/bad/metrics.jsonl").write_bytes(b'{"loss": 1}\n[1]\n5\n{"step": 1, "lo\xff')
    assert run_here("runs") == Exit.DONE
    listed = capsys.readouterr().out
    assert "good" in listed and "bad" in listed
    assert run_here("watch", "bad") == Exit.DONE


# Words on the command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "unknown command"),
        (["train", "--wat"], "unrecognized arguments"),
        (["train", "--nproc", "0"], "starts nothing"),
        (["train", "train.stpes=3"], "did you mean `steps`?"),
        (["train", "train.seed=99999999999999999999"], "out of range"),
        (["data", "show"], "arguments are required"),
        (["generate", "x", "--temperature", "nan"], "--temperature is out of range"),
        (["eval", "x", "--batches", "0"], "--batches 0"),
        (["eval", "x", "model.hidden=3"], "cannot be used with `eval`"),
        (["watch", "nobody"], "no run `nobody`"),
        (["resume", "last"], "there is no last run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_that_mean_nothing(refused, words, said):
    assert said in refused(*words)


def test_no_compiler_is_no_bug_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--nproc", 1, "--no-verify", *SMALL, "train.steps=1", "run.name=plain"]
    done = run_command("train", *words, "speed.compile=blocks", cwd=tmp_path)
    assert done.returncode == Exit.USER_MISTAKE, done.stdout + done.stderr
    assert "resume runs/plain speed.compile=none" in done.stdout and "bug" not in done.stdout


# Ctrl-C --------------------------------------------------------------------------------------------------------------


def wait_until(what: str, happened: Callable[[], object], process: subprocess.Popen, deadline_s: float = 180.0) -> None:
    end = time.monotonic() + deadline_s
    while not happened():
        if process.poll() is not None:
            pytest.fail(f"ended while waiting for {what}:\n{process.stdout.read()}")
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"no {what} within {deadline_s} s:\n{process.stdout.read()}")
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, Exit.STOPPED)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_while_data_is_prepared_leaves_nothing_behind(tmp_path, number, code):
    (tmp_path / "endless.txt").touch()
    os.truncate(tmp_path / "endless.txt", 2**36)  # 64 GiB of nothing: its end does not come while somebody waits
    process = start_command("data", "prepare", "endless.txt", "--out", "tokens", cwd=tmp_path)
    wait_until("scratch directory", lambda: list(tmp_path.glob(".tokens.partial-*")), process)
    os.killpg(process.pid, number)
    output = finish(process)
    assert process.returncode == code, output
    assert [path.name for path in tmp_path.iterdir()] == ["endless.txt"]
    assert "Traceback" not in output


def test_ctrl_c_while_the_ranks_start_is_a_clean_stop(ranks, tmp_path):
    process = start_command("train", "--nproc", 2, *SMALL, "train.steps=3", "run.name=early", cwd=tmp_path)
    run = tmp_path / "runs/early"
    wait_until("rank processes", lambda: (run / "log/rank1.1.err").exists(), process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == Exit.INTERRUPTED, output
    assert "resumable" in output and "Traceback" not in output
    assert RunDir(run).state() == "stopped"
    again = warm_command(ranks, "resume", "early", "--nproc", 1, cwd=tmp_path)
    assert again.returncode == Exit.DONE, again.stdout + again.stderr
    assert max(losses_of(run)) == 3


def test_a_killed_checkpoint_is_never_seen(run_here, capsys, workdir):
    """What kill -9 leaves in the middle of a commit: a scratch directory, which the next commit sweeps away."""
    words = [*SMALL, "run.name=killed", "train.steps=2", "checkpoint.every=1"]
    assert run_here("train", "--nproc", 1, *words) == Exit.DONE
    checkpoints = workdir / "runs/killed/checkpoints"
    shutil.copytree(checkpoints / "step-2", checkpoints / ".step-3.partial-0123abcd")
    (checkpoints / ".step-3.partial-0123abcd/manifest.json").unlink()
    assert run_here("resume", "killed", "--allow", "train.steps", "train.steps=3") == Exit.DONE, capsys.readouterr()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-3"]


def test_settings_are_refused_where_no_config_is_read(run_here, capsys):
    assert run_here("runs", "train.steps=1") == Exit.USER_MISTAKE
    assert "`train.steps=1` cannot be used with" in capsys.readouterr().err


def test_another_frameworks_key_without_a_section_is_answered_with_ours(run_here, capsys):
    assert run_here("train", "gradient_accumulation_steps=4") == Exit.USER_MISTAKE
    assert "micro_batch" in capsys.readouterr().err


def test_a_misspelt_allow_is_refused(run_here, capsys):
    assert run_here("train", "--nproc", 1, *SMALL, "train.steps=1", "run.name=a") == Exit.DONE
    assert run_here("resume", "a", "--allow", "train.stps", "train.steps=3") == Exit.USER_MISTAKE
    assert "did you mean `steps`?" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_start_anew(run_here, capsys):
    assert run_here("train", "--nproc", 1, *SMALL, "train.steps=2", "run.name=a") == Exit.DONE
    weights = Path("runs/a/checkpoints/step-2/weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    words = ["--allow", "train.steps", "train.steps=3"]
    assert run_here("resume", "a", *words) == Exit.USER_MISTAKE
    assert "every checkpoint of this run is damaged" in capsys.readouterr().err
    assert run_here("resume", "a", "--from", 0, *words) == Exit.DONE
    assert Path("runs/a/checkpoints/abandoned-step-2").is_dir()


def test_a_config_json_that_is_no_object(run_here, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("[1, 2]")
    assert run_here("train", f"model.path={tmp_path / 'model'}") == Exit.USER_MISTAKE
    assert "not a JSON object" in capsys.readouterr().err
