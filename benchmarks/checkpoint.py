"""What a checkpoint costs: how long a save keeps a step waiting, and how much of the disk's speed is reached.

One rank with a model of `--gib` GiB of weights and AdamW states in fp32. In every round, one after the other, so that
all see the same machine: plain sequential direct writes of as many bytes and a flush; our save, with and without its
digests; a save in the background, with the time until it is committed; torch.distributed.checkpoint's save and
async_save; torch.save with a flush; and cold reads (the files are dropped from the page cache before): plain sequential
ones, our load, and our check of all digests. Medians of the rounds.

    python benchmarks/checkpoint.py [--gib 1] [--rounds 3] [--dir DIR] [--out benchmarks/results/checkpoint.json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

BLOCK = 16 * 2**20
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="weights and optimizer states together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary directory)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(Path(folder), args.gib, args.rounds)
    show(found)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote    {args.out}")


def build(gib: float) -> tuple[Any, torch.optim.Optimizer]:
    """One rank's engine and optimizer; states are there, with other numbers in each page."""
    from shardwise.prove.reference import Trial
    from shardwise.prove.trial import build_trial, trial_plan
    from shardwise.spec.presets import preset

    spec = preset("tiny").with_overrides({"hidden": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64,
                                          "ffn": 2816, "vocab": 8192, "num_layers": 1})  # fmt: skip
    per_layer = spec.with_overrides({"num_layers": 2}).num_parameters - spec.num_parameters
    layers = 1 + max(0, round((gib * 2**30 / 12 - spec.num_parameters) / per_layer))
    spec = spec.with_overrides({"num_layers": layers})
    trial = Trial(precision="fp32")
    engine = build_trial(spec, trial_plan(trial), trial, 0, CPU)
    optimizer = engine.optimizer(trial.optimizer)
    for shard in engine.shards:
        local = shard.local
        moments = {"exp_avg": local.detach() * 0.1, "exp_avg_sq": local.detach() ** 2}
        optimizer.state[local] = {"step": torch.tensor(1.0), **moments}
    return engine, optimizer


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def write_plainly(file: Path, size: int) -> None:
    """Sequential direct writes of one thread, and a flush."""
    buffer = mmap.mmap(-1, BLOCK)
    buffer[:] = os.urandom(2**16) * (BLOCK // 2**16)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    for at in range(0, size - size % BLOCK, BLOCK):
        os.pwrite(handle, buffer, at)
    os.fsync(handle)
    os.close(handle)


def read_plainly(files: list[Path]) -> None:
    buffer = mmap.mmap(-1, BLOCK)
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        while os.readv(handle, [buffer]):
            pass
        os.close(handle)


def drop(folder: Path) -> list[Path]:
    """Drops a folder's files from the page cache, and returns them."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return files


class NoDigest:
    """In the place of SHA-256, to see what it costs."""

    def __init__(self, data: object):
        pass

    def hexdigest(self) -> str:
        return "0" * 64


def measure(folder: Path, gib: float, rounds: int) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from shardwise.checkpoint import part_file, store
    from shardwise.run.saving import Saver
    from shardwise.run.state import held_slices, restore_state

    torch.set_num_threads(os.cpu_count() or 1)
    engine, optimizer = build(gib)
    size = sum(one.nbytes for one in held_slices(engine, optimizer))
    tensors = {f"{one.group}.{one.name}": read() for one, read in held_slices(engine, optimizer).items()}
    sync = Saver(folder / "sync", engine, optimizer)
    behind = Saver(folder / "behind", engine, optimizer, background=True)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    seconds: dict[str, list[float]] = {}

    def note(what: str, took: float) -> None:
        seconds.setdefault(what, []).append(took)

    def save_without_digest() -> None:
        with patch.object(part_file.hashlib, "sha256", NoDigest):
            sync.save(1, dict)

    def save_by_torch() -> None:
        with open(folder / "torch.pt", "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    warnings.simplefilter("ignore")
    behind.save(1, dict)  # the first one makes the buffers
    first_stall = behind.stall_s
    behind.finish()
    for number in range(rounds):
        note("direct writes", timed(lambda: write_plainly(folder / "plain", size)))
        note("save", timed(lambda: sync.save(1, dict)))
        note("save without digests", timed(save_without_digest))
        began = time.perf_counter()
        behind.save(number + 2, dict)
        note("background: stall", time.perf_counter() - began)
        behind.finish()
        note("background: committed", time.perf_counter() - began)
        note("torch.save", timed(save_by_torch))
        (folder / "torch.pt").unlink()
        note("DCP save", timed(lambda: dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)))
        shutil.rmtree(folder / "dcp")
        began = time.perf_counter()
        future = dcp.async_save(tensors, checkpoint_id=str(folder / "dcp-async"))
        note("DCP async_save: stall", time.perf_counter() - began)
        future.result()
        note("DCP async_save: done", time.perf_counter() - began)
        shutil.rmtree(folder / "dcp-async")
        sync.save(1, dict)
        files = drop(folder / "sync")
        note("sequential reads", timed(lambda files=files: read_plainly(files)))
        drop(folder / "sync")
        checkpoint = store.Checkpoint(folder / "sync" / "step-1", 1)
        note("load", timed(lambda checkpoint=checkpoint: restore_state(engine, optimizer, checkpoint)))
        drop(folder / "sync")
        note("check of digests", timed(checkpoint.verify))
    behind.close()
    torch.distributed.destroy_process_group()
    median = {what: statistics.median(took) for what, took in seconds.items()}
    return {
        "date": str(date.today()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "bytes": size,
        "rounds": rounds,
        "first_background_stall_s": first_stall,
        "seconds": median,
        "all_seconds": seconds,
        "figures": {
            "bandwidth of a save over direct writes": median["direct writes"] / median["save"],
            "digests' share of a save": 1 - median["save without digests"] / median["save"],
            "stall in the background over a save": median["background: stall"] / median["save"],
            "DCP async_save's stall over ours": median["DCP async_save: stall"] / median["background: stall"],
            "DCP save's time over ours": median["DCP save"] / median["save"],
            "torch.save's time over ours": median["torch.save"] / median["save"],
            "speed of a load over sequential reads": median["sequential reads"] / median["load"],
        },
    }


def show(found: dict[str, Any]) -> None:
    size = found["bytes"]
    print(
        f"{size / 2**30:.2f} GiB, {found['machine']}, torch {found['versions']['torch']}, medians of {found['rounds']}"
    )
    for what, took in found["seconds"].items():
        speed = "" if "stall" in what else f"{size / took / 1e9:8.2f} GB/s"
        print(f"  {what:24} {took:8.3f} s {speed}")
    for what, value in found["figures"].items():
        print(f"  {what:42} {value:6.3f}")


if __name__ == "__main__":
    main()
