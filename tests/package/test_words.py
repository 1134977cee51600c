"""Names and texts of the package: one thing per class name, the field's own words in names, docstrings and printed
texts, docstrings that are sentences, nothing of the workshop.

Lines of at most 120 columns are ruff's to check.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from import_graph import FILES, PACKAGE, ROOT, room_of

WIDTH = 120

NOT_OUR_WORDS = {
    "product": "matmul",
    "products": "matmuls",
    "floor": "lower bound",
    "floors": "lower bounds",
    "rounded": "quantized",
    "squares": "gradient norm",
    "joined": "fused",
    "copies": "low-precision weights, or replicas",
    "message": "collective, or send and receive",
    "messages": "collectives, or sends and receives",
    "turned": "transposed",
    "chance": "dropout",
    "told": "reported",
    "teller": "reporter",
    "untold": "pending",
    "wishes": "stop requests",
    "farewell": "summary",
    "surroundings": "environment",
    "narrow_sum": "LoRA add",
    "narrow_sums": "LoRA add",
    "wide_state": "master weights",
    "try_out": "micro-batch search",
}
"""Words of an identifier -> what the field calls it."""

RIGHT_HERE = {
    ("products", "spec"): "the config key speed.products",
    ("copies", "spec"): "the config key speed.copies",
    ("message", "data"): "of a conversation",
    ("messages", "data"): "of a conversation",
    ("messages", "cli"): "of a conversation",
    ("message", "cli"): "argparse's own argument",
}
"""(word, room) -> what it means there, where it is the right word."""

NOT_OUR_PHRASES = {
    "matrix products?": "matmul",
    "products? of (?:a|the|two|these|both) matri(?:x|ces)": "matmul",
    "floors?": "lower bound; or `rounded down`",
    "rounded to (?:nf4|fp8|int8|4 bits|8 bits)": "quantized",
    "numbers of (?:a|an|each|every|the) (?:tensor|weight|matrix|gradient)": "elements",
    "joined (?:qkv|projections?|weights?|matmuls?)": "fused",
    "narrow sums?": "LoRA add",
    "wide (?:states?|weights?)": "master weights",
    "turned around": "transposed",
    "tellers?": "reporter",
    "untold": "pending",
    "wishes": "stop requests",
    "farewell": "summary",
    "surroundings": "environment",
    "try[_-]out": "micro-batch search",
}
"""Phrases of a docstring or of any other text in the code (a pattern, a space is any white space) -> what the field
calls it. Words that also have an innocent meaning (`told`, `message`, `turned`) are only sought in identifiers."""

WORKSHOP = (
    r"\bfirst / then\b",
    r"\bborrowed\b",
    r"shared/validation",
    r"\b(?:the|our|its) bars? (?:of|was|is|are)\b",
    r"\bthis session\b",
    r"\bthe issue\b",
)
"""What a reader who was not there when this was built cannot know."""

NO_VERBS = (
    "bytes|seconds|tokens|elements|layers|names|lines|sequences|numbers|ranks|rows|indices|parameters|weights|"
    "activations|dimensions|flops|gradients|ids|inputs|keys|layouts|logits|queries|radians|replicas|tables|tensors|"
    "its|this|fields|sizes"
)
"""Words that end as a verb in the third person does."""


def is_sentence(docstring: str) -> bool:
    """Returns whether a function's docstring says what it does or returns (`Returns …`, `Collective. Writes …`), or
    what its arguments are (`` `limit` is … ``), and ends where a sentence ends."""
    text = re.sub(r"^Collective\b[^.]*\. ", "", docstring.split("\n\n")[0].strip())
    begins = re.match(rf"(?!(?:{NO_VERBS})\b)(?:[A-Z][a-z]+s|Does|Is)\b|At least |`", text, re.IGNORECASE)
    return begins is not None and text.endswith((".", "…", ":"))


def definitions(tree: ast.AST) -> Iterator[str]:
    """Every name that a file gives to something: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    """The words of an identifier, and its pairs of words: `_FrozenProduct` has frozen, product, frozen_product."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return {*words, *("_".join(pair) for pair in pairwise(words))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


@cache
def unwanted() -> dict[tuple[str, str], list[str]]:
    """(word, room) -> where such a name is given."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for name in {file.stem, *definitions(tree)}:
            for word in words_of(name) & NOT_OUR_WORDS.keys():
                found[word, room_of(file)].append(f"{file.relative_to(PACKAGE)}: {name}")
    return found


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and every other string of a file, also the fixed parts of f-strings. Comments are
    none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def unwanted_phrases(tree: ast.AST) -> list[tuple[int, str, str]]:
    """(line, what it says, what the field says) of every phrase in a file's texts that is not the field's."""
    return [
        (line + text[: match.start()].count("\n"), match[0], better)
        for line, text in texts(tree)
        for phrase, better in NOT_OUR_PHRASES.items()
        for match in re.finditer(rf"\b{phrase}\b".replace(" ", r"\s+"), text, re.IGNORECASE)
    ]


def classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(file.relative_to(PACKAGE)))
    return found


def test_things_have_the_fields_names():
    excused = RIGHT_HERE.keys()
    assert {place: names for place, names in unwanted().items() if place not in excused} == {}


def test_texts_have_the_fields_words():
    found = [
        f"{file.relative_to(PACKAGE)}:{line} says {said!r}, the field says {better!r}"
        for file, tree in trees().items()
        for line, said, better in unwanted_phrases(tree)
    ]
    assert not found, "docstrings and texts with words that only this package would use:\n" + "\n".join(found)


def test_no_class_name_is_there_twice():
    twice = {name: files for name, files in classes().items() if len(files) > 1}
    assert twice == {}


def test_nothing_is_excused_that_is_clean():
    assert (RIGHT_HERE.keys()) - unwanted().keys() == set()


def test_docstrings_of_functions_are_sentences():
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and not is_sentence(text)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]  # fmt: skip
    assert found == []


def test_classes_that_others_may_use_say_what_they_are():
    silent = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for file, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_a_fragment_is_no_sentence():
    fragments = (
        "Micro-batches.",
        "And the slope.",
        "Bytes of one rank.",
        "The same, sorted.",
        "Returns it",
        "What is due.",
        "Logits of a batch.",
        "This rank's part.",
    )
    assert not any(map(is_sentence, fragments))
    assert all(map(is_sentence, ("Returns the bytes of a rank.", "Collective. Writes it.", "`limit` is in bytes.")))


def test_no_page_and_no_file_speaks_of_the_workshop():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.toml"), *FILES]
    pages += [page for page in (ROOT / "benchmarks").rglob("*") if page.suffix in (".md", ".py", ".toml")]
    found = [
        f"{page.relative_to(ROOT)}: {match[0]}"
        for page in pages
        for match in re.finditer("|".join(WORKSHOP), page.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert found == []


def test_phrases_are_found_in_texts_of_any_kind():
    source = (
        '"""Multiplies.\n\nOne matrix\nproduct."""\n'  # broken over two lines: found where it begins
        "def f(a='untold'):\n"
        '    """Returns the Floor."""\n'
        "    print(f'{a} wide states')  # a farewell\n"
        "    return 'productive, told, flooring'\n"
    )
    assert sorted(unwanted_phrases(ast.parse(source))) == [
        (3, "matrix\nproduct", "matmul"),
        (5, "untold", "pending"),
        (6, "Floor", "lower bound; or `rounded down`"),
        (7, "wide states", "master weights"),
    ]


def test_words_are_found_in_names_of_any_kind():
    assert words_of("_FrozenProduct") >= {"frozen", "product"}
    assert words_of("MOST_SQUARES") == {"most", "squares", "most_squares"}
    assert "try_out" in words_of("try_out_sizes")
    assert set(definitions(ast.parse("def f(turned):\n    self.told = chance = 1"))) == {
        "f",
        "turned",
        "told",
        "chance",
    }
