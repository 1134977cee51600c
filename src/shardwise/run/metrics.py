"""Writes metrics: one JSON line per step in the run directory, and copies to the loggers that the user asked for.

A logger is a guest: if it fails to import, to connect or to write, it is dropped with one printed line and the run goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shardwise.files import cannot_write
from shardwise.run.rundir import RunDir, to_json
from shardwise.spec.schema import RunConfig


def expert_load(tokens: list[list[float]]) -> dict[str, float]:
    """Returns how well the load balancing of experts works: the tokens of the busiest and of the idlest expert of any
    layer in a step, over the mean of its layer."""
    means = [sum(counts) / len(counts) for counts in tokens]
    shares = [count / mean for counts, mean in zip(tokens, means, strict=True) if mean for count in counts]
    if not shares:
        return {}
    # An expert takes as many tokens as choose it: there is no limit beyond which they would be dropped.
    return {"expert_load_max": max(shares), "expert_load_min": min(shares), "dropped_tokens": 0}


class Logger(Protocol):
    """What a logger must be able to do."""

    name: str

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Appends to metrics.jsonl (rank 0 only) and feeds the loggers."""

    def __init__(self, run: RunDir, config: RunConfig, settings: dict[str, Any], say: Callable[[str], None]):
        self.run, self.say = run, say
        self.file = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self.loggers: list[Logger] = []
        for name in config.loggers:
            if name != "jsonl":
                self._try(name, partial(self._open, name, settings))

    def _open(self, name: str, settings: dict[str, Any]) -> None:
        self.loggers.append(_open_logger(name, self.run, settings))

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl; the numbers of a step or evaluation go to the loggers too."""
        try:
            self.file.write(to_json(line) + "\n")
            self.file.flush()  # a reader, or whoever looks after a crash, sees every finished step
        except OSError as error:
            raise cannot_write(self.run.metrics, error) from None
        if "event" in line:
            return
        values = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        for logger in list(self.loggers):
            self._try(logger.name, partial(logger.log, line["step"], values), logger)

    def close(self) -> None:
        for logger in list(self.loggers):
            self._try(logger.name, logger.close, logger)
        self.file.close()

    def _try(self, name: str, action: Callable[[], None], logger: Logger | None = None) -> None:
        try:
            action()
        except Exception as error:  # a guest may fail in any way; the run must not
            if logger:
                self.loggers.remove(logger)
            hint = f"; pip install 'shardwise[{name}]'" if isinstance(error, ImportError) else ""
            self.say(f"logger   {name} is off: {error}{hint}")


class _TensorBoard:
    """Writes TensorBoard's files under log/tensorboard."""

    name = "tensorboard"

    def __init__(self, run: RunDir):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.log / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases:
    """Writes Weights & Biases' files under log/wandb, offline: `wandb sync` sends them later if the user wants to."""

    name = "wandb"

    def __init__(self, run: RunDir, settings: dict[str, Any]):
        import wandb

        folder = run.log / "wandb"
        folder.mkdir(exist_ok=True)
        self.run = wandb.init(
            mode="offline",
            project="shardwise",
            name=run.name,
            dir=str(folder),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class _MLflow:
    """Writes to a local database, log/mlflow.db; `mlflow ui --backend-store-uri sqlite:///…` shows it."""

    name = "mlflow"

    def __init__(self, run: RunDir, settings: dict[str, Any]):
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=f"sqlite:///{(run.log / 'mlflow.db').resolve()}")
        found = self.client.get_experiment_by_name("shardwise")
        experiment = found.experiment_id if found else self.client.create_experiment("shardwise")
        self.id = self.client.create_run(experiment, run_name=run.name).info.run_id
        for key, value in settings.items():
            self.client.log_param(self.id, key, value)

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.client.log_metric(self.id, key, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.id)


def _open_logger(name: str, run: RunDir, settings: dict[str, Any]) -> Logger:
    if name == "tensorboard":
        return _TensorBoard(run)
    if name == "wandb":
        return _WeightsAndBiases(run, settings)
    assert name == "mlflow", name
    return _MLflow(run, settings)
