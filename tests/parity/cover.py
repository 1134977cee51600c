"""A pairwise cover of the matrix: few rows in which every two values that can meet do meet.

A row has eight values: what its layout does along five kinds of axis, its model, its precision, its batch. Greedy:
the row with the most new pairs for its cost comes next, of equal ones that with the values used least so far.
Deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product

from layouts import BATCHES, LAYOUTS, MODELS, PRECISIONS, Case, degree, features, world

Value = tuple[str, str]  # which column, what stands in it
COST = {2: 1.0, 3: 1.1, 4: 1.2}  # by ranks. More take longer, but what runs on four alone has to run anyway
COST_OF_TP = {
    1: 1.0,
    2: 1.2,
    4: 4.0,
}  # hundreds of small collectives, each waiting for the slowest of four processes on few cores
COST_OF_MICROBATCH = 0.1  # each is another forward and backward in every step
MOST_RANKS = 4


@cache
def rows() -> tuple[Case, ...]:
    """Everything that can be combined, on few enough ranks."""
    small = [layout for layout in LAYOUTS if world(layout) <= MOST_RANKS]
    cases = (Case(*values) for values in product(small, MODELS, PRECISIONS, BATCHES))
    return tuple(case for case in cases if case.is_possible)


def values_of(case: Case) -> list[Value]:
    columns = features(case.layout) | {"model": case.model, "precision": case.precision, "batch": case.batch}
    return list(columns.items())


def goals_of(case: Case) -> set[tuple[Value, ...]]:
    return set(combinations(values_of(case), 2))


def cost_of(case: Case) -> float:
    """The time a row takes, roughly."""
    steps = 1 + COST_OF_MICROBATCH * case.plan.num_microbatches
    return COST[world(case.layout)] * COST_OF_TP[degree(case.layout, "tp")] * steps


def all_goals(cases: Iterable[Case]) -> set[tuple[Value, ...]]:
    return set().union(*(goals_of(case) for case in cases))


@cache
def cover() -> tuple[Case, ...]:
    numbers = {goal: number for number, goal in enumerate(sorted(all_goals(rows())))}
    left = {case: sum(1 << numbers[goal] for goal in goals_of(case)) for case in rows()}  # goals as bits of one integer
    cost = {case: cost_of(case) for case in left}
    uses: Counter[str] = Counter()
    chosen: list[Case] = []
    while left:

        def worth(case: Case, left: dict[Case, int] = left) -> tuple[float, int]:
            often = sum(uses[value] for value in (case.model, case.precision, case.batch))
            return left[case].bit_count() / cost[case], -often

        best = max(left, key=worth)
        chosen.append(best)
        uses.update((best.model, best.precision, best.batch))
        reached = left[best]
        left = {case: goals & ~reached for case, goals in left.items() if goals & ~reached}
    return tuple(chosen)
