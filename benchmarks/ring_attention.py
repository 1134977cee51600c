"""Ring attention against its ideal: one rank's attention over the whole sequence, shared out evenly, plus the measured transfer.

    python benchmarks/ring_attention.py             4 processes over gloo on this machine's cores
    python benchmarks/ring_attention.py --cuda      one GPU: every rank's blocks in turn, no transfer, against whole attention

Rounds of ring, whole attention and transfer take turns, so that a busy machine is busy for all of them; medians and quartiles of the
rounds. Bars: ring <= 1.15 x (whole / ranks + transfer), the slowest rank's compute <= 1.05 x the mean. With fewer cores than ranks
the ranks take turns on them, and ideal is whole / cores: the share of the cores that there are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core per rank

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from shardwise.model.attention import attend
from shardwise.model.masking import Mask
from shardwise.parallel.blocks import Score
from shardwise.parallel.ring import Ring, View, Zigzag, ring_backward, ring_forward

RESULTS = Path(__file__).parent / "results"
BAR_TIME, BAR_BALANCE = 1.15, 1.05


class Alone:
    """A ring without peers: what is passed on comes back at once. Times the blocks of one rank and nothing else."""

    def __init__(self, size: int, index: int):
        self.size, self.index = size, index

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


def rows(options: argparse.Namespace, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    return [torch.randn(1, options.tokens, n, options.width, device=device, dtype=dtype) for n in heads]


def pass_through(tensors: list[Tensor], ring: Any, view: View) -> None:
    q, k, v, grad = tensors
    score = Score(q.shape[-1] ** -0.5)
    out, lse = ring_forward(q, k, v, ring, view, score)
    ring_backward(grad, q, k, v, out, lse, ring, view, score)


def whole_attention(tensors: list[Tensor]) -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v, Mask(is_causal=True), "sdpa", q.shape[-1] ** -0.5, 0.0)
    torch.autograd.grad(out, (q, k, v), tensors[3])


def timed(work: Callable[[], None], device: str = "cpu") -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low_quartile": low, "high_quartile": high}


# On processes ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, options: argparse.Namespace, meeting: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    assert dist.group.WORLD is not None
    ring = Ring(dist.group.WORLD)
    tensors = rows(options, "cpu", torch.float32)
    view = View(Zigzag(ring.size, rank, options.tokens), None, None, torch.device("cpu"))
    mine = [view.place.take(x) for x in tensors]
    kv = torch.cat([x.flatten() for x in mine[1:3]])

    def transfer() -> None:
        """The ring's messages with nothing to compute: K and V twice, their gradients once."""
        for _ in range(3 * (ring.size - 1)):
            ring.pass_on(kv)()

    found: dict[str, list[float]] = {"ring": [], "whole": [], "transfer": [], "compute": []}
    for turn in range(options.rounds + 1):
        for name, work in (
            ("ring", lambda: pass_through(mine, ring, view)),
            ("transfer", transfer),
        ):
            dist.barrier()
            seconds = timed(work)
            slowest = torch.tensor([seconds])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(float(slowest))
        # One rank at a time from here on: nobody shares its core.
        for turn_of in range(ring.size):
            dist.barrier()
            if turn_of == rank:
                found["compute"].append(timed(lambda: pass_through(mine, Alone(ring.size, rank), view)))
        dist.barrier()
        if rank == 0:
            found["whole"].append(timed(lambda: whole_attention(tensors)))
        dist.barrier()
        if turn == 0:
            found = {name: [] for name in found}  # the first round warms up
    Path(results, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def on_processes(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options, f"{folder}/meeting", folder), nprocs=options.ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    at_once = min(options.ranks, len(os.sched_getaffinity(0)))
    ring, transfer, whole = found[0]["ring"], found[0]["transfer"], found[0]["whole"]
    ratios = [r / (w / at_once + t) for r, w, t in zip(ring, whole, transfer, strict=True)]
    compute = [statistics.median(rank["compute"]) for rank in found]
    balance = max(compute) / statistics.mean(compute)
    return {
        "cores_used_at_once": at_once,
        "ring_s": spread(ring),
        "whole_on_one_rank_s": spread(whole),
        "transfer_s": spread(transfer),
        "ratio_to_ideal": spread(ratios),
        "compute_s_by_rank": compute,
        "sum_of_compute_to_whole": sum(compute) / statistics.median(whole),
        "slowest_rank_to_mean": balance,
        "bars": {"ratio": BAR_TIME, "balance": BAR_BALANCE},
        "holds": statistics.median(ratios) <= BAR_TIME and balance <= BAR_BALANCE,
    }


# On one GPU -----------------------------------------------------------------------------------------------------------


def on_one_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """All ranks' blocks one after another: what the ring adds to attention beside transfer."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0)}
    for dtype in (torch.bfloat16, torch.float32):
        tensors = rows(options, "cuda", dtype)
        views = [
            View(Zigzag(options.ranks, rank, options.tokens), None, None, torch.device("cuda"))
            for rank in range(options.ranks)
        ]
        parts = [[view.place.take(x) for x in tensors] for view in views]
        whole: list[float] = []
        by_rank: list[list[float]] = [[] for _ in views]
        for turn in range(options.rounds + 3):
            seconds = timed(lambda tensors=tensors: whole_attention(tensors), "cuda")
            shares = [
                timed(lambda p=p, v=v: pass_through(p, Alone(options.ranks, v.place.index), v), "cuda")
                for p, v in zip(parts, views, strict=True)
            ]
            if turn >= 3:
                whole.append(seconds)
                for times, share in zip(by_rank, shares, strict=True):
                    times.append(share)
        compute = [statistics.median(times) for times in by_rank]
        name = str(dtype).removeprefix("torch.")
        found[name] = {
            "whole_s": spread(whole),
            "compute_s_by_rank": compute,
            "rank_to_ideal_share": statistics.mean(compute) / (statistics.median(whole) / options.ranks),
            "slowest_rank_to_mean": max(compute) / statistics.mean(compute),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="one GPU, no transfer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=None, help="4096; with --cuda 65536")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=None, help="2; with --cuda as many as heads")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    options.tokens = options.tokens or (65536 if options.cuda else 4096)
    options.kv_heads = options.kv_heads or (options.heads if options.cuda else 2)
    result = on_one_gpu(options) if options.cuda else on_processes(options)
    shape = {name: getattr(options, name) for name in ("ranks", "tokens", "heads", "kv_heads", "width", "rounds")}
    report = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "shape": shape, **result}
    out = options.out or RESULTS / f"ring_attention{'_cuda' if options.cuda else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if result.get("holds", True) else 1


if __name__ == "__main__":
    sys.exit(main())
