"""Figures over answered rows: errors of time and memory, out-of-memory calls, ranking within groups."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from accuracy.question import Question
from shardwise.plan.prediction.memory import fullest, predict_stages
from shardwise.plan.prediction.predict import kind_of_job, traits
from shardwise.spec.prediction import Prediction, StageMemory

SMALLEST_GROUP = 5
CLEAN_NODES, CLEAN_MFU = 16, 0.15


@dataclass(frozen=True)
class Answer:
    question: Question
    prediction: Prediction

    @property
    def failed(self) -> bool:
        return self.question.run.has_failed

    @property
    def step_s(self) -> float | None:
        return None if self.failed else self.question.run.step_s

    @property
    def memory_bytes(self) -> float | None:
        run = self.question.run
        return run.memory_bytes if self.question.memory_comparable and not run.has_failed else None

    @property
    def step_error(self) -> float | None:
        """Signed share: positive when too slow was predicted."""
        return self.prediction.step_s / self.step_s - 1 if self.step_s else None

    @cached_property
    def needed(self) -> tuple[StageMemory, ...]:
        """Tensors and what the allocator cannot use, by rank of the pipeline, without what merely lingers."""
        asked = self.question
        stack = replace(asked.stack, published="process")
        return predict_stages(asked.model, asked.plan, asked.job.optimizer, asked.job.adapter, stack)

    @property
    def predicted_bytes(self) -> int:
        """Of the rank whose figure a framework's users publish. What lingers fills a card at most: then the allocator
        waits and takes it back."""
        asked, stages = self.question, self.prediction.stages
        which = (
            0 if asked.stack.published_rank == "first" else max(range(len(stages)), key=lambda rank: stages[rank].peak)
        )
        peak = stages[which].peak
        if asked.stack.published == "process":
            return peak + asked.outside_bytes
        if asked.stack.lingers:
            return max(self.needed[which].peak, min(peak, asked.cluster.device.memory - asked.outside_bytes))
        return peak

    @property
    def memory_error(self) -> float | None:
        return self.predicted_bytes / self.memory_bytes - 1 if self.memory_bytes else None

    @property
    def fails(self) -> bool:
        """Predicted to need more memory than the card has, whatever part of it is published: allocator, context and
        NCCL count."""
        return fullest(self.needed).peak + self.question.outside_bytes > self.question.cluster.device.memory

    @property
    def mfu(self) -> float | None:
        return self.question.mfu(self.step_s) if self.step_s else None

    @property
    def is_clean(self) -> bool:
        """A failed run has no speed, so only its size and its recomputation decide."""
        if self.question.cluster.nodes > CLEAN_NODES or not self.question.recompute_known:
            return False
        return self.mfu is None or self.mfu >= CLEAN_MFU

    @property
    def group(self) -> tuple[Any, ...]:
        """Runs that one could have chosen between: same model, machines and batch."""
        run, job, model = self.question.run, self.question.job, self.question.model
        return (
            run.file,
            run.text("model"),
            model.num_layers,
            model.hidden,
            model.ffn,
            run.text("gpu_kind"),
            run.count("gpus"),
            job.seq_len,
            job.global_batch,
            job.adapter.kind,
        )


def quantile(values: Iterable[float], share: float) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found, at = [0.0] * len(values), 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for place in range(at, end + 1):
            found[order[place]] = (at + end) / 2 + 1
        at = end + 1
    return found


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """None where one side is all the same."""
    x, y = ranks(ours), ranks(theirs)
    if len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return statistics.correlation(x, y)


def score(answers: Sequence[Answer]) -> dict[str, Any]:
    steps = [error for one in answers if (error := one.step_error) is not None]
    memory = [error for one in answers if (error := one.memory_error) is not None]
    sizes = sorted(map(abs, steps))
    return {
        "rows": len(answers),
        "step": {
            "rows": len(steps),
            "mape": statistics.fmean(sizes) if sizes else None,
            "median": quantile(sizes, 0.5),
            "p90": quantile(sizes, 0.9),
            "bias": quantile(steps, 0.5),
        },
        "memory": {"rows": len(memory)}
        | {name: quantile(map(abs, memory), share) for name, share in {"p50": 0.5, "p90": 0.9, "p95": 0.95}.items()}
        | {"bias": quantile(memory, 0.5)},
        "oom": _out_of_memory(answers),
        "ranking": _ranking(answers),
    }


def _out_of_memory(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Of files that have failures: elsewhere nobody says that what failed was published."""
    files = {one.question.run.file for one in answers if one.failed}
    rows = [one for one in answers if one.question.run.file in files]
    if not rows:
        return None
    hits = sum(one.failed and one.fails for one in rows)
    called, failed = sum(one.fails for one in rows), sum(one.failed for one in rows)
    right = sum(one.failed == one.fails for one in rows)
    return {
        "rows": len(rows), "failed": failed, "predicted": called, "accuracy": right / len(rows),
        "precision": hits / called if called else None, "recall": hits / failed if failed else None,
    }  # fmt: skip


def _ranking(answers: Sequence[Answer]) -> dict[str, Any]:
    groups: dict[tuple[Any, ...], list[Answer]] = defaultdict(list)
    for one in answers:
        if not one.failed and one.question.run.pace:
            groups[one.group].append(one)
    found, regrets = [], []
    for rows in groups.values():
        if len(rows) < SMALLEST_GROUP:
            continue
        measured = [one.question.run.pace or 0.0 for one in rows]
        rho = spearman([one.prediction.step_s for one in rows], measured)
        if rho is not None:
            found.append(rho)
        pick = min(range(len(rows)), key=lambda index: (rows[index].fails, rows[index].prediction.step_s))
        regrets.append(measured[pick] / min(measured) - 1)
    return {
        "groups": len(regrets),
        "spearman_median": quantile(found, 0.5),
        "spearman_mean": statistics.fmean(found) if found else None,
        "regret_median": quantile(regrets, 0.5),
        "regret_mean": statistics.fmean(regrets) if regrets else None,
    }


def by(answers: Iterable[Answer], key: Callable[[Answer], str]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        found[key(one)].append(one)
    return dict(found)


def intervals(answers: Sequence[Answer]) -> str:
    """src/shardwise/plan/prediction/intervals.toml: measured over predicted time by kind of job, and the range of what
    was measured."""
    timed = [one for one in answers if one.step_error is not None]
    kinds = by(
        timed,
        lambda one: kind_of_job(one.question.model, one.question.cluster, one.question.plan, one.prediction.step_s),
    )
    lines = [
        "# Made by `python benchmarks/planner_accuracy.py DIR --intervals FILE`: of every published run with a step "
        "time, measured over predicted seconds, and",
        "# the largest of everything that ran. Other frameworks than ours, each with its profile in benchmarks/stacks.",
        "",
    ]
    for kind, rows in sorted(kinds.items()):
        factors = [1 / (1 + (one.step_error or 0.0)) for one in rows]
        low, high = quantile(factors, 0.1), quantile(factors, 0.9)
        lines.append(f'[step."{kind}"]\nrows = {len(rows)}\np10 = {low:.3f}\np90 = {high:.3f}\n')
    questions = [one.question for one in timed]
    most = {
        "nodes": max(one.cluster.nodes for one in questions),
        "devices": max(one.plan.world for one in questions),
        "sequence": max(one.job.seq_len for one in questions),
        "parameters": max(one.model.num_parameters for one in questions),
    }
    lines += ["[seen]"]
    lines += [f"devices = {json.dumps(sorted({one.cluster.device.name for one in questions}))}"]
    lines += [
        f"traits = {json.dumps(sorted({word for one in questions for word in traits(one.model, one.plan)}))}",
        "",
        "[seen.most]",
    ]
    return "\n".join(lines + [f"{name} = {size}" for name, size in most.items()]) + "\n"
