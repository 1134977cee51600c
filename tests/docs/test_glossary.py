"""docs/glossary.md keeps its promises: every file that it names has the word, and `explain` answers it with the page it
names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardwise
from shardwise.explain.pages import all_pages, find_page

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
PACKAGE = Path(shardwise.__file__).parent


@dataclass(frozen=True)
class Entry:
    word: str
    page: str
    files: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """The word as people write it: any case, a hyphen, a space or nothing between its parts (`KeyValueCache`), its
        last letters as grammar wants them."""
        stem = re.sub(r"(isation|ization|ing|ion|s)$", "", self.word)
        return re.compile(r"[-_ \n]*".join(map(re.escape, re.split(r"[- ]", stem))), re.IGNORECASE)


def entries() -> list[Entry]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\w-]+) \| (`[^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [Entry(word, page, tuple(re.findall(r"`([^`]+)`", files))) for word, page, files in rows]


def test_there_are_many_words_in_order():
    words = [entry.word.lower() for entry in entries()]
    assert len(words) >= 60 and words == sorted(words) and len(set(words)) == len(words)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.word)
def test_grep_finds_the_word_in_its_files(entry: Entry):
    assert entry.files
    for name in entry.files:
        assert entry.pattern.search((PACKAGE / name).read_text(encoding="utf-8")), f"{name} does not say {entry.word!r}"


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.word)
def test_explain_answers_the_word_with_its_page(entry: Entry):
    assert entry.page in all_pages()
    assert find_page(entry.word).word == entry.page
