"""How soon `shardwise train`, typed with nothing behind it, shows its first line and takes its first step.

    python benchmarks/startup.py [--starts 3] [--out results/startup.json]

Each start is the real command on a terminal of its own (a pseudo-terminal of 100 columns), as a person sees it. The
first start has an empty run directory: nothing was prepared, measured or proven there before. The starts after it find
the prepared text and the proof of the layout that the first one left. The clock runs from the start of the process to
the first character on the terminal, and to the line of step 1, which is printed when the step has ended; then Ctrl-C
ends the run. The seconds are this machine's: look at its load before you believe them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import pty
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "startup.json"
FIRST_STEP = re.compile(r"step\S*\s+\S*1/\d")
ESCAPE_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PATIENCE_S = 300.0


def started(run_dir: Path) -> dict[str, float]:
    """Return the seconds from one start to its first character and to the line of its first step."""
    terminal, its_side = pty.openpty()
    fcntl.ioctl(its_side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "shardwise", "train", f"run.dir={run_dir}"]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdin=its_side, stdout=its_side, stderr=its_side, start_new_session=True)
    os.close(its_side)
    seen: dict[str, float] = {}
    text = ""
    try:
        while "first_step_s" not in seen:
            try:
                piece = os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # Linux says so when the last process on the terminal has ended
                piece = ""
            now = time.monotonic() - begun
            if not piece or now > PATIENCE_S:
                raise SystemExit(f"startup.py: no first step after {now:.0f} s; the command said:\n{text}")
            text += ESCAPE_CODES.sub("", piece)
            if text.strip():
                seen.setdefault("first_line_s", now)
            if FIRST_STEP.search(text):
                seen["first_step_s"] = now
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(terminal, 65536):
                pass
        process.wait(60)
        os.close(terminal)
    return {name: round(seconds, 2) for name, seconds in seen.items()}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="starts with an empty run directory, and as many after")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {"empty run directory": [], "prepared before": []}
    load_before = os.getloadavg()[0]
    for _ in range(args.starts):
        with tempfile.TemporaryDirectory() as scratch:
            for name, found in rows.items():
                found.append(started(Path(scratch)))
                print(f"{name:20}", *(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "starts": rows,
        "median": {name: medians(found) for name, found in rows.items()},
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote    {args.out}")


if __name__ == "__main__":
    main()
