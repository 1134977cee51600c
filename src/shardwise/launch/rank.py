"""The first lines of a rank process: `python -m shardwise.launch.rank RUN_DIR`.

Importing torch takes seconds; a Ctrl-C in that time ends the process quietly instead of with a traceback from the depths of
an import. After that the worker's own handlers take over.
"""

from __future__ import annotations

import os
import signal
import sys

from shardwise.errors import Exit

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(int(Exit.INTERRUPTED)))
    from shardwise.run.worker import main

    sys.exit(main())
