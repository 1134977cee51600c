"""How fast, and in how much memory, a Hugging Face checkpoint is loaded.

Writes a synthetic checkpoint in several shards, loads it in a fresh process, and prints the peak resident memory next
to model + one shard, and the loading speed next to plainly reading the same files. Both reads find the files in the
page cache, which is the harder case for us: a disk is slower than either.

    python benchmarks/load_weights.py [--gigabytes 1.5] [--dtype bfloat16] [--out load_weights.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GIB = 2**30
SHARDS = 6


def make_spec(gigabytes: float, bytes_per_parameter: int):
    from shardwise.spec.presets import preset

    spec = preset("llama3.2-1b").with_overrides({"num_layers": 1, "vocab": 32000})
    two = spec.with_overrides({"num_layers": 2})
    per_layer = two.num_parameters - spec.num_parameters
    layers = max(1, round((gigabytes * 1e9 / bytes_per_parameter - spec.num_parameters) / per_layer))
    return spec.with_overrides({"num_layers": layers})


def write(directory: Path, gigabytes: float, dtype_name: str) -> None:
    import torch

    from shardwise.interop.huggingface.load_save import save_model
    from shardwise.model.decoder import Decoder

    dtype = getattr(torch, dtype_name)
    spec = make_spec(gigabytes, dtype.itemsize)
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index + 1)  # real pages, not the kernel's shared zero page
    save_model(model, directory, max_shard_bytes=spec.num_parameters * dtype.itemsize // (SHARDS - 1))


def load(directory: Path, dtype_name: str) -> None:
    """Runs in its own process; prints one JSON line."""
    import torch

    from shardwise.interop.huggingface.load_save import load_weights, read_config, spec_from_config
    from shardwise.model.decoder import Decoder

    spec = spec_from_config(read_config(directory))
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(getattr(torch, dtype_name)).to_empty(device="cpu")
    before = peak_bytes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the model's own pages are there first; what comes on top is loading's
    start = time.perf_counter()
    load_weights(model, directory)
    seconds = time.perf_counter() - start
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    print(json.dumps({"seconds": seconds, "base": before, "peak": peak_bytes(), "model": model_bytes}))


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_plainly(directory: Path) -> float:
    """Seconds to read every shard into memory that is already there, as the model's is.

    The memory is as large as a shard: a small buffer would stay in the processor's cache and flatter this number.
    """
    paths = sorted(directory.glob("*.safetensors"))
    memory = bytearray(b"x") * max(path.stat().st_size for path in paths)
    start = time.perf_counter()
    for path in paths:
        rest = memoryview(memory)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(rest):
                rest = rest[count:]
    return time.perf_counter() - start


def measure(gigabytes: float, dtype: str, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        child(["--write", str(directory), "--gigabytes", str(gigabytes), "--dtype", dtype])
        sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
        plain = min(read_plainly(directory) for _ in range(repeats))
        loads = [json.loads(child(["--load", str(directory), "--dtype", dtype])) for _ in range(repeats)]
    best = min(loads, key=lambda one: one["seconds"])
    return {
        "file_bytes": sum(sizes),
        "shards": len(sizes),
        "largest_shard_bytes": max(sizes),
        "model_bytes": best["model"],
        "interpreter_bytes": best["base"],
        "peak_bytes": max(one["peak"] for one in loads) - best["base"],
        "load_seconds": best["seconds"],
        "plain_read_seconds": plain,
    }


def child(arguments: list[str]) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout


def report(result: dict[str, float]) -> None:
    limit = result["model_bytes"] + result["largest_shard_bytes"]
    speed = result["file_bytes"] / result["load_seconds"] / 1e9
    plain = result["file_bytes"] / result["plain_read_seconds"] / 1e9
    print(f"checkpoint  {result['file_bytes'] / GIB:.2f} GiB in {result['shards']} shards")
    print(
        f"memory      {result['peak_bytes'] / GIB:.2f} GiB above the interpreter; model + one shard is "
        f"{limit / GIB:.2f}"
    )
    print(f"speed       {speed:.2f} GB/s; reading the files plainly {plain:.2f} GB/s (ratio {speed / plain:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.gigabytes, options.dtype)
    elif options.load:
        load(options.load, options.dtype)
    else:
        result = measure(options.gigabytes, options.dtype, options.repeats)
        report(result)
        if options.out:
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
