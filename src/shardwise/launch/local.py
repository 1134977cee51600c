"""Starts the ranks of a run on this machine, through torchrun's own process API, and waits for them.

Nothing listens beyond loopback: the store that ranks meet at is bound to 127.0.0.1, and gloo is told the loopback
interface. Rank 0 keeps the terminal; the others write to log/. Signals are passed on, so that every rank stops at the
same step.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardwise.launch.followed import Followed
from shardwise.launch.forked_ranks import ForkedRanks
from shardwise.launch.outcome import RanksEnded, exit_code
from shardwise.run.guards import INTERRUPT, answering, stop_signals
from shardwise.run.rundir import RunDir

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult


def start_ranks(
    run: RunDir,
    nproc: int,
    threads: int,
    interface: str | None,
    options: Sequence[str] = (),
    body: Callable[[], int] | None = None,
    attend: Callable[[], None] = lambda: None,
) -> int:
    """Runs `nproc` workers (worker.py, with `options`) over a prepared run directory and returns the exit code of the
    whole. With `body` ranks are copies of this process (fork) that call it. `attend` is called while they train."""
    from torch.distributed.elastic.multiprocessing import start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    store, port = _loopback_store()  # lives as long as the ranks do
    arguments = ["-m", "shardwise.launch.rank", str(run.path), "--launcher", str(os.getpid()), *options]
    followed = Followed(run.log, attempt := 1 + len(list(run.log.glob("rank1.*.out"))))  # a resume keeps earlier logs
    environments = _environments(nproc, port, threads, interface or _loopback_interface())
    start: Callable[[], PContext | ForkedRanks] = partial(
        start_processes,
        name="shardwise",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(nproc), tuple(arguments)),
        envs=environments,
        logs_specs=_rank_logs(run.log, nproc, attempt, followed),
    )
    if body is not None:
        start = partial(ForkedRanks, body, environments, run.log, attempt, is_followed=bool(followed.out))

    def look() -> None:
        attend()
        followed.show()

    asked, result = _supervise(start, look)
    look()
    del store
    return exit_code(run, RanksEnded.of(asked, result, first=0))


def _supervise(
    start: Callable[[], PContext | ForkedRanks], attend: Callable[[], None]
) -> tuple[list[int], RunProcsResult]:
    """Starts the ranks and waits for them; returns the signals that came and how the ranks ended. Signals are theirs to
    handle: they finish the step and commit."""
    pids: list[int] = []
    asked: list[int] = []

    def pass_on(number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, INTERRUPT if number == signal.SIGINT else number)

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        pass_on(number)

    with answering(stop_signals(), forward):
        # On the main thread torch would set handlers of its own, which raise in the midst of starting and leave
        # orphans.
        with ThreadPoolExecutor(1) as starter:
            context = starter.submit(start).result()
        pids += context.pids().values()
        for number in asked[:1]:  # it came while they were being started
            pass_on(number)
        try:
            while (result := context.wait(timeout=0)) is None:
                attend()
                time.sleep(0.1)
        except BaseException:  # of the program that is told of the steps: its ranks do not outlive the call
            pass_on(signal.SIGTERM)
            while context.wait(timeout=0) is None:
                time.sleep(0.1)
            raise
    return asked, result


def _environments(nproc: int, port: int, threads: int, interface: str) -> dict[int, dict[str, str]]:
    """Returns the environment variables of each rank."""
    return {
        rank: {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: ranks only connect
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": interface,
        }
        for rank in range(nproc)
    }


def _loopback_store() -> tuple[TCPStore, int]:
    """Returns a rendezvous store bound to 127.0.0.1 only, and its port; by default torch's would listen on every
    interface."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _rank_logs(folder: Path, nproc: int, attempt: int, followed: Followed) -> Any:
    """Returns where ranks print to: rank 0 to the terminal or to what is followed, rank N to log/rankN.ATTEMPT.out and
    .err."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            def files(ending: str, first: str | None = None) -> dict[int, str]:
                named = {rank: str(folder / f"rank{rank}.{attempt}.{ending}") for rank in range(nproc)}
                return named if first is None else named | {0: first}

            none = dict.fromkeys(range(nproc), "")
            return LogsDest(files("out", followed.out), files("err", followed.err), none, none, files("error.json"))

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return RankLogs()
