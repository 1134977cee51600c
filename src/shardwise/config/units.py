"""Reads and prints numbers with units.

Invariant: reading never guesses. A string either is a number with a unit of the expected kind or raises `ValueError`
with a sentence that names the spellings that work. `k`, `M`, `G` are powers of 1024 where lengths are meant ("8k"
tokens per sequence) and powers of 1000 where amounts are meant ("300B" tokens of training). Read next: values.py, which
calls these for the keys that carry a unit.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "b": 2**30, "t": 2**40}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
BYTES = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
SECONDS = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "sec": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
    "w": Decimal(604800),
}

_NUMBER = r"(\d[\d_,]*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)"
_QUANTITY = re.compile(rf"\s*{_NUMBER}\s*([a-z]*)\s*", re.IGNORECASE)
_TIME_PART = re.compile(rf"\s*{_NUMBER}\s*([a-z]+)\s*", re.IGNORECASE)
_CLOCK = re.compile(r"\s*(?:(\d+):)?(\d{1,2}):(\d{2})\s*")


def parse_binary(text: str) -> int:
    """Returns a length or a batch, where powers of two are meant: `8k` is 8192, `4M` is 4194304."""
    return _whole(text, _scaled(text, BINARY, "a number such as 8192, 8k or 4M"))


def parse_decimal(text: str) -> int:
    """Returns an amount, where people count in thousands: `1T` is 10**12, `300B` is 3 * 10**11."""
    return _whole(text, _scaled(text, DECIMAL, "a number such as 5000000, 1.5M, 300B or 1T"))


def parse_money(text: str) -> float:
    """Returns money: `500k` is 500000, `99.50` is 99.5."""
    return float(_scaled(text, DECIMAL, "an amount such as 250, 99.50 or 500k"))


def parse_bytes(text: str) -> int:
    """Returns bytes from `40GiB` (powers of 1024) or `25MB` (powers of 1000)."""
    return _whole(text, _scaled(text, BYTES, "a size such as 6GiB, 512MiB or 25MB"))


def parse_steps(text: str) -> range:
    """Returns a range of steps: `10:13` is steps 10, 11, 12 and 13."""
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if match is None:
        raise ValueError("expected a first and a last step such as 10:13")
    first, last = map(int, match.groups())
    if not 1 <= first <= last:
        raise ValueError("steps count from 1, and the last one is not before the first")
    if last >= 2**63:
        raise ValueError("no run has so many steps")
    return range(first, last + 1)


def parse_rate(text: str) -> float:
    """Returns bytes per second from `50GB/s`; `400Gbit/s` and `400Gb/s` are bits."""
    expected = "a rate such as 50GB/s or 400Gbit/s"
    match = re.fullmatch(r"(.*?)(b|bit|bits|B|iB)(?:/s|ps)\s*", text)
    if match is None:
        raise ValueError(f"expected {expected}")
    amount, letter = match.groups()
    if letter in ("b", "bit", "bits"):
        return float(_scaled(amount, DECIMAL, expected)) / 8
    return float(_scaled(amount + letter, BYTES, expected))


def parse_seconds(text: str) -> float:
    """Returns seconds from `90s`, `5m`, `1h30m`, `2d`, or a clock such as `1:30:00`."""
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    total, position = Decimal(0), 0
    while part := _TIME_PART.match(text, position):
        number, unit = part.groups()
        if unit.lower() not in SECONDS:
            break
        total += _number(number) * SECONDS[unit.lower()]
        position = part.end()
    if position == 0 or position != len(text):
        try:
            return float(_number(text.strip()))
        except ValueError:
            raise ValueError("expected a time such as 90s, 5m, 1h30m or 2d") from None
    return float(total)


def format_bytes(count: float) -> str:
    """Returns a number of bytes as people compare memory: `38.2 GiB`."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(count) >= 1024**power * 0.9995:
            return f"{_three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Returns a number of parameters or tokens: `3.4 M`, `70.6 B`."""
    for power, unit in ((4, "T"), (3, "B"), (2, "M"), (1, "k")):
        if abs(count) >= 1000**power * 0.9995:
            return f"{_three_digits(count / 1000**power)} {unit}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def format_seconds(seconds: float) -> str:
    """Returns a duration: `1:12`, `2:05:00`, `3 d 4:00:00`; below ten seconds `0.29 s`."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def format_days(seconds: float) -> str:
    """Returns how long a training takes: `12.5 days`, and less than one as `format_seconds` has it."""
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else format_seconds(seconds)


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def _number(text: str) -> Decimal:
    try:
        value = Decimal(re.sub(r"(?<=\d)[_,](?=\d)", "", text))
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None
    if not value.is_finite():
        raise ValueError(f"{text!r} is not a number")
    return value


def _scaled(text: str, units: dict[str, int], expected: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"expected {expected}")
    return _number(match[1]) * units[match[2].lower()]


def _whole(text: str, value: Decimal) -> int:
    """Returns a whole number, or raises for one that is not."""
    # Decimal, not float: "0.1G" style inputs must not pick up binary rounding before this test.
    if value != int(value):
        raise ValueError(f"{text.strip()!r} is {value}, which is not a whole number")
    return int(value)
