"""The measured and assumed figures of hardware and kernels, from calibration.toml: one table each, with unit, device,
date and origin. No torch.

    measured("straggler_share")      its value, for the module that works with it

The file is read once, when the first module asks. What follows from how a format or an algorithm is built (two bytes of
bf16, a tile of 128 queries) is no measurement and stays in the code. Invariant: every entry has all fields, and
somebody asks for it (a test looks).
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def figures() -> dict[str, dict[str, Any]]:
    """Returns all entries by name: each has a value (a number, or a list or table of numbers), its unit, the device it
    was measured on (`any`: assumed for all), the date since which it has been used here, and its origin."""
    return tomllib.loads(files("shardwise.plan.prediction").joinpath("calibration.toml").read_text(encoding="utf-8"))


def measured(name: str) -> Any:
    """Returns the value of one entry, in the unit that calibration.toml names."""
    return figures()[name]["value"]
