"""Makes the last lines of a run: how it ended, predicted beside measured, and what to type next. reporter.py prints
them."""

from __future__ import annotations

from shardwise.config.units import format_bytes, format_seconds
from shardwise.errors import Exit
from shardwise.report.history import History
from shardwise.report.memory import percent_off
from shardwise.report.terminal import format_rate
from shardwise.run.clock import verdict
from shardwise.run.listener import Ending
from shardwise.run.rundir import RunDir
from shardwise.spec.prediction import Prediction
from shardwise.spec.schema import Config, TrainConfig
from shardwise.terminal import shell_word


def finished_lines(history: History, prediction: Prediction, unigram: float, peak_bytes: int) -> list[str]:
    """Returns the closing lines of a run. `unigram` is the loss of a unigram model of the same text, in nats;
    `peak_bytes` is that of the fullest rank."""
    lines = []
    if history.losses:
        last = history.losses[max(history.losses)]
        lines.append(f"loss     {last:.3f} at the last step; a unigram model of the same text has {unigram:.3f}")
    held = f"{format_bytes(peak_bytes)} per rank ({percent_off(peak_bytes, prediction.memory_bytes)})"
    step_s = history.median_step_s()
    if step_s is None:
        return [*lines, f"measured {held}; too few steps to time them"]
    rate = format_rate(history.tokens / history.parts["step_s"])
    beside = f"{percent_off(step_s, prediction.step_s)} against predicted"
    return [
        *lines,
        f"speed    {rate} tok/s; {verdict(history.parts)}",
        f"measured {format_seconds(step_s)} per step ({beside}), {held}",
    ]


def next_lines(run: RunDir, config: Config, num_steps: int, is_chat: bool) -> list[str]:
    """Returns what to type next with a finished run. The prompt fits what it was trained on: a question for
    conversations, Python for Python's library, else what `train.sample_prompt` has or the beginning of any text."""
    is_python, train = config.data.source == "python", config.train
    prompt = train.sample_prompt or ("class " if is_python else "The ")
    words = '--chat --prompt "Hello"' if is_chat else f"--prompt {shell_word(prompt)}"
    return [
        f"run      {run.path}",
        f"next     shardwise generate {shell_word(run.path)} {words}",
        f"         shardwise eval {shell_word(run.path)}",
        f"         {longer_command(run, train, num_steps)}",
    ]


def longer_command(run: RunDir, train: TrainConfig, num_steps: int) -> str:
    """Returns the command that trains a finished run twice as long, by the key its length was given with."""
    if train.tokens:
        key, value = "train.tokens", str(2 * train.tokens)
    elif train.epochs:
        key, value = "train.epochs", f"{2 * train.epochs:g}"
    else:
        key, value = "train.steps", str(2 * num_steps)
    return run.how_to_resume(f"{key}={value}", allow=[key])


def why_stopped(ending: Ending) -> tuple[str, str]:
    """Returns the event for metrics.jsonl and its reason."""
    if ending.overflow:
        return "failed", f"fp16 overflows at every loss scale: {ending.overflow}"
    return ("failed", "the loss is not a number") if ending.code == Exit.DIVERGED else ("stopped", ending.why)


def stopped_lines(run: RunDir, ending: Ending) -> list[str]:
    step, code = ending.step, int(ending.code)
    if ending.overflow:
        what = f"STOPPED  step {step}: fp16 overflows at every loss scale; committed"
        return [
            f"{what}                exit {code}, diverged",
            f"  why    not finite first: {ending.overflow}",
            f"  do     {run.how_to_resume('memory.precision=bf16', 'memory.loss_scale=auto')}",
        ]
    if ending.code == Exit.DIVERGED:
        no_way_back = [f"         not gone back to a checkpoint: {ending.why}"] if ending.why else []
        return [
            f"STOPPED  step {step}: the loss is not a number any more                    exit {code}, diverged",
            "  why    usually the learning rate is too high, or the data holds something extreme",
            *no_way_back,
            f"  do     {run.how_to_resume('optimizer.lr=…', allow=['optimizer.lr'])}   (half of it, say)",
            "         or run.on_nan=skip, which passes over such steps",
        ]
    committed = "committed" if step else "nothing to commit yet"
    what = f"STOPPED  step {step}, by {ending.why}; {committed}"
    return [f"{what}                              exit {code}, resumable", f"  do     {run.how_to_resume()}"]
