"""Chooses the directory of an answer of `shardwise plan`: rows of another question are never overwritten.

Each row's second line names its question by a digest, so the same question is answered in the same place.
"""

from __future__ import annotations

import hashlib
import re
from itertools import count
from pathlib import Path

from shardwise.errors import UserError
from shardwise.plan.answer.plan_files import NUMBERED
from shardwise.plan.answer.question import Question

QUESTION = re.compile(r"^# row \d+ of \d+, question ([0-9a-f]{12}):", re.MULTILINE)


def digest_of(question: Question, cluster: str) -> str:
    """Returns a text that is the same for the same model, job, words and `cluster`, as it was typed: what is measured
    of a machine is never the same twice."""
    job = question.job
    asked = [
        repr(question.spec),
        repr(question.loaded.config),
        cluster,
        repr((job.seq_len, job.global_batch, job.tokens)),
    ]
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()[:12]


def folder_of(question: Question, digest: str, out: str | None, force: bool) -> Path:
    """Returns where rows go: the directory that was asked for, else plans/NAME, or plans/NAME-2 and so on where another
    question has been answered."""
    if out is not None:
        if not force and _is_of_another(Path(out), digest):
            raise UserError(
                f"{out} holds the answer to another question",
                why="its rows are of another model, cluster, job or other words, and would be overwritten",
                fix=f"--out {out}-2 to write elsewhere, or --force to overwrite them",
            )
        return Path(out)
    first = Path("plans") / question.name
    names = (first if number == 1 else first.with_name(f"{first.name}-{number}") for number in count(1))
    return next(path for path in names if not _is_of_another(path, digest))


def _is_of_another(directory: Path, digest: str) -> bool:
    """Returns whether a directory holds a row of a question that is not this one."""
    if not directory.is_dir():
        return False
    rows = [path for path in directory.iterdir() if NUMBERED.fullmatch(path.name)]
    return any(_question_in(path) not in (None, digest) for path in rows)


def _question_in(path: Path) -> str | None:
    try:
        found = QUESTION.search(path.read_text(encoding="utf-8")[:2000])
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None
