"""`python -m MODULE ...` without the start of a Python: what a warm command starts is forked from it, with torch
imported already.

Everything else is as if it had been started: its parent, its session, its output, its environment, its signals.
Invariant: who forks has not used torch yet (a fresh process of the pool); autograd refuses to work in a fork of a
process that has.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

from shardwise.launch import processes

FIRST_OWN_DESCRIPTOR = 3


@contextmanager
def forked_ranks() -> Iterator[None]:
    """In here the launcher forks the Python processes that it would start."""
    processes.Popen = _fork  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        processes.Popen = subprocess.Popen  # type: ignore[misc]


def _fork(args: tuple[str, ...], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    executable, option, module, *words = args
    assert (executable, option) == (sys.executable, "-m"), args
    sys.stdout.flush()
    sys.stderr.flush()  # else it would be written twice
    # Popen forks and redirects; the function that it calls before `exec` never returns, so there is no `exec`.
    kept = options.pop("pass_fds")
    return subprocess.Popen(args, preexec_fn=partial(_be_module, module, words, env, kept), pass_fds=kept, **options)


def _be_module(module: str, words: list[str], env: dict[str, str], kept: tuple[int, ...]) -> NoReturn:
    code = 1
    try:
        faulthandler.disable()
        ends = [FIRST_OWN_DESCRIPTOR - 1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
        for before, after in pairwise(ends):  # as `exec` would; Popen waits for the end of one of them
            os.closerange(before + 1, after)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        gc.enable()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
