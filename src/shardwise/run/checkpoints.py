"""Knows when a run's checkpoints are due and what they say about it, and restores what an earlier process left. Read
next: saving.py, state.py, checkpoint/store.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from shardwise.adapters.state import adapter_state, check_base
from shardwise.checkpoint import store
from shardwise.config.units import parse_seconds
from shardwise.data.own_rows import RowStream
from shardwise.data.streaming import TokenStream
from shardwise.errors import UserError
from shardwise.parallel.collect import exchange
from shardwise.parallel.engine import Engine
from shardwise.run.build import stored_spec
from shardwise.run.saving import Saver, ranks_that_see
from shardwise.run.session import Session
from shardwise.run.state import restore_state

AUTO_CHECKPOINT_S = 300.0


class CheckpointClock:
    """Says when the next checkpoint is due: by steps, or by time."""

    def __init__(self, every: int | str, done: int):
        self.steps = every if isinstance(every, int) else None
        self.seconds = AUTO_CHECKPOINT_S if every == "auto" else None if self.steps else parse_seconds(str(every))
        self.last_step, self.last_time = done, time.monotonic()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step. By time it says so once: the clock is set anew."""
        if self.steps:
            return step > 0 and step % self.steps == 0
        is_due = self.seconds is not None and time.monotonic() - self.last_time >= self.seconds
        if is_due:  # said once: what is asked before the checkpoint is written is not due again
            self.last_time = time.monotonic()
        return is_due

    def done(self, step: int) -> None:
        """Notes that a checkpoint of this step is committed."""
        self.last_step, self.last_time = step, time.monotonic()


def open_saver(session: Session, engine: Engine, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> Saver:
    """Collective. Returns what saves this run."""
    config = session.config.checkpoint
    return Saver(session.run.checkpoints, engine, optimizer, keep=config.keep, background=config.background, say=say)


def described(session: Session, step: int, engine: Engine) -> dict[str, Any]:
    """Returns what a checkpoint's manifest says about the run: what is trained, on what, and where the data stands."""
    state = {"model": session.spec.to_dict(), "plan": session.plan.to_dict(), "seed": session.config.train.seed}
    state |= {"optimizer": session.config.optimizer.name} if session.own.optimizer is None else {}
    state |= adapter_state(session.config, session.spec)
    if (rows := session.corpus.train.state_after(session.inputs.passed_over.number(step))) is not None:
        state["data"] = rows
    if session.corpus.fingerprint is not None:
        state["corpus"] = session.corpus.fingerprint
    return state | ({"loss_scale": engine.scaler.to_dict()} if engine.scaler.is_active else {})


def _check_model(checkpoint: store.Checkpoint, state: dict[str, Any], session: Session) -> None:
    """Refuses the checkpoint of another model, by the fields that differ. What was changed on purpose, with `--allow`,
    stands among the overrides; it may change what is computed, but no shape."""
    stored = stored_spec(checkpoint.path, state)
    before, now = (json.loads(json.dumps(spec.to_dict())) for spec in (stored, session.spec))  # tuples become lists
    differing = [key for key in now if key != "name" and before.get(key, now[key]) != now[key]]
    if type(stored) is not type(session.spec):
        differing = ["kind"]
    elif stored.num_parameters == session.spec.num_parameters:
        differing = [key for key in differing if key not in session.config.model.overrides]
    if differing:
        shown = [f"{key} {str(before.get(key))[:40]} there, {str(now.get(key))[:40]} here" for key in differing[:4]]
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(
            f"{checkpoint.path} is of another model ({stored.name}) than this run ({session.spec.name})",
            why=", ".join(shown) + more,
            fix="move it out of the run's checkpoints, or go on from another step: --from STEP",
        )


def _check_optimizer(checkpoint: store.Checkpoint, state: dict[str, Any], session: Session) -> None:
    """Refuses the states of an optimizer that has other ones. AdamW and its 8-bit form save the same."""
    before, now = state.get("optimizer"), session.config.optimizer.name
    if (
        session.own.optimizer is None
        and before not in (None, now)
        and not {before, now} <= {"adamw", "adamw8bit", "adam"}
    ):
        raise UserError(
            f"{checkpoint.path} has the states of {before}, this run's optimizer is {now}",
            why="the states of one optimizer mean nothing to another one",
            fix=f"optimizer.name={before}, or begin a new run from `shardwise export`: model.path=DIR",
        )


def restore(session: Session, engine: Engine, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> int:
    """Loads the newest good checkpoint, if there is one, and returns the number of steps already done."""
    if session.from_step == 0:
        if session.ranks.is_first:
            store.abandon_after(session.run.checkpoints, 0)
        say("resume   from the beginning, as asked")
        return 0
    parent, mesh, ranks = session.run.checkpoints, engine.mesh, session.ranks
    if ranks.is_first and parent.is_dir():
        store.sweep(parent)
    steps = exchange([checkpoint.step for checkpoint in store.committed(parent)], mesh)[0]
    # Those that read one directory share its digests out: all ranks, or those of a node. What one finds counts for all.
    see_one = ranks.nodes == 1 or all(ranks_that_see(parent, mesh))
    checkpoint, skipped = store.newest_good(
        parent,
        verify=session.config.checkpoint.verify,
        at_step=session.from_step,
        steps=steps,
        share=(ranks.rank, ranks.world) if see_one else (ranks.local_rank, ranks.local_world),
        agree=lambda problem: next((one for one in exchange(problem, mesh) if one), ""),
    )
    for line in skipped:
        say(line)
    if checkpoint is None:
        if session.run.metrics.is_file():  # an earlier process began
            say("resume   no checkpoint is committed: from the beginning")
        return 0
    say(f"resume   from step {checkpoint.step} of {session.plan.num_steps}, {checkpoint.path}")
    if session.from_step is not None and session.ranks.is_first:
        store.abandon_after(session.run.checkpoints, checkpoint.step)
    state = checkpoint.manifest().state
    _check_model(checkpoint, state, session)
    _check_optimizer(checkpoint, state, session)
    check_base(checkpoint.path, state, session.config, session.spec)
    restore_state(engine, optimizer, checkpoint)
    engine.scaler.restore(state.get("loss_scale", {}))
    if isinstance(session.corpus.train, RowStream | TokenStream) and "data" in state:
        session.corpus.train.restore(state["data"], session.inputs.passed_over.number(checkpoint.step) + 1)
    if state.get("corpus", session.corpus.fingerprint) != session.corpus.fingerprint:
        say("data     the text is not the one that the checkpoint was trained on: its files or settings have changed")
    return checkpoint.step
