"""Measured figures: each with its device, date and origin, each used, and none left in the code."""

import ast
import datetime
import re
from pathlib import Path

import shardwise.plan
from shardwise.plan.prediction import calibration
from shardwise.plan.prediction.kernels import GENERATIONS

HOUSE = Path(shardwise.plan.__file__).parent


def test_every_entry_has_all_fields():
    found = calibration.figures()
    assert len(found) > 30
    for name, figure in found.items():
        assert set(figure) == {"value", "unit", "device", "date", "origin"} and all(map(bool, figure.values())), name
        datetime.date.fromisoformat(figure["date"])


def test_every_entry_is_read_by_somebody():
    code = "".join(path.read_text(encoding="utf-8") for path in HOUSE.rglob("*.py"))
    asked = set(re.findall(r'measured\("(\w+)"\)', code))
    assert 'measured(f"generation_{name}")' in code
    generations = {f"generation_{name}" for name in (*GENERATIONS, "cpu")}
    assert asked | generations == set(calibration.figures())


def is_measured(value: float) -> bool:
    """Halves and whole numbers count bytes, operations and passes; anything else was measured or assumed."""
    return value * 2 != int(value * 2) or abs(value) > 64


WORDS_AND_UNITS = {"figures.py": "limits of words for seconds, and units"}
STRUCTURE = {22.5: "bytes of adapters/nf4.py", 86400.0: "seconds of a day"}


def test_no_measured_figure_is_left_in_the_code():
    left = []
    for path in sorted((HOUSE / "prediction").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_figure = isinstance(node, ast.Constant) and isinstance(node.value, float) and is_measured(node.value)
            if is_figure and node.value not in STRUCTURE and path.name not in WORDS_AND_UNITS:
                left.append(f"{path.name}:{node.lineno}: {node.value}")
    assert left == []
