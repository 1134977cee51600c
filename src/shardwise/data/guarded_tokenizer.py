"""Calls the tokenizers library so that a tokenizer.json made by others cannot hang or break the program.

Its patterns are regular expressions, of which some need exponential time; the library then panics, or does not return.
Invariant: a call gives a result, or three lines after a time in which the slowest sensible tokenizer would have been
done. What does not return goes on in a thread that nobody waits for, not even the interpreter at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

PATIENCE_SECONDS = 60.0
BYTES_PER_SECOND = 20_000  # usual tokenizers encode some millions of characters per second and core


class GuardedTokenizer:
    """A `tokenizers.Tokenizer` of which what encodes text is guarded; the rest is its own."""

    def __init__(self, content: bytes, path: Path):
        self._path = path
        self._core: Any = None
        self._core = self._guarded(lambda: _open(content), 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def encode(self, text: str, **options: Any) -> Any:
        return self._guarded(lambda: self._core.encode(text, **options), len(text))

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        return self._guarded(lambda: self._core.encode_batch(texts, **options), sum(map(len, texts)))

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        return self._guarded(lambda: self._core.encode_batch_fast(texts, **options), sum(map(len, texts)))

    def _guarded(self, call: Callable[[], Any], length: int) -> Any:
        """Returns what the call returns. It runs in a thread; the library works without the interpreter's lock."""
        found: list[Any] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as problem:  # a panic of Rust is no Exception
                problems.append(problem)

        thread = threading.Thread(target=run, name="tokenizer", daemon=True)
        thread.start()
        limit = PATIENCE_SECONDS + length / BYTES_PER_SECOND
        thread.join(limit)
        if found:
            return found[0]
        if problems and not isinstance(problems[0], Exception) and type(problems[0]).__name__ != "PanicException":
            raise problems[0]
        if not problems:
            why = f"{length:,} characters were not encoded after {limit:.0f} s: a pattern of it needs exponential time"
        else:
            why = f"the tokenizers library says: {' '.join(str(problems[0]).split())[:300]}"
        raise UserError(
            f"cannot {'read' if self._core is None else 'use'} the tokenizer {self._path}",
            why=why,
            fix="give a tokenizer.json saved by Hugging Face tokenizers, or data.tokenizer=bytes",
        )


def _open(content: bytes) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(content)
