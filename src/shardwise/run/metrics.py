"""Writes metrics: one JSON line per step in the run directory, and copies to the loggers that the user asked for
(loggers.py). One that fails is dropped with one printed line and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.files import cannot_write
from shardwise.run.loggers import Logger, open_logger
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


class Metrics:
    """Appends to metrics.jsonl (rank 0 only) and feeds the loggers."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        settings: dict[str, Any],
        say: Callable[[str], None],
        done: int = 0,
        hear: Callable[[dict[str, Any]], None] | None = None,
    ):
        """`settings` is the whole config, for the loggers; `done` counts the steps of earlier processes. `hear` is
        called with every line: a Python program's callbacks."""
        self.run, self.say, self.hear = run, say, hear
        self.file = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)
        self.loggers: list[Logger] = []
        for name in config.loggers:
            if name != "jsonl":
                self._try(name, partial(self._open, name, config, settings, done))

    def _open(self, name: str, config: RunConfig, settings: dict[str, Any], done: int) -> None:
        self.loggers.append(open_logger(name, self.run, config, settings, done, self.say))

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl; the numbers of a step or evaluation go to the loggers too."""
        try:
            self.file.write(to_json(line) + "\n")
            self.file.flush()  # a reader, or whoever looks after a crash, sees every finished step
        except OSError as error:
            raise cannot_write(self.run.metrics, error) from None
        if self.hear:
            self.hear(line)
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
            self.say(f"logger   {name} is off: {error}")
