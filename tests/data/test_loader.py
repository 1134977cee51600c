"""The loader: same batches as the sequences themselves, from a thread that ends when told and never hides a mistake."""

from __future__ import annotations

import threading

import pytest
import torch

from shardwise.data.loader import Loader
from shardwise.errors import UserError


@pytest.fixture
def train(open_rows, rows_file):
    return open_rows(rows_file, document_mask=True).train


class Broken:
    """Sequences whose third step fails, as a shard that vanishes would."""

    def __init__(self, train):
        self._train = train

    def batch(self, step, rows, global_batch):
        if step == 3:
            raise UserError("gone", why="the disk went away", fix="bring it back")
        return self._train.batch(step, rows, global_batch)


def test_steps_are_split_into_microbatches_and_the_last_may_be_smaller(train):
    with Loader(train, global_batch=8, rows=range(1, 8), micro_batch=3) as loader:
        step = loader.next()
    expected = train.batch(1, range(1, 8), 8)
    assert [len(micro.tokens) for micro in step.microbatches] == [3, 3, 1]
    for name in ("tokens", "targets", "documents"):
        joined = torch.cat([getattr(micro, name) for micro in step.microbatches])
        assert torch.equal(joined, torch.from_numpy(getattr(expected, name)))
    assert step.num_targets == (expected.targets != -100).sum()


def test_first_step_resumes_where_another_loader_would_be(train):
    with Loader(train, global_batch=4, rows=range(4), micro_batch=4) as loader:
        straight = [loader.next() for _ in range(6)]
    with Loader(train, global_batch=4, rows=range(4), micro_batch=2, first_step=6, depth=1) as loader:
        resumed = loader.next()
    assert resumed.step == straight[5].step == 6
    assert torch.equal(torch.cat([micro.tokens for micro in resumed.microbatches]), straight[5].microbatches[0].tokens)


def test_mistake_in_the_thread_is_raised_by_next_at_its_step_and_again(train):
    with Loader(Broken(train), global_batch=4, rows=range(4), micro_batch=4) as loader:
        assert [loader.next().step, loader.next().step] == [1, 2]
        for _ in range(2):
            with pytest.raises(UserError, match="gone"):
                loader.next()


def test_close_ends_the_thread_even_when_nobody_reads(train):
    loader = Loader(train, global_batch=4, rows=range(4), micro_batch=4, depth=1)
    loader.close()
    loader.close()
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        loader.next()


def test_no_rows_give_no_microbatches(train):
    with Loader(train, global_batch=4, rows=range(4, 4), micro_batch=2) as loader:
        step = loader.next()
    assert step.microbatches == [] and step.num_targets == 0
