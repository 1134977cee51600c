"""This is the child process behind devices.py: it times each device and says what it is about to do before it does it.

    python -m shardwise.cluster.measure.device_rates [DEVICE/MEASUREMENT to skip ...]

One JSON line per event (device, start, done), so that the parent knows which measurement ended the process.
"""

from __future__ import annotations

import json
import sys

import torch

from shardwise.cluster.measure.timer import seconds_of

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(skipped: set[str]) -> None:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            capability = [about.major, about.minor]
            _say("device", device, name=about.name, memory_bytes=about.total_memory, capability=capability)
        for measurement in (*FORMATS, "copy"):
            if f"{device}/{measurement}" in skipped:
                continue
            _say("start", device, measurement=measurement)
            value = _copy_rate(device) if measurement == "copy" else _matmul_rate(device, FORMATS[measurement])
            _say("done", device, measurement=measurement, value=value)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a square matmul."""
    side = 1024 if device.type == "cpu" else 8192
    left = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / seconds_of(lambda: left @ left, device)


def _copy_rate(device: torch.device) -> float:
    """Returns the bytes per second that a copy reads and writes, added up."""
    # 256 MiB and more, so that no cache holds source and target.
    source = torch.zeros((64 if device.type == "cpu" else 256) * 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def _say(event: str, device: torch.device, **more: object) -> None:
    print(json.dumps({"event": event, "device": str(device), **more}), flush=True)


if __name__ == "__main__":
    main(set(sys.argv[1:]))
