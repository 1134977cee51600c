"""docs/house.md and docs/house.svg show the rooms and arrows of the source; sizes may lag behind by a tenth."""

from __future__ import annotations

import re

import house
import pytest

AGAIN = "run: python tests/docs/house.py"
SIZE = re.compile(r"(?:< )?\d[\d,]*")


def without_sizes(text: str) -> str:
    return SIZE.sub("#", text)


def shown_sizes() -> dict[str, tuple[int, int]]:
    """Room or folder -> the files and lines that the page names."""
    rows = re.findall(r"^\| `([\w/]+)` \| (\d+) \| (< )?([\d,]+) \|", house.PAGE.read_text(encoding="utf-8"), re.M)
    return {name: (int(files), 50 if less else int(lines.replace(",", ""))) for name, files, less, lines in rows}


def test_rooms_and_arrows_are_as_drawn():
    old = house.PAGE.read_text(encoding="utf-8")
    assert without_sizes(old) == without_sizes(house.page(old)), AGAIN


def test_the_picture_has_them_too():
    """Its coordinates are numbers as well, so they are compared with their text; only what a box says of its size may
    differ."""
    size = re.compile(r"\d+ files, (?:&lt; )?[\d,]+ lines")
    assert size.sub("", house.PICTURE.read_text(encoding="utf-8")) == size.sub("", house.picture()), AGAIN


def test_sizes_are_about_right():
    shown = shown_sizes()
    assert shown.keys() == house.sizes().keys(), AGAIN
    for name, (files, lines) in house.sizes().items():
        assert shown[name][0] == pytest.approx(files, rel=0.1, abs=2), f"{name}: {AGAIN}"
        assert shown[name][1] == pytest.approx(lines, rel=0.1, abs=150), f"{name}: {AGAIN}"


def test_layers_stand_above_what_they_import():
    graph = {"top": frozenset({"left", "base"}), "left": frozenset({"base"}), "base": frozenset[str]()}
    assert house.layers(graph) == [["base"], ["left"], ["top"]]
    assert house.direct(graph)["top"] == {"left"}, "base follows from left"
    circle = {"one": frozenset({"two"}), "two": frozenset({"one", "base"}), "base": frozenset[str]()}
    assert house.layers(circle) == [["base"], ["one", "two"]]
