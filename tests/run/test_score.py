"""Scores of continuations are the log-softmax of one forward pass, whatever is computed beside them."""

from __future__ import annotations

import pytest
import torch
from decoders import make

from shardwise.cli.eval_tasks import split_pair, windows_of
from shardwise.data.tokenizer import open_tokenizer
from shardwise.run.score import score_continuations


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_scores_are_those_of_each_row_alone(batch: int) -> None:
    model, ids = make("llama"), torch.randint(1, 64, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [(ids[:5], ids[5:9]), (ids[:1], ids[1:20]), (ids[:12], ids[12:13]), (ids[:3], [])]
    found = score_continuations(model, rows, 64, batch)
    for (context, continuation), score in zip(rows, found):
        whole = torch.tensor([[*context, *continuation]])
        said = torch.log_softmax(model(whole)[0].float().detach(), -1)
        expected = sum(float(said[len(context) - 1 + n, token]) for n, token in enumerate(continuation))
        assert score.log_probability == pytest.approx(expected, abs=1e-4)
        likeliest = said.argmax(-1)[len(context) - 1 : -1].tolist()
        assert score.is_greedy == (continuation == likeliest)
    best = model(torch.tensor([ids[:5]]))[0, -1].argmax().item()
    assert score_continuations(model, [(ids[:5], [best])], 64, batch)[0].is_greedy


def test_of_a_text_that_is_too_long_the_end_is_scored() -> None:
    model = make("llama")
    (long,) = score_continuations(model, [(list(range(1, 20)), [20, 21])], 8, 1)
    (short,) = score_continuations(model, [(list(range(13, 20)), [20, 21])], 8, 1)
    assert long == short


def test_windows_score_every_token_once() -> None:
    windows = windows_of(list(range(11)), 4)
    assert [token for _, scored in windows for token in scored] == list(range(1, 11))
    assert all(context[-1] + 1 == scored[0] for context, scored in windows)


def test_spaces_before_a_continuation_belong_to_it() -> None:
    tokenizer = open_tokenizer("bytes", None)
    assert split_pair(tokenizer, "a ", "b") == ([ord("a")], [ord(" "), ord("b")])
    assert split_pair(tokenizer, "", "b") == ([tokenizer.separator], [ord("b")])
