"""Tokenizers: ids, separators, and text that comes out piece by piece."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import guarded_tokenizer
from shardwise.data.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from shardwise.errors import UserError

TEXT = "naïve 漢字 🙂 ok"


def test_bytes_round_trip_and_separator_disappears():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode(TEXT), 0]) == TEXT


def test_bytes_drop_nul_so_that_only_document_ends_are_zero():
    ids, lengths = ByteTokenizer().encode_documents([b"a\0b", "c"])
    assert ids.tolist() == [97, 98, 0, 99, 0] and lengths.tolist() == [3, 2]


def test_auto_is_the_models_own_tokenizer_else_bytes(tokenizer_dir, tmp_path):
    assert isinstance(open_tokenizer("auto", tokenizer_dir), FileTokenizer)
    assert isinstance(open_tokenizer("auto", tmp_path), ByteTokenizer)


def test_documents_are_what_the_library_encodes_plus_the_separator(bpe):
    ids, lengths = bpe.encode_documents([TEXT, b"the dog"])
    first, second = np.split(ids, [lengths[0]])
    assert first.tolist() == [*bpe.encode(TEXT), bpe.separator]
    assert second.tolist() == [*bpe.encode("the dog"), bpe.separator]
    assert ids.dtype == np.uint16


def test_separator_comes_from_generation_config_when_no_string_names_it(tokenizer_dir, tmp_path):
    shutil.copy(tokenizer_dir / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 2]}))
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).separator == 6


def test_separator_falls_back_to_a_common_name_and_changes_the_digest(tokenizer_dir, tmp_path, bpe):
    shutil.copy(tokenizer_dir / "tokenizer.json", tmp_path)
    alone = open_tokenizer(str(tmp_path))
    assert (alone.separator, alone.digest) == (bpe.separator, bpe.digest)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert open_tokenizer(str(tmp_path)).digest != bpe.digest


def test_tokenizer_without_any_end_token_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="names no token that ends a document"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [None, b"{not json"])
def test_unreadable_tokenizer_is_a_user_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        open_tokenizer(str(path))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_stream_never_emits_half_a_character(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) + stream.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_that_ends_inside_a_character_says_so():
    stream = ByteTokenizer().stream()
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


def test_ids_beyond_the_bytes_show_as_replacement_marks() -> None:
    """A model with a larger vocabulary than 256 may say anything; decoding must not fail."""
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode([104, 300, 105]) == "h\ufffdi"
    stream = tokenizer.stream()
    assert "".join([stream.push(104), stream.push(49151), stream.finish()]) == "h\ufffd"


def test_a_model_without_a_tokenizer_is_refused_unless_its_ids_are_bytes(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer") as caught:
        open_tokenizer("auto", tmp_path, 32_000)
    assert "32,000 token ids" in caught.value.why and "data.tokenizer=bytes" in caught.value.fix
    assert isinstance(open_tokenizer("auto", tmp_path, 256), ByteTokenizer)
    assert isinstance(open_tokenizer("bytes", tmp_path, 32_000), ByteTokenizer)


def test_a_sentencepiece_model_that_cannot_be_read_here_is_refused_with_what_reads_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\0not a model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*tokenizer\.model") as caught:
        open_tokenizer("auto", tmp_path, 32_000)
    assert "shardwise[sentencepiece]" in caught.value.fix or "data.tokenizer=PATH" in caught.value.fix


@pytest.mark.needs("transformers")
def test_words_and_merges_without_a_tokenizer_json_are_converted(bpe, tokenizer_dir, tmp_path):
    """GPT-2's old pair of files gives the ids that tokenizer.json gives."""
    model = json.loads((tokenizer_dir / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "add_prefix_space": false}'
    )
    converted = open_tokenizer("auto", tmp_path, 400)
    assert converted.encode(TEXT) == bpe.encode(TEXT)
    assert converted.separator == bpe.separator and json.loads(converted.content)["model"]["vocab"] == model["vocab"]


# Tokenizers that others made to do harm -----------------------------------------------------------------------------


def split_by(pattern: str, folder: Path) -> Path:
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    core = Core(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_pattern_that_panics_is_refused_in_three_lines(tmp_path):
    tokenizer = FileTokenizer(split_by("(x+x+)+y", tmp_path))
    assert tokenizer.encode("a") == [0]
    for encode in (tokenizer.encode, tokenizer.encode_prompt, lambda text: tokenizer.encode_documents([text])):
        with pytest.raises(UserError, match="cannot use the tokenizer") as caught:
            encode("x" * 40)
        assert len(str(caught.value).splitlines()) == 3


def test_a_tokenizer_has_a_time_limit(tmp_path, monkeypatch):
    tokenizer = FileTokenizer(split_by("x", tmp_path))
    monkeypatch.setattr(guarded_tokenizer, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(guarded_tokenizer, "BYTES_PER_SECOND", 2**60)
    with pytest.raises(UserError, match="were not encoded after 0 s"):
        tokenizer.encode("x " * 200_000)
