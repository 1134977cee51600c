"""Holds what a Python program brings to a run beside its config (shardwise.train): a loss, an optimizer, an evaluation,
and who hears of the lines of metrics.jsonl. No torch at module level.

Invariant: every rank has the same parts, or a run would compute something else on each. Read next: setup.py, which puts
them into place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardwise.data.corpus import Corpus
    from shardwise.spec.model import ModelSpec
    from shardwise.spec.schema import Config

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""From the logits (N, V) of N tokens and their targets (N,) to one loss per token (N,). A target of -100 has none."""

Score = Callable[[Sequence[Sequence[int]]], list[float]]
"""From rows of token ids to the model's mean loss of each, in nats per token. Collective."""


@dataclass(frozen=True)
class OwnParts:
    """What a program brings; None: as the config says."""

    loss: Loss | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    evaluate: Callable[[Score], Mapping[str, float]] | None = None
    corpus: Callable[[Config, ModelSpec], Corpus] | None = None  # makes what is trained on, of the program's rows
    hear: Callable[[dict[str, Any]], None] | None = None  # is called on the first rank with every line

    @property
    def names(self) -> list[str]:
        """What `resume` must be given again, by the names of train's arguments."""
        has = {"loss": self.loss, "optimizer": self.optimizer, "evaluate": self.evaluate, "data": self.corpus}
        return [name for name, part in has.items() if part is not None]
