"""What a program hears of a run while it trains, in the process that called `shardwise.train`, in every layout. No
torch.

    def show(step): print(step.step, step.loss)          a function hears of every step
    class Mine(Callback): ...                             an object hears of evaluations, checkpoints and the end too

Whoever raises `StopTraining` ends the run with a checkpoint, after the steps that are on their way already: results
come a few steps late where ranks run ahead of them. Any other error ends it as well and is raised again by `train`.
Ranks in other processes send lines of JSON through a pipe: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError
from shardwise.terminal import type_of

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir


class StopTraining(Exception):
    """Is raised by a callback to end the run, with a checkpoint, after the steps that are on their way already."""


@dataclass(frozen=True)
class StepInfo:
    """A finished step. `line` has everything that metrics.jsonl has of it."""

    step: int
    loss: float  # mean over the step's target tokens, in nats
    grad_norm: float
    lr: float
    step_s: float  # seconds
    tokens_per_s: float
    line: dict[str, Any]


class Callback:
    """Does nothing at any of these moments; subclasses override those that they want to hear of."""

    def on_step(self, step: StepInfo) -> None:
        """Is called with every finished step."""

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        """Is called with `eval_loss`, or with what the program's own evaluation found."""

    def on_save(self, step: int, path: Path) -> None:
        """Is called when the checkpoint of a step is committed."""

    def on_stop(self, step: int, why: str) -> None:
        """Is called at the end: `why` is "finished", or why the run stopped before its last step."""


OneCallback = Callback | Callable[[StepInfo], object]
Callbacks = OneCallback | Iterable[OneCallback]


class _OfFunction(Callback):
    def __init__(self, function: Callable[[StepInfo], object]):
        self.function = function

    def on_step(self, step: StepInfo) -> None:
        """Calls the function."""
        self.function(step)


class Hearing:
    """Passes a run's lines on to callbacks: directly, or through a pipe from another process."""

    def __init__(self, callbacks: Callbacks):
        given = callbacks if isinstance(callbacks, Iterable) and not isinstance(callbacks, str) else [callbacks]
        self.callbacks = [_as_callback(one) for one in given]
        self.run: RunDir | None = None
        self.error: Exception | None = None
        self._owner, (self._read, self._write) = os.getpid(), os.pipe()
        os.set_blocking(self._read, False)
        self._rest = b""

    def hear(self, line: dict[str, Any]) -> None:
        """Takes a line of metrics.jsonl on the first rank, whichever process that is."""
        if os.getpid() == self._owner:
            self._tell(line)
            return
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    def attend(self) -> None:
        """Calls the callbacks with what has come through the pipe."""
        while True:
            try:
                data = os.read(self._read, 2**16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._tell(json.loads(line))

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._read)
        os.close(self._write)

    def _tell(self, line: dict[str, Any]) -> None:
        if self.error is not None:
            return
        try:
            for callback in self.callbacks:
                self._call(callback, line)
        except StopTraining as stop:
            self._ask_to_stop(f"a callback: {stop}" if str(stop) else "a callback")
        except Exception as error:
            self.error = error
            self._ask_to_stop(f"an error in a callback: {error}")

    def _call(self, callback: Callback, line: dict[str, Any]) -> None:
        assert self.run is not None
        event, step = line.get("event"), line.get("step", 0)
        if event is None and "loss" in line:
            names = ("step", "loss", "grad_norm", "lr", "step_s", "tokens_per_s")
            callback.on_step(StepInfo(**{name: line[name] for name in names}, line=line))
        elif event is None:
            callback.on_eval(step, {key: value for key, value in line.items() if key not in ("step", "wall_time")})
        elif event == "saved":
            callback.on_save(step, self.run.checkpoints / f"step-{step}")
        elif event in ("finished", "stopped", "failed"):
            callback.on_stop(step, "finished" if event == "finished" else line.get("why", event))

    def _ask_to_stop(self, why: str) -> None:
        assert self.run is not None
        self.run.stop_request.write_text(why)


def _as_callback(given: OneCallback) -> Callback:
    if isinstance(given, Callback):
        return given
    if callable(given) and not isinstance(given, type):
        return _OfFunction(given)
    raise UserError(
        f"a callback is {'a class' if isinstance(given, type) else type_of(given)}",
        why="callbacks are functions of a step, or objects of a subclass of shardwise.Callback",
        fix="callbacks=[lambda step: print(step.loss)]",
    )
