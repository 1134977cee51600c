"""A run directory on nodes that do not share a file system: the first node's is the truth.

Each other node has a mirror of it at the same place: before the start it fetches what ranks read (config, plan,
tokenizer, the newest good checkpoint), and while they train it sends what they write (events, logs, traces, reports of
crashes) to the first node, piece by piece. Invariant: a mirror never replaces a directory that is not one, and nothing
but those files of a run can be fetched or written through here.
"""

from __future__ import annotations

import filecmp
import hashlib
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import MANIFEST
from shardwise.errors import UserError
from shardwise.files import cannot_write
from shardwise.launch.nodes.connection import NodeLink
from shardwise.run.rundir import MIRROR_SIGN, RunDir
from shardwise.terminal import shell_word

SHARED_SIGN = ".nodes-"  # begins the random name of an empty file of the first node, by which others know its directory
SEE_S = 3.0  # seconds in which a network file system shows another node's file
PIECE = 2**20  # bytes that travel at once: a slow link must let signs of life through between two
MOST_UNSENT = 2**23  # bytes that wait in this process for the network
SEND_LAST_S = 20.0  # seconds for what ranks have written last
READ = ("config.toml", "plan.json", "own-parts.json")
WRITTEN = re.compile(
    r"events/rank\d+\.jsonl|log/rank\d+\.\d+\.(out|err)|crash/rank\d+\.(txt|stack)|trace/rank-\d+\.json\.gz"
)

GROWING = ("events/", "log/")  # lines are added to these; the others are written once, and anew

Files = Mapping[str, int]  # path in the run directory -> bytes


@contextmanager
def shown(run: RunDir) -> Iterator[str]:
    """Yields the sign by which other nodes see whether they share a run's directory; it is gone afterwards. Its name is
    new each time: a network file system remembers for a while what an old name held, or that there was none."""
    sign = secrets.token_hex(8)
    file = run.path / f"{SHARED_SIGN}{sign}"
    try:
        for old in run.path.glob(f"{SHARED_SIGN}*"):  # of a start that was killed
            old.unlink(missing_ok=True)
        file.touch()
    except OSError as error:
        raise cannot_write(run.path, error) from None
    try:
        yield sign
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def sees(path: Path, sign: str) -> bool:
    """Returns whether a directory here is the one in which the first node has put its sign."""
    deadline = time.monotonic() + SEE_S
    while path.is_dir() and not (path / MIRROR_SIGN).exists():
        if (path / f"{SHARED_SIGN}{sign}").exists():
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return False


def files_to_read(run: RunDir, from_step: int | None) -> dict[str, int]:
    """Returns the files that ranks on another node read. Of the checkpoints it is the one to go on from, as the first
    node finds it good."""
    found = [run.path / name for name in READ if (run.path / name).is_file()]
    if run.tokenizer.is_dir():
        found += [file for file in run.tokenizer.iterdir() if file.is_file()]
    if from_step != 0 and run.checkpoints.is_dir():
        from shardwise.checkpoint.store import newest_good  # it loads torch

        checkpoint, _ = newest_good(run.checkpoints, at_step=from_step)
        if checkpoint is not None:
            found += [checkpoint.path / MANIFEST, *(checkpoint.path / name for name in checkpoint.manifest().files)]
    return {str(file.relative_to(run.path)): file.stat().st_size for file in found}


def piece_of(run: RunDir, files: Files, name: str, offset: int) -> bytes:
    """Returns a piece of a file that another node asks for; nothing of any other file."""
    if name not in files or offset < 0:
        return b""
    with open(run.path / name, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)


def check_is_no_mirror(run: RunDir) -> None:
    """Refuses to go on from a mirror as if it were the run: what was trained since is on the first node of then."""
    sign = run.path / MIRROR_SIGN
    with suppress(FileNotFoundError):
        of = sign.read_text(encoding="utf-8", errors="replace").strip()
        raise UserError(
            f"{run.path} is a mirror on {socket.gethostname()}, not the run itself",
            why=f"it mirrors {of}, which has the newest checkpoints; here are those of its last start at best",
            fix=f"start there, or copy that directory here; `rm {shell_word(sign)}` takes what is here",
        )


def open_mirror(path: Path, of: str, files: Files) -> None:
    """Makes the mirror of a run at `path`, or renews the one that is there. `of` says whose mirror it is: host and
    path. A checkpoint that the first node no longer has is removed."""
    sign = path / MIRROR_SIGN
    if outside := next((name for name in files if Path(name).is_absolute() or ".." in Path(name).parts), None):
        raise UserError(
            f"the first node's run has a file {outside[:80]!r}, which is none of a run",
            why="a mirror takes files of the run's directory alone",
            fix="see who has changed that run",
        )
    is_new = not path.exists()
    if not is_new and any(path.iterdir()) and not sign.is_file():
        raise UserError(
            f"{path} is there already, and is not a mirror of {of}",
            why="this node does not share the run's directory with the first one, and a run is never overwritten",
            fix="another run.dir or run.name, or a directory on a shared file system",
        )
    try:
        path.mkdir(parents=True, exist_ok=not is_new)  # a shared directory may only just have come into sight
        sign.write_text(f"{of}\n", encoding="utf-8")
        (path / "checkpoints").mkdir(exist_ok=True)
        for folder in ("crash", "trace"):  # sent by an earlier start
            shutil.rmtree(path / folder, ignore_errors=True)
        RunDir(path).make_folders()
        for old in (path / "checkpoints").iterdir():
            if not any(name.startswith(f"checkpoints/{old.name}/") for name in files):
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def fetch(path: Path, files: Files, ask: Callable[[str, int], bytes]) -> None:
    """Fetches files of a run into its mirror. `ask`: from a name and an offset to the next piece. Files of a checkpoint
    that are there already are kept if its manifest, which is fetched first and has their digests, is the same."""
    for name in sorted(files, key=lambda name: not name.endswith(f"/{MANIFEST}")):
        target = path / name
        if name.startswith("checkpoints/") and target.name != MANIFEST and _has(target, files[name]):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch, offset = target.with_name(f".{target.name}.part"), 0
        with open(scratch, "wb") as out:
            while offset < files[name]:
                piece = ask(name, offset)
                if not piece:
                    raise OSError(f"{name} ended after {offset} of {files[name]} bytes")
                out.write(piece)
                offset += len(piece)
        if target.name == MANIFEST and not (target.is_file() and filecmp.cmp(scratch, target, shallow=False)):
            for old in target.parent.iterdir():  # of a run that was begun anew under this name
                if old != scratch:
                    old.unlink()
        scratch.replace(target)


def send_written(link: NodeLink, outbox: Outbox, is_last: bool) -> None:
    """Sends the first node what ranks have written here since the last time. Where they print faster than the network
    carries the rest waits in its files; the last time this waits for the network, for a while."""
    began = time.monotonic()
    for name, offset, piece in outbox.pieces(is_last):
        link.send("written", piece, name=name, offset=offset)
        while is_last and link.num_unsent_bytes > MOST_UNSENT and time.monotonic() - began < SEND_LAST_S:
            time.sleep(0.05)
        if link.num_unsent_bytes > MOST_UNSENT:
            break


class Outbox:
    """What the ranks of this node have written into the mirror and the first node does not have yet."""

    def __init__(self, path: Path):
        self.path = path
        self._sent: dict[str, int] = {name: size for name, size in _written(path)}  # of earlier starts

    def pieces(self, is_last: bool = False) -> Iterator[tuple[str, int, bytes]]:
        """Yields name, offset and content of what is new. What is written at once travels at the end."""
        for name, size in _written(self.path):
            if not is_last and not name.startswith(GROWING):
                continue
            if self._sent.get(name, 0) > size:  # it was begun anew
                self._sent[name] = 0
            while (offset := self._sent.get(name, 0)) < size:
                with open(self.path / name, "rb") as file:
                    file.seek(offset)
                    piece = file.read(min(PIECE, size - offset))
                if not piece:
                    break
                self._sent[name] = offset + len(piece)
                yield name, offset, piece


def take_in(run: RunDir, words: Mapping[str, Any], data: bytes) -> None:
    """Writes a piece of a file that ranks of another node have written; a name that is none of theirs is left out."""
    name, offset = words.get("name"), words.get("offset")
    if not isinstance(name, str) or not isinstance(offset, int) or not WRITTEN.fullmatch(name) or offset < 0:
        return
    target = run.path / name
    target.parent.mkdir(exist_ok=True)
    with open(target, "wb" if offset == 0 and not name.startswith(GROWING) else "ab") as out:
        out.write(data)


def digest_of(run: RunDir) -> str:
    """Returns a digest of what this node's ranks will execute: the config and the plan."""
    found = hashlib.sha256()
    for name in READ[:2]:
        found.update((run.path / name).read_bytes())
    return found.hexdigest()[:16]


def _written(path: Path) -> list[tuple[str, int]]:
    files = [file for folder in ("events", "log", "crash", "trace") for file in sorted((path / folder).glob("*"))]
    named = ((str(file.relative_to(path)), file.stat().st_size) for file in files if file.is_file())
    return [(name, size) for name, size in named if WRITTEN.fullmatch(name)]


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
