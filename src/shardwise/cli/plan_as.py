"""The best layout that another framework runs, for `shardwise plan --as FRAMEWORK`: found by the same search under that
framework's rules, and compared with row 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.frameworks.export import export_as, framework_named
from shardwise.interop.frameworks.framework import Exported, Framework, UpdateRule
from shardwise.plan.answer.answer import Answer
from shardwise.plan.layouts.candidate import Candidate, rank_of
from shardwise.plan.prediction.figures import step_text

AS_FAST = 5e-4
"""Steps that differ by less are called equal."""

FEW = 3
"""Reasons that are said in the line about the difference; all of them are in --json."""


@dataclass(frozen=True)
class AsFramework:
    """A framework's best layout, written for it."""

    framework: Framework
    candidate: Candidate
    exported: Exported
    slower: float  # its step over row 1's
    lacks: list[str]  # why it does not run row 1; empty where it does

    def title(self, winner: Candidate, file: Path) -> list[str]:
        """Returns the lines above the text: what is written, and what it costs against row 1."""
        plan = self.candidate.plan
        step = step_text(self.candidate.prediction.step_s)
        name = self.framework.name
        first = (
            f"{self.framework.title}: {plan.layout}, micro-batch {plan.micro_batch}, {plan.world} GPUs, {step} per step"
        )
        if not self.lacks:
            return [first, f"row 1 of `shardwise plan`, also in {file}"]
        more = "" if len(self.lacks) <= FEW else f"; and {len(self.lacks) - FEW} more"
        return [
            f"{first}: the best that {name} runs, {_compared(self.slower)} row 1",
            f"row 1 is what {name} does not run: {winner.plan.layout}, micro-batch {winner.plan.micro_batch}, "
            f"{winner.plan.world} GPUs, {step_text(winner.prediction.step_s)} per step ({file}); {name} has "
            f"{'; '.join(self.lacks[:FEW])}{more}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `--json` says of it."""
        return {
            "framework": self.framework.name,
            "version": self.framework.title,
            "layout": self.candidate.plan.layout,
            "step_s": self.candidate.prediction.step_s,
            "slower": self.slower,
            "lacks": self.lacks,
            "plan": self.candidate.plan.to_dict(),
            **vars(self.exported),
        }


def as_framework(made: Answer, name: str) -> AsFramework:
    """Returns row 1 where the framework runs it, else the best layout that it does run; refuses where there is none."""
    question = made.question
    spec, job, winner = question.spec, question.job, made.rows[0].candidate
    framework = framework_named(name, spec, job)
    lacks = framework.runs_in(spec, winner.plan)
    best = _best(made, framework) if lacks else winner
    if best is None:
        raise UserError(
            f"no layout of {spec.name} on {question.cluster.name} fits that {framework.title} runs",
            why=f"row 1 is {winner.plan.layout}; {framework.title} has {'; '.join(lacks)}",
            fix=f"{f'leave out {question.fixed}, ' if job.constraints else ''}more GPUs, a smaller --seq, or another "
            "framework",
        )
    config = question.loaded.config
    rule = UpdateRule(config.optimizer, config.train.clip)
    exported = export_as(name, spec, job, best.plan, question.cluster.per_node, rule)
    slower = best.prediction.step_s / winner.prediction.step_s
    return AsFramework(framework, best, exported, slower, lacks)


def _best(made: Answer, framework: Framework) -> Candidate | None:
    """Returns the best of the layouts on as many GPUs as row 1 has, and of all others; answers to the inverse questions
    keep their number of GPUs."""
    engine, question, winner = made.result.engine, made.question, made.rows[0].candidate
    assert engine is not None, "a search that found rows keeps its engine"
    accept = framework.accepts(question.spec, question.job.seq_len, question.job.global_batch)
    found = engine.best(1, [winner.plan.world], accept)
    if not made.inverse:
        found += engine.best(1, None, accept)
    return min(found, key=rank_of, default=None)


def _compared(slower: float) -> str:
    """Returns how a step compares with row 1's. Row 1 may be the slower one by little where it is the plainer one."""
    if slower >= 2:
        return f"{slower:.1f} times as long as"
    if abs(slower - 1) < AS_FAST:
        return "as fast as"
    if slower < 1:
        return f"{100 * (1 - slower):.1f} % faster, with more parts, than"
    return f"{100 * (slower - 1):.1f} % slower than"
