"""Samples text, one token at a time with a key/value cache: from a plain decoder, or through an engine of any
layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.data.corpus import Corpus
from shardwise.errors import UserError
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.parallel.engine import Engine
from shardwise.run.ranks import Ranks
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import Config

PROMPT_TOKENS = 12  # taken from held-out text where no prompt is given

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Takes new tokens (one row) and returns the logits of the last one; remembers what it has seen."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.8  # 0: always the likeliest token
    top_p: float = 0.95  # sample among the likeliest tokens that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            why = "logits are divided by it; 0 takes the likeliest token"
            raise UserError(f"temperature = {self.temperature:g} is out of range", why=why, fix="--temperature 0.8")
        if not 0 < self.top_p <= 1:
            why = "it is the probability of the tokens that are sampled from, more than 0 and at most 1"
            raise UserError(f"top_p = {self.top_p:g} is out of range", why=why, fix="--top-p 0.95")


@torch.inference_mode()
def generate(
    model: Decoder, prompt: Sequence[int], max_new: int, sampling: Sampling, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yields up to `max_new` token ids that follow `prompt`; ends early at an id in `stop` (which is not yielded)."""
    device, limit = next(model.parameters()).device, _limit(model.spec, len(prompt) + max_new)
    cache = KeyValueCache(limit)
    was_training = model.training
    model.eval()
    try:
        forward: Forward = lambda tokens_BT: model(tokens_BT, cache=cache)[0, -1].float()  # noqa: E731
        yield from _sample(forward, prompt, limit, sampling, stop, device)
    finally:
        model.train(was_training)


@torch.inference_mode()
def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    sampling: Sampling,
    stop: frozenset[int] = frozenset(),
    enough: Callable[[int, int], bool] = lambda row, token: False,
) -> list[list[int]]:
    """Returns what follows each prompt, computed together: up to `max_new` ids, fewer where an id in `stop` comes (it
    is not returned) or `enough`, which is told of the row and its new token, says so.

    All rows stand at one position, that of the shortest prompt first; a longer one goes on with its own tokens instead
    of sampled ones. So nothing is padded or masked. Row n draws with the seed `sampling.seed + n`.
    """
    device, longest = next(model.parameters()).device, max(map(len, prompts))
    limit = _limit(model.spec, longest + max_new)
    kept = [list(prompt)[: limit - 1] for prompt in prompts]
    cache, length = KeyValueCache(limit), min(map(len, kept))
    draws = [torch.Generator(device=device).manual_seed(sampling.seed + row) for row in range(len(kept))]
    new: list[list[int]] = [[] for _ in kept]
    going = set(range(len(kept)))
    tokens_BT = torch.tensor([prompt[:length] for prompt in kept], device=device)
    was_training = model.training
    model.eval()
    try:
        while going and length < limit:
            logits_BV = model(tokens_BT, cache=cache)[:, -1].float()
            column = [prompt[length] if length < len(prompt) else 0 for prompt in kept]  # 0: of a row that has ended
            for row in sorted(going):
                if length < len(kept[row]):
                    continue
                column[row] = token = _choose(logits_BV[row], sampling, draws[row])
                if token in stop:
                    going.discard(row)
                    continue
                new[row].append(token)
                if enough(row, token) or len(new[row]) == max_new:
                    going.discard(row)
            tokens_BT, length = torch.tensor(column, device=device)[:, None], length + 1
    finally:
        model.train(was_training)
    return new


def generate_together(
    engine: Engine, prompt: Sequence[int], max_new: int, sampling: Sampling, stop: frozenset[int] = frozenset()
) -> list[int]:
    """Collective. Returns what `generate` yields, computed through all ranks of a layout; every rank gets every
    token."""
    limit = _limit(engine.spec, len(prompt) + max_new)
    caches = engine.new_caches(limit)
    engine.train(False)
    try:
        forward: Forward = lambda tokens_BT: engine.logits(tokens_BT, caches)[0]  # noqa: E731
        return list(_sample(forward, prompt, limit, sampling, stop, engine.mesh.device, engine.mesh.agree))
    finally:
        engine.train(True)


def sample_text(engine: Engine, corpus: Corpus, config: Config, ranks: Ranks) -> str | None:
    """Returns a short continuation of a prompt, with the prompt, as training shows it. Ranks that hold only a part of
    the model all take part. Returns None on ranks that were not needed, and where no sample is asked for."""
    length = config.train.sample_tokens
    if length == 0 or (engine.is_whole and not ranks.is_first):
        return None
    is_python = config.data.source == "python" and corpus.packing != "rows"
    text = config.train.sample_prompt or ("def " if is_python else None)
    prompt: Sequence[int] = corpus.tokenizer.encode(text) if text else corpus.held_out_start(PROMPT_TOKENS)
    sampling, stop = Sampling(seed=config.train.seed), frozenset({corpus.tokenizer.separator})
    if engine.is_whole:
        new = list(generate(engine.models[0], prompt, length, sampling, stop))
    else:
        new = generate_together(engine, prompt, length, sampling, stop)
    return corpus.tokenizer.decode([*prompt, *new])


def _limit(spec: ModelSpec, length: int) -> int:
    """Returns the most tokens that a sequence may have, prompt included: learned positions end somewhere."""
    return min(length, spec.max_seq_len) if spec.positions == "learned" else length


def _sample(
    forward: Forward,
    prompt: Sequence[int],
    limit: int,
    sampling: Sampling,
    stop: frozenset[int],
    device: torch.device,
    agree: Callable[[int], int] = int,
) -> Iterator[int]:
    """Yields token ids one by one; `agree` makes all ranks take the same one."""
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    tokens = torch.tensor([list(prompt)[: limit - 1]], device=device)
    for _ in range(limit - tokens.shape[1]):
        token = agree(_choose(forward(tokens), sampling, generator))
        if token in stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


def _choose(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Returns the id of the next token, drawn from the logits of one position."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities, order = torch.softmax(logits_V / sampling.temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the first token always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
