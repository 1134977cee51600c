"""The training loop. Read `train` top to bottom: it is the program.

One rank's view of a run; every rank executes this file. Numerics of a step are in step.py, its timing in clock.py, what is
printed in tell.py, report.py and view.py. Ranks decide nothing alone: stopping and checkpointing are agreed on at every step.

Where results are read late (`speed.results`, the rule on GPUs), a step's numbers are waited for when the next step has been queued, so the
device never waits for the host. Whatever looks at the model (evaluation, samples, checkpoints, the end) waits for every step before it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch

from shardwise.adapters.state import adapter_state, check_base
from shardwise.checkpoint import store
from shardwise.config.units import parse_seconds
from shardwise.data.corpus import Corpus
from shardwise.data.loader import Loader, StepBatch
from shardwise.errors import Exit
from shardwise.launch.ranks import Ranks
from shardwise.memory.usage import peak_bytes
from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.optim.schedule import learning_rate
from shardwise.parallel.apply import bucket_bytes, parallelize_decoder
from shardwise.parallel.engine import Engine
from shardwise.plan.prediction.predict import predict
from shardwise.report import lines as report
from shardwise.report.reporter import Teller, Untold, is_finite
from shardwise.report.terminal import View
from shardwise.run.agreement import answer, largest, summed, wishes
from shardwise.run.bubble_filling import held_out_filler
from shardwise.run.build import corpus_of, weights_of
from shardwise.run.clock import Clock
from shardwise.run.evaluate import evaluate
from shardwise.run.events import Events
from shardwise.run.guards import StopRequests
from shardwise.run.measured_cluster import measured_cluster
from shardwise.run.measured_split import measured_split
from shardwise.run.memory_watch import MemoryWatch
from shardwise.run.metrics import Metrics
from shardwise.run.micro_batch_search import measured_micro_batch
from shardwise.run.profile import Profile
from shardwise.run.rundir import RunDir
from shardwise.run.state import collect_state, restore_state
from shardwise.run.step import find_overflow, start_step
from shardwise.spec.job import job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

AUTO_CHECKPOINT_S = 300.0


FROZEN_FLOPS = 2 / 3
"""Of a step's matrix work, when weights are frozen: no gradients of the weights."""


@dataclass(frozen=True)
class Session:
    """What a rank knows before it starts."""

    run: RunDir
    config: Config
    plan: Plan
    spec: ModelSpec
    ranks: Ranks
    device: torch.device
    memory_limit: int
    from_step: int | None = None  # resume: a certain checkpoint instead of the newest
    quiet: bool = False


def train(session: Session, stops: StopRequests) -> Exit:
    with ExitStack() as opened:  # whatever happens, threads end and files are closed
        return _train(session, stops, opened)


def _train(session: Session, stops: StopRequests, opened: ExitStack) -> Exit:
    config, plan, spec, ranks, run, device = (
        session.config, session.plan, session.spec, session.ranks, session.run, session.device,
    )  # fmt: skip

    # What it learns from, and how it is cut.
    corpus = corpus_of(config, spec, progress=False)
    view = View(plan.num_steps, corpus.unigram_entropy(), quiet=session.quiet or not ranks.is_first)
    opened.enter_context(closing(view))
    if plan.pp > 1 and config.parallel.split == "auto":
        plan = replace(plan, split=measured_split(spec, plan, config.model.attention, device))

    # This rank's part of the model, its optimizer, and where an earlier process left off.
    report.before_weights(view, config, spec)
    fill = weights_of(config.model, config.train.seed)
    engine = parallelize_decoder(
        spec,
        plan,
        ranks.rank,
        device,
        config.comm,
        config.model.attention,
        fill,
        adapter=config.adapter,
        seed=config.train.seed,
    )
    if config.train.micro_batch == "auto":
        plan = replace(plan, micro_batch=measured_micro_batch(engine, config, session.memory_limit))
        engine.follow(plan)
    cluster = measured_cluster(spec, plan, config, device, bucket_bytes(plan, config.comm))
    prediction = predict(spec, cluster, job_of(config, plan), plan)
    peak_flops = report.peak_flops(plan, device, cluster)
    if config.adapter.kind != "none":
        peak_flops /= FROZEN_FLOPS  # MFU counts what there is to compute
    optimizer = engine.optimizer(config.optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        view.say(optimizer.about())
    rate = learning_rate(config.optimizer, plan.num_steps, plan.global_batch)
    done = _restore(session, engine, optimizer, view)
    loader = opened.enter_context(
        Loader(
            corpus.train,
            global_batch=plan.global_batch,
            rows=plan.rows(engine.mesh.at.dp),
            micro_batch=plan.micro_batch,
            num_microbatches=plan.num_microbatches,
            same_shape=plan.pp > 1,
            first_step=done + 1,
            pin_memory=device.type == "cuda",
        )
    )
    events = opened.enter_context(
        closing(Events(run.events, ranks.rank, config.run.events_every, [stage.index for stage in engine.stages]))
    )
    fills = config.parallel.fill_bubbles == "eval"
    filler = held_out_filler(engine, corpus.validation, config.train.eval_batches) if fills else None
    metrics, clock = None, Clock(device)
    if ranks.is_first:
        report.write_plan(run, plan, prediction)
        report.header(view, session, plan, engine, corpus, prediction)
        metrics = opened.enter_context(closing(Metrics(run, config.run, plan.to_dict(), view.say)))
        metrics.write({"event": "resumed" if done else "started", "step": done, "wall_time": time.time()})
    watched = range(done + 1, done + (1 if fills else 2) + 1) if config.run.events_every else range(0)
    memory = MemoryWatch(engine, optimizer, clock, watched, session.memory_limit)
    profile = opened.enter_context(Profile(config.run.profile, run.trace(ranks.rank), clock, device, view))
    teller = Teller(run, plan, spec, device, prediction, peak_flops, done, view, metrics, events, memory, filler)
    checkpoint = _CheckpointClock(config.checkpoint.every, done)

    # Steps that were started and not told yet, and what was agreed on: at most `ahead` of each.
    ahead = 2 if plan.results == "late" else 1
    untold: deque[Untold] = deque()
    agreed: deque[tuple[Exit, int, bool]] = deque()  # what follows the next step: stop, its successor's targets, save
    batches: deque[StepBatch | None] = deque()
    about = done - 1  # the step after which what was last asked is settled

    def ask() -> list[int]:
        """Get this rank's rows of a step to come; say how many targets they have, and what this rank wishes before that step."""
        nonlocal about
        about += 1
        memory.gradients_are_here()
        with clock.span("data_wait", "next batch"):
            batches.append(loader.next() if about < plan.num_steps else None)
        batch = batches[-1]
        targets = batch.num_targets if batch and engine.mesh.counts_targets else 0
        return [*wishes(stops.check()), targets, int(ranks.is_first and checkpoint.due(about))]

    def tell_all_but(newest: int) -> tuple[Exit, str]:
        """Wait for steps and tell of them. DIVERGED if the last one told must be the last, with the overflow if it was one."""
        while len(untold) > newest:
            it = untold.popleft()
            result = teller.tell(it)
            agreed.append(answer(result.answers))
            if config.run.on_nan != "stop":
                continue
            if engine.scaler.is_stuck:
                return Exit.DIVERGED, find_overflow(engine, it.batch, it.started.num_targets, clock)
            # With loss scaling such a step was passed over, and a smaller scale is tried.
            if not is_finite(result) and not engine.scaler.is_active:
                return Exit.DIVERGED, ""
        return Exit.DONE, ""

    stops.has_begun = True
    clock.begin()
    agreed.extend(answer(summed(ask(), device, plan)) for _ in range(ahead))
    stop, num_targets, _ = agreed.popleft()
    overflow = ""
    for step in range(done + 1, plan.num_steps + 1) if not stop else ():
        # Train. The one small message of a step also settles how a later one starts.
        if filler:
            filler.before_step()
        batch = batches.popleft()
        assert batch is not None
        with profile.during(step), memory.during(step):
            started = start_step(
                engine,
                optimizer,
                batch,
                num_targets=num_targets,
                lr=rate(step),
                clip=config.train.clip,
                clock=clock,
                skip_non_finite=config.run.on_nan == "skip",
                ask=ask,
            )
        if step == done + 1:
            report.products(view, plan)
        is_timed = (step not in watched or plan.num_steps - done <= len(watched) + 1) and step not in profile.steps
        untold.append(Untold(step, started, clock.lap(), rate(step), batch, is_timed))

        # Tell, and see what follows this step.
        stop, overflow = tell_all_but(ahead - 1)
        if stop:
            break
        stop, num_targets, save = agreed.popleft()
        evaluates, samples = (
            every and step % every == 0 for every in (config.train.eval_every, config.train.sample_every)
        )
        if evaluates or samples or save or stop or step == plan.num_steps or profile.ends_with(step):
            diverged, overflow = tell_all_but(0)
            if diverged:
                stop = diverged
                break
        if profile.ends_with(step):
            profile.finish()
        if evaluates and step < plan.num_steps:
            report.evaluation(view, metrics, step, _evaluate(engine, corpus, session))
        if samples and step < plan.num_steps:
            report.sample(view, engine, corpus, config, ranks)
        if not untold:  # else the device is busy, and its next step began where this one ended
            clock.begin()
        if save and step < plan.num_steps:
            _save(session, step, engine, optimizer)
            checkpoint.done(step)
        if stop:
            break

    # Commit, and say how it went.
    loader.close()
    step = teller.last
    if (stop != Exit.DIVERGED or overflow) and step > checkpoint.last_step:  # what overflowed was never applied
        _save(session, step, engine, optimizer)
    if fills:
        report.filled(view, metrics, step, filler.result() if filler else None)
    peak = int(largest(peak_bytes(device), device, plan))
    was_short = teller.measured is None and step > done
    if was_short:
        teller.compare()
    measured = teller.measured
    if not stop:
        stop, *_ = answer(summed([*wishes(stops.check()), 0, 0], device, plan))
    if not stop:
        report.evaluation(view, metrics, step, _evaluate(engine, corpus, session))
        report.sample(view, engine, corpus, config, ranks)
    if metrics and stop:
        held = measured and measured["memory"]
        report.stopped(view, metrics, run, step, stop, stops.why or "another rank's request", held, overflow)
    elif metrics:
        is_right = report.finished(
            view, metrics, session, plan, corpus, prediction, teller.history, measured, peak, stops
        )
        if measured and was_short:
            report.compared(view, run, plan, prediction, measured)
        report.farewell(view, session, plan)
        return Exit.DONE if is_right else Exit.FOUND_WRONG
    return stop or Exit.DONE


def _evaluate(engine: Engine, corpus: Corpus, session: Session) -> float | None:
    plan = engine.plan
    engine.train(False)
    loss = evaluate(
        engine.evaluate,
        corpus.validation,
        global_batch=plan.global_batch,
        rows=plan.rows(engine.mesh.at.dp),
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        same_shape=plan.pp > 1,
        counts_targets=engine.mesh.counts_targets,
        device=session.device,
        max_batches=session.config.train.eval_batches,
        distributed=plan.world > 1,
    )
    engine.train(True)
    return loss


class _CheckpointClock:
    """When the next checkpoint is due: by steps, or by time."""

    def __init__(self, every: int | str, done: int):
        self.steps = every if isinstance(every, int) else None
        self.seconds = AUTO_CHECKPOINT_S if every == "auto" else None if self.steps else parse_seconds(str(every))
        self.last_step, self.last_time = done, time.monotonic()

    def due(self, step: int) -> bool:
        if self.steps:
            return step > 0 and step % self.steps == 0
        is_due = self.seconds is not None and time.monotonic() - self.last_time >= self.seconds
        if is_due:  # said once: what is asked before the checkpoint is written is not due again
            self.last_time = time.monotonic()
        return is_due

    def done(self, step: int) -> None:
        self.last_step, self.last_time = step, time.monotonic()


def _save(session: Session, step: int, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """All ranks hand in their shards, the first one writes; the others meet it again at the next agreement."""
    groups = collect_state(engine, optimizer)
    if session.ranks.is_first:
        state = {"model": session.spec.to_dict(), "plan": engine.plan.to_dict(), "seed": session.config.train.seed}
        state |= adapter_state(session.config, session.spec)
        state |= {"loss_scale": engine.scaler.to_dict()} if engine.scaler.is_active else {}
        store.save(session.run.checkpoints, step, groups, state, session.config.checkpoint.keep)


def _restore(session: Session, engine: Engine, optimizer: torch.optim.Optimizer, view: View) -> int:
    """Load the newest good checkpoint, if there is one; returns the number of steps already done."""
    if session.from_step == 0:
        if session.ranks.is_first:
            store.abandon_after(session.run.checkpoints, 0)
        return 0
    checkpoint, skipped = store.newest_good(
        session.run.checkpoints, verify=session.config.checkpoint.verify, at_step=session.from_step
    )
    for line in skipped:
        view.say(line)
    if checkpoint is None:
        return 0
    if session.from_step is not None and session.ranks.is_first:
        store.abandon_after(session.run.checkpoints, checkpoint.step)
    check_base(checkpoint.path, checkpoint.manifest()["state"], session.config, session.spec)
    restore_state(engine, optimizer, checkpoint)
    engine.scaler.restore(checkpoint.manifest()["state"].get("loss_scale", {}))
    return checkpoint.step
