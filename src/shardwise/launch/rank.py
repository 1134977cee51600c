"""This is the first code of a rank process: `python -m shardwise.launch.rank RUN_DIR`.

Importing torch and meeting the other ranks take seconds. A signal in that time ends the process at once, by the kernel:
there is nothing to save yet, and Python's own handlers would only run after the import or the wait. Before the first
step the worker's handlers take over.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext

from shardwise.launch.leave import run_and_leave


def work() -> int:
    """Returns the exit code of this rank."""
    from shardwise.run.known_warnings import known_warnings_left_out
    from shardwise.terminal import patience, prepared

    with prepared(), known_warnings_left_out():
        # Modules are no garbage: walking over half a million objects of them takes a quarter of the time to load them,
        # and later some of a step's.
        gc.disable()
        with patience("loading  torch in every process ...", 5.0) if os.environ["RANK"] == "0" else nullcontext():
            from shardwise.launch.worker import main
        gc.freeze()
        gc.enable()
        return main()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_and_leave(work)
