"""Small real parts: a byte-level BPE tokenizer, chat templates, and text files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.corpus import Corpus, open_corpus
from shardwise.data.tokenizer import FileTokenizer, open_tokenizer
from shardwise.spec.schema import DataConfig

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "12",
    "wise",
    "shards",
    "keep",
    "order",
]

TEMPLATES = Path(__file__).parent / "templates"


def sentences(count: int, start: int = 0) -> list[str]:
    return [" ".join(WORDS[(start + i * 7 + j * 3) % len(WORDS)] for j in range(5 + i % 9)) for i in range(count)]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = tmp_path_factory.mktemp("tokenizer")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(sentences(200), trainer)
    core.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|endoftext|>"},
        "bos_token": "<|begin_of_text|>",
        "chat_template": (TEMPLATES / "chatml.jinja").read_text(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def bpe(tokenizer_dir: Path) -> FileTokenizer:
    tokenizer = open_tokenizer("auto", tokenizer_dir)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def chatml() -> str:
    return (TEMPLATES / "chatml.jinja").read_text()


@pytest.fixture(scope="session")
def headers() -> str:
    return (TEMPLATES / "headers.jinja").read_text()


@pytest.fixture
def lines_file(tmp_path: Path) -> Callable[..., Path]:
    """lines_file(rows, name="rows.jsonl") writes rows as JSON lines and gives the path."""

    def write(rows: list, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def rows_file(lines_file: Callable[..., Path]) -> Path:
    """300 short documents."""
    return lines_file([{"text": text} for text in sentences(300)])


@pytest.fixture
def open_rows(tmp_path: Path) -> Callable[..., Corpus]:
    """open_rows(source, seq_len=16, **data settings) opens a corpus of byte tokens (or of another tokenizer)."""

    def opened(
        source: Path | str | tuple[str, ...],
        *,
        seq_len: int = 16,
        seed: int = 0,
        vocab: int = 512,
        can_mask: bool = True,
        **settings: Any,
    ) -> Corpus:
        names = source if isinstance(source, tuple) else str(source)
        data = DataConfig(source=names, **settings)
        return open_corpus(
            data,
            seq_len=seq_len,
            seed=seed,
            vocab=vocab,
            model_dir=None,
            cache_dir=tmp_path / "cache",
            progress=False,
            can_mask=lambda: can_mask,
        )

    return opened
