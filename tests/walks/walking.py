"""Walks: what a person types, one command after another in one directory, and the sentence that is looked for in each
answer. The same walk is taken on terminals of three encodings.

A command of one process runs in this one; one that starts ranks in a warm process, or, where it is a `Step` of
`locale="C"`, in a process as a user starts it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from commands import warm_command
from said import check_plain, type_in

if TYPE_CHECKING:
    from ranks import RankPool

ENCODINGS = ("utf-8", "latin-1", "ascii")

LOCALE_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale without letters beyond ASCII, also for files that nobody has given an encoding."""


class Step(NamedTuple):
    """Words that are typed, a sentence of the answer, and the exit code."""

    words: str
    looked_for: str
    code: int = 0
    starts_ranks: bool = False


def walk(steps: Sequence[Step], encoding: str, place: Path, ranks: RankPool, words: Mapping[str, str]) -> None:
    """Takes every step, in this order, and shows each answer that is not as it should be. `words`: what stands for
    several, such as TINY."""
    wrong = []
    for step in steps:
        listed = [part for word in shlex.split(step.words) for part in shlex.split(words.get(word, "")) or [word]]
        code, out, err = take(step, listed, encoding, place, ranks)
        said = out + err
        if code != step.code or step.looked_for not in said:
            wrong.append(f"shardwise {step.words}: {code} and no {step.looked_for!r}:\n{said}")
        check_plain(said, err, code)
        said.encode(encoding)
    assert not wrong, "\n\n".join(wrong)


def take(step: Step, words: list[str], encoding: str, place: Path, ranks: RankPool) -> tuple[int, str, str]:
    if not step.starts_ranks:
        return type_in(words, encoding)
    if encoding != "ascii":
        done = warm_command(ranks, *words, cwd=place, encoding=encoding)
        return done.returncode, done.stdout, done.stderr
    real = subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        cwd=place,
        env={**os.environ, **LOCALE_C},
        capture_output=True,
        timeout=300,
        check=False,
    )
    return real.returncode, real.stdout.decode("ascii"), real.stderr.decode("ascii")
