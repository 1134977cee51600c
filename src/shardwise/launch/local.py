"""Starts the ranks of a run on this machine, with the variables that torchrun would set, and waits for them.

Nothing listens beyond loopback: the store that ranks meet at is bound to 127.0.0.1, and gloo is told the loopback
interface. Rank 0 keeps the terminal; the others write to log/. Signals are passed on, so that every rank stops at the
same step.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.launch.followed import Followed
from shardwise.launch.judge import Patience
from shardwise.launch.memory_kills import killed_for_memory
from shardwise.launch.outcome import RanksEnded
from shardwise.launch.processes import ForkedRanks, RankFiles, RankProcesses, SpawnedRanks
from shardwise.launch.restarts import Restarts
from shardwise.launch.signs import Watch
from shardwise.launch.supervisor import JobEnds, Supervisor
from shardwise.run.guards import answering, stop_signals
from shardwise.run.heartbeat import Heartbeats
from shardwise.run.rundir import RunDir

if TYPE_CHECKING:
    from torch.distributed import TCPStore


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
    body: Callable[[int | None], int] | None = None,
    attend: Callable[[], None] = lambda: None,
    from_step: int | None = None,
    max_restarts: int = 0,
) -> int:
    """Runs `nproc` workers of this node alone, again where that may help, and returns the exit code of the whole. They
    go on from the checkpoint of `from_step`; None: the newest."""
    share, restarts = Share(nproc, nproc, interface=interface), Restarts(run, max_restarts)
    while True:
        asked = [*options, *from_step_option(from_step)]
        ready: Callable[[], int] | None = body and partial(body, from_step)
        if restarts.done and ready is None and run.read_plan().get("device") == "cpu":
            ready = _copy_of_this(run, asked)
        ended = ranks_ended(run, share, threads, asked, ready, attend)
        if not restarts.again(ended):
            return restarts.code
        from_step = None if ended.has_begun else from_step  # once it has begun, newer ones are gone


def _copy_of_this(run: RunDir, options: Sequence[str]) -> Callable[[], int]:
    """Returns what a rank does that is a copy of this process, which has loaded torch for the store and has computed
    nothing: it is there seconds before one that must load it. On GPUs nobody has tried that."""
    from shardwise.launch.worker import main

    return partial(main, _rank_arguments(run, options))


def _rank_arguments(run: RunDir, options: Sequence[str]) -> list[str]:
    return [str(run.path), "--launcher", str(os.getpid()), *options]


def from_step_option(from_step: int | None) -> list[str]:
    """Returns the words by which a rank is told where to go on from."""
    return [] if from_step is None else ["--from-step", str(from_step)]


def ranks_ended(
    run: RunDir,
    share: Share,
    threads: int,
    options: Sequence[str] = (),
    body: Callable[[], int] | None = None,
    attend: Callable[[], None] = lambda: None,
    store: LoopbackStore | None = None,
) -> RanksEnded:
    """Runs the workers of this node (worker.py, with `options`) over a prepared run directory and returns how they
    ended. With `body` ranks are copies of this process (fork) that call it. `attend` is called while they train; what
    it raises ends them. `store`: where the ranks meet, on the head of several nodes; one node has one of its own."""
    if (port := share.store_port) is None:
        store = store or LoopbackStore()
        port = store.port
    if store and body is not None:
        store.open()  # the copies have torch then
    arguments = ["-m", "shardwise.launch.rank", *_rank_arguments(run, options)]
    followed = Followed(run.log, attempt := share.attempt or next_attempt(run), has_first=share.first == 0)
    killed_before = killed_for_memory()
    asked: list[int] = []  # signals, answered from before there are ranks: none is left behind by one
    with Heartbeats(share.count) as heartbeats, answering(stop_signals(), lambda number, frame: asked.append(number)):
        environments = _environments(share, port, threads, heartbeats)
        files = {rank: _files(run.log, rank, attempt, followed) for rank in environments}
        ranks: RankProcesses = (
            ForkedRanks(body, environments, files)
            if body is not None
            else SpawnedRanks(arguments, environments, files, heartbeats.descriptors)
        )

        def look() -> None:
            if store:
                store.open()  # at the first look: the ranks are loading torch, too
            attend()
            followed.show()

        watch = Watch(heartbeats, ranks.pids)
        is_whole = share.count == share.world
        supervisor = Supervisor(run, ranks, watch, Patience.of(run.read_plan()), look, asked, is_whole=is_whole)
        supervisor.wait()
        with suppress(JobEnds):
            look()
        return RanksEnded.of(supervisor, killed_for_memory() - killed_before)


def _files(folder: Path, rank: int, attempt: int, followed: Followed) -> RankFiles:
    """Returns where a rank prints to: rank 0 to the terminal or to what is followed, rank N to log/rankN.ATTEMPT.out
    and .err."""
    if rank == 0:
        return RankFiles(followed.out, followed.err)
    return RankFiles(str(folder / f"rank{rank}.{attempt}.out"), str(folder / f"rank{rank}.{attempt}.err"))


def next_attempt(run: RunDir) -> int:
    """Returns the number of the next start of a run: a resume keeps the logs of earlier ones."""
    found = (re.fullmatch(r"rank\d+\.(\d+)\.(out|err)", file.name) for file in run.log.glob("rank*"))
    return 1 + max((int(match[1]) for match in found if match), default=0)


def _environments(share: Share, port: int, threads: int, heartbeats: Heartbeats) -> dict[int, dict[str, str]]:
    """Returns the environment variables of each rank of this node."""
    interface = share.interface or _loopback_interface()
    return {
        share.first + local: {
            **os.environ,
            "RANK": str(share.first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(share.world),
            "LOCAL_WORLD_SIZE": str(share.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: ranks only connect
            "OMP_NUM_THREADS": str(threads),
            "SHARDWISE_HEARTBEAT": heartbeats.variable(local),
            **sockets_at(interface),
        }
        for local in range(share.count)
    }


def sockets_at(interface: str) -> dict[str, str]:
    """Returns the variables by which gloo and NCCL learn which network interface they may use."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface)}


class LoopbackStore:
    """A rendezvous store bound to 127.0.0.1 only; by default torch's would listen on every interface. Ranks may be
    started as soon as it has its port: whoever connects before it is open waits. It lives as long as this object."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._store: TCPStore | None = None

    def open(self) -> None:
        """Serves the store. That loads torch, which takes a second, where this process has not done so yet."""
        if self._store is None:
            from torch.distributed import TCPStore

            fd = self._listener.detach()
            self._store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
