"""A pairwise cover of the matrix: few cheap rows in which every two values that can meet do meet.

A row has eight values: what its layout does along five kinds of axis, its model, its precision, its batch. Greedy: the
row with the most new pairs for its cost comes next, of equal ones that with the values used least so far; then rows
whose pairs the others have are dropped, dear ones first. Rows on eight ranks are run in any case, and their pairs
count. Deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product

from layouts import BATCHES, LAYOUTS, MODELS, NUM_STEPS, PRECISIONS, Case, degree, features, plan_fields, world

Value = tuple[str, str]  # which column, what stands in it
MOST_RANKS = 4
CHEAPNESS = 0.5  # the power of the cost; with 1, more rows that are cheaper take longer together

EIGHT_RANKS = [
    Case("dp=2 zero=1 tp=2 sp pp=2 schedule=zero-bubble", "tied", "fp64", "odd"),
    Case("dp=4 zero=3 replicate=2 tp=2 sp", "grouped-query", "fp64", "ragged"),
    Case("tp=2 sp cp=2 cp_kind=ring pp=2 schedule=1f1b", "window", "fp64", "ragged"),
    Case("dp=2 zero=3 tp=2 sp cp=2 cp_kind=ring ep=4", "latent", "fp64", "even"),
    # Enough micro-batches for the steady state of DualPipeV, which has whole and split backwards
    *(
        Case(f"{zero}pp=2 schedule=dualpipev virtual_stages=2", "tied", "fp64", "even")
        for zero in ("", "zero=1 ", "zero=3 ")
    ),
    Case("pp=2 schedule=dualpipev virtual_stages=2", "experts", "fp64", "odd"),
]


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


def steps_of(case: Case) -> int:
    """Eight steps are promised in fp64. What else differs in fp32 and bf16 are roundings: four, eight in `make
    parity`."""
    return NUM_STEPS if case.precision == "fp64" else 4


def cost_of(case: Case) -> float:
    """Seconds of a core that a row of five steps takes on all its ranks, over gloo. The precision is not asked: each
    of the three shall have as many rows."""
    fields = plan_fields(case.layout)
    passes = case.plan.num_microbatches / degree(case.layout, "pp")
    seconds_of_a_pass = 0.011 + sum(
        seconds
        for seconds, is_here in (
            (0.016, "tp" in fields),
            (0.023, fields.get("cp_kind") == "ring"),
            (0.020, "ep" in fields),
            (0.014, case.spec.is_moe),
            (0.005, fields.get("zero", 0) > 1),
        )
        if is_here
    )
    seconds_of_a_step = 0.002 + 0.015 * ("zero" in fields) + passes * seconds_of_a_pass
    return world(case.layout) * (0.13 + 5 * seconds_of_a_step)


def all_goals(cases: Iterable[Case]) -> set[tuple[Value, ...]]:
    return set().union(*(goals_of(case) for case in cases))


@cache
def cover() -> tuple[Case, ...]:
    """The rows beside those on eight ranks."""
    numbers = {goal: number for number, goal in enumerate(sorted(all_goals(rows())))}  # goals are bits of one integer
    goals = {case: sum(1 << numbers[goal] for goal in goals_of(case)) for case in rows()}
    reached = sum(1 << numbers[goal] for goal in all_goals(EIGHT_RANKS) & numbers.keys())
    cost = {case: cost_of(case) ** CHEAPNESS for case in goals}
    uses: Counter[str] = Counter()
    chosen: list[Case] = []
    left = {case: new for case, held in goals.items() if (new := held & ~reached)}
    while left:

        def worth(case: Case, left: dict[Case, int] = left) -> tuple[float, int]:
            often = sum(uses[value] for value in (case.model, case.precision, case.batch))
            return left[case].bit_count() / cost[case], -often

        best = max(left, key=worth)
        chosen.append(best)
        uses.update((best.model, best.precision, best.batch))
        left = {case: new for case, held in left.items() if (new := held & ~left[best])}
    for case in sorted(chosen, key=cost_of, reverse=True):
        others = reached
        for other in chosen:
            others |= goals[other] if other != case else 0
        if not goals[case] & ~others:
            chosen.remove(case)
    return tuple(chosen)
