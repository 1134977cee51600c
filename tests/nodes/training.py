"""The small run that tests on nodes train, the ways to start it there, and what one process computes of it."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import SMALL, losses_of
from nodes import Command, Node

STEPS = 160
PORT = 29_400
TINY = [
    *SMALL,
    f"train.steps={STEPS}",
    "memory.precision=fp64",
    "optimizer.schedule=constant",
    "optimizer.warmup=0",
    "train.eval_every=0",
    "run.name=tiny",
]
"""In fp64, so that the losses of a few hundred steps differ by roundings alone; the learning rate does not depend on
the number of steps, so any part of the run can be compared."""


def train(*words: object) -> list[str]:
    """Returns the one line that every node of a job runs."""
    one = ["--nproc", "1", "--resume", "auto", "--no-verify"]
    return [sys.executable, "-m", "shardwise", "train", *TINY, *map(str, words), *one]


def plan_file(path: Path, cluster: str = "2x1xcpu", *words: str) -> Path:
    """Writes the run as a file of `shardwise plan` for a cluster, and returns its path."""
    settings = dict(word.split("=", 1) for word in [*TINY, f"run.name={path.stem}", "parallel.dp=2", *words])
    lines = [f"{key} = {value if value[0].isdigit() else json.dumps(value)}" for key, value in settings.items()]
    row = f"# row 1 of 1, question 000000000000: dp=2 on 2 of {cluster}"
    path.write_text("\n".join([row, *lines]) + "\n")
    return path


def places(nodes: Sequence[Node], head: str | None = None) -> list[dict[str, object]]:
    """Returns the variables of each node of a job that is started by hand. Its secret is in a file of each node."""
    secret = secrets.token_hex(16)
    variables = []
    for index, node in enumerate(nodes):
        file = node.files / ".secret"
        file.touch(mode=0o600)
        file.write_text(secret)
        variables.append(
            {
                "SHARDWISE_NODE": index,
                "SHARDWISE_NODES": len(nodes),
                "SHARDWISE_HEAD": head or nodes[0].address,
                "SHARDWISE_PORT": PORT,
                "SHARDWISE_SECRET_FILE": node.cwd / ".secret",
            }
        )
    return variables


def start_on(nodes: Sequence[Node], *words: object, head: str | None = None) -> list[Command]:
    """Starts the run on these nodes, the first being the head, and returns the command of each."""
    placed = zip(nodes, places(nodes, head), strict=True)
    return [node.start(*train(*words), **variables) for node, variables in placed]


def run_of(node: Node, name: str = "tiny") -> Path:
    """Returns the run directory as this machine sees it."""
    return node.files / "runs" / name


def steps_of(node: Node, name: str = "tiny") -> int:
    """Returns how many steps the run on a node has trained."""
    run = run_of(node, name)
    return max(losses_of(run), default=0) if (run / "metrics.jsonl").exists() else 0


def check_same_losses(node: Node, reference: dict[int, float], last: int = STEPS, name: str = "tiny") -> None:
    """Fails unless the run has trained every step to `last`, with the losses of one process."""
    losses = losses_of(run_of(node, name))
    assert list(losses) == list(range(1, last + 1))
    assert losses == pytest.approx({step: reference[step] for step in losses}, abs=1e-9)
