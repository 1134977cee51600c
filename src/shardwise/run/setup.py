"""Makes one rank ready for its first step: engine, optimizer, loader, what an earlier process left, and what watches
the run.

Set-up is also where the plan becomes final: layers per stage and sequences per micro-batch are measured here when they
are left open. From then on nobody changes it. Invariant: `session.plan` and the engine's plan are one object.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch

from shardwise.data.loader import Loader
from shardwise.data.own_rows import RowStream
from shardwise.data.quarantine import FILE as QUARANTINED
from shardwise.data.streaming import TokenStream
from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.optim.schedule import learning_rate
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.collect import exchange
from shardwise.parallel.engine import Engine
from shardwise.run.bubble_filling import held_out_filler
from shardwise.run.build import use_losses, weights_of
from shardwise.run.checkpoints import open_saver, restore
from shardwise.run.clock import Clock
from shardwise.run.listener import Listener
from shardwise.run.measured_cluster import measured_cluster
from shardwise.run.measured_split import measured_split
from shardwise.run.memory_watch import MemoryWatch
from shardwise.run.micro_batch_search import search_micro_batch
from shardwise.run.passed_over import PassedOver, batches_in
from shardwise.run.planner import Planner
from shardwise.run.profile import Profile
from shardwise.run.session import Session


class Setup:
    """Everything that one rank needs to train. Collective: every rank makes one. `opened` closes what it opens."""

    def __init__(self, session: Session, planner: Planner, listener: Listener, opened: ExitStack):
        config, spec, device = session.config, session.spec, session.device
        self.session = session
        self.engine = _build_engine(session, planner)
        plan = session.plan
        measured = measured_cluster(spec, plan, config, device, self.engine.bucket_bytes, session.ranks.nodes)
        self.forecast = planner.forecast(plan, *measured)
        self.optimizer = self.engine.optimizer(config.optimizer, session.own.optimizer)
        peak, given = config.optimizer.peak_lr, max(float(group["lr"]) for group in self.optimizer.param_groups)
        if session.own.optimizer is not None and given != peak:
            listener.say(f"lr       {peak:g} of optimizer.lr goes for the program's optimizer, not its own {given:g}")
        if isinstance(self.optimizer, OffloadedOptimizer):
            listener.say(self.optimizer.about())
        self.learning_rate = learning_rate(config.optimizer, plan.num_steps, plan.global_batch)
        # torch seeds its own generator from the system in every process. What draws from it (nothing of ours) is to be
        # the same in two runs with one seed, and so is the state of it that checkpoints keep.
        torch.default_generator.manual_seed(config.train.seed)
        passed_over = batches_in(session.run.passed_over) if session.ranks.is_first else []
        self.passed_over = session.inputs.passed_over = PassedOver(exchange(passed_over, self.engine.mesh)[0])
        self._opened, self.say = opened, listener.say
        self.done = restore(session, self.engine, self.optimizer, listener.say)  # steps of earlier processes
        self.saver = opened.enter_context(open_saver(session, self.engine, self.optimizer, listener.say))
        if self.done and isinstance(session.corpus.train, RowStream) and not session.corpus.train.has_state:
            listener.say(f"data     passing over the rows of {self.done} steps: data has no state_dict to go on from")
        if isinstance(session.corpus.train, TokenStream):
            session.corpus.train.say = listener.say
            if session.corpus.train.quarantine and session.ranks.is_first:
                session.corpus.train.quarantine.list_in(session.run.path / QUARANTINED, listener.say)
        self.loader = opened.enter_context(self._open_loader(self.done))
        self.fills_bubbles = plan.fill_bubbles == "eval"
        validation, num_batches = session.corpus.validation, config.train.eval_batches
        self.filler = held_out_filler(self.engine, validation, num_batches) if self.fills_bubbles else None
        self.clock = Clock(device)
        self.clock.heartbeat = session.heartbeat
        num_watched = (1 if self.fills_bubbles else 2) if config.run.events_every else 0
        self.watched_steps = range(self.done + 1, self.done + num_watched + 1)
        self.memory = MemoryWatch(
            self.engine, self.optimizer, self.clock, self.watched_steps, session.memory_limit, planner.process_bytes
        )
        trace = session.run.trace(session.ranks.rank)
        self.profile = opened.enter_context(Profile(config.run.profile, trace, self.clock, device, listener.say))

    def go_back(self, step: int) -> None:
        """Collective. Takes the state of an earlier step's checkpoint, and leaves those after it behind. Data goes on
        there, but for what is passed over. Whoever asks for it says so."""
        self.loader.close()
        self.session.corpus.begin_anew()
        restore(replace(self.session, from_step=step), self.engine, self.optimizer, lambda line: None)
        self.loader = self._opened.enter_context(self._open_loader(step))

    def _open_loader(self, done: int) -> Loader:
        plan = self.session.plan
        return Loader(
            self.session.corpus.train,
            global_batch=plan.global_batch,
            rows=plan.rows(self.engine.mesh.at.dp),
            micro_batch=plan.micro_batch,
            num_microbatches=plan.num_microbatches,
            same_shape=plan.pp > 1,
            first_step=self.passed_over.number(done) + 1,
            passed_over=self.passed_over.batches,
            pin_memory=self.session.device.type == "cuda",
        )

    def is_timed(self, step: int) -> bool:
        """Returns whether the time of this step counts: nothing is measured in it that takes time itself, or the run is
        too short to choose."""
        is_short = self.session.plan.num_steps - self.done <= len(self.watched_steps) + 1
        return (step not in self.watched_steps or is_short) and step not in self.profile.steps


def _build_engine(session: Session, planner: Planner) -> Engine:
    """Collective. Returns this rank's part of the model, in the final plan."""
    config, spec, device, inputs = session.config, session.spec, session.device, session.inputs
    if inputs.plan.pp > 1 and config.parallel.split == "auto":
        split = measured_split(spec, inputs.plan, config.model.attention, device)
        inputs.plan = replace(inputs.plan, split=split)
    engine = parallelize_decoder(
        spec,
        inputs.plan,
        session.ranks.rank,
        device,
        config.model.attention,
        weights_of(config.model, config.train.seed),
        adapter=config.adapter,
        seed=config.train.seed,
    )
    if session.own.loss is not None:
        use_losses(engine.models, session.own.loss)
    if config.train.micro_batch == "auto":
        size = search_micro_batch(engine, planner, session.memory_limit)
        inputs.plan = replace(inputs.plan, micro_batch=size)
        engine.follow(inputs.plan)
    return engine
