"""Pipeline schedules as data: what each rank does, in which order, in one training step.

A schedule is a pure function of (name, ranks, virtual stages, micro-batches). One list per rank comes out; the executor
runs it, `spec/timeline.py` times it, the page draws it. So what is drawn is what runs.

Invariant: every list made here passes `check_actions`, for any number of micro-batches. Messages are not in the lists,
they follow from them: a send never blocks, a receive waits, and under that rule no list can deadlock.

The model is cut into pp * virtual_stages stages in model order. An *activation* is what one stage keeps of one
micro-batch. It is held from its forward until its weight gradients are done: until B, or until W where backward is
split. With M micro-batches:

    gpipe        all forwards, then all backwards. Holds all M.
    1f1b         one forward, one backward in turn (PipeDream-flush). Rank r holds min(M, pp - r).
    interleaved  1f1b over several stages per rank: the bubble shrinks by their number, the memory grows.
    zero-bubble  backward is split, and W fills gaps. With one stage per rank (ZB-H1) a third of 1f1b's bubble, if
                 F = I = W and M >= pp; every rank may hold min(M, pp), which in 1f1b only rank 0 does.
    zbv          split as well, two stages per rank in a V: 2 min(M, pp) activations of half the size. If F = I = W
                 and M >= pp, half the bubble of ZB-H1: only the way down to the last rank is left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
NAMES = {"F": "forward", "B": "backward", "I": "backward inputs", "W": "backward weights", "E": "held-out forward"}
"""Of the kinds of action, in clocks and events."""


class Action(NamedTuple):
    """`kind`: F forward, B whole backward, I gradient of the inputs only, W gradient of the weights only. E is a forward of
    something held out, which `parallel/pipeline/idle_slots.py` puts into idle slots; no schedule has it."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


Actions = tuple[tuple[Action, ...], ...]
"""One list per rank."""


def splits_backward(schedule: str) -> bool:
    """Whether it uses I and W in place of B."""
    return schedule in ("zero-bubble", "zbv")


@lru_cache(maxsize=1024)
def stage_owners(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage: round and round, except for the V, which goes down the ranks and up again."""
    _assert_possible(schedule, pp, virtual_stages)
    if schedule == "zbv":
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * virtual_stages))


@lru_cache(maxsize=64)
def schedule_actions(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> Actions:
    """One list of actions per rank."""
    _assert_possible(schedule, pp, virtual_stages)
    assert num_microbatches >= 1, f"a step has at least one micro-batch, not {num_microbatches}"
    if schedule == "zbv":
        return _fill_with_weights([_vee(pp, rank, num_microbatches) for rank in range(pp)], 2 * pp, limit=2 * pp)

    groups = _groups(num_microbatches, 1 if schedule == "gpipe" else max(1, num_microbatches // pp))
    first_loop = (virtual_stages - 1) * len(groups[0])  # forwards before a rank's last stage sees its first micro-batch
    orders = []
    for rank in range(pp):
        below = pp - 1 - rank  # ranks between this one and the last
        warm_up = {
            "gpipe": virtual_stages * num_microbatches,
            "1f1b": below,
            "interleaved": first_loop + 2 * below,  # as published: the second forward per rank hides the messages
            "zero-bubble": first_loop + below,
        }[schedule]
        orders.append(_alternate(groups, pp, rank, virtual_stages, warm_up, "I" if splits_backward(schedule) else "B"))
    if splits_backward(schedule):
        return _fill_with_weights(orders, pp * virtual_stages, limit=first_loop + pp)
    return tuple(map(tuple, orders))


def check_actions(actions: Sequence[Sequence[Action]], owners: Sequence[int], num_microbatches: int) -> None:
    """AssertionError unless each stage runs each micro-batch once, on its owner, in order and without deadlock."""
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
    """(rank, action) for all of them, each after what it needs. AssertionError when ranks wait for each other."""
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
    """Whose results must be there before it can start."""
    kind, stage, microbatch = action
    if kind in "FE":
        return (Action(kind, stage - 1, microbatch),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    forward = Action("F", stage, microbatch)
    return (forward, Action("I", stage + 1, microbatch)) if stage < num_stages - 1 else (forward,)


def result(action: Action) -> Action:
    """The name under which `needs` knows it: a whole backward gives the gradient of the inputs too."""
    return action._replace(kind="I") if action.kind == "B" else action


def _assert_possible(schedule: str, pp: int, virtual_stages: int) -> None:
    """The config layer has told the user already; this is for callers."""
    assert schedule in SCHEDULES, f"unknown schedule {schedule!r}"
    assert pp >= 1 and virtual_stages >= 1, f"pp={pp}, virtual_stages={virtual_stages}"
    assert schedule != "1f1b" or virtual_stages == 1, "1f1b has one stage per rank; with more it is called interleaved"
    assert schedule != "interleaved" or virtual_stages >= 2, "interleaved needs at least two stages per rank"
    assert schedule != "zbv" or virtual_stages == 2, "zbv has two stages per rank"


def _groups(num_microbatches: int, count: int) -> list[range]:
    """`count` groups of nearly equal size, larger first. A group passes all stages of a rank before the next starts.

    The textbook takes groups of pp, so M must divide by pp. Groups of at least pp keep its bubble for every M >= pp.
    That costs memory where M is small and just below a multiple of pp: with M = 2 pp - 1 the whole batch is one group.
    """
    size, larger = divmod(num_microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _alternate(
    groups: list[range], pp: int, rank: int, virtual_stages: int, warm_up: int, backward: str
) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    stages = [loop * pp + rank for loop in range(virtual_stages)]
    forwards = [Action("F", stage, m) for group in groups for stage in stages for m in group]
    backwards = [Action(backward, stage, m) for group in groups for stage in reversed(stages) for m in group]
    pairs = zip_longest(forwards[warm_up:], backwards)
    return forwards[:warm_up] + [action for pair in pairs for action in pair if action]


def _vee(pp: int, rank: int, num_microbatches: int) -> list[Action]:
    """F and I of one rank of a V. `down` is its stage on the way to the last rank, `up` the one on the way back.

    It needs room for 2 pp activations. With F = I = W and M >= 2 pp - 1, once W fills what is open, no rank waits
    between its first and its last action.
    """
    down, up = rank, 2 * pp - 1 - rank
    above, below = rank, pp - rank
    turns = [("F", down)] * (2 * below - 1)  # until the first micro-batch has been at the last rank and comes up again
    turns += [("F", up), ("F", down)] * above  # until it has reached rank 0, the end of the model
    turns += [("F", up), ("I", up)] * below  # until its gradient has come up on the other side
    turns += [("F", down), ("I", down), ("F", up), ("I", up)] * (num_microbatches - pp)
    turns += [("I", down), ("I", up)] * above
    turns += [("I", down)] * below
    taken: Counter[tuple[str, int]] = Counter()
    order = []
    for turn in turns:
        if taken[turn] < num_microbatches:  # few micro-batches: turns stay empty
            order.append(Action(*turn, taken[turn]))
            taken[turn] += 1
    return order


def _fill_with_weights(orders: Sequence[Sequence[Action]], num_stages: int, limit: int) -> Actions:
    """Adds W to lists of F and I: where a rank would wait, or where it holds `limit` activations and must free one.

    Every action counts as one unit of time, as in the published schedules.
    """
    count = 1 + max(action.microbatch for action in orders[0])
    forwards = [bytearray(count) for _ in range(num_stages)]  # by stage and micro-batch: whether it is done
    gradients = [bytearray(count) for _ in range(num_stages)]
    weights: list[deque[Action]] = [deque() for _ in orders]
    position, held, left = [0] * len(orders), [0] * len(orders), sum(map(len, orders))
    filled: list[list[Action]] = [[] for _ in orders]
    while left or any(weights):
        now = []
        for rank, order in enumerate(orders):
            at = position[rank]
            if at < len(order):
                kind, stage, microbatch = action = order[at]
                # The forward that an I needs as well stands before it in the same list.
                if kind == "I":
                    is_ready = stage == num_stages - 1 or gradients[stage + 1][microbatch]
                else:
                    is_ready = held[rank] < limit and (stage == 0 or forwards[stage - 1][microbatch])
                if is_ready:
                    now.append((rank, action))
                    position[rank], left = at + 1, left - 1
                    continue
            if weights[rank]:
                now.append((rank, weights[rank].popleft()))
        assert now, f"no rank can move: {[str(o[at]) for o, at in zip(orders, position, strict=True) if at < len(o)]}"
        for rank, action in now:  # only now: what ends in this unit can be used in the next
            kind, stage, microbatch = action
            filled[rank].append(action)
            if kind == "F":
                forwards[stage][microbatch] = 1
                held[rank] += 1
            elif kind == "I":
                gradients[stage][microbatch] = 1
                weights[rank].append(Action("W", stage, microbatch))
            else:
                held[rank] -= 1
    return tuple(map(tuple, filled))
