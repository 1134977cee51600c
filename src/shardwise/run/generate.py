"""Sampling text from a decoder, one token at a time with a key/value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8  # 0: always the likeliest token
    top_p: float = 0.95  # sample among the likeliest tokens that together have this probability
    seed: int = 0


@torch.inference_mode()
def generate(
    model: Decoder, prompt: Sequence[int], max_new: int, sampling: Sampling, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yield up to `max_new` token ids that follow `prompt`; ends early at an id in `stop` (which is not yielded)."""
    weight = next(model.parameters())
    device, spec = weight.device, model.spec
    limit = len(prompt) + max_new
    if spec.positions == "learned":
        limit = min(limit, spec.max_seq_len)
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    was_training = model.training
    model.eval()
    try:
        cache = KeyValueCache(limit)
        tokens = torch.tensor([list(prompt)[: limit - 1]], device=device)
        for _ in range(limit - tokens.shape[1]):
            logits = model(tokens, cache=cache)[0, -1].float()
            token = _choose(logits, sampling, generator)
            if token in stop:
                return
            yield token
            tokens = torch.tensor([[token]], device=device)
    finally:
        model.train(was_training)


def _choose(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities, order = torch.softmax(logits_V / sampling.temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first token always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
