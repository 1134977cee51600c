"""One of the two processes that time all-reduces for link.py: `python -m shardwise.cluster.measure.link_rank STORE SIZES RANK`."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main(store_path: str, sizes: list[int], rank: int) -> None:
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    points = [(size, _all_reduce_seconds(size)) for size in sizes]
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(points))


def _all_reduce_seconds(size: int) -> float:
    buffer = torch.zeros(max(1, size // 4))
    repeats = 9 if size >= 2**22 else 30
    times = []
    for _ in range(repeats + 3):  # the first three warm up connections and caches
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - start)
    return min(times[3:])  # the link itself, not what other processes did to this machine meanwhile


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2].split(",")], int(sys.argv[3]))
