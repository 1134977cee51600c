"""Chooses the device of a verb that has no plan: a GPU if torch can use one. A GPU that it cannot use is named, with
the reason."""

from __future__ import annotations

import sys

import torch

from shardwise.cluster.describe.machine import this_machine


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if problem := this_machine().gpu_problem:
        print(f"gpu      {problem}; this is computed on CPUs", file=sys.stderr)
    return torch.device("cpu")
