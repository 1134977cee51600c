"""Turns text into token ids and back: the built-in bytes, and any Hugging Face `tokenizer.json` through the
`tokenizers` library.

Invariant: every document ends with `separator`, and `separator` never appears inside plain text by accident: the byte
tokenizer drops NUL bytes, because byte 0 is its separator. `digest` names the mapping from text to ids: two tokenizers
with one digest give the same ids. Chat rendering lives in `chat.py`; who calls `encode_documents` is `prepare.py`.
"""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.data.converted import as_tokenizer_json, find_files, no_tokenizer
from shardwise.data.guarded_tokenizer import GuardedTokenizer
from shardwise.errors import UserError
from shardwise.files import open_regular
from shardwise.foreign_json import read_object

BYTES = 256  # ids of a model whose tokens are bytes

Span = tuple[int, int]

# End-of-document tokens in common use, tried in this order when no file beside tokenizer.json names one.
COMMON_SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")


class TextStream(Protocol):
    """Turns ids that arrive one by one into text, holding back characters that are not complete yet."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(ABC):
    """Text to ids and back. `path` is the tokenizer.json behind it (one that may have been made up in memory), None for
    bytes."""

    name: str
    vocab_size: int
    separator: int
    digest: str
    path: Path | None = None
    content: bytes = b""  # of that tokenizer.json
    special_strings: dict[str, str]  # eos_token, bos_token, ...: what a chat template may ask for

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer type that holds every id."""
        for kind in (np.uint8, np.uint16):
            if self.vocab_size <= np.iinfo(kind).max + 1:
                return np.dtype(kind)
        return np.dtype(np.uint32)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a piece of text, nothing added."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of many texts, computed on all cores; nothing is added."""

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of the start of a document, with whatever the tokenizer itself puts there (a begin token,
        often)."""
        return self.encode(text)

    @abstractmethod
    def encode_documents(self, texts: Sequence[bytes | str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns all documents' ids in one array, each ended by the separator, and the length of each."""

    @abstractmethod
    def encode_spans(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the ids of each text and, per id, whether it holds a character of one of that text's spans."""

    @abstractmethod
    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Returns the text of the ids; incomplete characters become the replacement mark, special tokens vanish unless
        kept."""

    @abstractmethod
    def stream(self) -> TextStream:
        """Returns a fresh incremental decoder for generated tokens."""


class ByteTokenizer(Tokenizer):
    """Has one id per UTF-8 byte; byte 0 ends a document."""

    def __init__(self) -> None:
        self.name, self.vocab_size, self.separator, self.digest = "bytes", 256, 0, "bytes"
        # In a rendered chat, the end-of-turn string is the separator itself: generation stops there.
        self.special_strings = {"eos_token": "\0", "bos_token": ""}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(_without_nul(text)) for text in texts]

    def encode_documents(self, texts: Sequence[bytes | str]) -> tuple[np.ndarray, np.ndarray]:
        pieces = [_without_nul(text) for text in texts]
        lengths = np.array([len(piece) + 1 for piece in pieces], dtype=np.int64)
        return np.frombuffer(b"\0".join([*pieces, b""]), dtype=np.uint8), lengths

    def encode_spans(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, np.ndarray]]:
        rows = []
        for text, answers in zip(texts, spans, strict=True):
            ids = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
            trained = np.zeros(len(ids), dtype=np.uint8)
            for start, end in answers:
                first = len(text[:start].encode("utf-8", errors="replace"))
                trained[first : first + len(text[start:end].encode("utf-8", errors="replace"))] = 1
            rows.append((ids, trained))
        return rows

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        text = b"".join(_byte(token) for token in ids if token or keep_special).decode("utf-8", errors="replace")
        return text.replace("\0", "␀")

    def stream(self) -> TextStream:
        return _ByteStream()


class FileTokenizer(Tokenizer):
    """Uses a Hugging Face tokenizer.json."""

    def __init__(
        self,
        path: Path,
        *,
        separator: int | None = None,
        special_strings: dict[str, str] | None = None,
        content: bytes | None = None,
    ):
        self.path, self.name = path, str(path)
        self.content = content = _read_bytes(path) if content is None else content
        self._core = GuardedTokenizer(content, path)
        # Documents are cut by packing, never by a truncation length that a saved tokenizer happens to carry.
        self._core.no_truncation()
        self._core.no_padding()
        vocabulary = self._core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.special_strings = _special_strings(path.parent) if special_strings is None else special_strings
        self.separator = _find_separator(path, vocabulary, self.special_strings) if separator is None else separator
        self.special_strings.setdefault("eos_token", self._core.id_to_token(self.separator) or "")
        self.digest = hashlib.sha256(content + f"/{self.separator}".encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        ids = self._core.encode(text).ids
        # Some post-processors also close the text; a prompt must stay open.
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.separator else ids

    def encode_documents(self, texts: Sequence[bytes | str]) -> tuple[np.ndarray, np.ndarray]:
        decoded = [text.decode("utf-8") if isinstance(text, bytes) else text for text in texts]
        encodings = self._core.encode_batch_fast(decoded, add_special_tokens=False)
        lengths = np.fromiter((len(encoding) + 1 for encoding in encodings), dtype=np.int64, count=len(encodings))
        end = (self.separator,)
        ids = chain.from_iterable(chain(encoding.ids, end) for encoding in encodings)
        return np.fromiter(ids, dtype=self.dtype, count=int(lengths.sum())), lengths

    def encode_spans(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, np.ndarray]]:
        rows = []
        encodings = self._core.encode_batch(texts, add_special_tokens=False)
        for encoding, answers in zip(encodings, spans, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            starts, ends = offsets[:, 0], offsets[:, 1]
            # Byte-level tokenizers trim a token of spaces to an empty range at its end: it belongs to what precedes.
            empty = starts == ends
            trained = np.zeros(len(starts), dtype=bool)
            for first, last in answers:
                trained |= np.where(empty, (starts > first) & (starts <= last), (ends > first) & (starts < last))
            rows.append((np.array(encoding.ids, dtype=self.dtype), trained.astype(np.uint8)))
        return rows

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        return self._core.decode([int(token) for token in ids], skip_special_tokens=not keep_special)

    def stream(self) -> TextStream:
        return _FileStream(self)


def open_tokenizer(name: str, model_dir: Path | None = None, vocab: int = BYTES) -> Tokenizer:
    """Returns the tokenizer of a name: `bytes`, the path of a tokenizer.json (or a directory that holds one), or
    `auto`, the model's own, else bytes. A model of `vocab` ids that knows more than bytes must bring its own."""
    if name == "bytes":
        return ByteTokenizer()
    if name != "auto":
        path = Path(name).expanduser()
        return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path)
    if model_dir is None:
        return ByteTokenizer()
    own = model_dir / "tokenizer.json"
    if own.is_file():
        return FileTokenizer(own)
    if find_files(model_dir):
        return FileTokenizer(own, content=as_tokenizer_json(model_dir))
    if vocab != BYTES:
        raise no_tokenizer(model_dir, vocab)
    return ByteTokenizer()


def _byte(token: int) -> bytes:
    """Returns the byte of an id. A model may have more ids than there are bytes; one beyond them shows as the
    replacement mark (0xff is no UTF-8)."""
    return bytes([token if token < 256 else 0xFF])


class _ByteStream:
    """Decodes bytes as they arrive."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(_byte(token)) if token else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FileStream:
    """Decodes a short window twice and emits the difference: a token's text may depend on the one before it."""

    def __init__(self, tokenizer: FileTokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_emitted = 0  # ids at the start of the window whose text is out already

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):  # an unfinished character decodes to the replacement mark
            return ""
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        return text

    def finish(self) -> str:
        text = self._pending()
        self._window, self._num_emitted = [], 0
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_emitted])
        return self._tokenizer.decode(self._window)[len(before) :]


def _without_nul(text: bytes | str) -> bytes:
    # A lone surrogate (JSON can hold one) has no UTF-8 form: it becomes "?".
    data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
    return data.replace(b"\0", b"") if b"\0" in data else data


def _read_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}",
            why=error.strerror or str(error),
            fix="give the path of a tokenizer.json, or data.tokenizer=bytes",
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a small file beside the tokenizer; it is empty for one that is absent."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # never ignored: it may name the token that ends a document
        raise UserError(
            f"cannot read {path}",
            why=str(error),
            fix="fetch it again, or remove it; data.tokenizer=bytes needs no files",
        ) from None


def _special_strings(directory: Path) -> dict[str, str]:
    """Returns eos_token, bos_token, ... as the files beside tokenizer.json spell them (a string, or an object with
    `content`)."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in _read_json(directory / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def _find_separator(path: Path, vocabulary: dict[str, int], special_strings: dict[str, str]) -> int:
    """Returns the id that ends a document, as the files beside tokenizer.json name it."""
    named = special_strings.get("eos_token")
    if named in vocabulary:
        return vocabulary[named]
    for file in ("generation_config.json", "config.json"):
        listed = _read_json(path.parent / file).get("eos_token_id")
        first = listed[0] if isinstance(listed, list) and listed else listed
        if isinstance(first, int) and 0 <= first <= max(vocabulary.values(), default=-1):
            return first
    for token in COMMON_SEPARATORS:
        if token in vocabulary:
            return vocabulary[token]
    raise UserError(
        f"{path} names no token that ends a document",
        why="no eos_token in tokenizer_config.json or special_tokens_map.json beside it, and none of "
        + " ".join(COMMON_SEPARATORS),
        fix='write {"eos_token": "..."} into tokenizer_config.json beside it',
    )
