"""Judges a run against another one: better, worse, or the same within the A/A band.

The band is how far apart runs are that differ by chance alone: by their seed, and by what changes no number (where the
run lies, how it is split, its checkpoints). It is measured from such runs, never assumed; without any, a difference is
said and nothing is concluded from how large it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAY_DIFFER = ("train.seed", "train.micro_batch", "run.", "parallel.", "checkpoint.")
"""Keys and sections in which runs may differ and still be repetitions of each other: chance, and what changes no
number."""

HELD_OUT, LAST = "held-out loss", "last loss"


@dataclass(frozen=True)
class Judged:
    """A run as it is judged: its settings by key, its figures by label."""

    name: str
    values: Mapping[str, Any]
    figures: Mapping[str, float | None]

    @property
    def experiment(self) -> tuple[tuple[str, str], ...]:
        """What the run tries, apart from chance: two runs with the same are repetitions, A and A."""
        kept = ((k, repr(v)) for k, v in self.values.items() if not k.startswith(MAY_DIFFER))
        return tuple(sorted(kept))


@dataclass(frozen=True)
class Band:
    """How far repetitions lay apart in one figure; None where there were none."""

    figure: str
    width: float | None
    names: tuple[str, ...]  # the repetitions it was measured from

    @property
    def said(self) -> str:
        if self.width is None:
            return (
                "unknown: no two runs here are repetitions; train one again with another train.seed, and differences "
                "that are chance are known"
            )
        runs = ", ".join(self.names[:6]) + (" ..." if len(self.names) > 6 else "")
        return f"repetitions differ by up to {self.width:.3g} in {self.figure} ({runs})"

    def to_dict(self) -> dict[str, Any]:
        return {"figure": self.figure, "width": self.width, "runs": list(self.names)}


def judge(runs: Sequence[Judged], others: Sequence[Judged]) -> tuple[list[dict[str, Any]], Band]:
    """Returns a verdict on every run but the first, against the first, and the band it was judged by; `others` lie
    beside them and are looked through for repetitions."""
    figure = HELD_OUT if all(_known(run, HELD_OUT) for run in runs) else LAST
    band = _band(figure, runs, others)
    return [_verdict(runs[0], run, band) for run in runs[1:]], band


def _known(run: Judged, figure: str) -> bool:
    value = run.figures.get(figure)
    return value is not None and math.isfinite(value)


def _band(figure: str, runs: Sequence[Judged], others: Sequence[Judged]) -> Band:
    """Returns the largest distance between repetitions of a compared run. A pair without any chance in it, of one seed,
    says nothing."""
    groups: dict[tuple[tuple[str, str], ...], list[Judged]] = {run.experiment: [] for run in runs}
    for run in (*runs, *others):
        if run.experiment in groups and _known(run, figure):
            groups[run.experiment].append(run)
    pairs = [
        (abs((a.figures[figure] or 0.0) - (b.figures[figure] or 0.0)), a.name, b.name)
        for group in groups.values()
        for a, b in itertools.combinations(group, 2)
        if a.values.get("train.seed") != b.values.get("train.seed") and a.figures["steps"] == b.figures["steps"]
    ]
    names = tuple(dict.fromkeys(name for _, *both in pairs for name in both))
    return Band(figure, max((width for width, *_ in pairs), default=None), names)


def _verdict(first: Judged, run: Judged, band: Band) -> dict[str, Any]:
    """Returns the word, the difference in nats and, in words, why."""
    if not _known(first, band.figure) or not _known(run, band.figure):
        word = "worse" if _known(first, band.figure) else "better" if _known(run, band.figure) else "unknown"
        missing = [one.name for one in (first, run) if not _known(one, band.figure)]
        return {"verdict": word, "difference": None, "why": f"{' and '.join(missing)} has no finite {band.figure}"}
    before, after = first.figures[band.figure] or 0.0, run.figures[band.figure] or 0.0
    difference = after - before
    why = f"{band.figure} {after:.4f}, {difference:+.4f}"
    if difference == 0.0 or (band.width is not None and abs(difference) <= band.width):
        word = "same"
        why += ", to the last digit" if difference == 0.0 else f", within the A/A band of {band.width:.3g}"
    else:
        word = "better" if difference < 0 else "worse"
        why += f", beyond the A/A band of {band.width:.3g}" if band.width is not None else ", which may be chance"
    if first.figures["steps"] != run.figures["steps"]:
        why += f"; after {run.figures['steps']:.0f} steps, not {first.figures['steps']:.0f}"
    return {"verdict": word, "difference": difference, "why": why}
