"""Loggers get the whole config and go on with the same run after a resume; one that fails never stops a run."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import SMALL

from shardwise.run.loggers import check_loggers, flat, whole_config
from shardwise.run.metrics import Metrics
from shardwise.run.rundir import RunDir, create_run_dir
from shardwise.spec.schema import Config, RunConfig

CONFIG = replace(Config(), run=RunConfig(tags=("first", "small"), project="tests", offline=True))
SETTINGS = whole_config(CONFIG, {"dp": 2, "split": (3, 3)})


def open_metrics(run: RunDir, name: str, said: list[str], done: int = 0, **changed: object) -> Metrics:
    return Metrics(run, replace(CONFIG.run, loggers=("jsonl", name), **changed), SETTINGS, said.append, done)


def test_a_logger_that_is_missing_is_refused_before_the_start(run_here, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    assert run_here("train", *SMALL, "--nproc", 1, "run.loggers=jsonl,wandb") == 2
    said = capsys.readouterr().err
    assert "run.loggers asks for wandb, which is not installed" in said and "pip install 'shardwise[wandb]'" in said
    assert not list(Path("runs").glob("tiny*"))
    check_loggers(("jsonl", "tensorboard"))


def test_the_whole_config_has_the_words_that_a_user_types():
    words = flat(SETTINGS)
    assert words["train.seq_len"] == CONFIG.train.seq_len and words["run.tags"] == ["first", "small"]
    assert words["plan.dp"] == 2 and words["plan.split"] == [3, 3]


@pytest.mark.needs("tensorboard")
def test_a_logger_that_fails_never_stops_a_run(tmp_path):
    run, said = create_run_dir(tmp_path, "logged", "tiny"), []
    metrics = open_metrics(run, "tensorboard", said)
    metrics.write({"step": 1, "loss": 2.0})
    metrics.loggers[0].writer.close()  # whatever goes wrong inside a logger …
    metrics.loggers[0].writer = None
    metrics.write({"step": 2, "loss": 1.0})
    metrics.close()
    assert [line.split(":")[0] for line in said] == ["logger   tensorboard is off"]
    assert [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()] == [2.0, 1.0]


@pytest.mark.needs("tensorboard")
def test_tensorboard_drops_steps_that_are_made_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = create_run_dir(tmp_path, "logged", "tiny")
    for done, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        metrics = open_metrics(run, "tensorboard", [], done)
        for step in steps:
            metrics.write({"step": step, "loss": float(10 * done + step)})
        metrics.close()
    seen = EventAccumulator(str(run.log / "tensorboard"))
    seen.Reload()
    assert {event.step: event.value for event in seen.Scalars("loss")} == {1: 1.0, 2: 12.0, 3: 13.0}
    text = seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"train.seq_len = {CONFIG.train.seq_len}" in text


@pytest.mark.needs("wandb")
def test_wandb_goes_on_with_the_same_run(tmp_path):
    run, said = create_run_dir(tmp_path, "logged", "tiny"), []
    for done in (0, 1):
        metrics = open_metrics(run, "wandb", said, done)
        logger = metrics.loggers[0].run
        assert (logger.project, logger.tags, logger.name) == ("tests", ("first", "small"), "logged")
        assert logger.config["train"]["seq_len"] == CONFIG.train.seq_len
        metrics.write({"step": done + 1, "loss": 2.0})
        metrics.close()
    name = (run.log / "wandb-run").read_text().strip()
    assert [path.name.endswith(name) for path in (run.log / "wandb/wandb").glob("offline-run-*")] == [True, True]
    assert said == []


@pytest.mark.needs("wandb")
def test_wandb_without_its_server_is_offline_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.run.loggers.START_S", 3.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    run, said = create_run_dir(tmp_path, "logged", "tiny"), []
    metrics = open_metrics(run, "wandb", said, offline=False)
    metrics.write({"step": 1, "loss": 2.0})
    metrics.close()
    assert len(said) == 1 and said[0].startswith("logger   wandb is offline: ") and "wandb sync" in said[0]
    assert list((run.log / "wandb/wandb").glob("offline-run-*"))


@pytest.mark.needs("mlflow")
def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, said = create_run_dir(tmp_path, "logged", "tiny"), []
    for done in (0, 1):
        metrics = open_metrics(run, "mlflow", said, done)
        metrics.write({"step": done + 1, "loss": 2.0 - done})
        metrics.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{run.log / 'mlflow.db'}")
    [found] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.data.params["train.seq_len"] == str(CONFIG.train.seq_len) and found.data.tags["first"] == "true"
    assert [metric.value for metric in client.get_metric_history(found.info.run_id, "loss")] == [2.0, 1.0]
    assert said == []
