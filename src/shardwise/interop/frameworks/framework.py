"""What is known of a training framework: its version, what it cannot run, and how a plan is written for it. No torch.

A `Rule` is one thing that a framework cannot do with a layout, with the reason in words. Rules read the names of a
`Plan`, or those of the parts of one as far as a search has chosen them, so the same rules judge a whole plan
(`runs_in`) and cut a search short (`forbids`). Invariant: a plan that no rule forbids, of a model that is not refused,
is written as something that the framework's own parser takes; tests send it through that parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap
from types import SimpleNamespace
from typing import Any, NamedTuple

from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.schema import OptimizerConfig

PARTS = {
    "grid": ("dp", "tp", "sequence", "cp", "cp_kind", "pp", "ep"),
    "pace": ("micro_batch", "schedule", "virtual_stages"),
    "states": ("zero", "replicate"),
    "saving": ("recompute", "offload", "activation_offload"),
}
"""The parts of a layout in the order of a search's `accept`, and the names of a plan that each has."""


@dataclass(frozen=True)
class Rule:
    """One thing that a framework cannot run: `forbids` takes the model and the layout."""

    reads: tuple[str, ...]  # the parts of a layout that must be known
    lacks: str  # what the framework has not, such as "no ring attention"
    forbids: Callable[[ModelSpec, Any], bool]


class UpdateRule(NamedTuple):
    """How weights move apart from the learning rate, which whoever starts the training adds with its schedule."""

    optimizer: OptimizerConfig = OptimizerConfig()
    clip: float | None = 1.0

    @property
    def in_words(self) -> str:
        """Returns it for scripts that build their own optimizer."""
        kind, (beta1, beta2) = OPTIMIZERS[self.optimizer.name], self.optimizer.betas
        words = [self.optimizer.name]
        words += [f"betas {beta1:g} and {beta2:g}", f"eps {self.optimizer.eps:g}"] if kind.is_adam else []
        return ", ".join([*words, f"weight decay {self.optimizer.weight_decay:g} on matrices only"])


@dataclass(frozen=True)
class Exported:
    """A plan as another framework reads it."""

    text: str  # what that framework reads
    kind: str  # flags | toml | json | yaml
    missing: tuple[str, ...]  # what it cannot do, and what it does instead

    def to_print(self, *title: str) -> str:
        """Returns one text that the framework reads, with the rest as comments; JSON has none, so they go under a key
        that nobody reads."""
        if self.kind == "json":
            return json.dumps({"_shardwise": [*title, *self.missing], **json.loads(self.text)}, indent=2)
        return "\n".join([*(part for line in (*title, *self.missing) for part in _comment(line)), self.text])


def _comment(line: str) -> list[str]:
    """Returns a line as comments that a terminal need not break; a second one is indented."""
    return wrap(
        line, 116, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True)
class Framework:
    """A framework whose files are written, in the version whose parser they were checked with."""

    name: str
    title: str  # with its version
    rules: tuple[Rule, ...]
    refuses: Callable[[ModelSpec, Job], list[str]]  # why it would train another model, or cannot train this job at all
    write: Callable[[ModelSpec, Job, Plan, int, UpdateRule], Exported]

    def runs_in(self, spec: ModelSpec, plan: Plan) -> list[str]:
        """Returns what the framework lacks to run a plan; an empty list where it can."""
        at = _view(
            plan.seq_len, plan.global_batch, {name: getattr(plan, name) for part in PARTS.values() for name in part}
        )
        return list(dict.fromkeys(rule.lacks for rule in self.rules if rule.forbids(spec, at)))

    def accepts(self, spec: ModelSpec, seq_len: int, global_batch: int) -> Callable[..., bool]:
        """Returns the `accept` of a best-first search: whether a region may hold a layout that the framework runs."""

        def accept(*parts: Any) -> bool:
            known = dict(zip(PARTS, parts, strict=True))
            values = {name: value for part in parts if part is not None for name, value in part._asdict().items()}
            at = _view(seq_len, global_batch, values)
            return not any(
                rule.forbids(spec, at) for rule in self.rules if all(known[part] is not None for part in rule.reads)
            )

        return accept


def _view(seq_len: int, global_batch: int, values: dict[str, Any]) -> SimpleNamespace:
    """Returns the layout as rules read it: its own names, and what follows from them."""
    at = SimpleNamespace(seq_len=seq_len, global_batch=global_batch, **values)
    at.shard = at.dp // at.replicate if "replicate" in values else None
    return at


def micro_batches(at: Any) -> int:
    """Returns the micro-batches of a step, rounded up."""
    return -(-at.global_batch // (at.dp * at.micro_batch))


def adamw_is_left(optimizer: str) -> str:
    """Returns what is said where a framework has AdamW only: the layout was chosen for another one's memory."""
    kind, adamw = OPTIMIZERS[optimizer], OPTIMIZERS["adamw"]
    more = 4 * adamw.num_states - (kind.num_states if kind.is_low_bit else 4 * kind.num_states)
    return (
        f"cannot run optimizer.name={optimizer}: AdamW is left, whose states are {more} bytes per parameter larger; "
        "plan with optimizer.name=adamw to see whether they fit"
    )


WHOLE_BATCHES = Rule(
    ("grid", "pace"),
    "no steps of an uneven number of sequences: a batch must divide by micro-batch x data-parallel ranks",
    lambda spec, at: at.global_batch % (at.dp * at.micro_batch) != 0,
)
"""A rule of all of them; our runtime adds empty sequences instead."""

NOT_OURS = "its model is built by the transformers library, whose layers are not described here"
