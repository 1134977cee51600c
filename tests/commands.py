"""The small text, a tiny model, and the real command: in processes of its own as a user starts it, or in warm ones.

A process of its own imports torch for seconds. It is for tests of processes: signals, kills, what listens, what is
left. A test of what a command or a program computes or says takes a warm one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import RankPool

STORIES = Path(__file__).parent / "golden" / "stories.jsonl"

SMALL = [
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn=64",
    f"data.source={STORIES}",
    "train.seq_len=32",
    "train.global_batch=8",
    "train.eval_batches=2",
    "train.sample_tokens=8",
    "optimizer.lr=1e-3",
]
"""A model that trains a step in milliseconds."""


def _hear_ctrl_c() -> None:
    """Whoever starts the tests in the background has SIGINT ignored, and children inherit that; a terminal's do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_command(*words: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start the real command as a user would, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_ctrl_c,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""},
        **options,
    )


def run_command(*words: object, cwd: Path, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end; a hang is killed with its whole process group and fails with its output."""
    process = start_command(*words, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"shardwise {' '.join(map(str, words))} hung for {timeout} s; its output:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def warm_command(
    ranks: RankPool, *words: object, cwd: Path, nproc: int = 1, timeout: float = 180.0, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[str]:
    """Run a verb in a fresh process of the pool, which is the launcher if the verb wants several ranks: it forks them.
    With `nproc` the pool stands for torchrun: every process of it runs the verb as one rank, and what rank 0 said comes
    back. `encoding` is that of its output."""
    listed = [str(word) for word in words]
    code, out, err = ranks.run(be_command, nproc, listed, str(cwd), encoding, timeout=timeout, fresh=nproc == 1)[0]
    return subprocess.CompletedProcess(["shardwise", *listed], code, out, err)


def warm_program(ranks: RankPool, path: Path, *, cwd: Path, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `python PATH` does, in a fresh process of the pool."""
    code, out, err = ranks.run(be_program, 1, str(path), str(cwd), timeout=timeout, fresh=True)[0]
    return subprocess.CompletedProcess(["python", str(path)], code, out, err)


class WarmProcess:
    """A verb in a fresh process of the pool, while the test looks at it and sends it signals. Has what is used of a
    Popen here."""

    def __init__(self, ranks: RankPool, *words: object, cwd: Path):
        [self.pid] = ranks.run(os.getpid, 1, fresh=True)
        waiting = ThreadPoolExecutor(1)  # nobody else may use the pool until the command has ended
        self._end = waiting.submit(ranks.run, be_command, 1, [str(word) for word in words], str(cwd), timeout=600.0)
        waiting.shutdown(wait=False)

    def poll(self) -> int | None:
        return self._end.result()[0][0] if self._end.done() else None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        try:
            [(_, out, err)] = self._end.result(timeout)
        except FutureTimeout:
            raise subprocess.TimeoutExpired("shardwise", timeout or 0.0) from None
        return out + err, None


def be_command(words: list[str], cwd: str, encoding: str = "utf-8") -> tuple[int, str, str]:
    """A job of the pool. Exit code, output and errors."""
    import torch.distributed as dist
    from forked_python import forked_ranks

    from shardwise.cli.main import main

    os.chdir(cwd)
    if dist.get_world_size() > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    else:
        be_no_rank()
    os.environ["PYTHONIOENCODING"] = encoding  # what it starts has the same
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=encoding)  # type: ignore[union-attr]
    with caught(1, sys.stdout, encoding) as out, caught(2, sys.stderr, encoding) as err, forked_ranks():
        code = _code_of(lambda: main(words))
    return code, out[0], err[0]


def be_program(path: str, cwd: str) -> tuple[int, str, str]:
    """A job of the pool. Exit code, output and errors."""
    from forked_python import forked_ranks

    os.chdir(cwd)
    be_no_rank()
    sys.argv, sys.path[0:0] = [path], [cwd]
    with caught(1, sys.stdout) as out, caught(2, sys.stderr) as err, forked_ranks():
        try:
            code = _code_of(lambda: runpy.run_path(path, run_name="__main__"))
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, out[0], err[0]


def _code_of(call: Callable[[], Any]) -> int:
    """The exit code of a command, or of a program, which returns none."""
    try:
        code = call()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return code if isinstance(code, int) else 0


def be_no_rank() -> None:
    """What the pool has made of this process is undone: it may start ranks of its own."""
    import torch.distributed as dist

    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


@contextmanager
def caught(descriptor: int, stream: Any, encoding: str = "utf-8") -> Iterator[list[str]]:
    """What this process and those that it starts write there."""
    said: list[str] = []
    with ExitStack() as held:
        file = held.enter_context(tempfile.TemporaryFile("w+", encoding=encoding))
        before = os.dup(descriptor)
        held.callback(os.close, before)
        os.dup2(file.fileno(), descriptor)
        try:
            yield said
        finally:
            stream.flush()
            os.dup2(before, descriptor)
            file.seek(0)
            said.append(file.read())


def finish(process: subprocess.Popen[str] | WarmProcess, timeout: float = 180.0) -> str:
    """The output of a process that was told to stop; one that does not is killed, and the test fails with what it
    said."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running {timeout} s after it was told to stop:\n{process.communicate()[0]}")


def losses_of(run: Path, key: str = "loss") -> dict[int, float]:
    """The loss (or another metric) of each step, the later line winning. A line that is just being written does not
    count."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines():
        values = json.loads(line)
        if "loss" in values and "event" not in values:
            found[values["step"]] = values[key]
    return found
