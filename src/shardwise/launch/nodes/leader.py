"""The head's part of a multi-node job: it waits for the others, plans, hands out the run, and says how it ended.

The other side is member.py. Invariant: whatever ends the head's part, the other nodes are told and end too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.launch.allocator import set_allocator
from shardwise.launch.local import LoopbackStore, Share, from_step_option, next_attempt, ranks_ended
from shardwise.launch.nodes.checks import Checks
from shardwise.launch.nodes.connection import Frame
from shardwise.launch.nodes.head import JobHead
from shardwise.launch.nodes.hello import check_nodes, hello, machine_of, named
from shardwise.launch.nodes.interfaces import choose_interface, own_address
from shardwise.launch.nodes.job import END_S, JOIN_S, READY_S, NodeJob
from shardwise.launch.nodes.mirror import digest_of, files_to_read, piece_of, shown, take_in
from shardwise.launch.nodes.preflight import Preflight, Report
from shardwise.launch.nodes.refusal import refusal_of, refused_by
from shardwise.launch.outcome import RanksEnded, together
from shardwise.launch.restarts import Restarts
from shardwise.launch.start import PlannedRun, write_run
from shardwise.launch.supervisor import JobEnds
from shardwise.private_names import check_private_names
from shardwise.run.rundir import RunDir
from shardwise.terminal import patience, say, say_error

LOOK_EVERY_S = 0.005  # at what the other nodes ask for
LAST_WORDS_S = 15.0  # for the nodes that are left when one is lost: their ranks are ended


class Leader:
    """The head's part."""

    def __init__(self, job: NodeJob, secret: bytes | Callable[[], bytes]):
        """`secret`: as JobHead takes it."""
        self.job, self.place = job, job.place
        self.interface = choose_interface(job.interface, job.place.heads)
        self.own = own_address(job.interface, job.place.heads)
        self.head = JobHead(self.own.address, job.place.port, job.place.count, secret)
        self.ended: dict[int, dict[str, Any]] = {}  # how ranks of other nodes have ended
        self.lost: UserError | None = None  # the node that was lost first, and how

    def work(self) -> int:
        with self.head:
            try:
                return self._work()
            except BaseException as error:  # the others must not wait
                self.head.tell("refuse", **refusal_of(error))
                raise

    def _work(self) -> int:
        hellos = self._meet()
        report = self._check_nodes(hellos)
        if self.job.only_checks:
            verdict = Exit.HARDWARE if report.findings else Exit.DONE
            self.head.tell("exit", code=int(verdict))
            return verdict
        run, planned = self.job.prepare(machine_of(hellos))
        is_done = max(run.steps(), default=0) >= planned.plan.num_steps and self.job.from_step is None
        if run.state() == "finished" and is_done:
            say(f"run      {run.path} is finished; nothing to do")
            self.head.tell("exit", code=int(Exit.DONE))
            return Exit.DONE
        self._check_ranks(planned)
        with run.lock():
            write_run(run, planned)
            note_excluded(run, report.excluded)
            check_private_names()
            code = self._train(run, planned)
        self.head.tell("exit", code=code)
        return code

    def _check_ranks(self, planned: PlannedRun) -> None:
        plan, count = planned.plan, self.place.count
        if plan.world % count:
            raise UserError(
                f"{plan.layout} has {plan.world} rank{'s' if plan.world > 1 else ''}, this job has {count} nodes",
                why="every node of a job starts as many ranks as the others",
                fix=f"--nproc {max(1, plan.world // count)}, or a job of another number of nodes",
            )

        local = plan.world // count
        for axis, degree in (("tp", plan.tp), ("cp x tp", plan.cp * plan.tp), ("ep", plan.ep)):
            if degree > 1 and local % degree:
                say_error(
                    f"nodes    {axis}={degree} goes over several nodes, which have {local} ranks each: "
                    "its collectives take the slow links; `shardwise plan` knows layouts that do not"
                )
                break

    def _train(self, run: RunDir, planned: PlannedRun) -> int:
        """Has all nodes start their ranks, again where that may help, and returns the exit code of the whole. A node
        that is lost is not replaced here: the scheduler does that."""
        from_step, restarts = self.job.from_step, Restarts(run, planned.config.run.max_restarts)
        while True:
            self.ended.clear()
            own = self._start(run, planned, from_step)
            if (code := self._lost_one(run, own)) is not None:
                return code
            others = [(RanksEnded.from_dict(words), bool(words["was_ended"])) for words in self.ended.values()]
            ended = together(own, others, was_ended=bool(self._failed_first()))
            if not restarts.again(ended):
                return restarts.code
            from_step = None if ended.has_begun else from_step

    def _start(self, run: RunDir, planned: PlannedRun, from_step: int | None) -> RanksEnded:
        """Has all nodes start their ranks and returns how those of this one ended."""
        plan = planned.plan
        if plan.device == "cuda":
            set_allocator(plan.allocator, os.environ)
        count = plan.world // self.place.count
        share = Share(count, plan.world, interface=self.interface.name, attempt=next_attempt(run))
        options = [*self.job.options, *from_step_option(from_step)]
        files = files_to_read(run, from_step)
        with shown(run) as sign:
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
        store = LoopbackStore()  # lives as long as the ranks of all nodes do
        self.head.store_port = store.port
        self.head.tell("go")
        ended = ranks_ended(run, share, plan.threads_per_rank, options, attend=lambda: self._attend(run), store=store)
        self._wait_until_ended(run, ended)
        return ended

    def _check_nodes(self, hellos: Mapping[int, Mapping[str, Any]]) -> Report:
        """Has all nodes checked against each other and says what was found. Before a run it is a warning: who pays for
        the nodes decides."""
        only = self.job.only_checks
        with patience("checking the nodes ...", 3.0):
            checks = Checks(0, self.job.runs, self.own.address, self.head.secret, self.head.thread)
            report = Preflight(hellos, self.head.links, checks).run(devices=only)
        if not only:
            self._frames()
        for line in report.lines() if only else report.lines()[-1:]:
            say(line)
        for error in report.errors():
            say_error(error)
        if hosts := report.excluded:
            say(f"exclude  --exclude={','.join(hosts)}   leaves {'them' if len(hosts) > 1 else 'it'} out")
        return report

    def _meet(self) -> dict[int, dict[str, Any]]:
        """Waits for all other nodes and returns what they say, if they go together."""
        place, began = self.place, time.monotonic()
        say(f"nodes    {place.count} by {place.scheduler}, job {place.job}; this is node 0, at {self.own}")
        with patience(f"waiting  for {place.count - 1} other node{'s' if place.count > 2 else ''} ...", 3.0):
            while len(self.head.hellos) < place.count - 1:
                if time.monotonic() - began > JOIN_S:
                    raise self._missing()
                self._frames()
                time.sleep(0.05)
        hellos = {0: hello(0, self.job.asked, place.attempt, place.name), **self.head.hellos}
        check_nodes(hellos)
        return hellos

    def _missing(self) -> UserError:
        place = self.place
        missing = [str(index) for index in range(1, place.count) if index not in self.head.hellos]
        strangers = f"; turned away: {'; '.join(self.head.strangers)}" if self.head.strangers else ""
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
                if time.monotonic() > deadline:
                    late = next(index for index in self.head.links if index not in ready)
                    raise self._gone(late, f"it was not ready within {READY_S:.0f} s")
                came = self._frames()
                for index, frame in came:
                    if frame.words.get("kind") == "get":
                        name, offset = str(frame.words.get("name")), int(frame.words.get("offset", 0))
                        self.head.links[index].send("piece", piece_of(run, files, name, offset))
                    elif frame.words.get("kind") == "ready":
                        ready[index] = bool(frame.words.get("mirrors"))
                if not came:
                    time.sleep(LOOK_EVERY_S)
        if mirrors := [index for index, is_mirror in sorted(ready.items()) if is_mirror]:
            nodes = ", ".join(map(str, mirrors[:8])) + (" ..." if len(mirrors) > 8 else "")
            say(f"nodes    {run.path} is not shared with node {nodes}: mirrored there, logs and events come here")

    def _frames(self) -> list[tuple[int, Frame]]:
        """Returns the next frame of each node that has sent one; raises if a node refuses, or is gone."""
        found = []
        for index, link in list(self.head.links.items()):
            frame = link.next()
            if frame is None and (why := link.lost) and (frame := link.next()) is None:  # it may have come just before
                raise self._gone(index, why)
            if frame is not None and frame.words.get("kind") == "refuse":
                raise refused_by(named(index, self.head.hellos[index]), frame)
            if frame is not None:
                found.append((index, frame))
        return found

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
            why = link.lost  # before the last frames are read
            while (frame := link.next()) is not None:
                if frame.words.get("kind") == "written":
                    take_in(run, frame.words, frame.data)
                elif frame.words.get("kind") == "ended":
                    self.ended[index] = frame.words
                elif frame.words.get("kind") == "refuse":
                    self.lost = self.lost or refused_by(named(index, self.head.hellos[index]), frame)
            if index not in self.ended and why:
                self.lost = self.lost or self._gone(index, why)

    def _wait_until_ended(self, run: RunDir, own: RanksEnded) -> None:
        """Waits until the other nodes have said how their ranks ended, or are lost."""
        if own.failures:
            self.head.tell("end")
        began, is_ending = time.monotonic(), False
        while late := [index for index, link in self.head.links.items() if index not in self.ended and not link.lost]:
            self._hear(run)
            if self.lost is not None and not is_ending:  # nobody waits for its ranks
                self.head.tell("end")
                began, is_ending = time.monotonic(), True
            if time.monotonic() - began > (LAST_WORDS_S if is_ending else END_S):
                break
            time.sleep(0.02)
        self._hear(run)
        if self.lost is None and late:
            self.lost = self._gone(late[0], f"it did not say within {END_S:.0f} s how its ranks ended")

    def _lost_one(self, run: RunDir, own: RanksEnded) -> int | None:
        """Returns the exit code of a job that has lost a node, None for one that has not."""
        if (problem := self.lost) is not None:
            self.head.tell("end")
            event = run.last_event() or {}
            if not own.failures and event.get("event") in ("finished", "stopped"):  # all ranks had come to their end
                say_error(f"nodes    {problem.what}, after the end: {problem.why}")
                return int(event.get("exit", Exit.DONE))
            say_error(f"error: {problem.what}\n  why  {problem.why}\n  fix  {run.how_to_resume()}")
            run.append({"event": "failed", "exit": int(problem.code), "why": problem.what, "wall_time": time.time()})
            return int(problem.code)
        return None

    def _failed_first(self) -> list[int]:
        return [index for index, words in self.ended.items() if words["failures"] and not words["was_ended"]]


def note_excluded(run: RunDir, hosts: list[str]) -> None:
    """Leaves in the run directory which nodes the checks have named, for a script that starts the job again
    (slurm_script.py)."""
    if hosts:
        write_atomically(run.exclude, ",".join(hosts) + "\n")
    else:
        run.exclude.unlink(missing_ok=True)
