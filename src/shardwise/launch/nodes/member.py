"""The part of a node that is not the head: it says hello, sees the run or mirrors it, starts its ranks and reports how
they ended.

The other side is leader.py. Invariant: this node's ranks do not outlive its connection to the head by more than a
minute.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.launch.allocator import set_allocator
from shardwise.launch.local import Share, ranks_ended
from shardwise.launch.nodes.checks import Checks
from shardwise.launch.nodes.connection import Frame
from shardwise.launch.nodes.follower import Follower
from shardwise.launch.nodes.hello import hello
from shardwise.launch.nodes.interfaces import choose_interface
from shardwise.launch.nodes.job import END_S, JOIN_S, READY_S, NodeJob
from shardwise.launch.nodes.mirror import Outbox, digest_of, fetch, open_mirror, sees, send_written
from shardwise.launch.nodes.refusal import refusal_of
from shardwise.launch.supervisor import JobEnds
from shardwise.run.build import corpus_of, model_spec
from shardwise.run.rundir import RunDir
from shardwise.terminal import say_error

SEND_EVERY_S = 1.0


class HeadLeft(Exception):
    """Is raised where the head ends the job, or is lost, while this node asks it for something."""

    def __init__(self, frame: Frame | None):
        super().__init__("the head has left")
        self.frame = frame


class Member:
    """The part of a node that is not the head."""

    def __init__(self, job: NodeJob, secret: bytes, newer: Callable[[], bytes] | None = None):
        """`newer` returns the secret anew where the head leaves it in a file (agent.py)."""
        self.job, self.place = job, job.place
        self.interface = choose_interface(job.interface, job.place.heads)
        said = hello(self.place.index, job.asked, self.place.attempt, self.place.name)
        self.way = Follower(self.place.heads, self.place.port, secret, said, JOIN_S, newer)
        self.was_ended = False
        self.last: Frame | None = None  # the head's last word, if it came while ranks were running
        self.outbox: Outbox | None = None
        self.sent_at = 0.0

    def work(self) -> int:
        with self.way:
            try:
                return self._work()
            except HeadLeft as left:
                return self._left(left.frame)
            except BaseException as error:  # the others must not wait
                self.way.link.send("refuse", **refusal_of(error))
                raise

    def _work(self) -> int:
        link = self.way.link
        checks = Checks(self.place.index, self.job.runs, self.interface.address, self.way.secret, self.way.thread)
        while frame := link.receive("check", "run", "exit", "refuse", timeout=JOIN_S + READY_S):
            if frame.words["kind"] != "check":
                break
            link.answer(checks.answer(frame.words))
        while frame is not None and frame.words["kind"] == "run":  # again, where another start may help
            frame = self._start(frame.words)
        return self._left(frame)

    def _start(self, words: dict[str, Any]) -> Frame | None:
        """Starts this node's ranks, says how they ended, and returns the head's next word; None where it is lost."""
        link = self.way.link
        self.was_ended, self.outbox = False, None
        run = self._open(words)
        link.send("ready", mirrors=self.outbox is not None)
        frame = link.receive("go", "exit", "refuse", timeout=READY_S)
        if frame is None or frame.words["kind"] != "go":
            return frame
        if words["device"] == "cuda":
            set_allocator(words["allocator"], os.environ)
        given = words["share"]
        share = Share(
            **{
                **given,
                "first": self.place.index * given["count"],
                "store_port": self.way.open_tunnel(),
                "interface": self.interface.name,
            }
        )
        ended = ranks_ended(run, share, words["threads"], words["options"], attend=self._attend)
        self._send(is_last=True)
        link.send("ended", **ended.to_dict(), was_ended=self.was_ended)
        return self.last or link.receive("run", "exit", "refuse", timeout=READY_S)  # rank 0 may have more to do

    def _open(self, words: dict[str, Any]) -> RunDir:
        """Returns the run directory on this node: the shared one, or a mirror that is up to date. Refuses what would
        have this node's ranks compute something else."""
        shared = Path(words["path"])
        if sees(shared, words["sign"]):
            self._check(RunDir(shared), words)
            return RunDir(shared)
        path, files = shared, {str(name): int(size) for name, size in words["files"].items()}
        open_mirror(path, f"{self.way.address}:{shared}", files)
        fetch(path, files, self._piece)
        self.outbox = Outbox(path)
        self._check(RunDir(path), words)
        return RunDir(path)

    def _check(self, run: RunDir, words: dict[str, Any]) -> None:
        if digest_of(run) != words["digest"]:
            raise UserError(
                f"{run.path} on {socket.gethostname()} is not what the first node has there",
                why="the config or the plan in it differs",
                fix="remove the directory on this node if it is an old mirror; else choose another run.name",
                code=Exit.HARDWARE,
            )
        config = load_config(run.config).config
        found = corpus_of(config, model_spec(config.model), progress=False).fingerprint
        if found != words["text"]:
            raise UserError(
                f"the text on {socket.gethostname()} is not the one on the first node",
                why=f"data.source = {config.data.source} has other content or another tokenizer here",
                fix="the same files on every node, or a data.source on a shared file system",
            )

    def _piece(self, name: str, offset: int) -> bytes:
        self.way.link.send("get", name=name, offset=offset)
        frame = self.way.link.receive("piece", "exit", "refuse", timeout=END_S)
        if frame is None or frame.words["kind"] != "piece":
            raise HeadLeft(frame)
        return frame.data

    def _attend(self) -> None:
        link = self.way.link
        while (frame := link.next()) is not None:
            if frame.words.get("kind") in ("end", "exit", "refuse"):
                self.was_ended = True
            if frame.words.get("kind") in ("exit", "refuse"):
                self.last = frame
        if self.was_ended or link.lost:
            self.was_ended = True
            raise JobEnds
        self._send()

    def _send(self, is_last: bool = False) -> None:
        if self.outbox is None or (not is_last and time.monotonic() - self.sent_at < SEND_EVERY_S):
            return
        self.sent_at = time.monotonic()
        send_written(self.way.link, self.outbox, is_last)

    def _left(self, frame: Frame | None) -> int:
        """Returns the code with which this node leaves: the head's, or that of a node that has lost it."""
        if frame is None:
            say_error(f"error: {socket.gethostname()} has lost the first node of this job, {self.way.address}")
            say_error(f"  why  {self.way.link.lost or 'it said nothing any more'}")
            say_error("  fix  start the job again: it goes on from the last checkpoint")
            return int(Exit.HARDWARE)
        if frame.words["kind"] == "refuse" and (text := frame.words.get("text")):
            say_error(str(text))
        return int(frame.words.get("code", frame.words.get("exit", Exit.USER_MISTAKE)))
