"""Starts the processes of a demo on this machine, lets them meet over gloo, and collects what each of them returns.

torch is loaded once, by the process that forks the ranks, so that four of them are there as soon as one is. They meet
at a file, and gloo listens on the loopback interface only. Invariant: when `play` returns or raises, no rank is alive;
a rank whose parent was killed ends by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every model loads it: here once, not in each rank
import torch.distributed as dist

from shardwise.cluster.measure.link import loopback_interface
from shardwise.errors import Exit, UserError

DEADLINE_S = 60.0
LAST_WORDS_S = 2.0
"""How long the other ranks are listened to after one has failed: the system may close the sockets of a killed rank, and
its peers complain, before it closes its pipe."""
Say = Callable[[str], None]
Act = Callable[[int, int, Say], Any]
"""Called with (rank, world, say) and returns what the rank saw. `say` names what the rank does now, for the error
about one that is stuck."""


def play(act: Act, world: int, deadline_s: float = DEADLINE_S) -> list[Any]:
    """Returns what `act` returned on each of `world` ranks."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    sys.stdout.flush()  # else a forked rank would print it again
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="shardwise-demo-") as folder:
        try:
            for rank in range(world):
                here, there = context.Pipe(duplex=False)
                arguments = (act, rank, world, str(Path(folder) / "store"), there, os.getpid(), deadline_s)
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                pipes.append(here)
                processes[-1].start()
                there.close()
            return _collect(pipes, time.monotonic() + deadline_s, deadline_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], end: float, deadline_s: float) -> list[Any]:
    """Returns what each rank has sent at last. Of ranks that failed, the first one explains the others, which only lost
    it."""
    doing, results = ["starting"] * len(pipes), dict[int, Any]()
    failed = dict[int, tuple[float, Exception]]()  # when, by the clock that all processes share

    def read_all() -> None:
        for rank, pipe in enumerate(pipes):
            while rank not in results and rank not in failed and pipe.poll():
                try:
                    kind, value = pipe.recv()
                except EOFError:  # it had no time to send anything: whatever the others say came after it
                    failed[rank] = (0.0, _killed(rank, doing[rank]))
                    continue
                if kind == "failed":
                    at_s, trace = value
                    failed[rank] = (at_s, RuntimeError(f"rank {rank} failed at: {doing[rank]}\n{trace}"))
                elif kind == "doing":
                    doing[rank] = value
                else:
                    results[rank] = value

    while len(results) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in results]
        if not wait([pipes[rank] for rank in waiting], timeout=max(0.0, end - time.monotonic())):
            raise _stuck({rank: doing[rank] for rank in waiting}, deadline_s)
        read_all()
        if failed:  # the others lose it and are through soon; the first to fail may be the last that is heard of
            end = min(end, time.monotonic() + LAST_WORDS_S)
            while (silent := [pipes[rank] for rank in range(len(pipes)) if rank not in {*results, *failed}]) and wait(
                silent, timeout=max(0.0, end - time.monotonic())
            ):
                read_all()
            raise min(failed.values(), key=lambda one: one[0])[1]
    return [results[rank] for rank in range(len(pipes))]


def _killed(rank: int, doing: str) -> UserError:
    return UserError(
        f"rank {rank} of the demo was killed",
        why=f"it was at: {doing}; often the system ran out of memory",
        fix="close other programs and try again",
        code=Exit.HARDWARE,
    )


def _stuck(doing: dict[int, str], deadline_s: float) -> UserError:
    return UserError(
        f"{', '.join(f'rank {rank}' for rank in doing)} did not finish within {deadline_s:.0f} s",
        why="; ".join(f"rank {rank} is at: {text}" for rank, text in doing.items()),
        fix="a very busy machine needs longer: try again when it is calmer",
        code=Exit.HARDWARE,
    )


def _rank(act: Act, rank: int, world: int, store: str, pipe: Connection, parent: int, deadline_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody in the terminal; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if interface := loopback_interface():
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo's own variable: listen there and nowhere else
    torch.set_num_threads(1)
    try:
        meeting, patience = dist.FileStore(store, world), timedelta(seconds=deadline_s)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=patience)
        found = act(rank, world, lambda text: pipe.send(("doing", text)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        pipe.send(("failed", (time.monotonic(), traceback.format_exc())))
    else:
        pipe.send(("done", found))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(int(Exit.STOPPED))
