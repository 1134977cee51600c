"""This is one of the processes that time collectives for collectives.py: `python -m
shardwise.cluster.measure.collective_rank STORE BACKEND RANK WORLD SIZES [COLLECTIVE ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.cluster.measure.timer import collective_seconds


def main(store_path: str, backend: str, rank: int, world: int, sizes: list[int], only: list[str]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(store_path, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    points = []
    for size in sizes:
        for name, action in _actions(size, rank, world, device).items():
            if not only or name in only:
                points.append((name, world, size, collective_seconds(action, size, device)))
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(points))


def _actions(size: int, rank: int, world: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns the collectives to time, by name. `size` bytes are what all ranks together hold of the result of an
    all-gather, and what each holds for the others."""
    count = max(1, size // 4 // world) * world
    whole, other = (torch.zeros(count, device=device) for _ in range(2))
    part = whole[: count // world].clone()

    def reduce_scatter() -> None:
        if device.type == "cuda":
            dist.reduce_scatter_tensor(part, whole)
        else:  # as runs on gloo do it: see parallel/zero/sharding.py
            dist.all_to_all_single(other, whole)
            torch.sum(other.view(world, -1), 0, out=part)

    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(other, part),
        "reduce-scatter": reduce_scatter,
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
    }


if __name__ == "__main__":
    path, kind, number, count, numbers, *names = sys.argv[1:]
    main(path, kind, int(number), int(count), [int(size) for size in numbers.split(",")], names)
