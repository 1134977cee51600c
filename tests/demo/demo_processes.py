"""Demos as a user starts them, and who of their processes is still there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def start_demo(word: str, *options: str) -> subprocess.Popen[str]:
    """In a session of its own, so that `left_over` finds its children whatever became of their parent."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", "explain", word, "--demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # whoever runs tests in the background ignores it
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def left_over(leader: int) -> list[int]:
    """Living processes of the session or the process group that this one leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # ended meanwhile
            continue
        if leader in (int(group), int(session)) and state not in "ZX":
            found.append(int(folder.name))
    return found
