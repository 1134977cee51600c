"""What every node can be asked before a job starts: its clock, what it sees of the run directory, its devices, how fast
it reaches another node.

The head asks (preflight.py); each node, the head itself too, answers here. Invariant: a question changes nothing on a
node but one small file in the runs directory, which is removed again.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.cluster.measure.devices import measure_devices
from shardwise.launch.nodes.connection import Background
from shardwise.launch.nodes.stream import Receiver, send_to

SHARED_MEMORY = Path("/dev/shm")
TEST_FILE = ".preflight"


class Checks:
    """One node's answers."""

    def __init__(self, index: int, runs: Path, address: str, secret: bytes, thread: Background):
        self.index, self.runs, self.secret, self.thread = index, runs, secret, thread
        self.receiver = Receiver(address, secret)
        thread.call(self.receiver.open())
        self._answers = {
            "clock": self._clock,
            "write": self._write,
            "read": self._read,
            "clean": self._clean,
            "port": self._port,
            "send": self._send,
            "devices": self._devices,
        }

    def answer(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what was found, with the question's number. A question that cannot be answered has a `problem`."""
        echo = {"kind": "checked", "number": words.get("number")}
        try:
            return {**echo, **self._answers[str(words["what"])](words)}
        except Exception as error:  # whatever it is, it is a finding about this node
            return {**echo, "problem": f"{type(error).__name__}: {error}"}

    def _clock(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return {"time": time.time()}

    def _write(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a small file into the runs directory by one rename, as checkpoints are committed."""
        self.runs.mkdir(parents=True, exist_ok=True)
        scratch = self.runs / f"{TEST_FILE}-{words['sign']}-{self.index}.part"
        scratch.touch()
        scratch.rename(scratch.with_suffix(""))
        return {"free": shutil.disk_usage(self.runs).free}

    def _read(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Returns which nodes' files are seen here. Each is asked for by its name, which is new: a network file system
        may list what was there a while ago."""
        named = {node: self.runs / f"{TEST_FILE}-{words['sign']}-{node}" for node in words["nodes"]}
        return {"seen": [node for node, file in named.items() if file.exists()]}

    def _clean(self, words: Mapping[str, Any]) -> dict[str, Any]:
        for file in self.runs.glob(f"{TEST_FILE}-*-{self.index}*"):
            file.unlink(missing_ok=True)
        return {}

    def _port(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return {"address": self.receiver.address, "port": self.receiver.port}

    def _send(self, words: Mapping[str, Any]) -> dict[str, Any]:
        return {"rate": self.thread.call(send_to(words["address"], words["port"], self.secret))}

    def _devices(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Measures one matmul per device; says what is free on each GPU, and how large /dev/shm is."""
        rates = measure_devices("CPU", 0)
        chosen = [entry for entry in rates if entry.device != "cpu"] or rates
        found = [
            {
                "device": entry.device,
                "flops_per_s": max(entry.flops_per_s.values(), default=0.0),
                **_said(entry.problems),
            }
            for entry in chosen
        ]
        shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
        return {"devices": found, "gpus": _gpu_memory(), "shared_memory": shared}


def _said(problems: Mapping[str, str]) -> dict[str, str]:
    return {"problem": "; ".join(f"{name}: {why}" for name, why in problems.items())} if problems else {}


def _gpu_memory() -> list[dict[str, Any]]:
    """Returns driver, memory and free memory of each GPU, in MiB, as nvidia-smi says; empty without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"driver": row[0], "total": int(row[1]), "free": int(row[2])}
        for row in rows
        if len(row) == 3 and row[1].isdigit()
    ]
