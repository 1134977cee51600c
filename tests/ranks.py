"""Warm rank processes for tests: `RankPool.run` calls one function on every rank of a gloo job; results come in rank
order.

Three kinds of process. The pool lives in pytest. It starts one template, which imports torch and shardwise and never
runs a job. Ranks are forked from the template in milliseconds, where an import of torch takes seconds: more ranks, or
new ones after a failure, are cheap. A rank stays and takes one job after another. The other two processes are in
rank_process.py.

Invariant: when `run` returns, its ranks are as good as new: no process group, no mesh, torch's default settings. When
`run` raises, all ranks are dead and the next job gets fresh ones. No rank outlives the pool, whichever way pytest ends.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rank_process import STACK_SIGNAL, Job, Trouble, pack

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",  # what a rank printed is there when it dies
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # newer units round bf16 differently: the same numbers on every machine
}
PATHS = [str(TESTS), str(TESTS.parent)]
TEMPLATE = f"import sys; sys.path[:0] = {PATHS!r}; import rank_process; rank_process.be_template(*sys.argv[1:])"
START_LIMIT_S = 180.0  # importing torch on a busy machine
GRACE_S = 3.0  # from the first error until ranks that still wait for the failed one are killed
STACK_LIMIT_S = 3.0
CONTROL = (
    socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM
)  # one message at a time, where there is


class RankFailure(Exception):
    """A rank raised or died. The text starts with the rank that explains the others."""


class RankHang(Exception):
    """A job did not finish in time. The text has the Python stack of every rank."""


class RankPool:
    """Runs functions of test or product modules on ranks; they find `torch.distributed` initialised.

    A rank works in the test's current directory, but does not see environment variables that the test sets. A job may
    set torch's switches, variables, signal handlers: nothing of it is left for the next one. What it patches in a
    module it must restore itself. Compare in the test rather than in the rank, where pytest does not explain a failed
    `assert`.
    """

    def __init__(self) -> None:
        self._environment = {**os.environ, **ENVIRONMENT}
        self._template: _Template | None = None
        self._ranks: list[_Rank] = []
        self._num_jobs = 0

    def run(
        self, function: Callable, world: int, *args: Any, timeout: float = 120.0, fresh: bool = False, **kwargs: Any
    ) -> list[Any]:
        """`function(*args, **kwargs)` on each of `world` ranks; `fresh`: that have run nothing before, so that it may
        fork. The start of new ranks does not count as time of the job."""
        module, name = function.__module__, function.__qualname__
        if "<" in name or module == "__main__":
            raise TypeError(f"{name} cannot be found by its name: give a function at the top of a module")
        job = Job(self._num_jobs, world, timeout, sys.path, os.getcwd(), module, name, pack((args, kwargs)))
        self._num_jobs += 1
        if fresh:
            self._end_ranks()
        self._grow(world)
        ranks, title, start = self._ranks[:world], f"{module}.{name} on {world} ranks", time.monotonic()
        try:
            for rank in ranks:
                rank.forget_words()
            _send(ranks, pickle.dumps(job))
            results = self._gather(ranks, title, start, timeout)
            _send(ranks, b"end")  # nobody tears the group down before everybody is done with it
            self._gather(ranks, f"the end of {title}", start, timeout)
        except BaseException:  # Ctrl-C too
            self._end_ranks()
            raise
        return results

    def preload(self, *modules: str) -> None:
        """Import modules once, in the template, so that not every rank does. They must start no thread."""
        self._grow(0)
        assert self._template is not None
        if new := [name for name in modules if name not in self._template.preloaded]:
            self._end_ranks()  # the next ones have them
            try:
                self._template.load(new)
            except RuntimeError:
                self.close()  # the next job gets a new template
                raise

    def close(self) -> None:
        """End all processes. A later `run` would start them again."""
        self._end_ranks()
        if self._template is not None:
            self._template.close()
        self._template = None

    def pids(self) -> list[int]:
        """The processes of the pool: the template, then the ranks."""
        return [*([self._template.process.pid] if self._template else []), *(rank.pid for rank in self._ranks)]

    def _grow(self, world: int) -> None:
        if self._template is not None and self._template.process.poll() is not None:
            self.close()  # somebody killed it, and the ranks went with it
        if self._template is None:
            self._template = _Template(self._environment)
        while len(self._ranks) < world:
            self._ranks.append(self._template.fork(len(self._ranks)))

    def _end_ranks(self) -> None:
        if self._template is not None:
            self._template.end(self._ranks)
        for rank in self._ranks:
            rank.channel.close()
        self._ranks = []

    def _gather(self, ranks: list[_Rank], title: str, start: float, timeout: float) -> list[Any]:
        """One answer from each rank. Raises when a rank fails, dies, or does not answer in time."""
        answers: dict[int, Any] = {}
        troubles: dict[int, Trouble] = {}
        waiting = {rank.number: rank for rank in ranks}
        deadline = start + timeout
        while waiting:
            ready = wait([rank.channel for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in waiting.values() if rank.channel in ready]:
                del waiting[rank.number]
                answer = self._answer_of(rank)
                if isinstance(answer, Trouble):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    troubles[rank.number] = answer
                else:
                    answers[rank.number] = answer
        if troubles:
            raise _failure(title, time.monotonic() - start, ranks, troubles, list(waiting))
        if waiting:
            raise _hang(title, time.monotonic() - start, ranks, list(waiting))
        return [answers[number] for number in range(len(ranks))]

    def _answer_of(self, rank: _Rank) -> Any:
        try:
            message = rank.channel.recv_bytes()
        except (EOFError, OSError):
            return self._death_of(rank)
        return pickle.loads(message)

    def _death_of(self, rank: _Rank) -> Trouble:
        assert self._template is not None
        self._template.end([rank])
        if rank.exit_code is None:
            how = "is gone, and so is the process that started it"
        elif rank.exit_code < 0:
            how = f"was killed by {signal.Signals(-rank.exit_code).name}"
        else:
            how = f"ended with exit code {rank.exit_code}"
        return Trouble(0, time.monotonic(), how, how)


def _send(ranks: list[_Rank], message: bytes) -> None:
    for rank in ranks:
        with suppress(OSError):  # it is dead, which `_gather` will find out
            rank.channel.send_bytes(message)


def _failure(
    title: str, seconds: float, ranks: list[_Rank], troubles: dict[int, Trouble], late: list[int]
) -> RankFailure:
    _ask_for_stacks([ranks[number] for number in late])
    telling = sorted(troubles, key=lambda number: (troubles[number].weight, troubles[number].at))
    finished = set(range(len(ranks))) - set(troubles) - set(late)
    parts = [f"{title} failed after {seconds:.1f} s: rank {telling[0]}: {troubles[telling[0]].headline}"]
    parts += [f"rank {number}: {troubles[number].text}{ranks[number].last_words()}" for number in telling]
    parts += [f"rank {number}: had not finished {GRACE_S:g} s later{ranks[number].last_words()}" for number in late]
    parts += [f"rank {number}: had finished" for number in sorted(finished)]
    return RankFailure("\n\n".join(parts))


def _hang(title: str, seconds: float, ranks: list[_Rank], late: list[int]) -> RankHang:
    _ask_for_stacks(ranks)
    parts = [f"{title} hung: after {seconds:.1f} s {_names(late)} had not finished"]
    for rank in ranks:
        parts.append(f"rank {rank.number}: had {'not ' * (rank.number in late)}finished{rank.last_words()}")
    return RankHang("\n\n".join(parts))


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(f"rank {number}" for number in numbers)


@dataclass
class _Rank:
    number: int
    pid: int
    channel: Connection
    output: Path
    stack: Path
    exit_code: int | None = None  # negative: the signal that killed it

    def forget_words(self) -> None:
        self.output.write_bytes(b"")
        self.stack.write_bytes(b"")

    def last_words(self) -> str:
        """The end of what it printed, and the stack that it wrote when asked or when it crashed."""
        words = {"output": _read(self.output)[-2000:].strip(), "stack": _read(self.stack).strip()}
        return "".join(f"\n  {title}:\n{text}" for title, text in words.items() if text)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _ask_for_stacks(ranks: list[_Rank]) -> None:
    """Each rank writes where it is, all threads. The main thread comes last, and its outermost frame ends the text."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, STACK_SIGNAL)
    deadline = time.monotonic() + STACK_LIMIT_S
    while time.monotonic() < deadline and not all(
        _read(rank.stack).endswith(("in <module>\n", "  ...\n")) for rank in ranks
    ):
        time.sleep(0.02)


class _Template:
    """The pool's handle on the template process, and the store at which ranks meet."""

    def __init__(self, environment: dict[str, str]):
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, CONTROL)
        self._num_asked = 0
        self.preloaded: list[str] = []
        with theirs, open(self._folder / "template", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TEMPLATE, str(theirs.fileno()), str(self._folder)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for pytest, which ends the ranks itself
            )
        self._store, self._port = _loopback_store()  # meanwhile
        self._control.settimeout(START_LIMIT_S)
        with suppress(OSError):
            if self._control.recv(100) == b"ready":
                return
        words = _read(self._folder / "template")
        self.close()
        raise RuntimeError(f"the template of all ranks could not start:\n{words}")

    def fork(self, number: int) -> _Rank:
        channel, theirs = Pipe()
        output, stack = self._folder / f"{number}.output", self._folder / f"{number}.stack"
        with theirs:
            [pid] = self._ask(f"fork {number} {self._port}", theirs.fileno())
        return _Rank(number, int(pid), channel, output, stack)

    def load(self, modules: list[str]) -> None:
        if self._ask(" ".join(["import", *modules])) != ["done"]:
            raise RuntimeError(f"{' '.join(modules)} cannot be imported:\n{_read(self._folder / 'template')}")
        self.preloaded += modules

    def end(self, ranks: list[_Rank]) -> None:
        """Kill ranks and whatever they started. One that is dead already keeps its own exit code."""
        left = [rank for rank in ranks if rank.exit_code is None]
        for rank, code in zip(left, self._ask(" ".join(["end", *(str(rank.pid) for rank in left)]))):
            rank.exit_code = int(code)

    def _ask(self, request: str, *descriptors: int) -> list[str]:
        """The template's answer; nothing if it is dead. What it answers to a question that Ctrl-C cut short is
        dropped."""
        self._num_asked += 1
        with suppress(OSError):
            socket.send_fds(self._control, [f"{self._num_asked} {request}".encode()], descriptors)
            while answer := self._control.recv(1000).decode().split():
                if int(answer[0]) == self._num_asked:
                    return answer[1:]
        return []

    def close(self) -> None:
        self._control.close()  # this ends it, and it ends its ranks
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # it has done so, unless it was killed


def _loopback_store() -> tuple[Any, int]:
    """One server for all jobs, each of which uses a prefix of its own."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port
