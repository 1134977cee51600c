"""Writes files and directories that appear complete or not at all, and has the three lines for those that cannot be
written.

Everything Shardwise writes for keeps goes through here: a scratch neighbour first, one rename at the end. Whatever ends
the writing early, nobody ever sees half of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from uuid import uuid4

from shardwise.errors import UserError

if TYPE_CHECKING:
    import torch

ABANDONED_SECONDS = 24 * 3600.0
TEXT_BYTES = 4 * 2**20  # a config has a few kB


def write_atomically(path: str | Path, text: str) -> None:
    """Writes a text file. Readers see the old file or the new one, never a part."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a config is to be read
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file. Its library keeps only the text of the system's error: here it is an OSError again."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
        code = next((code for code in known if f"os error {code})" in str(error)), errno.EIO)
        raise OSError(code, os.strerror(code), str(file)) from None


def check_regular(path: Path) -> None:
    """Raises OSError for what is no regular file: a pipe may never be written to, a device never ends."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
        kind = next((name for holds, name in kinds if holds(mode)), "device")
        code = errno.EISDIR if kind == "directory" else errno.EINVAL
        raise OSError(code, f"it is a {kind}, not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading in bytes; raises OSError for a pipe or a device, without waiting for it."""
    check_regular(path)
    return path.open("rb")


def read_text(path: Path) -> str:
    """Returns the text of a file that people write, in UTF-8; raises OSError for a pipe, a device, or a file that is
    too large to be one, without reading it to its end."""
    with open_regular(path) as file:
        content = file.read(TEXT_BYTES + 1)
    if len(content) > TEXT_BYTES:
        raise OSError(errno.EINVAL, f"it has more than {TEXT_BYTES >> 20} MiB, the limit for a file of this kind")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


@contextmanager
def appearing_at_once(out: Path, *, replace: bool) -> Iterator[Path]:
    """Makes a scratch directory beside `out` that takes its name when the block succeeds and vanishes when it does
    not."""
    scratch = out.with_name(f".{out.name}.partial-{uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep_abandoned(out)
        scratch.mkdir()
        yield scratch
        for file in scratch.rglob("*"):
            flush(file)
        take_name(scratch, out, replace)
        flush(out.parent)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def flush(path: Path) -> None:
    """Flushes a file onto the disk before the rename, so that a power cut cannot leave the name without the content."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open directories
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep_abandoned(out: Path) -> None:
    """Removes what a killed process left behind long ago; a living one touches its scratch directory all the time."""
    for left in out.parent.glob(f".{out.name}.partial-*"):
        newest = max((path.stat().st_mtime for path in [left, *left.glob("*")]), default=0.0)
        if time.time() - newest > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def take_name(scratch: Path, out: Path, replace: bool) -> None:
    """Renames a scratch directory to the name that it is for. A directory that is to be replaced steps aside first."""
    if not (replace and out.exists()):
        scratch.rename(out)
        return
    old = out.with_name(f".{out.name}.replaced-{uuid4().hex[:8]}")
    out.rename(old)
    try:
        scratch.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def cannot_write(out: Path, error: OSError) -> UserError:
    """Returns three lines for a file or directory that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no room to write {out}",
            why=f"{error.strerror}; {_free(out)}",
            fix="free some space, or write elsewhere: --out DIR (for training: run.dir=DIR)",
        )
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and out.exists():
        return UserError(
            f"{out} appeared while it was being written",
            why="another process wrote it first",
            fix="use it as it is, or choose another --out",
        )
    return UserError(
        f"cannot write {out}",
        why=f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""),
        fix="choose a directory you may write to: --out DIR (for training: run.dir=DIR)",
    )


def refused(error: OSError) -> UserError:
    """Returns three lines for an error of the system that nobody expected."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return cannot_write(Path(error.filename or "."), error)
    what = error.strerror or str(error)
    return UserError(
        f"the system refused {error.filename}" if error.filename else f"the system refused: {what}",
        why=what,
        fix="check that the path exists, that you may use it, and that its disk has room",
    )


def _free(out: Path) -> str:
    try:
        return f"{shutil.disk_usage(out.parent).free / 1e9:.1f} GB are free there"
    except OSError:
        return "the disk does not say how much is free"
