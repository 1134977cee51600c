"""Scores given text with a plain model: how likely a continuation is after its context, without sampling anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class TextScore:
    """The sum of the log-probabilities of some tokens, in nats, and whether each of them was the likeliest."""

    log_probability: float
    is_greedy: bool


@torch.inference_mode()
def score_continuations(
    model: nn.Module, rows: Sequence[tuple[Sequence[int], Sequence[int]]], max_len: int, batch: int
) -> list[TextScore]:
    """Returns a score for each (context, continuation) of token ids, in order; a context has a token at least. Of what
    is longer than `max_len` tokens the end is kept. Rows of similar length are computed together; what pads the shorter
    ones on the right changes nothing before it."""
    device, was_training = next(model.parameters()).device, model.training
    kept = [([*context, *continuation][-max_len - 1 :], len(continuation)) for context, continuation in rows]
    scores = [TextScore(0.0, True)] * len(kept)
    order = sorted(range(len(kept)), key=lambda row: -len(kept[row][0]))
    model.eval()
    try:
        for first in range(0, len(order), batch):
            some = order[first : first + batch]
            longest = max(len(kept[row][0]) for row in some) - 1
            padded = [[*kept[row][0][:-1], *[0] * (longest + 1 - len(kept[row][0]))] for row in some]
            logits_BTV = model(torch.tensor(padded, device=device))
            for row, logits_TV in zip(some, logits_BTV, strict=True):
                scores[row] = _score(logits_TV, *kept[row])
    finally:
        model.train(was_training)
    return scores


def _score(logits_TV: torch.Tensor, ids: Sequence[int], num_scored: int) -> TextScore:
    """Returns the score of the last `num_scored` ids, whose logits stand one place before them."""
    num_scored = min(num_scored, len(ids) - 1)
    said = logits_TV[len(ids) - 1 - num_scored : len(ids) - 1].float()
    targets = torch.tensor(ids[len(ids) - num_scored :], device=said.device)
    total = functional.log_softmax(said, dim=-1).gather(1, targets[:, None]).sum()
    return TextScore(float(total), bool((said.argmax(dim=-1) == targets).all()))
