"""Rows of the planner's answer as config files: plans/NAME/1.toml and so on, complete, for `train` and `verify`. No
torch.

Invariant: a file that a person wrote or changed is never overwritten without consent. Each file's first line carries a
digest of the rest, which says whether it is still ours.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shardwise.config.keys import DEFAULT
from shardwise.config.write import resolved_text
from shardwise.errors import UserError
from shardwise.files import write_atomically
from shardwise.plan.answer.question import Question
from shardwise.plan.resolve.usual import LAYOUT
from shardwise.spec.plan import Plan
from shardwise.spec.schema import CommConfig, Config, MemoryConfig, ParallelConfig, TrainConfig

MARK = re.compile(r"# A row of `shardwise plan`, digest ([0-9a-f]{16})")
NUMBERED = re.compile(r"\d+\.toml")
CLUSTER = re.compile(r"# row .* on \d+ of (\S+)")
PLANNER = "planner"

DECIDED = (
    *LAYOUT,
    *("seq_len", "micro_batch", "precision", "reduce_dtype", "offload_to", "quantize_weights", "quantize_gradients"),
)
"""Config keys whose value a row has from its plan."""

Section = TypeVar("Section", TrainConfig, ParallelConfig, MemoryConfig, CommConfig)


def config_of(question: Question, plan: Plan) -> Config:
    """Returns the config of a run, in which nothing is left open that the plan decides."""
    config = question.loaded.config

    def decided(section: Section, **otherwise: object) -> Section:
        keys = [name for name in DECIDED if name in type(section).__dataclass_fields__]
        return replace(section, **{name: getattr(plan, name) for name in keys} | otherwise)

    alone: dict[str, object] = {} if plan.pp > 1 else {"schedule": "1f1b", "split": "auto"}
    whole: dict[str, object] = {} if plan.zero else {"replicate": "auto"}
    tokens = None if config.train.global_batch else plan.tokens_per_step
    return replace(
        config,
        train=decided(config.train, global_batch_tokens=tokens),
        parallel=decided(config.parallel, **alone, **whole, layout=None),
        memory=decided(config.memory),
        comm=decided(config.comm, secondary_shard=plan.secondary_shard or None),
    )


def row_text(question: Question, plan: Plan, notes: Sequence[str]) -> str:
    """Returns the text of a file: a digest, `notes` (what is predicted and why), then every key with its origin."""
    config, typed = config_of(question, plan), question.loaded.origins
    default = Config()
    origins = {}
    for name in typed:
        section, _, key = name.partition(".")
        changed = getattr(getattr(config, section), key, None) != getattr(getattr(default, section), key, None)
        origins[name] = typed[name] if typed[name] != DEFAULT else PLANNER if changed else DEFAULT
    body = "\n".join([*(f"# {_line(note)}" if note else "#" for note in notes), "#", resolved_text(config, origins)])
    return f"# A row of `shardwise plan`, digest {_digest(body)}\n{body}"


def write_rows(directory: Path, rows: Mapping[str, str], force: bool = False) -> list[Path]:
    """Writes each text under its name and returns the paths. Removes older rows that are ours and not replaced."""
    paths = {directory / name: text for name, text in rows.items()}
    for path in paths:
        if path.exists() and not force and not is_ours(path):
            raise UserError(
                f"{path} is not as `shardwise plan` wrote it",
                why="somebody wrote or changed it, and it would be overwritten",
                fix=f"--out {directory}-2 to write elsewhere, or --force to overwrite it",
            )
    if directory.is_dir():
        for path in directory.iterdir():
            if NUMBERED.fullmatch(path.name) and path not in paths and is_ours(path):
                path.unlink()
    for path, text in paths.items():
        write_atomically(path, text)
    return list(paths)


def is_ours(path: Path) -> bool:
    """Returns whether a file was written here and has not been changed since."""
    try:
        first, _, body = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return False
    mark = MARK.fullmatch(first)
    return mark is not None and mark[1] == _digest(body)


def cluster_named(path: Path) -> str | None:
    """Returns the cluster that a row was planned for, as it was typed; None where a file does not say."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:4]
    except (OSError, UnicodeDecodeError):
        return None
    return next((match[1] for line in lines if (match := CLUSTER.match(line))), None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
