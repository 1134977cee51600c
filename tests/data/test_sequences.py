"""Rows: packing both ways, shifted targets, document masks, and an order that depends on (seed, step) alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.prepare import prepare
from shardwise.data.sequences import IGNORE, Layout, Sequences, whole_document_starts
from shardwise.data.shards import TokenStore
from shardwise.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Three documents of bytes: aaaa0 bb0 cccccccccc0."""
    directory = tmp_path_factory.mktemp("split")
    for name, text in (("1.txt", "abcd"), ("2.txt", "ef"), ("3.txt", "ghijklmnop")):
        (directory / name).write_text(text)
    prepare([str(directory)], ByteTokenizer(), directory / "out", validation_fraction=0.0)
    return TokenStore(directory / "out").train


@pytest.fixture(scope="module")
def long_split(tmp_path_factory):
    """Five thousand distinct tokens' worth of numbers as text."""
    directory = tmp_path_factory.mktemp("long")
    (directory / "numbers.txt").write_text(" ".join(map(str, range(1100))))
    prepare([str(directory / "numbers.txt")], ByteTokenizer(), directory / "out", validation_fraction=0.0)
    return TokenStore(directory / "out").train


def rows_in_order(layout: Layout, document_mask: bool = False):
    """Every sequence of a layout, in stream order."""
    sequences = Sequences([layout], seq_len=layout.seq_len, seed=0, document_mask=document_mask)
    _, indices = sequences.locate(np.arange(layout.count))
    batch = sequences.batch(1, range(layout.count), layout.count)
    order = np.argsort(indices)
    return batch.tokens[order], batch.targets[order], None if batch.documents is None else batch.documents[order]


def as_text(row) -> str:
    return "".join("." if token == IGNORE else "0" if token == 0 else chr(token) for token in row)


def test_stream_packing_cuts_every_seq_len_and_targets_are_shifted_by_one(split):
    tokens, targets, documents = rows_in_order(Layout(split, 6, "stream", 0))
    assert [as_text(row) for row in tokens] == ["abcd0e", "f0ghij", "klmnop"]
    assert [as_text(row) for row in targets] == ["bcd0ef", "0ghijk", "lmnop0"]
    assert documents is None


def test_document_mask_numbers_documents_and_ignores_targets_across_them(split):
    _, targets, documents = rows_in_order(Layout(split, 6, "stream", 0), document_mask=True)
    assert [as_text(row) for row in targets] == ["bcd0.f", "0.hijk", "lmnop0"]
    assert documents.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    assert documents.dtype == np.int32


def test_whole_packing_keeps_documents_whole_and_splits_only_those_too_long(split):
    tokens, targets, documents = rows_in_order(Layout(split, 9, "whole", 0), document_mask=True)
    assert [as_text(row) for row in tokens] == ["abcd0ef00", "ghijklmno", "p00000000"]
    assert [as_text(row) for row in targets] == ["bcd0.f0..", "hijklmnop", "0........"]
    assert documents.tolist() == [[0] * 5 + [1] * 3 + [2], [0] * 9, [0] * 2 + [1] * 7]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), seq_len=st.integers(2, 30))
def test_whole_packing_covers_the_stream_and_breaks_only_long_documents(lengths, seq_len):
    boundaries = np.concatenate(([0], np.cumsum(lengths)))
    starts = whole_document_starts(boundaries, seq_len)
    assert starts[0] == 0 and starts[-1] == boundaries[-1]
    assert (np.diff(starts) > 0).all() and (np.diff(starts) <= seq_len).all()
    for cut in set(starts.tolist()) - set(boundaries.tolist()):
        document = np.searchsorted(boundaries, cut) - 1
        assert lengths[document] > seq_len


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), step=st.integers(1, 5000), cuts=st.sets(st.integers(0, 12)))
def test_any_division_of_the_rows_gives_the_same_batch(long_split, seed, step, cuts):
    sequences = Sequences([Layout(long_split, 16, "stream", 0)], seq_len=16, seed=seed)
    whole = sequences.batch(step, range(12), 12)
    edges = sorted({0, 12, *cuts})
    parts = [sequences.batch(step, range(a, b), 12) for a, b in pairwise(edges)]
    assert (np.concatenate([part.tokens for part in parts]) == whole.tokens).all()
    assert (np.concatenate([part.targets for part in parts]) == whole.targets).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), global_batch=st.integers(5, 60), seq_len=st.integers(16, 64))
def test_every_epoch_has_every_sequence_exactly_once(long_split, seed, global_batch, seq_len):
    sequences = Sequences([Layout(long_split, seq_len, "stream", 0)], seq_len=seq_len, seed=seed)
    count = sequences.num_sequences
    num_steps = -(-3 * count // global_batch)
    seen = np.concatenate(
        [sequences.locate((step - 1) * global_batch + np.arange(global_batch))[1] for step in range(1, num_steps + 1)]
    )
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_epochs_differ_but_validation_repeats(long_split):
    layout = Layout(long_split, 16, "stream", 0)
    train, fixed = (Sequences([layout], seq_len=16, seed=0, fixed_order=fixed) for fixed in (False, True))
    first, second = np.arange(layout.count), np.arange(layout.count) + layout.count
    assert (train.locate(first)[1] != train.locate(second)[1]).any()
    assert (fixed.locate(first)[1] == fixed.locate(second)[1]).all()


def test_a_larger_global_batch_walks_the_same_samples(long_split):
    sequences = Sequences([Layout(long_split, 16, "stream", 0)], seq_len=16, seed=1)
    eight = sequences.batch(3, range(8), 8).tokens
    fours = [sequences.batch(step, range(4), 4).tokens for step in (5, 6)]
    assert (eight == np.concatenate(fours)).all()


def test_weights_give_each_source_its_share_and_its_own_epochs(split, long_split):
    layouts = [Layout(split, 6, "stream", 0), Layout(long_split, 6, "stream", 0)]
    sequences = Sequences(layouts, seq_len=6, seed=0, weights=(0.25, 0.75))
    source, index = sequences.locate(np.arange(2**16))
    assert abs((source == 0).mean() - 0.25) < 1e-4
    times = np.bincount(index[source == 0], minlength=3)
    assert times.max() - times.min() <= 1


def test_without_weights_sources_are_one_pool(split, long_split):
    layouts = [Layout(split, 6, "stream", 0), Layout(long_split, 6, "stream", 0)]
    sequences = Sequences(layouts, seq_len=6, seed=0)
    source, index = sequences.locate(np.arange(sequences.num_sequences))
    assert sequences.num_sequences == layouts[0].count + layouts[1].count
    assert len(set(zip(source.tolist(), index.tolist()))) == sequences.num_sequences
