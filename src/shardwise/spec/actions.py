"""Defines the actions that pipeline schedules are made of, what each needs before it can start, and the check of whole
lists.

A schedule gives one list of actions per rank. Sends and receives are not in the lists, they follow from them: a send
never blocks, a receive waits, and under that rule a list that passes `check_actions` cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NAMES = {"F": "forward", "B": "backward", "I": "backward inputs", "W": "backward weights", "E": "held-out forward"}
"""What clocks and events call each kind of action."""


class Action(NamedTuple):
    """One action of a schedule. `kind` is F forward, B whole backward, I gradient of the inputs only, W gradient of the
    weights only. E is a forward of something held out, which `parallel/pipeline/idle_slots.py` puts into idle slots; no
    schedule has it."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


Actions = tuple[tuple[Action, ...], ...]
"""One list of actions per rank."""


def check_actions(actions: Sequence[Sequence[Action]], owners: Sequence[int], num_microbatches: int) -> None:
    """Raises AssertionError unless each stage runs each micro-batch once, on its owner, in order and without
    deadlock."""
    if len(actions) != max(owners) + 1:
        raise AssertionError(f"{len(actions)} lists for {max(owners) + 1} ranks")
    history: dict[tuple[int, int], str] = {}
    for rank, mine in enumerate(actions):
        for action in mine:
            kind, stage, microbatch = action
            if not (0 <= stage < len(owners) and 0 <= microbatch < num_microbatches):
                raise AssertionError(f"rank {rank} runs {action}: there is no such stage or micro-batch")
            if owners[stage] != rank:
                raise AssertionError(f"rank {rank} runs {action}, which belongs to rank {owners[stage]}")
            before = history.get((stage, microbatch), "")
            if before + kind not in ("F", "FB", "FI", "FIW"):
                raise AssertionError(f"rank {rank} runs {action} after {' '.join(before) or 'nothing'}")
            history[stage, microbatch] = before + kind
    for stage in range(len(owners)):
        for microbatch in range(num_microbatches):
            ran = history.get((stage, microbatch), "")
            if ran not in ("FB", "FIW"):
                raise AssertionError(
                    f"stage {stage} runs {' '.join(ran) or 'nothing'} for micro-batch {microbatch}: not F B, not F I W"
                )
    for _ in in_order(actions, len(owners)):
        pass


def in_order(actions: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) for all of them, each after what it needs. Raises AssertionError when ranks wait for each
    other."""
    position = [0] * len(actions)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    awake = deque(range(len(actions)))
    while awake:
        rank = awake.popleft()
        while position[rank] < len(actions[rank]):
            action = actions[rank][position[rank]]
            missing = [need for need in needs(action, num_stages) if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            yield rank, action
            position[rank] += 1
            done.add(result(action))
            awake.extend(waiting.pop(result(action), ()))
    stuck = [
        f"rank {r} waits with {actions[r][position[r]]} for {need}" for need, ranks in waiting.items() for r in ranks
    ]
    if stuck:
        raise AssertionError("deadlock: " + "; ".join(sorted(stuck)))


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Returns the actions whose results must be there before this one can start."""
    kind, stage, microbatch = action
    if kind in "FE":
        return (Action(kind, stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    forward = Action("F", stage, microbatch)
    return (forward, Action("I", stage + 1, microbatch)) if stage < num_stages - 1 else (forward,)


def result(action: Action) -> Action:
    """Returns the name under which `needs` knows an action: a whole backward gives the gradient of the inputs too."""
    return action._replace(kind="I") if action.kind == "B" else action
