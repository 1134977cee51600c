"""`--why-not LAYOUT`: a layout, or a part of one, against the winner: what it costs, why, and the smallest change after
which it fits or wins.

What the layout leaves open is completed by the search under its words as constraints, so it is judged by its best form.
Every change that is named was tried. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.config.units import format_bytes
from shardwise.errors import UserError
from shardwise.plan.answer.answer import Answer, Row, nothing_fits, row_of
from shardwise.plan.answer.question import Question
from shardwise.plan.layouts.search import Candidate, Remedy, explore
from shardwise.plan.prediction.collectives import PARTS_OF_AXES, placement
from shardwise.plan.prediction.figures import step_text
from shardwise.plan.prediction.predict import predict
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.layout import parse_layout
from shardwise.spec.plan import Plan

SHARE = 0.005
"""Differences below this share of the winner's step are not reported."""

REACH = 64.0
"""Links are tried up to this many times slower and faster."""


@dataclass(frozen=True)
class Difference:
    """One part of a step in which a layout takes longer than the winner."""

    part: str
    seconds: float  # more than the winner's
    why: str


@dataclass(frozen=True)
class WhyNot:
    """How the layout that was asked about compares with the winner, and what would change that."""

    asked: str
    row: Row  # the completed layout
    fits: bool
    limit: int
    slower: float  # its step over the winner's
    differences: list[Difference] = field(default_factory=list)
    nearest: list[tuple[str, Row]] = field(default_factory=list)  # one word changed -> what comes out
    remedies: list[Remedy] = field(default_factory=list)
    wins_if: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "completed": self.row.to_dict(),
            "fits": self.fits,
            "slower": self.slower,
            "differences": [vars(one) for one in self.differences],
            "nearest": [{"change": change, **row.to_dict()} for change, row in self.nearest],
            "would_fit": [remedy.what for remedy in self.remedies],
            "would_win_if": self.wins_if,
        }


def why_not(base: Answer, layout: str) -> WhyNot:
    question = base.question
    words = [f"{key}={value}" for key, value in parse_layout(layout, "--why-not").items()]
    asked = question.constrained(words)
    found = explore(asked.spec, asked.cluster, asked.job, 1)
    candidate = found.candidates[0] if found.candidates else found.closest_miss
    if candidate is None:
        raise nothing_fits(asked, found)
    row, winner = row_of(question, candidate), base.rows[0]
    fits = bool(found.candidates)
    made = WhyNot(layout, row, fits, found.limit, row.step_s / winner.step_s, remedies=found.remedies[:3])
    if row.candidate.plan == winner.candidate.plan:
        return made
    return replace(
        made,
        differences=differences(question, row.candidate, winner.candidate),
        nearest=_nearest(question, words, row if fits else None)[:3],
        wins_if=wins_if(question, row.candidate, winner.candidate) if fits else [],
    )


# What it costs -------------------------------------------------------------------------------------------------------


def differences(question: Question, other: Candidate, winner: Candidate) -> list[Difference]:
    """Returns the parts of a step in which the two differ, those that take the most seconds more first."""
    ours, theirs = winner.prediction.step, other.prediction.step
    more = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in {**ours, **theirs}}
    reported = [part for part, seconds in more.items() if abs(seconds) > SHARE * winner.prediction.step_s]
    return [
        Difference(part, more[part], reason(part, other.plan, winner.plan, question.cluster) if more[part] > 0 else "")
        for part in sorted(reported, key=lambda part: -more[part])
    ]


def reason(part: str, other: Plan, winner: Plan, cluster: ClusterSpec) -> str:
    """Returns why this part of a step takes longer in one plan than in another."""
    if part in PARTS_OF_AXES:
        return _link_reason(PARTS_OF_AXES[part], other, winner, cluster)
    if part == "bubble":
        slots = other.num_microbatches * other.virtual_stages
        share = f"(p-1)/(m v) = {(other.pp - 1) / slots:.0%}"
        return f"{other.pp} ranks of a pipeline wait for {other.num_microbatches} micro-batches: {share}"
    if part == "compute":
        if other.tp > winner.tp:
            return f"tp={other.tp} cuts matrices narrower, which run below their rate"
        if other.micro_batch < winner.micro_batch:
            return f"micro-batches of {other.micro_batch} instead of {winner.micro_batch} make smaller matmuls"
        if other.world < winner.world:
            return f"{other.world} instead of {winner.world} GPUs share the work"
        return "matmuls run further below their rate"
    if part == "recompute":
        return f"recompute={other.recompute} runs forward again"
    if part == "optimizer":
        return f"a rank updates 1/{other.state_shards} of its states instead of 1/{winner.state_shards}"
    if part == "offload":
        return f"offload={other.offload} goes over the bus"
    if part == "launch":
        return f"{other.num_microbatches} micro-batches launch more kernels"
    if part == "straggler":
        return "more ranks wait for the slowest"
    return ""


def _link_reason(axis: str, other: Plan, winner: Plan, cluster: ClusterSpec) -> str:
    theirs = {found.name: found for found in placement(cluster, other)}
    ours = {found.name: found for found in placement(cluster, winner)}
    if axis not in theirs:
        return ""
    link = theirs[axis].link
    over = f"over {link.name}, {link.bandwidth / 1e9:.3g} GB/s"
    if axis in ours and ours[axis].link.name != link.name:
        return f"{axis}={theirs[axis].ranks} leaves {ours[axis].link.name}: {over}"
    if axis == "dp" and other.stage.drops_parameters and other.num_microbatches > 1:
        return f"parameters are gathered for each of {other.num_microbatches} micro-batches, {over}"
    if axis not in ours:
        return f"{axis}={theirs[axis].ranks} talks {over}; the winner does not"
    return f"{axis}={theirs[axis].ranks} instead of {ours[axis].ranks}, {over}"


# What would change the verdict ---------------------------------------------------------------------------------------


def _nearest(question: Question, words: list[str], row: Row | None) -> list[tuple[str, Row]]:
    """Returns the best rows with all words kept but one, where they are faster, each with that word's change."""
    if len(words) < 2:
        return []
    found = []
    for word in words:
        try:
            free = question.constrained([other for other in words if other != word])
        except UserError:
            continue
        best = explore(free.spec, free.cluster, free.job, 1).candidates
        if best and (row is None or best[0].prediction.step_s < (1 - SHARE) * row.step_s):
            found.append((_said(word, best[0].plan), row_of(question, best[0])))
    return sorted(found, key=lambda item: item[1].step_s)


def _said(word: str, plan: Plan) -> str:
    """Returns what became of a word that was left open, as `tp=4 instead of 8`."""
    name, _, value = word.partition("=")
    key = name.partition(".")[2]
    now = getattr(plan, key, None)
    return f"{key}={now} instead of {value}" if str(now) != value else f"{key} left open"


def wins_if(question: Question, other: Candidate, winner: Candidate) -> list[str]:
    """Returns in words where the two change places: the speed of each link, and the batch. Only these two plans are
    compared, on the same job."""
    found = []
    for number, link in enumerate(question.cluster.tiers):

        def slower_by(factor: float, number: int = number) -> float:
            tiers = list(question.cluster.tiers)
            tiers[number] = replace(tiers[number], bandwidth=tiers[number].bandwidth * factor)
            return _lead(replace(question, cluster=replace(question.cluster, tiers=tuple(tiers))), other, winner)

        for end, word in ((1 / REACH, "below"), (REACH, "above")):
            crossing = _crossing(slower_by, end)
            if crossing is not None:
                found.append(
                    f"{link.name} {word} {crossing * link.bandwidth / 1e9:.3g} GB/s per card "
                    f"(it has {link.bandwidth / 1e9:.3g})"
                )
    for size in _batches(question.job.global_batch, max(other.plan.dp, winner.plan.dp)):
        if _lead(question, _with_batch(other, size), _with_batch(winner, size)) < 0:
            found.append(f"a batch of {size * question.job.seq_len:,} tokens")
            break
    return found


def _lead(question: Question, other: Candidate, winner: Candidate) -> float:
    """Returns the seconds per step by which the winner is ahead."""
    job = replace(question.job, global_batch=winner.plan.global_batch)
    times = [predict(question.spec, question.cluster, job, one.plan).step_s for one in (other, winner)]
    return times[0] - times[1]


def _crossing(lead: Callable[[float], float], end: float) -> float | None:
    """Returns the factor nearest to 1 at which the lead is gone; None if it lasts up to `end`."""
    if lead(end) >= 0:
        return None
    keeps, loses = 1.0, end
    for _ in range(12):
        middle = (keeps * loses) ** 0.5
        keeps, loses = (middle, loses) if lead(middle) >= 0 else (keeps, middle)
    return loses


def _batches(now: int, least: int) -> Iterator[int]:
    for factor in (2, 4, 8):
        yield now * factor
        if now % factor == 0 and now // factor >= least:
            yield now // factor


def _with_batch(candidate: Candidate, size: int) -> Candidate:
    plan = candidate.plan
    rows = -(-size // plan.dp)
    return replace(candidate, plan=replace(plan, global_batch=size, micro_batch=min(plan.micro_batch, rows)))


# In words ------------------------------------------------------------------------------------------------------------


def why_not_lines(made: WhyNot, winner: Row) -> list[tuple[str, str]]:
    """Returns the printed lines, each as a label and a text."""
    plan, prediction = made.row.candidate.plan, made.row.candidate.prediction
    if plan == winner.candidate.plan:
        return [("why not", f"{made.asked}: that is #1, {plan.layout}")]
    lines = [("why not", f"{made.asked}: at best {plan.layout}, micro-batch {plan.micro_batch}, {plan.world} GPUs")]
    if not made.fits:
        parts = sorted(prediction.memory.items(), key=lambda item: -item[1])[:3]
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size > 0)
        needs = f"{format_bytes(prediction.memory_bytes)} of {format_bytes(made.limit)}"
        lines.append(("", f"does not fit: {needs}; {held}"))
        ways = [f"{way.what} ({step_text(way.step_s)} per step)" for way in made.remedies]
        ways += [f"{change} ({step_text(row.step_s)} per step)" for change, row in made.nearest]
        lines += [("would fit", way) for way in ways]
        return lines
    lines.append(("", f"fits, {step_text(made.row.step_s)} per step: {_percent(made.slower)}"))
    for one in made.differences[:4]:
        lines.append(("", f"{one.seconds:+.2g} s {one.part}" + (f": {one.why}" if one.why else "")))
    lines += [("nearest", f"{change}: {row.layout}, {step_text(row.step_s)}") for change, row in made.nearest]
    lines += [("wins if", text) for text in made.wins_if]
    if not made.wins_if and made.slower > 1:
        lines.append(
            ("wins if", f"nothing tried: links {REACH:.0f} times slower and faster, batches an eighth to eight times")
        )
    return lines


def _percent(ratio: float) -> str:
    if ratio >= 1.5:
        return f"{ratio:.1f} times as long as #1"
    return f"{100 * (ratio - 1):.1f} % slower than #1" if ratio >= 1 else f"{100 * (1 - ratio):.1f} % faster than #1"
