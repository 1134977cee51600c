"""Ring attention against its ideal: one rank's attention over the whole sequence, shared out evenly, plus the measured
transfer.

    python benchmarks/ring_attention.py --json FILE      4 processes over gloo, 4,096 and 16,384 tokens, about a minute
    python benchmarks/ring_attention.py --cuda           one GPU: every rank's blocks in turn, against whole attention

Forward and backward. Rounds of ring, transfer and whole attention take turns, so that a busy machine is busy for all of
them; medians and quartiles of the rounds' ratios. Targets: ring <= 1.15 x (whole / ranks + transfer), the slowest
rank's compute <= 1.05 x the mean. Whole attention is timed on one rank while the others stand still, which is what the
target means, and once more on all ranks at once: what a core is slower while its neighbours work is no cost of the
ring, and the second ratio leaves it out.

With at least one core more than ranks each rank computes on a core of its own; the threads that send and receive go
where there is room. With fewer cores than ranks the ranks take turns on them, and ideal is whole / cores: the share of
the cores that there are. What ranks compute without sending is timed in seconds of the processor: then it does not
matter who else uses the machine.
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

from shardwise.model.attention_kernels import KERNELS, attend
from shardwise.model.masking import Mask
from shardwise.parallel.context.attention_blocks import Score
from shardwise.parallel.context.ring import Ring, ring_backward, ring_forward
from shardwise.parallel.context.zigzag import AttentionView, Zigzag

RESULTS = Path(__file__).parent / "results"
TARGET_TIME, TARGET_BALANCE = 1.15, 1.05


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


def pass_through(tensors: list[Tensor], ring: Any, view: AttentionView) -> None:
    q, k, v, grad = tensors
    score = Score(q.shape[-1] ** -0.5)
    out, lse = ring_forward(q, k, v, ring, view, score)
    ring_backward(grad, q, k, v, out, lse, ring, view, score)


def whole_attention(tensors: list[Tensor]) -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v, Mask(is_causal=True), KERNELS["sdpa"], q.shape[-1] ** -0.5, 0.0)
    torch.autograd.grad(out, (q, k, v), tensors[3])


def timed(work: Callable[[], None], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low_quartile": low, "high_quartile": high}


# On processes ---------------------------------------------------------------------------------------------------------


def own_cores(ranks: int) -> list[int]:
    """One for each rank, far apart: neighbours may be halves of one core. None where a thread that sends would find no
    other."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[:: (len(cores) - 1) // ranks][:ranks] if len(cores) > ranks else []


def rank_main(rank: int, options: argparse.Namespace, meeting: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    dist.barrier()
    if cores := own_cores(options.ranks):
        os.sched_setaffinity(0, {cores[rank]})  # this thread; those that send and receive have started
    found = {length.tokens: measure(rank, length) for length in lengths(options)}
    Path(results, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measure(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round. What all ranks do at once takes as long as the slowest."""
    assert dist.group.WORLD is not None
    ring = Ring(dist.group.WORLD)
    tensors = rows(options, "cpu", torch.float32)
    view = AttentionView(Zigzag(ring.size, rank, options.tokens), None, None, torch.device("cpu"))
    mine = [view.place.take(x) for x in tensors]
    kv = torch.cat([x.flatten() for x in mine[1:3]])
    alone = Alone(ring.size, rank)

    def transfer() -> None:
        """The ring's sends with nothing to compute: K and V twice, their gradients once."""
        for _ in range(3 * (ring.size - 1)):
            ring.pass_on(kv)()

    together: dict[str, Callable[[], None]] = {
        "ring": lambda: pass_through(mine, ring, view),
        "transfer": transfer,
        "whole_at_once": lambda: whole_attention(tensors),
    }
    found: dict[str, list[float]] = {name: [] for name in (*together, "whole", "compute", "whole_cpu")}
    for turn in range(options.rounds + 1):
        for name, work in together.items():
            dist.barrier()
            slowest = torch.tensor([timed(work)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(float(slowest))
        dist.barrier()
        found["compute"].append(timed(lambda: pass_through(mine, alone, view), clock=time.process_time))
        dist.barrier()
        if rank == 0:
            began = time.process_time()
            found["whole"].append(timed(lambda: whole_attention(tensors)))
            found["whole_cpu"].append(time.process_time() - began)
        dist.barrier()
        if turn == 0:
            found = {name: [] for name in found}  # the first round warms up
    return found


def on_processes(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options, f"{folder}/meeting", folder), nprocs=options.ranks)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    lines = [
        shape(length) | summary([rank[str(length.tokens)] for rank in found], options.ranks)
        for length in lengths(options)
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "pinned_to": own_cores(options.ranks),
        "targets": {"ratio": TARGET_TIME, "balance": TARGET_BALANCE},
        "lengths": lines,
        "holds": all(line["holds"] for line in lines),
    }


def summary(found: list[dict[str, list[float]]], ranks: int) -> dict[str, Any]:
    at_once = min(ranks, len(os.sched_getaffinity(0)))
    first = found[0]
    compute = [statistics.median(rank["compute"]) for rank in found]
    balance = max(compute) / statistics.mean(compute)

    def ratios(whole: list[float], shared_by: int) -> dict[str, float]:
        rounds = zip(first["ring"], whole, first["transfer"], strict=True)
        return spread([ring / (one / shared_by + transfer) for ring, one, transfer in rounds])

    ratio = ratios(first["whole"], at_once)
    return {
        "ring_s": spread(first["ring"]),
        "whole_on_one_rank_s": spread(first["whole"]),
        "whole_on_all_ranks_at_once_s": spread(first["whole_at_once"]),
        "transfer_s": spread(first["transfer"]),
        "ratio_to_ideal": ratio,
        "ratio_with_whole_at_once": ratios(first["whole_at_once"], ranks),
        "compute_cpu_s_by_rank": compute,
        "sum_of_compute_to_whole": sum(compute) / statistics.median(first["whole_cpu"]),
        "slowest_rank_to_mean": balance,
        "holds": ratio["median"] <= TARGET_TIME and balance <= TARGET_BALANCE,
    }


# On one GPU -----------------------------------------------------------------------------------------------------------


def on_one_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """All ranks' blocks one after another: what the ring adds to attention beside transfer."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0)}
    for dtype in (torch.bfloat16, torch.float32):
        tensors = rows(options, "cuda", dtype)
        views = [
            AttentionView(Zigzag(options.ranks, rank, options.tokens), None, None, torch.device("cuda"))
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


LENGTHS = (
    {"tokens": 4096, "heads": 8, "kv_heads": 2, "rounds": 9},
    {"tokens": 16384, "heads": 2, "kv_heads": 1, "rounds": 5},
)
ON_GPU = {"tokens": 65536, "heads": 8, "kv_heads": 8, "rounds": 7}


def lengths(options: argparse.Namespace) -> list[argparse.Namespace]:
    """One shape for each sequence length, what the command line says before what stands above."""
    said = {name: value for name, value in vars(options).items() if value is not None}
    defaults = [ON_GPU] if options.cuda else LENGTHS
    kept = [one for one in defaults if options.tokens in (None, one["tokens"])] or defaults[:1]
    return [argparse.Namespace(**(one | said)) for one in kept]


def shape(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("ranks", "tokens", "heads", "kv_heads", "width", "rounds")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="one GPU, no transfer")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="one length only")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="benchmarks/results/ring_attention[_cuda].json")
    options = parser.parse_args()
    load, began = os.getloadavg()[0], time.perf_counter()
    if options.cuda:
        one = lengths(options)[0]
        result = {"shape": shape(one), **on_one_gpu(one)}
    else:
        result = on_processes(options)
    about = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "load_average_before": load}
    report = about | result | {"took_s": time.perf_counter() - began}
    out = options.json or RESULTS / f"ring_attention{'_cuda' if options.cuda else ''}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if result.get("holds", True) else 1


if __name__ == "__main__":
    sys.exit(main())
