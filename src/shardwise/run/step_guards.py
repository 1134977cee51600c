"""Asks every guard about a step whose results are here, and says what follows: nothing, repairs, going back, the end.

Guards find trouble in numbers that all ranks have alike, so the answer is the same on all of them. Read next:
non_finite.py, spikes.py, replica_check.py, going_back.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.checkpoint import store
from shardwise.errors import Exit, UserError
from shardwise.run.going_back import GoingBack, Trouble, WayBack
from shardwise.run.non_finite import NonFinite, is_finite
from shardwise.run.replica_check import Repair, ReplicaCheck
from shardwise.run.setup import Setup
from shardwise.run.spikes import Spikes
from shardwise.run.step import StepResult

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Consequence:
    """What follows from a step's results."""

    way_back: WayBack | None = None  # the run goes back
    has_diverged: bool = False  # the run ends
    repairs: tuple[Repair, ...] = ()  # that were made on replicas
    spike: Trouble | None = None  # that is only reported
    saves_again: bool = False  # the newest checkpoint may have been damaged before the repair


FINE = Consequence()


class StepGuards:
    """One rank's guards. Collective: every rank makes one."""

    def __init__(self, setup: Setup):
        config = setup.session.config.run
        self.setup, self.config = setup, config
        self.non_finite = NonFinite(config.on_nan)
        self.spikes = Spikes()
        self.replicas = ReplicaCheck(setup.engine, setup.optimizer, config.check_replicas, setup.done)
        self.going_back = GoingBack(setup.session, setup.engine.mesh, setup.say)

    def digests(self, step: int, saved: int) -> torch.Tensor | None:
        """Returns what this rank adds to the step's all-reduce, where replicas are compared in it. `saved`: the step of
        the newest checkpoint."""
        if not self.replicas.is_due(step, saved):
            return None
        with self.setup.clock.span("other", "digests of replicas"):
            return self.replicas.digests()

    def look(self, step: int, result: StepResult, saved: int) -> Consequence:
        """Collective where there is trouble. Returns what follows from a step's results."""
        scales = self.setup.engine.scaler.is_active  # then what overflows is passed over, and a smaller scale is tried
        if not scales and (trouble := self.non_finite.look(step, result)):
            way = None if self.config.on_nan == "stop" else self._way_back(trouble)
            return Consequence(way_back=way, has_diverged=way is None)
        found = self._compare(step, result.added, saved) if result.added else FINE
        if self.config.on_spike == "ignore" or found.way_back or not is_finite(result):
            return found
        if spike := self.spikes.look(step, result):
            if self.config.on_spike == "rollback" and (way := self._way_back(spike)):
                return replace(found, way_back=way)
            self.spikes.goes_on()
            return replace(found, spike=spike)
        return found

    def went_back(self, way: WayBack) -> None:
        """Is told that the run has gone back."""
        self.replicas.clean = way.to
        self.spikes.went_back(way.to)

    def _compare(self, step: int, digests: list[float], saved: int) -> Consequence:
        """Collective where replicas differ. Returns what follows from the digests of a step."""
        trouble, repairs = self.replicas.look(step, digests)
        if trouble:
            way = self._way_back(trouble)
            if way is None:
                raise self._lost(trouble)
            return Consequence(way_back=way)
        if not repairs:
            return FINE
        clean, session = self.replicas.clean, self.setup.session
        self.setup.saver.finish()
        if session.ranks.is_first:  # whichever replica wrote it, it may have been the damaged one
            store.abandon_after(session.run.checkpoints, clean)
        return Consequence(repairs=tuple(repairs), saves_again=saved > clean)

    def _way_back(self, trouble: Trouble) -> WayBack | None:
        """Collective. Returns the way back, once what is still being written is there or not: else a later step would
        be committed after it, or the one to go back to dropped."""
        with self.setup.session.heartbeat.during("going back"):
            self.setup.saver.finish()
            return self.going_back.way_back(trouble)

    def _lost(self, trouble: Trouble) -> UserError:
        return UserError(
            f"step {trouble.step}: replicas of the model do not hold the same bits any more",
            why=f"{trouble.why}. Not gone back: {self.going_back.why_not}",
            fix=f"look for errors of memory on these machines; {self.setup.session.run.how_to_resume()}",
            code=Exit.HARDWARE,
        )
