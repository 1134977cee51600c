"""Ends a process without Python's last clean-up, in which a library's thread may bring it down.

Now and then a process that used gloo died with SIGABRT ("terminate called without an active exception") after all
its work was done, most often on busy cores. The likely cause, not proven: a gloo thread lets go of a collective's
tensors a moment after the collective is done, and takes the interpreter's lock for it; if the interpreter is just
ending, Python 3.11 and 3.12 end that thread from inside C++ code that may not be unwound.
Invariant: everything a process has to do at its end (other threads, exit handlers, open streams) is done before.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

ERROR = 1  # what Python ends with after an exception that nobody catches


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Runs the program of this process and ends it with the code that the program returns. To be called before anything
    is imported that has exit handlers: those that are registered later run earlier."""
    code = ERROR

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it any more
                stream.flush()
        os._exit(code)

    atexit.register(leave)
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else ERROR if ended.code else 0
        raise
    sys.exit(code)
