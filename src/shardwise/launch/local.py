"""Starts the ranks of a run on this machine, through torchrun's own process API, and waits for them.

Nothing listens beyond loopback: the store that ranks meet at is bound to 127.0.0.1, and gloo is told the loopback
interface. Rank 0 keeps the terminal; the others write to log/. Signals are passed on, so that every rank stops at the
same step.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
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


LAST_WORDS_S = 5.0  # seconds in which ranks that have lost a peer say so and end by themselves


class JobEnds(Exception):
    """Is raised by who attends to the ranks when they must end, because those of another node have ended."""


@dataclass(frozen=True)
class Share:
    """The ranks that this node starts, of how many, and what they meet by."""

    count: int
    world: int
    first: int = 0  # the rank of the first of them
    store_port: int | None = None  # of the loopback interface; None: a store of their own
    interface: str | None = None  # network interface; None: loopback
    attempt: int | None = None  # numbers the logs; None: one more than there are


def start_ranks(
    run: RunDir,
    nproc: int,
    threads: int,
    interface: str | None,
    options: Sequence[str] = (),
    body: Callable[[], int] | None = None,
    attend: Callable[[], None] = lambda: None,
) -> int:
    """Runs `nproc` workers of this node alone and returns the exit code of the whole."""
    share = Share(nproc, nproc, interface=interface)
    return exit_code(run, ranks_ended(run, share, threads, options, body, attend))


def ranks_ended(
    run: RunDir,
    share: Share,
    threads: int,
    options: Sequence[str] = (),
    body: Callable[[], int] | None = None,
    attend: Callable[[], None] = lambda: None,
) -> RanksEnded:
    """Runs the workers of this node (worker.py, with `options`) over a prepared run directory and returns how they
    ended. With `body` ranks are copies of this process (fork) that call it. `attend` is called while they train; what
    it raises ends them."""
    from torch.distributed.elastic.multiprocessing import start_processes

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    store, port = (None, share.store_port) if share.store_port else loopback_store()  # lives as long as the ranks do
    arguments = ["-m", "shardwise.launch.rank", str(run.path), "--launcher", str(os.getpid()), *options]
    followed = Followed(run.log, attempt := share.attempt or next_attempt(run), has_first=share.first == 0)
    environments = _environments(share, port, threads)
    start: Callable[[], PContext | ForkedRanks] = partial(
        start_processes,
        name="shardwise",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(share.count), tuple(arguments)),
        envs=environments,
        logs_specs=_rank_logs(run.log, share, attempt, followed),
    )
    if body is not None:
        start = partial(ForkedRanks, body, environments, run.log, attempt, is_followed=bool(followed.out))

    def look() -> None:
        attend()
        followed.show()

    asked, result = _supervise(start, look)
    with suppress(JobEnds):
        look()
    del store
    return RanksEnded.of(asked, result, share.first)


def next_attempt(run: RunDir) -> int:
    """Returns the number of the next start of a run: a resume keeps the logs of earlier ones."""
    found = (re.fullmatch(r"rank\d+\.(\d+)\.(out|err)", file.name) for file in run.log.glob("rank*"))
    return 1 + max((int(match[1]) for match in found if match), default=0)


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
        except JobEnds:  # they may wait for ranks that are gone, and notice it by themselves or never
            result = _end_soon(context, pids)
        except BaseException:  # of the program that is told of the steps: its ranks do not outlive the call
            pass_on(signal.SIGTERM)
            while context.wait(timeout=0) is None:
                time.sleep(0.1)
            raise
    return asked, result


def _end_soon(context: PContext | ForkedRanks, pids: Sequence[int]) -> RunProcsResult:
    """Gives ranks a moment to end by themselves, then ends them; returns how they ended."""
    deadline, result = time.monotonic() + LAST_WORDS_S, None
    while (result := context.wait(timeout=0)) is None:
        if time.monotonic() > deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return result


def _environments(share: Share, port: int, threads: int) -> dict[int, dict[str, str]]:
    """Returns the environment variables of each rank of this node, by its place here."""
    interface = share.interface or _loopback_interface()
    return {
        local: {
            **os.environ,
            "RANK": str(share.first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(share.world),
            "LOCAL_WORLD_SIZE": str(share.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: ranks only connect
            "OMP_NUM_THREADS": str(threads),
            **sockets_at(interface),
        }
        for local in range(share.count)
    }


def sockets_at(interface: str) -> dict[str, str]:
    """Returns the variables by which gloo and NCCL learn which network interface they may use."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface)}


def loopback_store() -> tuple[TCPStore, int]:
    """Returns a rendezvous store bound to 127.0.0.1 only, and its port; by default torch's would listen on every
    interface."""
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _rank_logs(folder: Path, share: Share, attempt: int, followed: Followed) -> Any:
    """Returns where ranks print to: rank 0 to the terminal or to what is followed, rank N to log/rankN.ATTEMPT.out and
    .err."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            def files(ending: str, first: str | None = None) -> dict[int, str]:
                ranks = [share.first + local for local in range(share.count)]
                named = {local: str(folder / f"rank{rank}.{attempt}.{ending}") for local, rank in enumerate(ranks)}
                return named if first is None or share.first else named | {0: first}

            none = dict.fromkeys(range(share.count), "")
            return LogsDest(files("out", followed.out), files("err", followed.err), none, none, files("error.json"))

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return RankLogs()
