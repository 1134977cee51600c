"""Prints the answer of `shardwise plan`: the table of layouts, the winner in bars, and the reasons. Plain when piped,
folded in narrow windows.

Invariant: nothing is said by colour alone, and everything printed is in `--json` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from shardwise.cli.plan_layout import LABEL, View, table_of
from shardwise.config.units import format_bytes, format_count, format_seconds
from shardwise.plan.answer.answer import Answer, Row, row_of
from shardwise.plan.answer.question import Question
from shardwise.plan.answer.what_if import WhatIf
from shardwise.plan.answer.why import WhyNot, why_not_lines
from shardwise.plan.prediction.collectives import PARTS_OF_AXES, placement
from shardwise.plan.prediction.figures import DAY, step_text
from shardwise.spec.plan import Plan
from shardwise.terminal import counted, shell_word

BAR = 30
MAX_REGIONS, MAX_COUNTS = 8, 5
AS_FAST = 5e-4
GIB = 2**30


def show(
    made: Answer,
    files: Sequence[Path],
    refused: WhyNot | None,
    changed: Sequence[WhatIf],
) -> None:
    """Prints the whole answer; a narrower question (`--why-not`, `--what-if`) gets the table and its own part."""
    view, is_narrow_question = View(), bool(refused or changed)
    _header(view, made)
    view.table(_rows_table(made, view.width))
    view.gap()
    if not is_narrow_question:
        _winner(view, made)
        _regions(view, made)
        _counts(view, made)
    _training(view, made)
    for one in made.advice:
        view.line("advice", f"{one.what}: {one.why}")
    if refused:
        before = ""
        for label, text in why_not_lines(refused, made.rows[0]):
            view.line("" if label == before else label, text)
            before = label or before
    if changed:
        if refused:
            view.gap()
        view.table(_what_if_table(made, changed, view.width))
    if is_narrow_question or made.advice or made.rows[0].whole:
        view.gap()
    _assumed(view, made.question)
    view.line("wrote", f"{files[0]}" + (f" ... {files[-1].name}" if len(files) > 1 else ""))
    first = shell_word(files[0])
    view.line("next", f"shardwise train {first}")
    view.line("prove", f"shardwise verify {first}")
    if made.rows[0].candidate.plan.world > made.question.cluster.per_node:
        view.line("launch", f"shardwise launch slurm {first}   writes the job for these nodes; also k8s, ray, ssh")


# The layouts ---------------------------------------------------------------------------------------------------------


def _header(view: View, made: Answer) -> None:
    question, counts = made.question, made.result.counts
    spec, cluster, job = question.spec, question.cluster, question.job
    active = f" ({format_count(spec.num_active_parameters)} active)" if spec.is_moe else ""
    view.line(
        "model",
        f"{spec.name}, {format_count(spec.num_parameters)} parameters{active}, {counted(spec.num_layers, 'layer')}",
    )
    links = "; ".join(f"{link.name} {link.bandwidth / 1e9:.3g} GB/s" for link in cluster.tiers if link.span > 1)
    cards = f"{cluster.world:,} x {format_bytes(cluster.device.memory)}"
    view.line("cluster", f"{cluster.name}: {cards}" + (f"; {links}" if links else ""))
    adapter = f", {job.adapter.kind}" if job.adapter.kind != "none" else ""
    batch = f"{job.tokens_per_step:,} tokens per step = {counted(job.global_batch, 'sequence')} x {job.seq_len:,}"
    view.line("job", f"{batch}; {job.precision}, {job.optimizer}{adapter}")
    if job.constraints:
        view.line("fixed", question.fixed)
    dropped = f"{counts.too_large:,} too large, {counts.too_slow:,} too slow, {counts.evaluated:,} predicted"
    view.line("search", f"{counts.considered:,} layouts in {counts.seconds:.1f} s: {dropped}")
    view.gap()


def _rows_table(made: Answer, width: int) -> Table:
    columns = ["#", "layout", "GPUs", "micro", "GiB", "step", "p10-p90", "tok/s", "MFU", "waits for"]
    columns += _whole_columns(made.question) if made.inverse else []
    rows = [_cells(made.question, row) | {"#": str(number)} for number, row in enumerate(made.rows, 1)]
    if any(row["GPUs"] != f"{made.question.cluster.world:,}" for row in rows):
        return table_of(columns, rows, width, _memory_title(made))
    return table_of([name for name in columns if name != "GPUs"], rows, width, _memory_title(made))


def _whole_columns(question: Question) -> list[str]:
    if question.job.tokens is None:
        return []
    return ["training", "cost"] if question.price is not None else ["training"]


def _memory_title(made: Answer) -> str:
    return f"GiB of {made.question.cluster.device.memory / GIB:.3g}"


def _cells(question: Question, row: Row) -> dict[str, str]:
    plan, prediction = row.candidate.plan, row.candidate.prediction
    return {
        "layout": _layout(plan) if "parallel.split" not in question.job.constraints else plan.layout,
        "micro": str(plan.micro_batch),
        "GiB": _size(prediction.memory_bytes),
        "step": step_text(row.step_s),
        "p10-p90": f"{_short(row.low)}-{_short(row.high)}",
        "GPUs": f"{plan.world:,}",
        "tok/s": _count(row.tokens_per_s),
        "MFU": f"{100 * row.mfu:.0f} %" if row.mfu >= 0.01 else f"{100 * row.mfu:.1g} %",
        "waits for": f"{row.link} {100 * row.link_share:.0f} %" if row.link_share >= 0.005 else "-",
        "training": _duration(row.whole.seconds) if row.whole else "-",
        "cost": _count(row.whole.cost) if row.whole and row.whole.cost is not None else "-",
    }


def _layout(plan: Plan) -> str:
    """Returns a layout's text. A long list of layers per stage is the balanced one, which `auto` stands for; the file
    has it in full."""
    words = plan.layout.split(" ")
    return " ".join("split=auto" if word.startswith("split=") and word.count(",") > 7 else word for word in words)


def _size(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds / DAY:.3g} d"
        if seconds >= 2 * DAY
        else f"{seconds / 3600:.3g} h"
        if seconds >= 7200
        else format_seconds(seconds)
    )


def _count(value: float) -> str:
    return format_count(value) if value >= 1000 else f"{value:.3g}"


# The winner ----------------------------------------------------------------------------------------------------------


def _winner(view: View, made: Answer) -> None:
    question, row = made.question, made.rows[0]
    plan, prediction, cluster = row.candidate.plan, row.candidate.prediction, question.cluster
    axes = placement(cluster, plan)
    links = {axis.name: axis.link.name for axis in axes}
    _bars(
        view, prediction.step, row.step_s, {part: links[axis] for part, axis in PARTS_OF_AXES.items() if axis in links}
    )
    if row.outside:
        view.line("note", f"outside what was ever measured here: {row.outside}")
    parts = sorted(
        ((size, name) for name, size in prediction.memory.items() if size > 0.002 * prediction.memory_bytes),
        reverse=True,
    )
    held = ", ".join(f"{name} {_size(size)}" for size, name in parts)
    apart = -sum(size for size in prediction.memory.values() if size < 0)
    never = f"; {_size(apart)} of these never at once" if apart > 0.01 * prediction.memory_bytes else ""
    card, limit = cluster.device.memory, made.result.limit
    view.line(
        "memory", f"{_size(prediction.memory_bytes)} of {_size(card)} GiB (planned up to {_size(limit)}): {held}{never}"
    )
    places = {"host": "in CPU memory", "disk": "on a disk"}
    away = [f"{_size(size)} GiB {places[place]}" for place, size in prediction.elsewhere.items() if size]
    if away:
        view.line("", f"and per rank {', '.join(away)}")
    _stages(view, row)
    said = ", ".join(
        f"{axis.name}={axis.ranks} on {axis.link.name} ({axis.link.bandwidth / 1e9:.3g} GB/s)" for axis in axes
    )
    view.line("links", said or "none: one device")
    view.line("batch", plan.batch_in_words)
    _simpler(view, made)
    _leaner(view, made)


def _bars(view: View, step: dict[str, float], whole: float, links: dict[str, str]) -> None:
    """Prints where every second of a step goes, largest first; a bar's length is its share."""
    parts = sorted(((seconds, name) for name, seconds in step.items() if seconds > 0.001 * whole), reverse=True)
    width = max(len(name) for _, name in parts)
    room = max(0, min(BAR, view.width - LABEL - width - 30))
    for index, (seconds, name) in enumerate(parts):
        share = seconds / whole
        bar = "█" * round(share * room) or "▏"
        over = f"  over {links[name]}" if name in links else ""
        figures = f"{name:<{width}}  {step_text(seconds):>8}  {100 * share:>4.1f} %"
        view.line("#1 step" if index == 0 else "", f"{figures}  {bar if room >= 4 else ''}{over}".rstrip())


def _simpler(view: View, made: Answer) -> None:
    """Prints, where something is a little faster than what comes first, how much, and that it is no reason."""
    row = made.rows[0]
    rest = [other.candidate for other in made.rows] + [
        one.candidate for one in made.result.regions if one.slower and one.candidate
    ]
    fastest = min(rest, key=lambda found: found.prediction.step_s)
    gain = 1 - fastest.prediction.step_s / row.step_s
    if gain >= AS_FAST and not made.inverse:
        view.line(
            "simpler",
            f"{_layout(fastest.plan)} is {gain:.1%} faster: less than runs differ from day to day, "
            "and #1 has fewer parts",
        )


def _leaner(view: View, made: Answer) -> None:
    """Prints the fastest layout of the Pareto set that needs much less memory on as many GPUs."""
    row = made.rows[0]
    plan, most = row.candidate.plan, 0.6 * row.candidate.prediction.memory_bytes
    same = [found for found in made.result.pareto if found.plan.world == plan.world]
    lean = [found for found in same if found.prediction.memory_bytes <= most]
    if not lean:
        return
    best = min(lean, key=lambda found: found.prediction.step_s)
    slower = best.prediction.step_s / row.step_s - 1
    micro = f"micro-batch {best.plan.micro_batch}"
    view.line("leaner", f"{_layout(best.plan)}, {micro}: {_size(best.prediction.memory_bytes)} GiB, {slower:+.1%} time")


def _stages(view: View, row: Row) -> None:
    """Prints each pipeline rank's peak, and when it happens."""
    stages = row.candidate.prediction.stages
    numbers = range(len(stages)) if len(stages) <= 4 else (0, 1, len(stages) - 1)
    for index, number in enumerate(numbers):
        of = f"pipeline rank {number + 1} of {len(stages)}: " if len(stages) > 1 else ""
        view.line("peak" if index == 0 else "", f"{of}{_size(stages[number].peak)} GiB: {stages[number].moment}")


# The rest ------------------------------------------------------------------------------------------------------------


def _regions(view: View, made: Answer) -> None:
    regions = [region for region in made.result.regions if region.slower is None or abs(region.slower - 1) >= AS_FAST]
    if not regions or made.rows[0].candidate is not made.result.candidates[0]:  # they tell of the fastest
        view.gap()
        return
    width = min(28, max(len(region.what) for region in regions))
    ordered = sorted(regions, key=lambda region: (region.slower is None, region.slower or 0.0))
    for index, region in enumerate(ordered[:MAX_REGIONS]):
        view.line("rejected" if index == 0 else "", f"{region.what:<{width}}  {region.reason}")
    if len(ordered) > MAX_REGIONS:
        view.line("", f"{len(ordered) - MAX_REGIONS} more in 1.toml and in --json")
    view.gap()


def _counts(view: View, made: Answer) -> None:
    """Prints the best of all, half, a quarter of the GPUs and so on, and of the fewest that the model fits on."""
    counts = sorted(made.result.by_gpus)
    if len(counts) < 2 or made.inverse:
        return
    halves = [count for count in counts if counts[-1] % count == 0 and (counts[-1] // count).bit_count() == 1]
    most = [count for count in counts if count == counts[0] or count in halves[-MAX_COUNTS + 1 :]]
    question = made.question
    columns = ["GPUs", "best layout", "GiB", "step", "tok/s", "tok/s/GPU", *_whole_columns(question)]
    rows = []
    for count in most:
        row = row_of(question, made.result.by_gpus[count])
        cells = _cells(question, row)
        rows.append(cells | {"best layout": cells["layout"], "tok/s/GPU": f"{row.tokens_per_s / count:,.0f}"})
    view.table(table_of(columns, rows, view.width, _memory_title(made)))
    view.gap()


def _training(view: View, made: Answer) -> None:
    job, whole = made.question.job, made.rows[0].whole
    if whole is None or job.tokens is None:
        return
    steps = -(-job.tokens // job.tokens_per_step)
    length = _duration(whole.seconds)
    tokens = f"#1: {format_count(job.tokens)} tokens in {counted(steps, 'step')}"
    words = [f"{tokens}, {length}, {_count(whole.gpu_hours)} GPU-hours"]
    if whole.cost is not None:
        words.append(f"cost {_count(whole.cost)}")
    if whole.kwh is not None:
        words.append(f"{_count(whole.kwh)} kWh (boards at rated power, no hosts or cooling)")
    view.line("training", ", ".join(words))


def _what_if_table(made: Answer, changed: Sequence[WhatIf], width: int) -> Table:
    priced = next((one.question for one in changed if one.question.price is not None), made.question)
    columns = ["what if", "layout", "GPUs", "GiB", "step", "tok/s", "change", *_whole_columns(priced)]
    base = row_of(made.question, made.result.candidates[0])
    everyone: list[tuple[str, Question, Row | None]] = [("(as it is)", made.question, base)]
    everyone += [(one.change, one.question, one.row) for one in changed]
    rows = []
    for name, question, row in everyone:
        cells = _cells(question, row) if row else dict.fromkeys(columns, "-") | {"layout": "nothing fits"}
        gain = f"{row.tokens_per_s / base.tokens_per_s - 1:+.1%}" if row and row is not base else ""
        rows.append(cells | {"what if": name, "change": gain})
    return table_of(columns, rows, width)


def _assumed(view: View, question: Question) -> None:
    """Prints the assumptions by origin, so that what was only assumed stands out."""
    groups: dict[str, list[str]] = {}
    for one in question.assumptions:
        origin, _, why = one.origin.partition(": ")
        groups.setdefault(origin, []).append(f"{one.what} {one.value}" + (f" ({why})" if why else ""))
    for index, (origin, texts) in enumerate(groups.items()):
        view.line("given" if index == 0 else "", f"{origin}: {'; '.join(texts)}")
