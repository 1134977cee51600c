"""Copies a run's metrics to the loggers that the user asked for: TensorBoard, Weights & Biases, MLflow.

Each gets the whole config, and after a resume goes on with what it began: its name for the run is kept in a file of the
run directory. A logger is a guest: that it is installed is checked before a run starts (`check_loggers`), and whatever
fails later costs a line and never the run. Imports stand where a logger is opened: none is needed to train.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import UserError
from shardwise.files import write_atomically
from shardwise.run.rundir import RunDir
from shardwise.spec.schema import RunConfig

PROJECT = "shardwise"
START_S = 20.0  # seconds that Weights & Biases may take to reach its server, and to send the rest at the end
MOST_LETTERS = 6000  # of a parameter's value in MLflow


class Logger(Protocol):
    """What a logger must be able to do."""

    name: str

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def check_loggers(names: tuple[str, ...]) -> None:
    """Refuses a logger that was asked for and is not installed, before anything starts."""
    for name in names:
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise UserError(
                f"run.loggers asks for {name}, which is not installed",
                why="its package is not one of those that training needs",
                fix=f"pip install 'shardwise[{name}]'   or leave {name} out of run.loggers",
            )


def open_logger(
    name: str, run: RunDir, config: RunConfig, settings: Mapping[str, Any], done: int, say: Callable[[str], None]
) -> Logger:
    """Returns a logger of this run. `settings` is the whole config by section, `done` the steps of earlier
    processes."""
    if name == "tensorboard":
        return _TensorBoard(run, settings, done)
    if name == "wandb":
        return _WeightsAndBiases(run, config, settings, say)
    assert name == "mlflow", name
    return _MLflow(run, config, settings)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as the `section.key` words that a user types."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[key] = value
    return found


class _TensorBoard:
    """Writes TensorBoard's files under log/tensorboard."""

    name = "tensorboard"

    def __init__(self, run: RunDir, settings: Mapping[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint that a run goes on from are made again: what was drawn of them is dropped.
        self.writer = SummaryWriter(str(run.log / "tensorboard"), purge_step=done + 1 if done else None)
        self.writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in flat(settings).items()), done)

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases:
    """Sends to Weights & Biases, and writes its files under log/wandb. Where its server is not reached in time, or
    nobody is logged in, the files are written only, and a line says how to send them later."""

    name = "wandb"

    def __init__(self, run: RunDir, config: RunConfig, settings: Mapping[str, Any], say: Callable[[str], None]):
        import wandb

        folder = run.log / "wandb"
        folder.mkdir(exist_ok=True)
        self.id = kept_id(run.log / "wandb-run")
        limits = {"init_timeout": START_S, "login_timeout": START_S, "finish_timeout": START_S}
        options: dict[str, Any] = {
            "project": config.project or (None if os.environ.get("WANDB_PROJECT") else PROJECT),
            "entity": config.entity,
            "tags": list(config.tags) or None,
            "name": run.name,
            "id": self.id,
            "dir": str(folder),
            "config": dict(settings),
            "settings": wandb.Settings(silent=True, console="off", **limits),
        }
        try:
            # W&B's own WANDB_MODE holds where the config does not say.
            mode = "offline" if config.offline else None
            self.run = wandb.init(mode=mode, resume=None if config.offline else "allow", **options)
        except Exception as error:
            wandb.teardown()  # its service holds the run's name
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            say(f"logger   wandb is offline: {reason}; `wandb sync {folder}/wandb/offline-run-*` sends this run later")
            self.run = wandb.init(mode="offline", **options)
        # A step may be logged twice, after a resume from an earlier one: W&B's own counter never goes back.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    """Sends to the server of MLFLOW_TRACKING_URI, or writes a local database, log/mlflow.db; `mlflow ui
    --backend-store-uri sqlite:///…` shows it."""

    name = "mlflow"

    def __init__(self, run: RunDir, config: RunConfig, settings: Mapping[str, Any]):
        from mlflow.tracking import MlflowClient

        local = f"sqlite:///{(run.log / 'mlflow.db').resolve()}"
        self.client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
        file = run.log / "mlflow-run"
        if file.exists():
            self.id = file.read_text(encoding="utf-8").strip()
            self.client.update_run(self.id, status="RUNNING")
        else:
            name = config.project or PROJECT
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            self.id = self.client.create_run(experiment, run_name=run.name).info.run_id
            write_atomically(file, self.id + "\n")
        for tag in config.tags:
            self.client.set_tag(self.id, tag, "true")
        known = self.client.get_run(self.id).data.params
        for key, value in flat(settings).items():
            text = str(value)[:MOST_LETTERS]
            if key not in known:
                self.client.log_param(self.id, key, text)
            elif known[key] != text:  # a parameter stays what it was; what a resume changed is a tag
                self.client.set_tag(self.id, key, text)

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.client.log_metric(self.id, key, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.id)


def kept_id(file: Path) -> str:
    """Returns the name that a run has with a logger: drawn once, and then read from this file of its directory."""
    if not file.exists():
        write_atomically(file, secrets.token_hex(8) + "\n")
    return file.read_text(encoding="utf-8").strip()


def whole_config(config: Any, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every key of a config by section, and the plan that came of it, in values that JSON has."""
    from dataclasses import asdict

    return json.loads(json.dumps({**asdict(config), "plan": plan}, default=str))
