"""Opening a corpus: caching, mixing, validation, and what is refused before training starts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.corpus import open_corpus
from shardwise.data.prepare import prepare
from shardwise.data.sequences import IGNORE
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import UserError
from shardwise.spec.schema import DataConfig


def refusal(open_rows, *args, **settings) -> str:
    with pytest.raises(UserError) as caught:
        open_rows(*args, **settings)
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


def test_second_opening_reuses_the_cache_and_a_changed_file_does_not(open_rows, rows_file, tmp_path):
    open_rows(rows_file)
    (cached,) = (tmp_path / "cache").iterdir()
    made = (cached / "index.json").stat().st_mtime_ns
    open_rows(rows_file)
    assert (cached / "index.json").stat().st_mtime_ns == made
    rows_file.write_text(rows_file.read_text() + '{"text": "one more"}\n')
    open_rows(rows_file)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_damaged_cache_is_prepared_again(open_rows, rows_file, tmp_path):
    open_rows(rows_file)
    (shard,) = (tmp_path / "cache").glob("*/train-00000.tokens")
    os.truncate(shard, 5)
    corpus = open_rows(rows_file)
    assert corpus.train.num_sequences > 100 and "damaged" in corpus.notes[0]


def test_python_is_the_default_corpus(tmp_path):
    corpus = open_corpus(
        DataConfig(), seq_len=256, seed=0, vocab=256, model_dir=None, cache_dir=tmp_path, progress=False
    )
    assert corpus.description.startswith("Python's own library, ") and corpus.description.endswith(" MB")
    assert corpus.train.num_sequences > 10_000 and corpus.validation.num_sequences > 0
    assert 2.5 < corpus.unigram_entropy() < 4.0
    assert corpus.tokenizer.decode(corpus.held_out_start(40))


def test_training_and_validation_share_no_document(open_rows, rows_file):
    corpus = open_rows(rows_file, validation_fraction=0.3)
    store = corpus.stores[0]
    assert store.train.num_documents + store.validation.num_documents == 300
    assert corpus.validation.num_sequences > 10


def test_too_few_documents_hold_out_the_last_sequences_instead(open_rows, tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"{i:04d}\n" for i in range(400)))
    corpus = open_rows(tmp_path / "one.txt", validation_fraction=0.1)
    assert corpus.validation.num_sequences == 12 and "held out instead" in corpus.notes[0]
    train = corpus.train.batch(1, range(corpus.train.num_sequences), corpus.train.num_sequences)
    held = corpus.validation.batch(1, range(12), 12)
    assert not {row.tobytes() for row in held.tokens} & {row.tobytes() for row in train.tokens}


def test_validation_fraction_zero_means_no_validation(open_rows, rows_file):
    assert open_rows(rows_file, validation_fraction=0.0).validation.num_sequences == 0


def test_unigram_entropy_of_two_equally_frequent_tokens(open_rows, tmp_path):
    (tmp_path / "ab.txt").write_text("ab" * 20000)
    assert open_rows(tmp_path / "ab.txt").unigram_entropy() == pytest.approx(math.log(2), abs=1e-3)


def test_chat_is_packed_whole_with_loss_on_answers_only(open_rows, lines_file):
    path = lines_file([{"prompt": f"q{i}", "response": f"answer {i}"} for i in range(40)])
    corpus = open_rows(path, seq_len=64)
    assert corpus.packing == "whole"
    batch = corpus.train.batch(1, range(4), 4)
    trained = bytes(int(target) for target in batch.targets[0] if target != IGNORE).decode()
    assert trained.startswith("answer ") and "q" not in trained and "#" not in trained
    assert any("built-in" in note for note in corpus.notes)


def test_documents_longer_than_a_sequence_are_announced_as_split(open_rows, rows_file):
    assert any("split over several sequences" in note for note in open_rows(rows_file, packing="whole").notes)


def test_prepared_directory_is_used_as_it_is(open_rows, rows_file, bpe, tmp_path):
    prepare([str(rows_file)], bpe, tmp_path / "out")
    corpus = open_rows(tmp_path / "out")
    assert corpus.tokenizer.digest == bpe.digest and not (tmp_path / "cache").exists()


def test_prepared_and_raw_sources_mix_by_weight(open_rows, rows_file, tmp_path):
    (tmp_path / "x.txt").write_text("x" * 4000)
    prepare([str(tmp_path / "x.txt")], ByteTokenizer(), tmp_path / "out", validation_fraction=0.0)
    corpus = open_rows((str(rows_file), str(tmp_path / "out")), mix=(1.0, 3.0))
    tokens = corpus.train.batch(1, range(2000), 2000).tokens
    assert (tokens == ord("x")).all(axis=1).mean() == pytest.approx(0.75, abs=0.04)
    assert corpus.description.startswith("2 sources, ")


def test_two_processes_preparing_the_same_source_agree(open_rows, rows_file, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        batches = [
            corpus.train.batch(7, range(8), 8).tokens for corpus in pool.map(lambda _: open_rows(rows_file), range(4))
        ]
    assert all((batch == batches[0]).all() for batch in batches)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_seed_changes_the_order_and_nothing_else(open_rows, rows_file):
    one, two = (open_rows(rows_file, seed=seed) for seed in (1, 2))
    count = one.train.num_sequences
    first, second = (corpus.train.batch(1, range(count), count).tokens for corpus in (one, two))
    assert (first != second).any()
    assert (np.sort(first, axis=None) == np.sort(second, axis=None)).all()
    assert (one.validation.batch(1, range(4), 4).tokens == two.validation.batch(1, range(4), 4).tokens).all()


def test_mix_of_wrong_length_or_sign(open_rows, rows_file):
    assert "2 weights for 1 source" in refusal(open_rows, rows_file, mix=(1.0, 2.0))
    assert "not above zero" in refusal(open_rows, (str(rows_file), str(rows_file)), mix=(1.0, 0.0))
    assert "not above zero" in refusal(open_rows, (str(rows_file), str(rows_file)), mix=(1.0, float("nan")))


def test_no_source(open_rows):
    assert "no data to train on" in refusal(open_rows, ())


def test_corpus_shorter_than_a_sequence(open_rows, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    assert "shorter than one sequence" in refusal(open_rows, tmp_path / "short.txt")


def test_token_id_beyond_the_vocabulary(open_rows, rows_file):
    assert "beyond the model's vocabulary of 100" in refusal(open_rows, rows_file, vocab=100)


def test_prepared_with_another_tokenizer(open_rows, rows_file, bpe, tmp_path):
    prepare([str(rows_file)], bpe, tmp_path / "out")
    assert "prepared with another tokenizer" in refusal(open_rows, tmp_path / "out", tokenizer="bytes")


def test_cache_that_cannot_be_written(rows_file, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    data = DataConfig(source=str(rows_file))
    with pytest.raises(UserError, match="cannot write"):
        open_corpus(data, seq_len=16, seed=0, vocab=256, model_dir=None, cache_dir=tmp_path / "cache", progress=False)


def test_models_own_tokenizer_and_template_are_used(lines_file, tokenizer_dir, tmp_path):
    path = lines_file([{"prompt": "the quick", "response": "brown fox"}] * 30)
    data = DataConfig(source=str(path))
    corpus = open_corpus(
        data, seq_len=64, seed=0, vocab=512, model_dir=Path(tokenizer_dir), cache_dir=tmp_path / "c", progress=False
    )
    text = corpus.tokenizer.decode(corpus.train.batch(1, range(1), 1).tokens[0], keep_special=True)
    assert text.startswith(
        "<|im_start|>user\nthe quick<|im_end|>\n<|im_start|>assistant\nbrown fox<|im_end|>\n<|endoftext|>"
    )


def test_notes_are_printed_when_progress_is_wanted(rows_file, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("some text " * 100)
    data = DataConfig(source=str(tmp_path / "one.txt"))
    open_corpus(data, seq_len=16, seed=0, vocab=256, model_dir=None, cache_dir=tmp_path / "cache", progress=True)
    assert "data     too few documents" in capsys.readouterr().err


def test_conversations_in_one_row_do_not_see_each_other_unless_asked(open_rows, lines_file):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = lines_file([{"messages": talk}] * 40)
    train = open_rows(path, seq_len=64).train
    assert train.document_mask and train.batch(1, range(1), 1).documents.max() > 0
    assert open_rows(path, seq_len=64, document_mask=False).train.batch(1, range(1), 1).documents is None


def test_plain_text_is_one_stream_by_default_and_a_model_without_masks_has_a_row_for_each(
    open_rows, rows_file, lines_file
):
    assert not open_rows(rows_file).train.document_mask
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = lines_file([{"messages": talk}] * 40, "talk.jsonl")
    corpus = open_rows(path, seq_len=64, can_mask=False)
    assert (corpus.packing, corpus.train.document_mask) == ("single", False)
    assert any("each conversation has a row of its own" in note for note in corpus.notes)
    split = corpus.stores[0].train
    assert corpus.train.num_sequences + corpus.validation.num_sequences == split.num_documents
    one = corpus.train.batch(1, range(1), 1)  # all conversations are alike
    ids = split.tokens(0, int(split.documents[1])).tolist()
    assert one.tokens[0].tolist() == ids + [corpus.tokenizer.separator] * (64 - len(ids))
    packed = open_rows(path, seq_len=64, can_mask=False, packing="whole")
    assert any("conversations in one row see each other" in note for note in packed.notes)
    asked = open_rows(path, seq_len=64, can_mask=False, document_mask=False)
    assert asked.packing == "whole" and not asked.train.document_mask


def test_held_out_data_that_is_too_little_to_mean_anything_is_announced(open_rows, rows_file):
    [line] = open_rows(rows_file).about(100)
    assert line.startswith("held out ") and "sequences, " in line and "coarse measure" in line
    assert open_rows(rows_file, validation_fraction=0.3).about(100) == []
    assert open_rows(rows_file, validation_fraction=0.0).about(100) == []


def test_a_mix_says_how_much_of_each_source_is_read_and_how_often(open_rows, rows_file, tmp_path):
    (tmp_path / "few.txt").write_text("few words " * 16)
    sources = (str(rows_file), str(tmp_path / "few.txt"))
    corpus = open_rows(sources, mix=(1.0, 3.0), validation_fraction=0.0)
    many, few = (layout.count for layout in corpus.train.layouts)
    first, second = corpus.about(4000)
    assert first.startswith("mix      25.0% from rows.jsonl: ") and first.endswith(f"read {1000 / many:.2g} times")
    assert second.startswith("mix      75.0% from few.txt: ") and second.endswith(f"read {3000 / few:.2g} times")
    drawn = corpus.train.locate(np.arange(4000))[0]
    assert (drawn == 1).mean() == pytest.approx(0.75, abs=0.01)
    by_size = open_rows(sources, validation_fraction=0.0)
    assert by_size.train.shares == pytest.approx([many / (many + few), few / (many + few)])
