"""Lists pipeline schedules as records: each is one function that gives the action list of every rank, and the facts
about it.

The executor runs the lists, `spec/timeline.py` times and draws them, the planner prices them; all of them ask the
record, none knows a schedule by name. To add one, write its function and one `Schedule` in `SCHEDULES`; nothing else
needs to change.

Invariant: every list made here passes `check_actions`, for any number of micro-batches.

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
    dualpipev    the V of DeepSeek's DualPipe: in its steady state a forward and a whole backward of two micro-batches
                 stand side by side; backward is split only where a rank would wait. Holds one activation more than
                 zbv.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from types import MappingProxyType

from shardwise.spec.actions import Action, Actions

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule: its algorithm, and every fact that the config, the runtime and the planner ask of it."""

    name: str
    line: str
    """What it does, in a few words, for `shardwise explain`."""
    make: Callable[[int, int, int], Lists]
    """Takes (pp, virtual stages, micro-batches) and returns one list of actions per rank."""

    fewest_stages: int = 1
    """The fewest stages per rank that it takes, and the most; None: any number."""
    most_stages: int | None = 1
    usual_stages: int = 1
    """The stages per rank where nobody says."""
    why_stages: str = "it has one stage per rank"
    """Why it takes no other number of stages per rank, and the schedule that does."""
    instead: str | None = None

    is_v: bool = False
    """Whether stages go down the ranks and up again, so that the first rank has both ends of the model. Else they go
    round and round."""
    splits_backward: bool = False
    """Whether it has I and W actions, the gradients of inputs and of weights apart."""
    holds_all: bool = False
    """Whether all micro-batches wait for their backward at once."""
    repeats: Callable[[int, int, int], bool] = lambda pp, virtual_stages, num_microbatches: True
    """Takes (pp, virtual stages, micro-batches) and returns whether later groups of micro-batches pass as the first
    ones do, so that some stand for all."""
    most_held: Callable[[int, int, int, int], int] | None = None
    """Takes (pp, virtual stages, micro-batches, rank) and returns the most activations held, where there is a formula;
    None: its list is counted."""

    is_proposed: bool = True
    """Whether the planner considers it by itself. Else it runs when asked for."""
    is_simple: bool = False
    """Whether it has one stage per rank and a whole backward: no surcharge in the planner's ranking."""
    torchtitan: str | None = None
    """What other frameworks call it; None: they do not have it."""
    megatron: bool = False

    def takes_stages(self, virtual_stages: int) -> bool:
        """Returns whether it works with so many stages per rank."""
        return self.fewest_stages <= virtual_stages <= (self.most_stages or virtual_stages)


def stage_owners(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the rank of each stage: round and round, or for a V down the ranks and up again."""
    return owners_of(_possible(schedule, pp, virtual_stages).is_v, pp, virtual_stages)


@lru_cache(maxsize=1024)
def owners_of(is_v: bool, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the rank of each stage, for a V or for stages that go round and round."""
    down = tuple(range(pp))
    return down + down[::-1] if is_v else down * virtual_stages


@lru_cache(maxsize=64)
def schedule_actions(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> Actions:
    """Returns one list of actions per rank."""
    assert num_microbatches >= 1, f"a step has at least one micro-batch, not {num_microbatches}"
    lists = _possible(schedule, pp, virtual_stages).make(pp, virtual_stages, num_microbatches)
    return tuple(map(tuple, lists))


ENOUGH = 3
"""Times pp: with more micro-batches, the same happens again and again."""


def enough_actions(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> Actions:
    """Returns the lists of actions of so many micro-batches that each rank holds as much as it ever does."""
    kind = SCHEDULES[schedule]
    is_longer = num_microbatches > ENOUGH * pp and not kind.holds_all
    if is_longer and kind.repeats(pp, virtual_stages, num_microbatches):
        num_microbatches = ENOUGH * pp + num_microbatches % pp
    return schedule_actions(schedule, pp, virtual_stages, num_microbatches)


def splits_backward(schedule: str) -> bool:
    """Returns whether a schedule uses I and W actions."""
    return SCHEDULES[schedule].splits_backward


def _possible(schedule: str, pp: int, virtual_stages: int) -> Schedule:
    """Returns the record of a schedule, and asserts that it can have these stages. The config layer has told the user
    already; this is for callers."""
    assert schedule in SCHEDULES, f"unknown schedule {schedule!r}"
    found = SCHEDULES[schedule]
    assert pp >= 1 and virtual_stages >= 1, f"pp={pp}, virtual_stages={virtual_stages}"
    assert found.takes_stages(virtual_stages), f"{schedule} with {virtual_stages} stages: {found.why_stages}"
    return found


def _gpipe(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    groups = _groups(num_microbatches, 1)
    all_of_them = virtual_stages * num_microbatches
    return [_alternate(groups, pp, rank, virtual_stages, all_of_them, "B") for rank in range(pp)]


def _one_forward_one_backward(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    groups = _groups(num_microbatches, max(1, num_microbatches // pp))
    return [_alternate(groups, pp, rank, virtual_stages, pp - 1 - rank, "B") for rank in range(pp)]


def _interleaved(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Returns the lists as published: the second forward per rank in its warm-up hides the sends."""
    groups = _groups(num_microbatches, max(1, num_microbatches // pp))
    loop = _first_loop(groups, virtual_stages)
    return [_alternate(groups, pp, rank, virtual_stages, loop + 2 * (pp - 1 - rank), "B") for rank in range(pp)]


def _zero_bubble(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    groups = _groups(num_microbatches, max(1, num_microbatches // pp))
    loop = _first_loop(groups, virtual_stages)
    orders = [_alternate(groups, pp, rank, virtual_stages, loop + pp - 1 - rank, "I") for rank in range(pp)]
    return _fill_with_weights(orders, pp * virtual_stages, limit=loop + pp)


def _zbv(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    return _fill_with_weights([_vee(pp, rank, num_microbatches) for rank in range(pp)], 2 * pp, limit=2 * pp)


def _dualpipev(pp: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Returns DualPipeV in the eight steps of its authors (DeepSeek, "DualPipe", the cut-in-half variant). 0 is a
    rank's stage on the way down, 1 the one on the way up; B is a whole backward, I and W are its halves. It is defined
    for M >= 2 pp; fewer pass as in zbv."""
    if num_microbatches < 2 * pp:
        return _zbv(pp, virtual_stages, num_microbatches)
    lists = []
    for rank in range(pp):
        below, odd = pp - 1 - rank, rank % 2
        turns = ["F0"] * (2 * below)  # 1: nF0
        turns += ["F0", "F1"] * (rank + 1)  # 2: nF0F1
        turns += ["I1", "W", "F1"] * below  # 3: nB1W1F1, with a split backward
        turns += ["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * pp + rank + 1)  # 4, the steady state: nF0B1F1B0
        turns += ["B1", "F1", "B0"] * below  # 5: nB1F1B0
        middle = (rank + 1) // 2
        for turn in range(rank + 1):  # 6: nB1B0; its second half splits backward
            turns += ["I1" if turn > middle or (turn == middle and odd) else "B1"]
            turns += ["I0" if turn >= middle else "B0"]
        turns += ["W", "I0"] * below  # 7: nWB0
        turns += ["W"] * (rank + 1)  # 8: nW
        lists.append(_numbered(turns, stages=(rank, 2 * pp - 1 - rank)))
    return lists


def _numbered(turns: Sequence[str], stages: tuple[int, int]) -> list[Action]:
    """Returns turns such as F0, I1 or W as actions: each stage takes its micro-batches in order, W the oldest weight
    gradients that wait."""
    taken: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    order = []
    for turn in turns:
        if turn == "W":
            if waiting:
                order.append(Action("W", *waiting.popleft()))
            continue
        kind, stage = turn[0], stages[int(turn[1])]
        count = ("F" if kind == "F" else "B", stage)
        order.append(Action(kind, stage, taken[count]))
        if kind == "I":
            waiting.append((stage, taken[count]))
        taken[count] += 1
    return order + [Action("W", *left) for left in waiting]


def _first_loop(groups: list[range], virtual_stages: int) -> int:
    """Returns how many forwards a rank makes before its last stage sees its first micro-batch."""
    return (virtual_stages - 1) * len(groups[0])


def _groups(num_microbatches: int, count: int) -> list[range]:
    """Returns `count` groups of nearly equal size, larger first. A group passes all stages of a rank before the next
    starts.

    The textbook takes groups of pp, so M must divide by pp. Groups of at least pp keep its bubble for every M >= pp.
    That costs memory where M is small and just below a multiple of pp: with M = 2 pp - 1 the whole batch is one group.
    """
    size, larger = divmod(num_microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _alternate(
    groups: list[range], pp: int, rank: int, virtual_stages: int, warm_up: int, backward: str
) -> list[Action]:
    """Returns `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    stages = [loop * pp + rank for loop in range(virtual_stages)]
    forwards = [Action("F", stage, m) for group in groups for stage in stages for m in group]
    backwards = [Action(backward, stage, m) for group in groups for stage in reversed(stages) for m in group]
    pairs = zip_longest(forwards[warm_up:], backwards)
    return forwards[:warm_up] + [action for pair in pairs for action in pair if action]


def _vee(pp: int, rank: int, num_microbatches: int) -> list[Action]:
    """Returns F and I of one rank of a V. `down` is its stage on the way to the last rank, `up` the one on the way
    back.

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
    """Returns lists of F and I with W added: where a rank would wait, or where it holds `limit` activations and must
    free one.

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


def _group(pp: int, num_microbatches: int) -> int:
    """Returns how many micro-batches pass a stage before the next stage of the rank takes over."""
    return -(-num_microbatches // max(1, num_microbatches // pp))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        record.name: record
        for record in (
            Schedule(
                "gpipe",
                "all forwards, then all backwards",
                _gpipe,
                instead="interleaved",
                holds_all=True,
                most_held=lambda pp, v, m, rank: v * m,
                is_simple=True,
                torchtitan="GPipe",
            ),
            Schedule(
                "1f1b",
                "one forward, one backward in turn; the default",
                _one_forward_one_backward,
                instead="interleaved",
                most_held=lambda pp, v, m, rank: pp - rank,
                is_simple=True,
                torchtitan="1F1B",
                megatron=True,
            ),
            Schedule(
                "interleaved",
                "1f1b over two stages per rank (more are possible)",
                _interleaved,
                fewest_stages=2,
                most_stages=None,
                usual_stages=2,
                why_stages="it takes turns between the stages of a rank",
                instead="1f1b",
                most_held=lambda pp, v, m, rank: (v - 1) * _group(pp, m) + 2 * (pp - 1 - rank) + 1,
                torchtitan="Interleaved1F1B",
                megatron=True,
            ),
            Schedule(
                "zero-bubble",
                "W fills the gaps; also over several stages per rank",
                _zero_bubble,
                most_stages=None,
                splits_backward=True,
                repeats=lambda pp, v, m: v == 1 or m % pp == 0,
                most_held=lambda pp, v, m, rank: (v - 1) * _group(pp, m) + pp,
                torchtitan="InterleavedZeroBubble",
            ),
            Schedule(
                "zbv",
                "split as well; two stages per rank, down the ranks and up again",
                _zbv,
                fewest_stages=2,
                most_stages=2,
                usual_stages=2,
                why_stages="its V goes down the ranks and up again: two stages on each",
                is_v=True,
                splits_backward=True,
                most_held=lambda pp, v, m, rank: 2 * pp,
                torchtitan="ZBVZeroBubble",
            ),
            Schedule(
                "dualpipev",
                "zbv's V with whole backwards in the steady state; runs when asked for",
                _dualpipev,
                fewest_stages=2,
                most_stages=2,
                usual_stages=2,
                why_stages="its V goes down the ranks and up again: two stages on each",
                is_v=True,
                splits_backward=True,
                is_proposed=False,
                torchtitan="DualPipeV",
            ),
        )
    }
)
"""The schedules by name, in the order in which they are offered."""
