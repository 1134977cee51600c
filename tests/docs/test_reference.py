"""The reference pages are made from the code; these tests fail when somebody forgot to make them again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference import FOLDER, PAGES

from shardwise.config.keys import all_keys
from shardwise.errors import Exit

DOCS = FOLDER.parent
ROOT = DOCS.parent
EVERY_PAGE = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run: python tests/docs/reference.py"


def test_every_key_is_on_the_page():
    page = (FOLDER / "config.md").read_text(encoding="utf-8")
    sections = {part.split("]")[0]: part for part in page.split("\n## [")[1:]}
    missing = [key.dotted for key in all_keys().values() if f"| `{key.name}` |" not in sections[key.section]]
    assert missing == []


def test_exit_codes_are_all_documented():
    page = (FOLDER / "run-directory.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {int(code) for code in Exit}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    targets = [
        target for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in target
    ]
    missing = [target for target in targets if not (page.parent / target.split("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    """`run/loop.py` and the like, wherever a page names a source file."""
    named = set(
        re.findall(
            r"`((?:src/shardwise/|tests/|benchmarks/)?[a-z_]+/[\w/]+\.(?:py|toml))`", page.read_text(encoding="utf-8")
        )
    )
    missing = [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src/shardwise"))]
    assert missing == []


def test_the_tree_of_the_readme_is_the_tree_of_the_source():
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("src/shardwise/\n")[1].split("\ntests/")[0]
    told = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert told == {path.parent.name for path in (ROOT / "src/shardwise").glob("*/__init__.py")}


@pytest.mark.parametrize("page, most", [("README.md", 12_000), ("docs/architecture.md", 15_000)])
def test_the_first_pages_stay_short(page: str, most: int):
    """In bytes. What is cut here belongs to the tutorial, or to the page of its technique."""
    assert (ROOT / page).stat().st_size <= most


def test_results_are_named_by_what_they_are():
    names = [path.name for path in (ROOT / "benchmarks/results").iterdir()]
    assert [name for name in names if re.search(r"_(first|second|third|then|new|old)(_|\.)", name)] == []


def test_nouns_of_the_map_are_classes():
    nouns = (DOCS / "architecture.md").read_text(encoding="utf-8").split("## Nouns")[1].split("\n## ")[0]
    named = set(
        re.findall(r"`([A-Z]\w+)`", " ".join(row.split("|")[1] for row in nouns.splitlines() if row[:1] == "|"))
    )
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/shardwise").rglob("*.py"))
    assert len(named) >= 15 and named - set(re.findall(r"^class (\w+)", source, re.MULTILINE)) == set()


@pytest.mark.parametrize("page", sorted((DOCS / "axes").glob("*.md")), ids=lambda page: page.name)
def test_the_page_of_an_axis_says_what_is_split_held_and_sent(page: Path):
    said = set(re.findall(r"\b(split|held|sent)\b", " ".join(re.findall(r"\*([\w ]+):?\*", page.read_text().lower()))))
    assert said == {"split", "held", "sent"}
