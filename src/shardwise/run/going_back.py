"""Decides how a run goes on after trouble that made its state worthless: back to the newest checkpoint before it, with
the batches behind the trouble passed over; or not at all.

Guards (non_finite.py) find trouble in what all ranks know of a step, so they agree on it
without a word; how the trainer goes back is in trainer.py. Invariant: a run goes back to one checkpoint MOST_TIMES at
most: what happens again and again is not in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shardwise.checkpoint import store
from shardwise.errors import UserError
from shardwise.parallel.collect import exchange
from shardwise.parallel.mesh import Mesh
from shardwise.run.session import Session

MOST_TIMES = 3


@dataclass(frozen=True)
class Trouble:
    """What a guard has found, the same on every rank."""

    step: int  # that showed it
    why: str  # in words
    newest: int  # the last step whose state is beyond doubt
    steps: tuple[int, ...] = ()  # whose batches are passed over


@dataclass(frozen=True)
class WayBack:
    """What a run does about trouble."""

    trouble: Trouble
    to: int  # the step of a checkpoint
    batches: tuple[int, ...] = ()  # that are passed over from now on, by number


class GoingBack:
    """Knows where a run can go back to, and how often it did."""

    def __init__(self, session: Session, mesh: Mesh, say: Callable[[str], None]):
        self.session, self.mesh, self.say = session, mesh, say
        self.times: Counter[int] = Counter()  # by checkpoint
        self.why_not = ""  # in words, where there was no way back

    def way_back(self, trouble: Trouble) -> WayBack | None:
        """Collective. Returns the way back from trouble; None where there is none."""
        if not self.session.corpus.can_begin_anew:
            self.why_not = "data yields its rows once"
            return None
        step = self._newest_good(trouble.newest)
        if not step:
            self.why_not = "there is no good checkpoint of before, on every node"
        elif self.times[step] == MOST_TIMES:
            self.why_not = f"it happened again after going back to step {step} {MOST_TIMES} times"
        else:
            self.times[step] += 1
            return WayBack(trouble, step)
        return None

    def _newest_good(self, limit: int) -> int:
        """Collective. Returns the newest step of at most `limit` whose checkpoint holds and is seen by every rank; 0
        for none. Nodes that do not share a directory have what was there when the run started."""
        parent, ranks, mesh = self.session.run.checkpoints, self.session.ranks, self.mesh
        seen = exchange([checkpoint.step for checkpoint in store.committed(parent)], mesh)
        with suppress(UserError):  # all are damaged
            found, damaged = store.newest_good(
                parent,
                verify=self.session.config.checkpoint.verify,
                steps=[step for step in seen[0] if step <= limit and all(step in theirs for theirs in seen)],
                share=(0, 1) if mesh.is_alone else (ranks.local_rank, ranks.local_world),
                agree=lambda problem: next((one for one in exchange(problem, mesh) if one), ""),
            )
            for line in damaged:
                self.say(line)
            return found.step if found else 0
        return 0
