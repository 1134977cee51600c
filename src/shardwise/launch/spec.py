"""Defines `LaunchSpec`: what a job of several nodes asks its scheduler for, and why. Every script is written from it.

Invariant: every value that a scheduler is asked for has its reason in `why`, which scripts print beside it. No torch,
and nothing of any scheduler. Who makes it from a plan file is launch/planned_job.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TERM", "TMPDIR"),
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "CUDA_HOME"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"),
)
"""Variables of the person's shell that ranks may see; nothing else of it reaches them but what --env names."""

OF_LOGGERS = {
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL"),
    "mlflow": ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"),
}
"""Logger -> the variables that its service is reached by. Only their names are ever written."""

OURS = ("SHARDWISE_HEAD", "SHARDWISE_PORT", "SHARDWISE_SECRET_FILE")


@dataclass(frozen=True)
class JobPart:
    """One config file of a job and the name of the run that it becomes; a job array has several."""

    file: str
    name: str


@dataclass(frozen=True)
class LaunchSpec:
    """What a job needs of its scheduler, in nodes, bytes and seconds."""

    parts: tuple[JobPart, ...]
    name: str
    run_dir: str  # seen under this path by all nodes
    words: tuple[str, ...]  # `section.key=value` words of the person, for the line to run
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0: the ranks compute on CPUs
    gpu: str  # its kind as the planner calls it; empty on CPUs
    cpus_per_node: int
    memory_bytes: int  # of CPU memory, per node
    seconds: int  # what the scheduler is asked for
    step_s: float | None  # predicted, of the slower kind; None where nothing is predicted
    grace_s: int  # from the first notice to the end: the step ends and a checkpoint is written
    environment: tuple[str, ...]
    reads_network: bool  # data or loggers are behind addresses outside of the cluster
    why: Mapping[str, str]  # field -> the reason of its value
    predicted: str  # a line on what is to come
    plan_text: str  # of the first config file
    is_check: bool = False  # the nodes are checked, nothing is trained

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def private(self) -> list[str]:
        """The variables of the person's shell that somebody asked for, or that a logger needs."""
        return [name for name in self.environment if name not in ENVIRONMENT]

    def command(self, part: JobPart, program: tuple[str, ...] = ("shardwise",)) -> tuple[str, ...]:
        """Returns the words of the one line that every node runs, at the start and after every restart."""
        settings = (f"run.dir={self.run_dir}", f"run.name={part.name}", *self.words)
        check = ("--preflight",) if self.is_check else ()
        return (*program, "train", part.file, *settings, "--resume", "auto", *check)

    def run_of(self, part: JobPart) -> Path:
        """Returns the run directory of one config."""
        return Path(self.run_dir) / part.name


def in_shell(words: tuple[str, ...]) -> str:
    """Returns words as a shell reads them back."""
    return shlex.join(words)


def clock(seconds: int) -> str:
    """Returns a duration as SLURM writes it, rounded up to a minute: `1-02:30:00`."""
    minutes = -(-seconds // 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00" if days else f"{rest // 60:02d}:{rest % 60:02d}:00"
