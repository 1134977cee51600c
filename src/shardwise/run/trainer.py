"""Does what the loop asks for, one method per sentence of it (loop.py). Every rank has one `Trainer`; they decide
nothing alone.

Where results are read late (`speed.results`, the rule on GPUs), a step's results are waited for when the next step has
been queued, so the device never waits for the host. Whatever looks at the model (evaluation, samples, checkpoints, the
end) waits for every step before it. Numerics of a step are in step.py, its timing in clock.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from shardwise.checkpoint import store
from shardwise.data.loader import StepBatch
from shardwise.errors import Exit
from shardwise.memory.usage import peak_bytes
from shardwise.run.agreement import Agreed, Agreement, agreed, largest, stop_votes, summed
from shardwise.run.bubble_filling import side_seconds
from shardwise.run.checkpoints import CheckpointClock, described
from shardwise.run.clock import Lap
from shardwise.run.evaluate import EVAL_ROWS, evaluate, score
from shardwise.run.generate import sample_text
from shardwise.run.going_back import Trouble, WayBack
from shardwise.run.guards import StopRequests
from shardwise.run.listener import Ending, FinishedStep
from shardwise.run.measured_steps import CHECK_AFTER, FirstSteps, MeasuredSteps
from shardwise.run.replica_check import Repair
from shardwise.run.setup import Setup
from shardwise.run.step import StartedStep, StepResult, find_overflow, start_step
from shardwise.run.step_guards import StepGuards


@dataclass(frozen=True)
class PendingStep:
    """A step that has been started and whose results were not read yet."""

    step: int
    started: StartedStep
    lap: Lap
    batch: StepBatch


class Trainer:
    """One rank's steps, and what comes between them."""

    def __init__(self, setup: Setup, stops: StopRequests):
        session = setup.session
        self.setup, self.stops, self.plan, self.config = setup, stops, session.plan, session.config
        self.checkpoint = CheckpointClock(self.config.checkpoint.every, setup.done)
        self.ahead = 2 if self.plan.results == "late" else 1  # steps that are started before the first is read
        self.pending: deque[PendingStep] = deque()
        self.first_steps = FirstSteps()
        self.measured: MeasuredSteps | None = None
        self.last = setup.done  # the last step whose results are here
        self.follows = Agreed(Exit.DONE, 0, False)  # the step that was finished last
        self.overflow = ""  # what does not fit into fp16 at any loss scale
        self.next_step = setup.done + 1
        self.guards = StepGuards(setup)
        self.way_back: WayBack | None = None  # what was agreed on, and not done yet
        self.repairs: list[Repair] = []  # of replicas, that nobody was told of yet
        self.spikes: list[Trouble] = []  # likewise, of those that the run goes on after
        self.saves_again = False  # what was saved last may have been damaged

    # Steps --------------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps to make, until they are done or all ranks agree to stop."""
        self.stops.has_begun = True
        self._agree_anew(self.setup.done)
        while self.next_step <= self.plan.num_steps and not self.stop:
            self.next_step += 1
            yield self.next_step - 1

    def _agree_anew(self, done: int) -> None:
        """Collective. Agrees on what follows a step that was not asked for in any step before it."""
        setup = self.setup
        self.agreement = Agreement(
            setup.loader,
            self.stops,
            self.checkpoint,
            setup.clock,
            done=done,
            num_steps=self.plan.num_steps,
            is_first=setup.session.ranks.is_first,
            counts_targets=setup.engine.mesh.counts_targets,
        )
        setup.clock.begin()
        for _ in range(self.ahead):
            self.agreement.settle(summed(self.agreement.ask(), setup.session.device, self.plan))
        self.follows = self.agreement.next()

    @property
    def stop(self) -> Exit:
        """The reason why no step follows; DONE where nothing stands against it."""
        return self.follows.stop

    def start(self, step: int) -> None:
        """Computes one step, or on a GPU queues it. Its one small all-reduce also settles how a later one starts."""
        setup = self.setup
        if setup.filler:
            setup.filler.before_step()
        batch = self.agreement.next_batch()
        digests = self.guards.digests(step, self.checkpoint.last_step)
        with setup.profile.during(step), setup.memory.during(step):
            started = start_step(
                setup.engine,
                setup.optimizer,
                batch,
                num_targets=self.follows.num_targets,
                lr=setup.learning_rate(step),
                clip=self.config.train.clip,
                clock=setup.clock,
                skip_non_finite=self.config.run.on_nan == "skip",
                ask=self._ask,
                added=digests,
            )
        self.pending.append(PendingStep(step, started, setup.clock.lap(), batch))

    def _ask(self) -> list[int]:
        self.setup.memory.gradients_are_here()
        return self.agreement.ask()

    def results_due(self, step: int) -> Iterator[FinishedStep]:
        """Yields the results of steps that are not read yet, in order: all but the newest where they are read late, and
        all of them when something looks at the model after this step. It ends with a step that must be the last."""
        yield from self._read_all_but(self.ahead - 1)
        if self.stop or self.way_back:
            return
        self.follows = self.agreement.next()
        ends_trace = self.setup.profile.ends_with(step)
        if self._looks_after(step) or ends_trace:
            yield from self._read_all_but(0)
        if ends_trace and not self.has_diverged and not self.way_back:
            self.setup.profile.finish()

    def _looks_after(self, step: int) -> bool:
        """Returns whether something after this step needs the model as it is then."""
        looks = any(_every(every, step) for every in (self.config.train.eval_every, self.config.train.sample_every))
        return looks or self.follows.save or self.saves_again or bool(self.stop) or step == self.plan.num_steps

    def _read_all_but(self, newest: int) -> Iterator[FinishedStep]:
        while len(self.pending) > newest and not self.has_diverged and not self.way_back:
            pending = self.pending.popleft()
            finished = self._read(pending)
            yield finished
            self.last = pending.step
            self.agreement.settle(finished.result.answers)
            self._check(pending, finished.result)

    def _read(self, pending: PendingStep) -> FinishedStep:
        """Waits for a step and returns its results."""
        step, lap, setup = pending.step, pending.lap, self.setup
        result, parts = pending.started.read(), lap.parts()
        is_timed, filler = setup.is_timed(step), setup.filler
        self.first_steps.add(parts, is_timed)
        side_eval = filler.after_step(step, lap.spans, parts["step_s"]) if filler else None
        is_check = step == setup.done + CHECK_AFTER
        return FinishedStep(
            step,
            result,
            lap,
            parts,
            setup.learning_rate(step),
            pending.started.num_targets,
            is_timed,
            memory_curve=setup.memory.curve(step),
            filled_s=side_seconds(lap.spans) if filler else None,
            side_eval=side_eval,
            measured=self._measure() if is_check else None,
        )

    def _measure(self) -> MeasuredSteps:
        """Collective. Notes and returns what the steps so far took on every rank."""
        self.measured = self.first_steps.gather(self.setup.memory, self.setup.session.device, self.plan)
        return self.measured

    def _check(self, pending: PendingStep, result: StepResult) -> None:
        """Looks for trouble in a step's result: all ranks find the same, go back together, or make this the last
        step. Collective where there is some."""
        scaler = self.setup.engine.scaler
        if scaler.is_stuck:
            num_targets = pending.started.num_targets
            self.overflow = find_overflow(self.setup.engine, pending.batch, num_targets, self.setup.clock)
        found = self.guards.look(pending.step, result, self.checkpoint.last_step)
        self.way_back = found.way_back
        self.repairs += found.repairs
        self.spikes += [found.spike] if found.spike else []
        self.saves_again |= found.saves_again
        if found.has_diverged or self.overflow:
            self.follows = self.follows._replace(stop=Exit.DIVERGED)

    @property
    def has_diverged(self) -> bool:
        """Whether the run ends because a step was not finite."""
        return self.stop == Exit.DIVERGED

    def go_back(self) -> WayBack:
        """Collective. Takes up the state of an earlier step and goes on from there; what was computed since is dropped,
        and the batches that are to blame are passed over. Returns where to, and why."""
        way, setup = self.way_back, self.setup
        assert way is not None
        self.way_back = None
        self.pending.clear()
        run, passed_over, is_first = setup.session.run, setup.passed_over, setup.session.ranks.is_first
        batches = [passed_over.number(step) for step in way.trouble.steps]
        if is_first:  # first of all: whatever ends this process from here on, the trouble is met again or passed over
            store.abandon_after(run.checkpoints, way.to)
        about = {"step": way.trouble.step, "why": way.trouble.why, "back_to": way.to, "wall_time": time.time()}
        passed_over.add(batches, run.passed_over, about, writes=is_first)
        setup.go_back(way.to)
        self.checkpoint.done(way.to)
        self.guards.went_back(way)
        self.last, self.next_step = way.to, way.to + 1
        self._agree_anew(way.to)
        return replace(way, batches=tuple(batches))

    def take_found(self) -> tuple[list[Repair], list[Trouble]]:
        """Returns the repairs, and the spikes that the run goes on after, since it was last asked."""
        found = self.repairs, self.spikes
        self.repairs, self.spikes = [], []
        return found

    # Between steps ------------------------------------------------------------------------------------------------

    def evaluates(self, step: int) -> bool:
        """Returns whether the model is evaluated after this step."""
        return self._goes_on(step) and _every(self.config.train.eval_every, step)

    def evaluate(self) -> float | None:
        """Collective. Returns the held-out loss in nats; None where nothing is held out."""
        engine, plan = self.setup.engine, self.plan
        engine.train(False)
        loss = evaluate(
            engine.evaluate,
            self.setup.session.corpus.validation,
            global_batch=plan.global_batch,
            rows=plan.rows(engine.mesh.at.dp),
            micro_batch=plan.micro_batch,
            num_microbatches=plan.num_microbatches,
            same_shape=plan.pp > 1,
            counts_targets=engine.mesh.counts_targets,
            device=self.setup.session.device,
            max_rows=EVAL_ROWS * self.config.train.eval_batches,
            distributed=plan.world > 1,
        )
        engine.train(True)
        return loss

    def own_evaluation(self) -> dict[str, float]:
        """Collective. Returns what the program's own evaluation finds; empty where it has none."""
        evaluate = self.setup.session.own.evaluate
        if evaluate is None:
            return {}
        self.setup.engine.train(False)
        found = dict(evaluate(partial(score, self.setup.engine)))
        self.setup.engine.train(True)
        return found

    def samples(self, step: int) -> bool:
        """Returns whether text is sampled after this step."""
        return self._goes_on(step) and _every(self.config.train.sample_every, step)

    def sample(self) -> str | None:
        """Collective where ranks hold only a part of the model. Returns a continuation in words; None on ranks that
        have none to show."""
        session = self.setup.session
        return sample_text(self.setup.engine, session.corpus, self.config, session.ranks)

    def restart_clock(self) -> None:
        """Begins the next step's time here: what came between two steps belongs to neither. A step that is queued keeps
        the device busy, and its next step began where this one ended, so the clock goes on there."""
        if not self.pending:
            self.setup.clock.begin()

    def saves(self, step: int) -> bool:
        """Returns whether a checkpoint is written after this step."""
        return self._goes_on(step) and (self.follows.save or self.saves_again)

    def save(self, step: int, *, wait: bool = False) -> None:
        """Collective. Commits a checkpoint, or begins to write one in the background. Where that still writes the one
        before, this one is left out; with `wait` it comes after it."""
        state = partial(described, self.setup.session, step, self.setup.engine)
        if self.setup.saver.save(step, state, wait=wait):
            self.checkpoint.done(step)
            self.saves_again = False

    def committed(self) -> list[int]:
        """Returns the steps whose checkpoints this rank has handed in since the last call. Raises what writing in the
        background has failed with."""
        return self.setup.saver.committed()

    def _goes_on(self, step: int) -> bool:
        """Returns whether something may follow this step: the last one is evaluated, sampled and saved at the run's
        end."""
        return not self.has_diverged and step < self.plan.num_steps

    # The end ------------------------------------------------------------------------------------------------------

    def commits(self) -> bool:
        """Returns whether the last step is still to be saved. It is not after an update that was not finite; a step
        that overflowed was never applied."""
        self.setup.loader.close()
        is_new = self.saves_again or self.last > self.checkpoint.last_step
        return (not self.has_diverged or bool(self.overflow)) and is_new

    def finish_saving(self) -> None:
        """Collective. Waits for what is still written in the background."""
        self.setup.saver.finish()

    def ending(self) -> Ending:
        """Collective. Returns how the run ended, over all ranks."""
        session, is_new = self.setup.session, self.measured is None and self.last > self.setup.done
        peak = int(largest(peak_bytes(session.device), session.device, self.plan))
        if is_new:
            self._measure()
        if not self.stop:
            votes = [*stop_votes(self.stops.check()), 0, 0]
            self.follows = agreed(summed(votes, session.device, self.plan))
        why = self.guards.going_back.why_not if self.has_diverged else self.stops.why or "another rank's request"
        return Ending(self.last, self.stop, why, self.overflow, peak, self.measured, is_new)


def _every(interval: int | None, step: int) -> bool:
    return bool(interval) and step % interval == 0  # type: ignore[operator]
