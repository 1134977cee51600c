"""The measured and assumed figures of hardware and kernels, from calibration.toml: one table each, with unit, device,
date and origin. No torch.

    measured("straggler_share")      its value, for the module that works with it

The file is read once, when the first module asks. What follows from how a format or an algorithm is built (two bytes of
bf16, a tile of 128 queries) is no measurement and stays in the code. Invariant: every entry has all fields, and
somebody asks for it (a test looks).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CalibratedFigure:
    """One entry of the file. Its value is a number, or a list or table of numbers."""

    value: Any
    unit: str
    device: str  # on which it was measured; `any`: assumed for all
    date: str  # since when it has been used here
    origin: str  # how it was found, or that it is assumed


asked: set[str] = set()
"""Names that somebody has asked for."""


@cache
def figures() -> dict[str, CalibratedFigure]:
    """Returns all entries by name."""
    text = files("shardwise.plan.prediction").joinpath("calibration.toml").read_text(encoding="utf-8")
    return {name: CalibratedFigure(**entry) for name, entry in tomllib.loads(text).items()}


def measured(name: str) -> Any:
    """Returns the value of one entry, in the unit that calibration.toml names."""
    asked.add(name)
    return figures()[name].value
