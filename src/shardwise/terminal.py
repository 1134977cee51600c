"""Knows what the terminal of this process can show, and prints lines in the one look that all verbs share.

A line is a label of at most eight letters and, from the tenth column on, what it says. On a terminal labels are dim,
values bold, and a long line hangs behind its label, broken between words; elsewhere the same line is printed as it is.
Invariant: nothing is said by colour alone, and no character that a stream cannot encode ends a process. rich is loaded
only where something is drawn.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LABEL = 9  # columns of a label with the space behind it

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "ascii"}
"""What `--plain` means, in the words that other programs and Python itself understand; ranks inherit it."""

ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    **dict(zip("░▒▓·▏━─│", ":%@'|=-|", strict=True)),
    **{"…": "...", "→": "->", "⟦": "[[", "⟧": "]]", "␀": "\\0", "€": "EUR ", "–": "-", "—": "-", "×": "x", "±": "+-"},
}
"""What is printed of ours where a stream cannot encode it; letters of other people's text are printed as escapes."""

COLOURS = {"SAME": "bold green", "WRONG": "bold red", "STOPPED": "bold yellow", "better": "green", "worse": "red"}
"""Labels that are coloured; all others are dim."""

BARS = {
    **dict.fromkeys(("bar.complete", "bar.finished", "bar.pulse"), "green"),
    **dict.fromkeys(("bar.back", "progress.remaining", "progress.elapsed", "progress.data.speed"), "dim"),
    **dict.fromkeys(("progress.percentage", "progress.download"), "bold"),
}
"""Styles of rich's progress bars, which have colours of their own."""

COPIED = ("next", "do", "fix", "prove", "run", "wrote")
"""Labels of lines that people copy: they are not broken, so that what is pasted is one command."""

LABELLED = re.compile(r"#\d+ \w+|held out|[^\s#]+")
WHERE = re.compile(r" {2,}(?=\S[^`]*$)")
INDENTED = re.compile(r"( {2,})(why|fix|do)? *")
UNIT = r"(?:%|s|ms|us|min|h|days|[KMGT]iB|[kMGT]?B|[GTP]FLOP/s|[kMGT]?B/s|k?tok/s|nats)(?![\w/])"
VALUE = re.compile(rf"(?<![\w./=,-])[+-]?\d(?:[\d.,:]*\d)?(?:e[+-]?\d+)?[kMGBTx]?(?: ?{UNIT})?(?![\w/=-]|\.\w)")
WORD = re.compile(rf"[+-]?\d\S* {UNIT}\S*|\S+")
"""What is not broken: a word, and a figure with its unit."""


def counted(number: int, one: str, many: str = "") -> str:
    """Returns how many there are of something: `1 step`, `1,000 steps`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def type_of(value: object) -> str:
    """Returns what a value is, with its article: `an int`, `a dict`, `nothing`."""
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def shell_word(text: object) -> str:
    """Returns a text, such as a path, as one word of a shell: as it is, or in double quotes where they are enough."""
    said = str(text)
    if re.fullmatch(r"[\w@%+=:,./-]+", said):
        return said
    return f'"{said}"' if said.isprintable() and not set(said) & set('"$`\\!') else shlex.quote(said)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Answers a character that a stream cannot encode: with ASCII that looks like it, else with its escape."""
    assert isinstance(error, UnicodeEncodeError)
    piece = error.object[error.start]
    return ASCII.get(piece, piece.encode("ascii", "backslashreplace").decode()), error.start + 1


codecs.register_error("shardwise", _replace)


@contextmanager
def prepared(plain: bool = False) -> Iterator[None]:
    """Makes this process's output safe to print anything to, whatever its encoding, and back again at the end. `plain`:
    ASCII without colour and without anything that is drawn anew, here and in processes that are started from here."""
    before = {name: os.environ.get(name) for name in PLAIN}
    both: tuple[Any, ...] = (sys.stdout, sys.stderr)
    streams = [(stream, stream.encoding, stream.errors) for stream in both if _can_change(stream)]
    if plain:
        os.environ.update(PLAIN)
    for stream, encoding, _ in streams:
        stream.reconfigure(encoding="ascii" if plain else encoding, errors="shardwise")
    try:
        yield
    finally:
        for stream, encoding, errors in streams:
            if not stream.closed:
                stream.reconfigure(encoding=encoding, errors=errors)
        for name, value in before.items() if plain else ():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _can_change(stream: Any) -> bool:
    return hasattr(stream, "reconfigure") and not stream.closed  # a notebook's stream takes every character


def is_live(stream: IO[str] | None = None) -> bool:
    """Returns whether a stream (default: standard output) is a terminal that can be drawn on."""
    stream = stream or sys.stdout
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def shows_colour(stream: IO[str] | None = None) -> bool:
    """Returns whether colours are seen there: NO_COLOR (no-color.org) turns them off."""
    return is_live(stream) and not os.environ.get("NO_COLOR")


def make_console(stream: IO[str] | None = None, **options: Any) -> Console:
    """Returns rich's console on a stream (default: standard output); it adds no colours of its own."""
    from rich.console import Console
    from rich.theme import Theme

    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    return Console(file=stream or sys.stdout, theme=Theme(BARS), **plain, **options)


def say(line: str = "", *, error: bool = False) -> None:
    """Prints a line, or several, on standard output, or on standard error. Raises BrokenPipeError where the reader has
    gone."""
    stream = sys.stderr if error else sys.stdout
    if not is_live(stream):
        print(line, file=stream, flush=True)
        return
    say_on(make_console(stream), line)
    stream.flush()


say_error = partial(say, error=True)


@contextmanager
def patience(doing: str, after_s: float = 0.8, every_s: float = 10.0) -> Iterator[None]:
    """Says on standard error what is being done, where it takes longer than `after_s` seconds, and then how long it has
    taken, every `every_s` seconds."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait, text = after_s, doing
        while not over.wait(wait):
            say_error(text)
            wait, text = every_s, f"         ... {time.monotonic() - began + every_s:.0f} s"

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def say_on(console: Console, text: str) -> None:
    """Prints lines in our look on a console."""
    for line in text.split("\n"):
        for row in rows_of(line, console):
            console.print(row, soft_wrap=True)


def rows_of(line: str, console: Console) -> list[Text]:
    """Returns a line as rows that are no wider than the console, unless it is one to be copied, or a word is wider."""
    text, start, label = styled(line)
    if len(line) <= console.width or label in COPIED or console.width <= 2 * start:
        return [text]
    from rich.text import Text

    if label == "error" and (where := WHERE.search(line)):  # the place of a mistake gets a row of its own
        place = Text(" " * start + line[where.end() :], style="dim")
        return [*rows_of(line[: where.start()], console), place]

    head, body = text[:start], text[start:]
    breaks, begin = [], 0
    for word in WORD.finditer(body.plain):
        if word.end() - begin > console.width - start and word.start() > begin:
            begin = word.start()
            breaks.append(begin)
    rows = list(body.divide(breaks))
    for row in rows:
        row.rstrip()
    return [head + rows[0], *(Text(" " * start) + row for row in rows[1:])]


def styled(line: str) -> tuple[Text, int, str]:
    """Returns a line in our look, the column where its text starts, and its label."""
    from rich.text import Text

    text = Text(line)
    if line.startswith("error: "):
        text.stylize("bold red", 0, 6)
        text.stylize("bold", 7)
        return text, 7, "error"
    label, start = "", 0
    head = line[:LABEL]
    if head.endswith(" ") and len(line) > LABEL and LABELLED.fullmatch(head.rstrip()):
        label, start = head.rstrip(), LABEL
        text.stylize(COLOURS.get(label, "dim"), 0, len(label))
    elif found := INDENTED.match(line):
        label, start = found[2] or "", found.end()
        text.stylize("dim", 0, start)
    if line[start:].startswith("shardwise "):
        text.stylize("bold cyan", start)
        return text, start, "do"
    for value in VALUE.finditer(line, start) if label != "sample" else ():  # there, figures are what a model wrote
        text.stylize("bold", *value.span())
    return text, start, label
