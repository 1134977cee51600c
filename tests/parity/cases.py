"""Runs rows of the matrix: the layout on ranks, the truth in one process, and what lies between them.

Both sides run in processes of the pool, which have the same kernels for every precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from flips import first_flip, plain_routes, routes_in_layout
from layouts import Case
from torch import Tensor

from shardwise.model.decoder import Decoder
from shardwise.prove import reference
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class Differences:
    """The largest over all steps or tensors."""

    loss: float  # absolute
    norm: float  # relative
    gradient: float  # of the first step, relative to the largest entry of the tensor
    parameter: float  # after the last step, absolute

    def over(self, limits: dict[str, float]) -> dict[str, float]:
        """What is not within its limit; a number that is not finite never is."""
        return {name: getattr(self, name) for name, limit in limits.items() if not getattr(self, name) <= limit}

    def __str__(self) -> str:
        return "  ".join(f"{part.name} {getattr(self, part.name):.1e}" for part in fields(self))


class Matrix:
    """Runs cases on a pool; remembers the truths that they share, and what it measured."""

    def __init__(self, ranks: Any):
        self.ranks = ranks
        self.measured: dict[Case, Differences] = {}
        self.truths: dict[tuple[Any, ModelSpec, Trial], Record] = {}

    def truth(self, spec: ModelSpec, plan: Plan, trial: Trial) -> Record:
        has_two_copies = trial.precision == "bf16" and spec.tied and plan.pp > 1
        key = (train_with_two_copies if has_two_copies else train_plain, spec, trial)
        if key not in self.truths:
            [self.truths[key]] = self.ranks.run(key[0], 1, spec, trial, timeout=120)
        return self.truths[key]

    def measure(self, case: Case) -> Differences:
        if case not in self.measured:
            self.measured[case] = self.compare(case.spec, case.plan, case.trial)
        return self.measured[case]

    def flips(self, case: Case, job: Any = routes_in_layout) -> str:
        """For a row that differs: which token took another way first. A tie that rounding broke looks like a mistake
        otherwise."""
        if not case.spec.num_experts:
            return ""
        [truth] = self.ranks.run(plain_routes, 1, case.spec, case.trial, timeout=120)
        found = self.ranks.run(job, case.plan.world, case.spec, case.plan, case.trial, timeout=120)
        return first_flip(truth, [route for routes in found for route in routes])

    def compare(self, spec: ModelSpec, plan: Plan, trial: Trial, job: Any = None, **options: Any) -> Differences:
        truth = self.truth(spec, plan, trial)
        records = self.ranks.run(
            job or in_layout, plan.world, spec, plan, trial, timeout=options.pop("timeout", 120), **options
        )
        told = {repr((record.losses, record.norms)) for record in records}  # repr: a NaN is like another NaN
        assert len(told) == 1, "ranks report different numbers"
        return differences(records[0], truth)


def in_layout(spec: ModelSpec, plan: Plan, trial: Trial) -> Record:
    return train_in_layout(spec, plan, trial, dist.get_rank(), torch.device("cpu"))


def train_with_two_copies(spec: ModelSpec, trial: Trial) -> Record:
    """The truth for a tied weight in bf16 when both ends of the model have a copy of it. Each copy's gradient is
    rounded to bf16 and their sum is not; one copy for both uses rounds the sum, which is another calculation (by
    about one part in 500)."""

    class TwoCopies(Decoder):
        def __init__(self, *args: Any):
            super().__init__(*args)
            assert self.head is not None
            self.head.register_forward_pre_hook(lambda head, args: (*args[:2], self.masters[0].bfloat16()))

        def _apply(self, *args: Any) -> Any:  # after a cast the parameter is final
            super()._apply(*args)
            assert self.embed is not None
            self.masters = [self.embed.weight]
            return self

    reference.Decoder = TwoCopies  # type: ignore[misc, assignment]
    try:
        return train_plain(spec, trial)
    finally:
        reference.Decoder = Decoder  # type: ignore[misc]


def differences(record: Record, truth: Record) -> Differences:
    for name in ("gradients", "parameters"):
        missing = getattr(record, name).keys() ^ getattr(truth, name).keys()
        assert not missing, f"{name} of {len(missing)} tensors on one side only: {sorted(missing)[:3]}"
    return Differences(
        loss=_largest(abs(a - b) for a, b in zip(record.losses, truth.losses, strict=True)),
        norm=_largest(abs(a - b) / b for a, b in zip(record.norms, truth.norms, strict=True)),
        gradient=_largest(
            _distance(record.gradients[name], value) / max(_scale(truth.gradients, name), 1e-300)
            for name, value in truth.gradients.items()
        ),
        parameter=_largest(_distance(record.parameters[name], value) for name, value in truth.parameters.items()),
    )


def _distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    return float((a - b).abs().max())


def _scale(gradients: dict[str, Tensor], name: str) -> float:
    """The largest entry. With learned positions a key bias shifts all scores of a query alike, which softmax ignores:
    its true gradient is zero, what is computed is noise, and the query bias beside it says how much of that is
    fair."""
    beside = name.replace("attention.k.bias", "attention.q.bias")
    return max(float(gradients[name].abs().max()), float(gradients[beside].abs().max()))


def _largest(values: Any) -> float:
    """A NaN counts as infinite: `max` would lose it."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)
