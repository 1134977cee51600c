"""A process ends after its exit handlers and before Python's clean-up, with its own code and everything written."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time
from shardwise.launch.leave import run_and_leave

class AtTheVeryEnd:
    def __del__(self):
        print("Python cleans up")

def main():
    global kept
    kept = AtTheVeryEnd()
    atexit.register(lambda: print("handler"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print("work", flush=False)
    {end}

run_and_leave(main)
"""


@pytest.mark.parametrize(
    "end, code",
    [("return 75", 75), ("return 0", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("raise ValueError", 1)],
)
def test_everything_runs_but_the_last_clean_up(end, code):
    script = SCRIPT.format(end=end)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert ended.stdout.split() == ["work", "thread", "handler"]
    assert ("Traceback" in ended.stderr) == ("raise" in end)
    assert ("why" in ended.stderr) == ("why" in end)
