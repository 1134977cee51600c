"""Refusals whose fixes have been tried: a layout is turned down together with changes after which it is accepted.

`degrees.py` raises a `Refusal` with candidates, best first, and does not care which of them work. Before anybody reads
it, `explained` applies each one and asks again. So no fix leads to the next refusal, unless none of them helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import Machine
from shardwise.config.check import check_config
from shardwise.config.keys import Origins, where_written
from shardwise.errors import UserError
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import Config

Fix = dict[str, Any]
"""Config key -> value, and `--nproc` -> number of processes."""

MAX_FIXES = 2


@dataclass(frozen=True)
class Asked:
    """A config, a model and a machine to run it on. `nproc`: processes asked for with --nproc or started by torchrun.
    `measured`: this machine as a file has it; None: as the table of devices has it. `place`: its name in refusals."""

    config: Config
    spec: ModelSpec
    machine: Machine
    nproc: int | None
    measured: ClusterSpec | None = None
    place: str = "this machine"

    @property
    def cluster(self) -> ClusterSpec:
        found = self.measured or this_cluster(self.machine)
        return found if found.host_memory else replace(found, host_memory=self.machine.memory_bytes // found.per_node)

    @property
    def device(self) -> str:
        return "cuda" if self.machine.gpus else "cpu"

    def changed(self, fix: Fix) -> Asked:
        config, nproc = self.config, self.nproc
        for name, value in fix.items():
            section, _, key = name.partition(".")
            if name == "--nproc":
                nproc = value
            else:
                config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
        return replace(self, config=config, nproc=nproc)


class Refusal(Exception):
    """A refused layout, with changes that may help, best first."""

    def __init__(self, what: str, *, why: str, keys: Sequence[str], fixes: Sequence[Fix]):
        super().__init__(what)
        self.what, self.why, self.keys, self.fixes = what, why, keys, fixes


def explained(problem: Refusal, asked: Asked, origins: Origins, choose: Callable[[Asked], object]) -> UserError:
    """Returns the refusal as people read it, with fixes that `choose` accepts."""
    fixes = [fix for fix in problem.fixes if fix]
    working = list(islice((fix for fix in fixes if _works(asked.changed(fix), choose)), MAX_FIXES))
    return UserError(
        problem.what,
        why=problem.why,
        fix=" or ".join(typed(fix) for fix in working or fixes[:MAX_FIXES]),
        where=where_written(origins, *problem.keys),
    )


def _works(asked: Asked, choose: Callable[[Asked], object]) -> bool:
    try:
        check_config(asked.config, {})
        choose(asked)
    except (Refusal, UserError):
        return False
    return True


def typed(fix: Fix) -> str:
    """Returns a fix as it is typed on the command line."""
    words = []
    for name, value in fix.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(f"{name} {text}" if name == "--nproc" else f"{name}={text}")
    return " ".join(words)
