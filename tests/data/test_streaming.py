"""Rows that are tokenised while training: the sequences of the prepared corpus, in their order, from any step on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardwise.data.hub import HubDataset, is_hub_name
from shardwise.data.order import slots_of
from shardwise.data.sequences import IGNORE, Layout
from shardwise.data.shards import Split
from shardwise.data.streaming import Position, SequenceReader, StreamedSource, TokenStream
from shardwise.errors import UserError

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "twelve", "wise", "shards"]


def text(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(1 + number * number % 60))


def talk(number: int) -> list:
    turns = [{"role": "user", "content": text(number)}, {"role": "assistant", "content": text(number + 1)}]
    return turns * (1 + number % 3)


ROWS = {
    "text": [{"text": text(number)} for number in range(300)],
    "blank": [{"text": text(number) if number % 3 else " "} for number in range(300)],
    "chat": [{"messages": talk(number)} for number in range(300)],
    "pairs": [{"prompt": text(number), "completion": text(number + 1)} for number in range(300)],
    "mixed": [{"messages": talk(number)} if number // 7 % 2 else {"text": text(number)} for number in range(300)],
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So few documents are tokenised at once that there are many places between them."""
    monkeypatch.setattr("shardwise.data.streaming.BATCH_BYTES", 2000)


def rows_of(layout: Layout, indices: range, document_mask: bool) -> list:
    """Sequences of a prepared corpus in the order of its files."""
    from shardwise.data.sequences import Sequences

    sequences = Sequences([layout], seq_len=layout.seq_len, seed=0, document_mask=document_mask)
    sequences.locate = lambda samples: (np.zeros(len(samples), dtype=int), np.array(indices))
    return same(sequences.batch(1, range(len(indices)), len(indices)))


def same(batch) -> list:
    """A batch as lists, to be compared."""
    documents = None if batch.documents is None else batch.documents.tolist()
    return [batch.tokens.tolist(), batch.targets.tolist(), documents]


def batches(train: TokenStream, steps: range, global_batch: int = 4) -> list:
    return [same(train.batch(step, range(global_batch), global_batch)) for step in steps]


def stream(open_rows, path, **settings):
    settings = {"shuffle_buffer": 0, "held_out": 0, "seq_len": 48} | settings
    return open_rows(path, streaming=True, **settings)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_a_stream_has_the_sequences_of_the_prepared_corpus_in_the_order_of_its_files(
    open_rows, lines_file, kind, packing, document_mask
):
    path = lines_file(ROWS[kind])
    settings = {"packing": packing, "document_mask": document_mask}
    prepared = open_rows(path, seq_len=48, validation_fraction=0.0, **settings)
    (layout,) = prepared.train.layouts
    assert layout.count > 60
    expected = rows_of(layout, range(layout.count), document_mask)
    streamed = stream(open_rows, path, **settings)
    assert same(streamed.train.batch(1, range(layout.count), layout.count)) == expected
    # the second pass has the same sequences
    assert same(streamed.train.batch(2, range(layout.count), layout.count)) == expected


def test_conversations_are_packed_whole_with_loss_on_answers_only_as_in_a_prepared_corpus(open_rows, lines_file):
    path = lines_file(ROWS["chat"])
    prepared, streamed = open_rows(path), stream(open_rows, path)
    assert (streamed.packing, streamed.document_mask, streamed.is_chat) == ("whole", True, True)
    assert (prepared.packing, prepared.document_mask, prepared.is_chat) == ("whole", True, True)
    plain = stream(open_rows, lines_file(ROWS["text"], "text.jsonl"))
    assert (plain.packing, plain.document_mask, plain.is_chat) == ("stream", False, False)


SETTINGS = [
    {},
    {"shuffle_buffer": 7},
    {"shuffle_buffer": 100, "held_out": 9},
    {"shuffle_buffer": 5, "packing": "whole"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["mixed", "blank"])
def test_what_a_step_left_behind_is_enough_to_go_on_from_it(open_rows, lines_file, settings, kind):
    path = lines_file(ROWS[kind][: 24 if kind == "mixed" else 50])
    whole = stream(open_rows, path, **settings)
    steps = range(1, 61)  # passes over the file more than once
    expected = {step: same(whole.train.batch(step, range(4), 4)) for step in steps}
    states = {}
    again = stream(open_rows, path, **settings).train
    for step in steps:
        again.batch(step, range(4), 4)
        states[step] = json.loads(json.dumps(again.state_after(step)))
    assert max(state["sources"][0]["epoch"] for state in states.values()) >= 1
    for step in range(1, 60, 4):
        resumed = stream(open_rows, path, **settings).train
        resumed.restore(states[step], step + 1)
        assert batches(resumed, range(step + 1, min(step + 4, 61))) == [
            expected[later] for later in range(step + 1, min(step + 4, 61))
        ]
    assert len(json.dumps(states[60])) < 1000  # no tokens


def test_several_sources_go_on_together_also_with_another_number_of_rows_per_step(open_rows, lines_file):
    names = tuple(str(lines_file(ROWS[kind][:40], f"{kind}.jsonl")) for kind in ("text", "mixed", "pairs"))
    settings = {"mix": (3.0, 1.0, 2.0), "shuffle_buffer": 6, "packing": "whole"}
    train = stream(open_rows, names, **settings).train
    expected = batches(train, range(1, 31))
    again = stream(open_rows, names, **settings).train
    batches(again, range(1, 11))
    state = json.loads(json.dumps(again.state_after(10)))
    resumed = stream(open_rows, names, **settings).train
    resumed.restore(state, 11)
    found = [same(resumed.batch(step, range(8), 8)) for step in range(11, 21)]
    assert [row for step in found for row in step[0]] == [row for step in expected[10:] for row in step[0]]
    with pytest.raises(UserError, match=r"data.mix: \[3.0, 1.0, 2.0\] there"):
        stream(open_rows, names, **settings | {"mix": (1.0, 1.0, 2.0)}).train.restore(state, 11)


def test_ranks_take_their_rows_of_one_order_and_another_number_of_ranks_goes_on(open_rows, lines_file):
    path = lines_file(ROWS["mixed"])
    alone = [stream(open_rows, path, shuffle_buffer=10).train.batch(1, range(8), 8)][0]
    parts = [stream(open_rows, path, shuffle_buffer=10).train for _ in range(2)]
    found = [train.batch(1, range(4 * rank, 4 * rank + 4), 8) for rank, train in enumerate(parts)]
    assert np.array_equal(np.concatenate([part.tokens for part in found]), alone.tokens)
    assert np.array_equal(np.concatenate([part.targets for part in found]), alone.targets)
    assert parts[0].state_after(1) == parts[1].state_after(1)


def test_a_step_is_reached_also_without_a_state_and_a_stream_is_read_anew(open_rows, lines_file):
    path = lines_file(ROWS["text"])
    train = stream(open_rows, path, shuffle_buffer=10).train
    expected = batches(train, range(1, 9))
    assert batches(stream(open_rows, path, shuffle_buffer=10).train, range(5, 9)) == expected[4:]
    assert batches(train.anew(), range(1, 9)) == expected


def test_shuffling_is_within_the_buffer_by_the_seed(open_rows, lines_file):
    path = lines_file(ROWS["text"])
    plain = stream(open_rows, path).train.batch(1, range(20), 20)
    shuffled = stream(open_rows, path, shuffle_buffer=10).train.batch(1, range(20), 20)
    other = stream(open_rows, path, shuffle_buffer=10, seed=1).train.batch(1, range(20), 20)
    for first in (0, 10):
        part = slice(first, first + 10)
        assert sorted(plain.tokens[part].tolist()) == sorted(shuffled.tokens[part].tolist())
        assert plain.tokens[part].tolist() != shuffled.tokens[part].tolist() != other.tokens[part].tolist()


def test_what_is_held_out_is_the_beginning_and_never_trained_on(open_rows, lines_file):
    path = lines_file([{"text": f"{number:06} " * 4} for number in range(200)])
    corpus = stream(open_rows, path, held_out=20, shuffle_buffer=8)
    (layout,) = open_rows(path, seq_len=48, validation_fraction=0.0).train.layouts
    assert corpus.validation.num_sequences == 20
    assert same(corpus.validation.batch(1, range(20), 20)) == rows_of(layout, range(20), False)
    trained = np.concatenate([corpus.train.batch(step, range(16), 16).tokens for step in range(1, 40)])
    held = {tuple(row) for row in corpus.validation.batch(1, range(20), 20).tokens.tolist()}
    assert not held & {tuple(row) for row in trained.tolist()}
    assert corpus.about(100) == ["held out the first 20 sequences of the stream"]
    # the next batch of held-out rows begins again at the end
    assert same(corpus.validation.batch(2, range(20), 20)) == same(corpus.validation.batch(1, range(20), 20))


def test_sources_mix_by_weight_each_in_its_own_order(open_rows, lines_file):
    paths = [lines_file([{"text": letter * 40}] * 50, f"{letter}.jsonl") for letter in "abc"]
    names = tuple(map(str, paths))
    corpus = stream(open_rows, names, mix=(2.0, 1.0, 1.0), seq_len=20)
    tokens = corpus.train.batch(1, range(2000), 2000).tokens
    counts = [int((tokens == ord(letter)).any(axis=1).sum()) for letter in "abc"]
    slots = slots_of((2.0, 1.0, 1.0))
    assert abs(counts[0] / 2000 - slots[0] / slots.sum()) < 0.05 and abs(counts[1] - counts[2]) < 150
    assert corpus.about(1)[0] == f"mix      50.0% from {paths[0].name}"
    by_size = stream(open_rows, names, seq_len=20)
    assert by_size.about(1)[0].startswith("mix      33.3%")


def test_another_pass_is_said(open_rows, lines_file):
    said: list[str] = []
    train = stream(open_rows, lines_file(ROWS["text"][:40])).train
    train.say = said.append
    batches(train, range(1, 60))
    assert said[0] == "data     pass 2 over rows.jsonl begins" and "pass 3" in said[1]


def test_the_first_tokens_show_how_well_a_model_does_that_knows_no_order(open_rows, lines_file):
    corpus = stream(open_rows, lines_file([{"text": "ab" * 30}] * 200), seq_len=61)
    assert 0.7 < corpus.unigram_entropy() < 0.8  # ln 2, and the end of each document
    assert corpus.tokenizer.decode(corpus.held_out_start(5)) == "ababa"


def refusal(open_rows, path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        stream(open_rows, path, **settings)
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


def test_streams_that_are_too_short_or_of_the_wrong_kind_are_refused_at_the_start(open_rows, lines_file, tmp_path):
    assert "no text in" in refusal(open_rows, lines_file([]))
    assert "no text in" in refusal(open_rows, lines_file([{"text": " "}] * 9))
    assert "shorter than one sequence" in refusal(open_rows, lines_file([{"text": "short"}]))
    error = refusal(open_rows, lines_file(ROWS["text"][:60]), held_out=1000)
    assert "shorter than what is held out of it" in error and "data.held_out=" in error
    assert "`text` is not text but int" in refusal(open_rows, lines_file([{"text": 5}]))
    assert "not an object but list" in refusal(open_rows, lines_file([[1]]))
    assert "beyond the model's vocabulary of 100" in refusal(open_rows, lines_file(ROWS["text"]), vocab=100)
    open_rows(lines_file(ROWS["text"]))
    (prepared,) = (tmp_path / "cache").iterdir()
    assert "is prepared already" in refusal(open_rows, prepared)


def test_a_row_of_the_wrong_type_in_the_middle_is_named_when_it_is_reached(open_rows, lines_file):
    train = stream(open_rows, lines_file([*ROWS["text"], {"text": 5}])).train
    with pytest.raises(UserError) as caught:
        batches(train, range(1, 200))
    assert "rows.jsonl:301" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"shuffle_buffer": 3}, "data.shuffle_buffer"),
        ({"held_out": 3}, "data.held_out"),
        ({"seed": 1}, "train.seed"),
        ({"vocab": 512}, "data.source"),
    ],
)
def test_the_state_of_another_stream_is_refused(open_rows, lines_file, change, key):
    train = stream(open_rows, lines_file(ROWS["text"])).train
    train.batch(1, range(4), 4)
    state = train.state_after(1)
    path = lines_file(ROWS["text"][: 299 if key == "data.source" else 300])
    with pytest.raises(UserError) as caught:
        stream(open_rows, path, **change).train.restore(state, 2)
    assert key in caught.value.why
    assert caught.value.fix.startswith("restore it" if key == "data.source" else f"shardwise resume RUN --allow {key} ")


def test_files_behind_an_address_stream_like_those_of_a_disk(open_rows, lines_file):
    import fsspec

    path = lines_file(ROWS["mixed"])
    fsspec.filesystem("memory").pipe("/stream/rows.jsonl", path.read_bytes())
    steps = range(1, 20)
    there, here = (stream(open_rows, name, shuffle_buffer=9).train for name in ("memory://stream/*.jsonl", path))
    assert batches(there, steps) == batches(here, steps)


@pytest.mark.needs("datasets")
def test_rows_of_the_datasets_library_stream_like_those_of_a_file(open_rows, lines_file, tmp_path):
    import datasets

    from shardwise.data.sources import Reading, find_source
    from shardwise.data.streaming import FileDocuments

    path = lines_file(ROWS["text"])
    local = FileDocuments(find_source(str(path)), Reading(raw_bytes=True))
    cache = str(tmp_path / "datasets")

    def make_rows():
        return datasets.load_dataset("json", data_files=str(path), split="train", streaming=True, cache_dir=cache)

    hub = HubDataset(make_rows, "owner/rows", "", Reading())
    cutting = stream(open_rows, path).train._cutting
    sources = [StreamedSource(SequenceReader(one, cutting), Position(), buffer=5, key=1) for one in (local, hub)]
    for count in range(1, 150):
        here, there = (source.take() for source in sources)
        assert np.array_equal(here.tokens, there.tokens)
        if count % 31 == 0:  # a place is JSON, and enough to go on from
            about = json.loads(json.dumps(sources[1].state()))
            sources[1] = StreamedSource(SequenceReader(hub, cutting), Position(), buffer=5, key=1)
            position = Position(about["place"], about["skip"], about["epoch"])
            sources[1].go_to(position, about["taken"])


def test_names_of_the_hub_say_configuration_and_split():
    assert is_hub_name("owner/name") and is_hub_name("owner/name:en") and is_hub_name("owner/name::validation")
    assert not is_hub_name("name") and not is_hub_name("/a/b") and not is_hub_name("a/b/c")


def test_a_dataset_of_the_hub_without_the_library_says_what_to_install(open_rows, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'shardwise[datasets]'" in refusal(open_rows, "owner/name")


def test_tokens_in_memory_have_what_is_needed_of_a_split(open_rows, lines_file):
    from shardwise.data.shards import MemorySplit

    split = open_rows(lines_file(ROWS["chat"]), validation_fraction=0.0).stores[0].train
    assert isinstance(split, Split)
    memory = MemorySplit(split.tokens(0, 900), split.mask(0, 900), np.array([0, 900]))
    assert np.array_equal(memory.tokens(5, 80), split.tokens(5, 80)) and memory.tokens(5, 80).dtype == np.int64
    assert np.array_equal(memory.mask(5, 80), split.mask(5, 80)) and IGNORE < 0
