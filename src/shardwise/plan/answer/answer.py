"""`answer`: what `shardwise plan` says to a question, as data. The terminal and `--json` show the same rows. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.units import format_bytes, format_days
from shardwise.errors import UserError
from shardwise.plan.answer.advice import Advice, advice_for
from shardwise.plan.answer.plan_files import row_text
from shardwise.plan.answer.question import Question
from shardwise.plan.layouts.inverse import Demand, cheapest, meeting
from shardwise.plan.layouts.search import Candidate, SearchResult, explore
from shardwise.plan.prediction.figures import Whole, binding_link, mfu, step_text, whole_training


@dataclass(frozen=True)
class Row:
    """A candidate with the figures that follow from its prediction."""

    candidate: Candidate
    tokens_per_s: float
    mfu: float
    link: str  # the link that most exposed communication waits for; empty: none does
    link_share: float  # of the step
    low: float  # seconds of a step: p10 and p90
    high: float
    outside: str
    whole: Whole | None

    @property
    def layout(self) -> str:
        return self.candidate.plan.layout

    @property
    def step_s(self) -> float:
        return self.candidate.prediction.step_s

    def to_dict(self) -> dict[str, Any]:
        plan, prediction = self.candidate.plan, self.candidate.prediction
        whole = self.whole
        return {
            "layout": plan.layout,
            "gpus": plan.world,
            "micro_batch": plan.micro_batch,
            "num_microbatches": plan.num_microbatches,
            "precision": plan.precision,
            "step_s": self.step_s,
            "step_s_p10": self.low,
            "step_s_p90": self.high,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": prediction.memory_bytes,
            "link": self.link or None,
            "link_share": self.link_share,
            "outside": self.outside or None,
            "prediction": prediction.to_dict(),
            "plan": plan.to_dict(),
            "days": whole.days if whole else None,
            "gpu_hours": whole.gpu_hours if whole else None,
            "cost": whole.cost if whole else None,
            "kwh": whole.kwh if whole else None,
        }


@dataclass(frozen=True)
class Answer:
    """What `plan` answers: the rows that it shows, fastest first, and what else it advises."""

    question: Question
    result: SearchResult
    rows: list[Row]
    advice: list[Advice] = field(default_factory=list)
    inverse: bool = False  # rows answer --within, --budget or --fewest-gpus, one for each number of GPUs


def row_of(question: Question, candidate: Candidate) -> Row:
    plan, prediction, cluster, job = candidate.plan, candidate.prediction, question.cluster, question.job
    link, waits = binding_link(plan, prediction, cluster) or ("", 0.0)
    return Row(
        candidate,
        job.tokens_per_step / prediction.step_s,
        mfu(question.spec, job, plan, prediction, cluster),
        link,
        waits / prediction.step_s,
        prediction.low,
        prediction.high,
        "; ".join(prediction.outside),
        whole_training(job, plan, prediction, cluster),
    )


def answer(
    question: Question,
    top: int = 5,
    *,
    within: float | None = None,
    budget: float | None = None,
    fewest: bool = False,
    detail: bool = True,
) -> Answer:
    """Returns the rows in the search's own order, or one per number of GPUs where an inverse question is asked.
    `detail`: also the best per number of GPUs, the Pareto set and what was rejected."""
    inverse = within is not None or budget is not None or fewest
    result = explore(question.spec, question.cluster, question.job, top, detail=detail or inverse)
    if not result.candidates:
        raise nothing_fits(question, result)
    advice = advice_for(question, result)
    if inverse:
        demand = Demand(question.job, question.cluster, within, budget)
        return Answer(question, result, _inverse(question, result, demand, fewest, top), advice, True)
    # Fewer devices that are as fast come first: 1.toml is what we would run.
    first = [one.candidate for one in advice if one.candidate is not None]
    found = [*first, *(candidate for candidate in result.candidates if candidate not in first)]
    return Answer(question, result, [row_of(question, candidate) for candidate in found[:top]], advice)


def _inverse(question: Question, result: SearchResult, demand: Demand, fewest: bool, top: int) -> list[Row]:
    """Returns one row per number of GPUs: the fewest that are in time first, else the fastest within the budget."""
    assert result.engine is not None
    rows = [row_of(question, candidate) for candidate in meeting(result.engine, demand, fewest, top)]
    if not rows:
        raise _not_met(question, result, demand)
    return rows if fewest or demand.within is not None else sorted(rows, key=lambda row: row.step_s)


def _not_met(question: Question, result: SearchResult, demand: Demand) -> UserError:
    within, budget = demand.within, demand.budget
    assert result.engine is not None
    found = cheapest(result.engine, demand)
    if found is None:
        assert within is not None
        every = [*result.candidates, *result.by_gpus.values()]
        fastest = row_of(question, min(every, key=lambda candidate: candidate.prediction.step_s))
        assert fastest.whole is not None
        factor = fastest.whole.seconds / within
        return UserError(
            f"no layout here trains {question.job.tokens:,} tokens within {format_days(within)}",
            why=f"the fastest, {fastest.layout} on {fastest.candidate.plan.world} GPUs, takes "
            f"{format_days(fastest.whole.seconds)}",
            fix=f"--within {fastest.whole.days * 1.01:.3g}d, or about {factor:.2g} times the GPUs, "
            f"or {100 / factor:.2g} % of the tokens",
        )
    whole = row_of(question, found).whole
    assert whole is not None and whole.cost is not None and budget is not None
    when = f" within {format_days(within)}" if within is not None else ""
    return UserError(
        f"no layout here trains {question.job.tokens:,} tokens{when} for {budget:,.12g}",
        why=f"the cheapest, {found.plan.layout} on {found.plan.world} GPUs, costs {whole.cost:,.2f}",
        fix=f"--budget {whole.cost * 1.01:.2f}, a lower --price, or {100 * budget / whole.cost:.2g} % of the tokens",
    )


def nothing_fits(question: Question, result: SearchResult) -> UserError:
    """Returns the error that names the closest miss, by how many bytes it is too large, and what would fit."""
    miss, asked = result.closest_miss, question.fixed
    under = f" with {asked}" if asked else ""
    where = f"{question.spec.name} does not fit on {question.cluster.name}{under}"
    ways = [f"{remedy.what} ({remedy.cost})" for remedy in result.remedies[:3]]
    if miss is None:
        words = asked.replace(" ", " and ") or "the model and the cluster"
        return UserError(
            f"no layout has {asked}" if asked else where,
            why=f"{words} leave nothing that the model, the batch and {question.cluster.world} GPUs allow",
            fix=" or ".join(ways) or "leave out one of them",
        )
    parts = sorted(miss.prediction.memory.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:3] if size > 0)
    over = miss.prediction.memory_bytes - result.limit
    return UserError(
        where,
        why=f"the closest, {miss.plan.layout} with micro-batch {miss.plan.micro_batch}, needs "
        f"{format_bytes(miss.prediction.memory_bytes)} of {format_bytes(result.limit)}, "
        f"{format_bytes(over)} too much: {held}",
        fix=" or ".join(ways) or "more GPUs, a smaller model or shorter sequences",
    )


# As files and as JSON ------------------------------------------------------------------------------------------------


def file_of(question: Question, row: Row, title: str, notes: Sequence[str]) -> str:
    """Returns the text of a row's config file: what is predicted, on what assumptions and why, then every key."""
    plan, prediction = row.candidate.plan, row.candidate.prediction
    spread = f" ({step_text(row.low)} to {step_text(row.high)})"
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in prediction.step.items() if seconds > 0)
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.memory.items() if size > 0)
    lines = [
        f"{title}: {plan.layout} on {plan.world} of {question.cluster.name}",
        f"predicted  {step_text(row.step_s)} per step{spread}, {row.tokens_per_s:,.0f} tokens/s, MFU {row.mfu:.0%}",
        f"           {parts}",
        f"memory     {format_bytes(prediction.memory_bytes)} of {format_bytes(question.cluster.device.memory)}: {held}",
        *(f"outside    {row.outside}" for _ in range(bool(row.outside))),
        *(f"why        {note}" for note in notes),
        *(f"given      {one.what}: {one.value} ({one.origin})" for one in question.assumptions),
        "yours      data.source and optimizer.lr: the planner decides neither",
    ]
    return row_text(question, plan, lines)


def to_json(made: Answer, files: Sequence[Path]) -> dict[str, Any]:
    question, result = made.question, made.result
    rows = [row.to_dict() for row in made.rows]
    for row, path in zip(rows, files):
        row["file"] = str(path)
    return {
        "schema": 1,
        "model": {"name": question.spec.name, "parameters": question.spec.num_parameters},
        "cluster": {
            "name": question.cluster.name,
            "gpus": question.cluster.world,
            "device": question.cluster.device.name,
        },
        "job": {
            "seq_len": question.job.seq_len,
            "global_batch": question.job.global_batch,
            "tokens": question.job.tokens,
            "precision": question.job.precision,
            "optimizer": question.job.optimizer,
            "constraints": dict(question.job.constraints),
            "price": question.price,
        },
        "memory_limit_bytes": result.limit,
        "assumptions": [{"what": one.what, "value": one.value, "origin": one.origin} for one in question.assumptions],
        "rows": rows,
        "by_gpus": {str(n): row_of(question, found).to_dict() for n, found in sorted(result.by_gpus.items())},
        "pareto": [row_of(question, found).to_dict() for found in result.pareto],
        "rejected": [
            {
                "what": region.what,
                "reason": region.reason,
                "slower": region.slower,
                "layout": region.candidate.plan.layout if region.candidate else None,
            }
            for region in result.regions
        ],
        "advice": [{"what": one.what, "why": one.why} for one in made.advice],
        "counts": {
            name: getattr(result.counts, name)
            for name in ("considered", "too_large", "too_slow", "evaluated", "seconds")
        },
    }
