"""What `shardwise train` and `resume` do on each node of a job: they find each other, agree, start their ranks, end
together.

    every node     the job's secret, its own address, hello to the head
    head           compares the hellos, plans, makes or finds the run directory, tells the others
    other nodes    see the run directory, or make a mirror of it; their ranks come to the head's store by a tunnel
    every node     starts its ranks; what they end with goes to the head, which says the exit code of all

Invariant: every process of a job ends with the same code, and none outlives the others by more than half a minute.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cluster.describe.machine import Machine
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.launch.allocator import set_allocator
from shardwise.launch.local import JobEnds, Share, loopback_store, next_attempt, ranks_ended
from shardwise.launch.nodes.connection import Frame
from shardwise.launch.nodes.follower import Follower
from shardwise.launch.nodes.head import Head
from shardwise.launch.nodes.hello import check_nodes, hello, machine_of, named
from shardwise.launch.nodes.interfaces import choose_interface, own_address
from shardwise.launch.nodes.mirror import (
    SHARED_SIGN,
    Outbox,
    digest_of,
    fetch,
    files_to_read,
    open_mirror,
    piece_of,
    take_in,
)
from shardwise.launch.nodes.secret import read_secret, shared_secret
from shardwise.launch.outcome import Failure, RanksEnded, exit_code
from shardwise.private_names import check_private_names
from shardwise.run.build import corpus_of, model_spec
from shardwise.run.rundir import RunDir
from shardwise.terminal import patience, say, say_error

if TYPE_CHECKING:
    from shardwise.launch.place import NodePlace
    from shardwise.launch.start import PlannedRun

JOIN_S = 600.0  # seconds that nodes may start after each other
READY_S = 3600.0  # to fetch a checkpoint and to read the text
END_S = 60.0  # for the other nodes to say how their ranks ended
SEND_EVERY_S = 1.0


@dataclass(frozen=True)
class NodeJob:
    """What this node was asked to do, before anybody has planned anything."""

    place: NodePlace
    asked: str  # a digest of it, the same on all nodes
    interface: str | None  # comm.interface
    runs: Path  # run.dir
    prepare: Callable[[Machine], tuple[RunDir, PlannedRun]]
    """Returns the run directory and the run, ready to start on all nodes together; only the head calls it."""
    options: tuple[str, ...] = ()  # for ranks: --no-verify and the like
    from_step: int | None = None


def work_on_node(job: NodeJob) -> int:
    """Does this node's part of a job and returns the exit code, which is the same on all nodes."""
    place = job.place
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's store warns of every address without a name
    with ExitStack() as opened:
        if place.secret_file:
            secret = read_secret(Path(place.secret_file))
        else:
            file = job.runs / f".secret-{place.scheduler}-{place.job}-{place.attempt}"
            secret = shared_secret(file, is_head=place.index == 0)
            opened.callback(file.unlink, missing_ok=True)
        return _Leader(job, secret).work() if place.index == 0 else _Member(job, secret).work()


class _Leader:
    """The head's part."""

    def __init__(self, job: NodeJob, secret: bytes):
        self.job, self.place = job, job.place
        self.own = own_address(job.interface, job.place.heads)
        self.head = Head(self.own.address, job.place.port, job.place.count, secret)
        self.ended: dict[int, dict[str, Any]] = {}  # how ranks of other nodes have ended
        self.lost: tuple[int, str] | None = None  # the node that was lost first, and how

    def work(self) -> int:
        with self.head:
            try:
                return self._work()
            except BaseException as error:  # the others must not wait
                code = error.code if isinstance(error, UserError) else Exit.INTERRUPTED
                self.head.tell("refuse", text=str(error) if isinstance(error, UserError) else "", exit=int(code))
                raise

    def _work(self) -> int:
        self._meet()
        machine = machine_of({0: hello(0, self.job.asked, self.place.attempt), **self.head.hellos})
        run, planned = self.job.prepare(machine)
        plan, count = planned.plan, self.place.count
        if run.state() == "finished":
            say(f"run      {run.path} is finished; nothing to do")
            self.head.tell("exit", code=int(Exit.DONE))
            return Exit.DONE
        if plan.world % count:
            raise UserError(
                f"{plan.layout} has {plan.world} rank{'s' if plan.world > 1 else ''}, this job has {count} nodes",
                why="every node of a job starts as many ranks as the others",
                fix=f"--nproc {max(1, plan.world // count)}, or a job of other nodes",
            )
        local, files = plan.world // count, files_to_read(run, self.job.from_step)
        with run.lock():
            from shardwise.launch.start import write_run

            write_run(run, planned)
            check_private_names()
            files |= files_to_read(run, 0)
            sign = secrets.token_hex(8)
            write_atomically(run.path / SHARED_SIGN, sign)
            if plan.device == "cuda":
                set_allocator(plan.allocator, os.environ)
            share = Share(local, plan.world, interface=self.own.name, attempt=next_attempt(run))
            options = [*self.job.options, *([] if self.job.from_step is None else ["--from-step", str(self.job.from_step)])]
            self.head.tell(
                "run",
                path=str(run.path.resolve()),
                sign=sign,
                files=files,
                digest=digest_of(run),
                text=planned.corpus.fingerprint,
                options=options,
                threads=plan.threads_per_rank,
                device=plan.device,
                allocator=plan.allocator,
                share=asdict(share),
            )
            self._wait_until_ready(run, files)
            store, self.head.store_port = loopback_store()
            share = Share(**{**asdict(share), "store_port": self.head.store_port})
            self.head.tell("go")
            ended = ranks_ended(run, share, plan.threads_per_rank, options, attend=lambda: self._attend(run))
            code = self._settle(run, ended)
            del store
        self.head.tell("exit", code=code)
        return code

    def _meet(self) -> None:
        """Waits for all other nodes and compares what they say."""
        place, began = self.place, time.monotonic()
        say(f"nodes    {place.count} by {place.scheduler}, job {place.job}; this is node 0, at {self.own}")
        with patience(f"waiting  for {place.count - 1} other node{'s' if place.count > 2 else ''} ...", 3.0):
            while len(self.head.hellos) < place.count - 1:
                if time.monotonic() - began > JOIN_S:
                    raise self._missing()
                time.sleep(0.05)
        check_nodes({0: hello(0, self.job.asked, place.attempt), **self.head.hellos})

    def _missing(self) -> UserError:
        place = self.place
        missing = [str(index) for index in range(1, place.count) if index not in self.head.hellos]
        strangers = f"; turned away: {'; '.join(self.head.strangers[-3:])}" if self.head.strangers else ""
        return UserError(
            f"{len(missing)} of {place.count} nodes did not come within {JOIN_S:.0f} s: node {', '.join(missing[:8])}",
            why=f"this is node 0, listening at {self.own} port {self.head.port}{strangers}",
            fix="look at what these nodes printed; a firewall between the nodes may close the port",
            code=Exit.HARDWARE,
        )

    def _wait_until_ready(self, run: RunDir, files: dict[str, int]) -> None:
        """Serves the files of the run to nodes that do not share them, until all are ready."""
        ready: dict[int, bool] = {}
        deadline = time.monotonic() + READY_S
        with patience("waiting  for the other nodes to read the run ...", 3.0):
            while len(ready) < self.place.count - 1:
                for index, link in self.head.links.items():
                    frame = link.receive("get", "ready", "refuse", timeout=0.02)
                    if frame is None:
                        if index not in ready and (link.lost or time.monotonic() > deadline):
                            raise self._gone(index, link.lost or f"it was not ready within {READY_S:.0f} s")
                    elif frame.words["kind"] == "get":
                        name, offset = str(frame.words.get("name")), int(frame.words.get("offset", 0))
                        link.send("piece", piece_of(run, files, name, offset))
                    elif frame.words["kind"] == "ready":
                        ready[index] = bool(frame.words.get("mirrors"))
                    else:
                        raise _refused_by(named(index, self.head.hellos[index]), frame)
        if mirrors := [index for index, is_mirror in sorted(ready.items()) if is_mirror]:
            nodes = ", ".join(map(str, mirrors[:8])) + (" ..." if len(mirrors) > 8 else "")
            say(f"nodes    {run.path} is not shared with node {nodes}: mirrored there, logs and events come here")

    def _gone(self, index: int, why: str) -> UserError:
        return UserError(
            f"{named(index, self.head.hellos[index])} is gone",
            why=why,
            fix="look at what it printed, and at the scheduler's word on that node",
            code=Exit.HARDWARE,
        )

    def _attend(self, run: RunDir) -> None:
        self._hear(run)
        failed = [index for index, words in self.ended.items() if words["failures"]]
        if failed or self.lost:
            self.head.tell("end")
            raise JobEnds

    def _hear(self, run: RunDir) -> None:
        """Takes in what the other nodes have sent."""
        for index, link in self.head.links.items():
            while not link.inbox.empty():
                frame = link.inbox.get()
                if frame.words.get("kind") == "written":
                    take_in(run, frame.words, frame.data)
                elif frame.words.get("kind") == "ended":
                    self.ended[index] = frame.words
            if index not in self.ended and link.lost and self.lost is None:
                self.lost = (index, link.lost)

    def _settle(self, run: RunDir, own: RanksEnded) -> int:
        """Waits for the other nodes and returns the exit code of the whole."""
        if own.failures:
            self.head.tell("end")
        deadline = time.monotonic() + END_S
        while len(self.ended) < self.place.count - 1 and self.lost is None and time.monotonic() < deadline:
            self._hear(run)
            time.sleep(0.02)
        late = [index for index in self.head.links if index not in self.ended]
        if self.lost is None and late:
            self.lost = (late[0], f"it did not say within {END_S:.0f} s how its ranks ended")
        if self.lost is not None:
            index, why = self.lost
            self.head.tell("end")
            problem = self._gone(index, why)
            say_error(f"error: {problem.what}\n  why  {why}\n  fix  {run.how_to_resume()}")
            run.append(
                {"event": "failed", "exit": int(problem.code), "why": problem.what, "wall_time": time.time()}
            )
            return int(problem.code)
        return exit_code(run, _together(own, self.ended.values(), was_ended=bool(self._failed_first())))

    def _failed_first(self) -> list[int]:
        return [index for index, words in self.ended.items() if words["failures"] and not words["was_ended"]]


def _together(own: RanksEnded, others: Any, was_ended: bool) -> RanksEnded:
    """Returns how the ranks of all nodes ended. Where ranks failed by themselves, those that were ended because of them
    have no say."""
    found = [(own.signals, own.failures, was_ended)]
    for words in others:
        failures = [Failure(**failure) for failure in words["failures"]]
        found.append((tuple(words["signals"]), tuple(failures), bool(words["was_ended"])))
    signals = tuple(signal for node in found for signal in node[0])
    first = [failure for _, failures, ended in found if not ended for failure in failures]
    return RanksEnded(signals, tuple(first or [failure for _, failures, _ in found for failure in failures]))


def _refused_by(node: str, frame: Frame) -> UserError:
    lines = str(frame.words.get("text", "")).splitlines()
    what, why, fix = [line.partition("  ")[2].strip() if number else line for number, line in enumerate(lines[:3])] or (
        "it gave no reason",
        "",
        "",
    )
    return UserError(
        f"{node}: {what.removeprefix('error: ')}",
        why=why.removeprefix("why").strip(),
        fix=fix.removeprefix("fix").strip(),
        code=Exit(int(frame.words.get("exit", Exit.USER_MISTAKE))),
    )


class _Member:
    """The part of a node that is not the head."""

    def __init__(self, job: NodeJob, secret: bytes):
        self.job, self.place = job, job.place
        self.interface = choose_interface(job.interface, job.place.heads)
        said = hello(self.place.index, job.asked, self.place.attempt)
        self.way = Follower(self.place.heads, self.place.port, secret, said, JOIN_S)
        self.was_ended = False
        self.outbox: Outbox | None = None
        self.sent_at = 0.0

    def work(self) -> int:
        with self.way:
            try:
                return self._work()
            except UserError as error:
                self.way.link.send("refuse", text=str(error), exit=int(error.code))
                raise

    def _work(self) -> int:
        link = self.way.link
        frame = link.receive("run", "exit", "refuse", timeout=JOIN_S + READY_S)
        if frame is None or frame.words["kind"] != "run":
            return self._left(frame)
        words = frame.words
        run = self._open(words)
        link.send("ready", mirrors=self.outbox is not None)
        frame = link.receive("go", "exit", "refuse", timeout=READY_S)
        if frame is None or frame.words["kind"] != "go":
            return self._left(frame)
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
        failures = [asdict(failure) for failure in ended.failures]
        link.send("ended", signals=list(ended.signals), failures=failures, was_ended=self.was_ended)
        return self._left(link.receive("exit", "refuse", timeout=END_S))

    def _open(self, words: dict[str, Any]) -> RunDir:
        """Returns the run directory on this node: the shared one, or a mirror that is up to date. Refuses what would
        have this node's ranks compute something else."""
        shared = Path(words["path"])
        with suppress(OSError):
            if (shared / SHARED_SIGN).read_text() == words["sign"]:
                self._check(RunDir(shared), words)
                return RunDir(shared)
        path, files = shared, {str(name): int(size) for name, size in words["files"].items()}
        names = open_mirror(path, f"{self.way.address}:{shared}", files)
        fetch(path, files, names, self._piece)
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
        frame = self.way.link.receive("piece", timeout=END_S)
        return frame.data if frame else b""

    def _attend(self) -> None:
        link = self.way.link
        while not link.inbox.empty():
            if link.inbox.get().words.get("kind") in ("end", "refuse"):
                self.was_ended = True
        if self.was_ended or link.lost:
            self.was_ended = True
            raise JobEnds
        self._send()

    def _send(self, is_last: bool = False) -> None:
        if self.outbox is None or (not is_last and time.monotonic() - self.sent_at < SEND_EVERY_S):
            return
        self.sent_at = time.monotonic()
        for name, offset, piece in self.outbox.pieces(is_last):
            self.way.link.send("written", piece, name=name, offset=offset)

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


def ranks_of(nproc: int | None, machine: Machine) -> int | None:
    """Returns how many ranks a job has on all its nodes, for `--nproc` on each; None where the plan decides."""
    return None if nproc is None else nproc * machine.nodes


def sequence_of(words: Sequence[str]) -> str:
    """Returns what a command asks for as one text, to be compared between nodes."""
    return "\n".join(words)
