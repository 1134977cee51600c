"""Finds and reads files behind addresses (s3://, gs://, hf://, https://, ...) through fsspec.

Whatever the storage's package raises becomes three lines without credentials; a read that fails is tried again a few
times at the same place. Invariant: a `RemoteFile` is plain data, and `stamp` differs when its content does: what the
storage says of it (etag, version, time), or a digest of its beginning where it says nothing. Who calls it is
`sources.py`; which addresses may be given is in spec/addresses.py.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from shardwise.errors import Exit, UserError
from shardwise.spec.addresses import check_address, without_secrets

STAMPS = (
    "ETag", "etag", "md5Hash", "content_md5", "blob_id", "version_id", "generation", "LastModified", "last_modified",
    "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip
"""What storages say of a file that changes with its content."""

BUFFER = 2**20
SAMPLE = 2**20  # bytes of a file whose storage says nothing of it
TRIES = 4
FIRST_WAIT_S = 0.5  # doubled before every further try
WEB = ("http://", "https://")


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an address, with those parts of pathlib's Path that reading needs."""

    address: str
    num_bytes: int  # 0 where the storage does not say
    stamp: str

    def __str__(self) -> str:
        return without_secrets(self.address)

    @cached_property
    def _path(self) -> PurePosixPath:
        is_web = self.address.startswith(WEB)
        return PurePosixPath(urlsplit(self.address).path if is_web else self.address.partition("://")[2])

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._path.suffixes

    def open(
        self, mode: str = "r", encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> IO[Any]:
        """Opens the file for reading, as text unless `mode` has a b."""
        file = io.BufferedReader(_Reading(self), BUFFER)
        return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)


class _Reading(io.RawIOBase):
    """The bytes of a remote file; it is opened again, at the same place, when the storage fails."""

    def __init__(self, file: RemoteFile):
        super().__init__()
        self._remote, self._at = file, 0
        self._file: Any = None
        self._can_seek = bool(self._tried(lambda opened: opened.seekable()))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._can_seek

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not self._can_seek:
            raise io.UnsupportedOperation("the storage sends this file from its beginning only")
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._remote.num_bytes}[whence] + offset
        self._tried(lambda opened: None)
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._tried(lambda opened: opened.read(len(buffer)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()

    def _tried(self, call: Callable[[Any], Any]) -> Any:
        """Returns what a call on the opened file at our place returns. What cannot be mended by waiting is refused at
        once."""
        wait = FIRST_WAIT_S
        for number in range(1, TRIES + 1):
            try:
                if self._file is None:
                    storage, path = _storage_of(self._remote.address)
                    self._file = storage.open(path, "rb")
                if self._file.tell() != self._at:
                    self._file.seek(self._at)
                return call(self._file)
            except (FileNotFoundError, PermissionError, UserError, ValueError, NotImplementedError) as error:
                raise _unreachable(self._remote.address, error) from None
            except Exception as error:  # each storage has exceptions of its own
                self._file = None
                if number == TRIES:
                    raise _unreachable(self._remote.address, error) from None
            time.sleep(wait)
            wait *= 2


def find_remote(name: str, is_readable: Callable[[RemoteFile], bool]) -> tuple[list[RemoteFile], str]:
    """Returns the files behind an address in sorted order, and the address that all of them lie below. A pattern names
    files, a folder all that are readable in it."""
    check_address(name)
    storage, path = _storage_of(name)
    try:
        is_web = name.startswith(WEB)
        if "*" in path or (not is_web and any(mark in path for mark in "?[")):
            found = storage.glob(path, detail=True)
            root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
        elif not is_web and storage.isdir(path):
            found, root = storage.find(path, detail=True), path.rstrip("/")
        else:
            about = storage.info(path)
            return [_described(storage, path, about)], storage.unstrip_protocol(path).rpartition("/")[0]
        files = [
            _described(storage, one, about)
            for one, about in sorted(found.items())
            if about.get("type") != "directory" and "/." not in one[len(root) :]
        ]
    except UserError:
        raise
    except Exception as error:
        raise _unreachable(name, error) from None
    readable = [file for file in files if is_readable(file)]
    if not readable:
        kinds = " ".join(sorted({file.suffix or file.name for file in files})[:8])
        raise UserError(
            f"nothing to read behind {without_secrets(name)}",
            why=f"it has {len(files):,} files{f', of the kinds {kinds}' if kinds else ''}",
            fix="name text, .jsonl or .parquet files; what `shardwise data prepare` wrote is copied to a disk",
        )
    return readable, storage.unstrip_protocol(root) if root else ""


def _described(storage: Any, path: str, about: dict[str, Any]) -> RemoteFile:
    address = storage.unstrip_protocol(path)
    size = int(about.get("size") or 0)
    stamps = [f"{key}={about[key]}" for key in STAMPS if about.get(key)]
    if not stamps:
        with RemoteFile(address, size, "").open("rb") as file:
            stamps = [f"beginning={sha256(file.read(SAMPLE)).hexdigest()}"]
    return RemoteFile(address, size, " ".join(stamps))


def _storage_of(name: str) -> tuple[Any, str]:
    """Returns fsspec's file system of an address and the path in it."""
    import fsspec.core

    protocol = name.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(name)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name
        raise UserError(
            f"cannot read {without_secrets(name)}",
            why=f"{protocol}:// needs {missing}, which is not installed" if missing else str(error),
            fix=f"pip install {missing.partition('.')[0]}" if missing else f"pip install 'fsspec[{protocol}]'",
        ) from None
    except ValueError as error:
        if protocol in fsspec.available_protocols():
            raise _unreachable(name, error) from None
        raise UserError(
            f"cannot read {without_secrets(name)}",
            why=f"`{protocol}://` is no protocol that fsspec knows",
            fix="s3://, gs://, az://, hf://, https://, sftp://, or a path of this machine",
        ) from None
    except Exception as error:  # whatever a storage raises without its settings
        raise _unreachable(name, error) from None


def _unreachable(name: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    shown = without_secrets(name)
    if isinstance(error, FileNotFoundError) and getattr(error.__cause__, "status", 404) != 404:
        error = PermissionError(str(error.__cause__))  # the web's server answers, but not with the file
    elif isinstance(error, FileNotFoundError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # fsspec says so of every failure of the web
    said = _said(error)
    if isinstance(error, FileNotFoundError):
        return UserError(
            f"no such data: {shown}", why="the storage has nothing of that name", fix="check the address with its tool"
        )
    if isinstance(error, PermissionError):
        return UserError(
            f"may not read {shown}",
            why=f"the storage says: {said or 'permission denied'}",
            fix="log in with the storage's own tool (aws, gcloud, hf), or set what it reads from the environment",
        )
    return UserError(
        f"cannot read {shown}",
        why=f"{type(error).__name__}: {said}" if said else type(error).__name__,
        fix="check the address and the network, then `shardwise resume last`; or copy the data here first",
        code=Exit.USER_MISTAKE if isinstance(error, ValueError | NotImplementedError) else Exit.HARDWARE,
    )


def _said(error: Exception) -> str:
    """Returns the first line of an error, as it may be shown."""
    return next((line.strip()[:200] for line in without_secrets(str(error)).splitlines() if line.strip()), "")
