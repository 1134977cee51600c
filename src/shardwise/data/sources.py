"""Finds and reads documents: text files, rows of tables, directories and patterns of these, datasets that Hugging
Face's library has saved, and Python's own library.

Invariant: the order of documents is a function of the files alone (directories are read in sorted order), and memory
does not grow with a file: long text files are cut at line ends into documents of at most MAX_TEXT_BYTES. Other
tables are read in `tables.py`, rows understood in `rows.py`; who consumes documents is `prepare.py`.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import io
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from shardwise.data import columns
from shardwise.data.columns import parquet_rows, too_large
from shardwise.data.hub import is_hub_name
from shardwise.data.quarantine import Quarantine
from shardwise.data.remote import RemoteFile, find_remote
from shardwise.data.rows import Document, document_of_row
from shardwise.data.tables import TABLE_SUFFIXES, cached_dataset, is_list_of_rows, read_table, training_split
from shardwise.errors import UserError
from shardwise.files import check_regular
from shardwise.spec.addresses import is_address, without_secrets
from shardwise.terminal import shell_word

MAX_TEXT_BYTES = 2**20
MAX_EXPANSION = 250  # gzip makes at most 1,032 bytes of one, text 3 to 30
EXPANDED_UNSEEN = 64 * 2**20  # bytes of a compressed file before its expansion is looked at
TEXT_SUFFIXES = (".txt", ".md", ".py")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *TABLE_SUFFIXES)
MOST_BESIDE = 1000  # files whose names are compared with one that is not there
SUFFIXES = TEXT_SUFFIXES + ROW_SUFFIXES

# Left out of the `python` corpus: other people's packages, tests, and tables that are data rather than code.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings", "ensurepip"}
)


@dataclass(frozen=True)
class Source:
    """A source as the user named it, and its files in reading order."""

    name: str
    files: tuple[Path | RemoteFile, ...]
    sizes: tuple[int, ...]
    title: str
    root: Path | str
    is_python: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def listing_digest(self) -> str:
        """A digest that changes when a file is added, removed, resized or touched."""
        digest = sha256()
        for file, size in zip(self.files, self.sizes, strict=True):
            stamp = file.stamp if isinstance(file, RemoteFile) else file.stat().st_mtime_ns
            digest.update(f"{self.relative(file)}\0{size}\0{stamp}\n".encode())
        return digest.hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """A digest that changes when a file is added, removed or resized, or when a storage says that it is another.
        Unlike the listing's, it is the same where files were copied."""
        digest = sha256()
        for file, size in zip(self.files, self.sizes, strict=True):
            stamp = file.stamp if isinstance(file, RemoteFile) else ""
            digest.update(f"{self.relative(file)}\0{size}\0{stamp}\n".encode())
        return digest.hexdigest()

    def relative(self, file: Path | RemoteFile) -> str:
        """Returns the name of a file below the root that all of them have."""
        if isinstance(file, RemoteFile):
            return file.address.removeprefix(f"{self.root}/")
        return file.relative_to(self.root).as_posix()


class Place(NamedTuple):
    """Where reading goes on: the number of a file, and how many documents and bytes of it were read."""

    file: int = 0
    documents: int = 0
    num_bytes: int = 0


@dataclass
class Reading:
    """How to read documents, and what was met on the way."""

    text_field: str = "text"
    raw_bytes: bool = False  # the byte tokenizer takes files as they are, valid UTF-8 or not
    replace_invalid: bool = False  # consent to turn invalid UTF-8 into replacement marks
    notes: dict[str, int] = field(default_factory=dict)
    quarantine: Quarantine | None = None  # takes rows that cannot be used; None: they are refused

    def document_of(self, row: Any, origin: str, num_bytes: int) -> Document:
        """Returns the document of a row."""
        return self.document(lambda: row, origin, num_bytes)

    def document(self, make: Callable[[], Any], origin: str, num_bytes: int) -> Document:
        """Returns the document of a row that `make` parses."""

        def parsed() -> Document:
            return document_of_row(make(), text_field=self.text_field, origin=origin, num_bytes=num_bytes)

        return self.quarantine.document(parsed, origin, num_bytes) if self.quarantine else parsed()

    def note(self, what: str, count: int = 1) -> None:
        self.notes[what] = self.notes.get(what, 0) + count


def find_source(name: str) -> Source:
    """Lists the files of one source and returns it; every problem with the listing is found here, before anything is
    read."""
    if name == "python":
        return _python_library()
    if is_address(name):
        return _behind_address(name)
    name_here = name.removeprefix("file://").removeprefix("local://")
    path = Path(name_here).expanduser()
    try:
        if path.is_dir():
            path = training_split(path)
            files = _files_below(path)
        elif path.exists():
            files = [path]
        elif is_pattern(name):
            files = _files_like(path)
            path = Path(os.path.commonpath([file.parent for file in files]))
        elif files := cached_dataset(name):
            path = files[0].parent
        else:
            raise _no_such_data(name)
        for file in files:
            check_regular(file)
        sizes = tuple(file.stat().st_size for file in files)
    except OSError as error:
        raise _unreadable(path, error) from None
    if path.is_file():
        _check_kind(name, path)
    root = path if path.is_dir() else path.parent
    given = Path(name_here).expanduser()
    title = (given.name or str(given.resolve().name)) if given.exists() else name
    return Source(name, tuple(files), sizes, title=title, root=root)


def _behind_address(name: str) -> Source:
    files, root = find_remote(name, lambda file: _suffix(file) in SUFFIXES)
    if len(files) > 1:  # as in a directory: most .json files beside text are settings
        files = [file for file in files if file.suffix != ".json" or is_list_of_rows(file)] or files
    _check_kind(name, files[0])
    sizes = tuple(file.num_bytes for file in files)
    return Source(name, tuple(files), sizes, title=without_secrets(name), root=root)


def is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _check_kind(name: str, file: Path | RemoteFile) -> None:
    if _suffix(file) not in SUFFIXES:
        raise UserError(
            f"unknown kind of file: {file if isinstance(file, RemoteFile) else name}",
            why=f"readable kinds are {' '.join(SUFFIXES)}",
            fix="rename it to .txt if it is plain text, or convert it to .jsonl",
        )


def _no_such_data(name: str) -> UserError:
    path = Path(name).expanduser()
    beside = islice(os.scandir(path.parent), MOST_BESIDE) if path.parent.is_dir() else ()
    names = {spelling: file.name for file in beside for spelling in (Path(file.name).stem, file.name)}
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    fix = "give a path, a pattern such as 'text/*.jsonl', a prepared directory, or `python` for its own library"
    if near:
        fix = f"did you mean {shell_word(path.with_name(names[near[0]]))}?"
    elif is_hub_name(name) and not path.parent.is_dir():
        fix = "data.streaming=true reads a dataset of that name from the hub; a file or directory needs its path"
    return UserError(
        f"no such data: {name}",
        why="it is neither a file nor a directory, and no dataset of that name is in the cache of `datasets`",
        fix=fix,
    )


def _files_like(pattern: Path) -> list[Path]:
    """Returns the readable files that a pattern names, sorted; directories among them are walked."""
    named = [Path(found) for found in sorted(glob.glob(str(pattern), recursive=True))]
    files = [file for one in named for file in (_walk(one, frozenset()) if one.is_dir() else [one])]
    readable = sorted({file for file in files if _suffix(file) in SUFFIXES})
    if not readable:
        raise UserError(
            f"no file is like {pattern}",
            why=f"{len(files):,} files match, and none is readable; readable kinds are {' '.join(SUFFIXES)}",
            fix="quote the pattern, so that the shell leaves it alone, and try it with ls",
        )
    return readable


def read_documents(source: Source | str, reading: Reading | None = None) -> Iterator[Document]:
    """Yields every document of a source, in a stable order, in constant memory."""
    reading = reading or Reading()
    source = find_source(source) if isinstance(source, str) else source
    return (document for document, _ in read_from(source, reading, Place()))


def read_from(source: Source, reading: Reading, start: Place) -> Iterator[tuple[Document, Place]]:
    """Yields the documents of a source from a place on, each with the place behind it."""
    for number in range(start.file, len(source.files)):
        file = source.files[number]
        place = start if number == start.file else Place(number)
        try:
            for document in _documents(file, reading, source.is_python, place):
                place = Place(number, place.documents + 1, place.num_bytes + document.num_bytes)
                yield document, place
        except OSError as error:
            raise _unreadable(file, error) from None


def _documents(file: Path | RemoteFile, reading: Reading, skip_invalid: bool, start: Place) -> Iterator[Document]:
    """Yields the documents of a file behind those that were read. Plain text and lines are entered at their byte, a
    .parquet file at its group of rows; other kinds are read once more from their beginning."""
    suffix = _suffix(file)
    if suffix == ".parquet":
        return _documents_of(parquet_rows(file, reading.text_field, start.documents), file, reading, start.documents)
    if suffix == ".jsonl":
        return _json_lines(file, reading, start.documents, start.num_bytes)
    if suffix in TABLE_SUFFIXES:
        found = _documents_of(read_table(file, reading.text_field, reading.replace_invalid), file, reading, 0)
    elif suffix in ROW_SUFFIXES:
        found = _json_lines(file, reading)
    elif skip_invalid:
        found = _text_pieces(file, reading, skip_invalid=True)
    else:
        return _text_pieces(file, reading, skip_invalid=False, offset=start.num_bytes)
    return islice(found, start.documents, None)


def _documents_of(
    rows: Iterator[tuple[Any, int]], file: Path | RemoteFile, reading: Reading, before: int
) -> Iterator[Document]:
    for number, (row, num_bytes) in enumerate(rows, before + 1):
        yield reading.document_of(row, f"{file}:{number}", num_bytes)


def _python_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        raise UserError(
            "this Python carries no sources of its standard library",
            why=f"no .py files below {root}",
            fix="give your own text: data.source=PATH",
        )
    sizes = tuple(path.stat().st_size for path in files)
    return Source("python", tuple(files), sizes, title="Python's own library", root=root, is_python=True)


def _files_below(directory: Path) -> list[Path]:
    visible = _walk(directory, frozenset())
    for path in visible:
        if _suffix(path) in SUFFIXES:
            check_regular(path)  # before one is opened to see what it holds
    files = [
        path for path in visible if _suffix(path) in SUFFIXES and (path.suffix != ".json" or is_list_of_rows(path))
    ]
    if not files:
        kinds = sorted({path.suffix or path.name for path in visible})[:8]
        raise UserError(
            f"nothing to read in {directory}",
            why=f"it holds {' '.join(kinds) if kinds else 'no files'}; readable kinds are {' '.join(SUFFIXES)}",
            fix="point data.source at text, .jsonl or .parquet files",
        )
    return files


def _walk(root: Path, pruned: frozenset[str]) -> list[Path]:
    """Returns the visible files below `root`, sorted by relative path with `/` between parts: the same on every
    system."""
    found = []
    visited = set()
    for where, directories, files in os.walk(root, onerror=_raise, followlinks=True):
        if os.path.realpath(where) in visited:  # a link back to where we have been
            directories.clear()
            continue
        visited.add(os.path.realpath(where))
        directories[:] = [
            name for name in directories if not name.startswith((".", "__pycache__")) and name not in pruned
        ]
        found += [Path(where, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _suffix(path: Path | RemoteFile) -> str:
    whole = "".join(path.suffixes[-2:]).lower()
    return whole if whole in (".jsonl.gz", ".jsonl.zst") else path.suffix.lower()


def _text_pieces(
    path: Path | RemoteFile, reading: Reading, *, skip_invalid: bool, offset: int = 0
) -> Iterator[Document]:
    """Yields one document, or several of at most MAX_TEXT_BYTES cut at line ends when the file is longer."""
    with path.open("rb") as file:
        _enter(file, offset)
        rest = b""
        while True:
            block = file.read(MAX_TEXT_BYTES - len(rest))
            piece = rest + block
            if not piece:
                return
            end = len(piece) if len(piece) < MAX_TEXT_BYTES else _cut(piece)
            rest, piece = piece[end:], piece[:end]
            if offset and not piece.isspace():
                reading.note(f"pieces cut from files longer than {MAX_TEXT_BYTES >> 20} MiB")
            text = piece if reading.raw_bytes else _valid(piece, path, offset, reading, skip_invalid)
            if text is not None:
                yield Document(str(path), len(piece), text=text)
            offset += len(piece)


def _enter(file: IO[bytes], offset: int) -> None:
    """Goes to a byte of a file, also of one that a storage sends from its beginning only."""
    if file.seekable():
        file.seek(offset)
    while not file.seekable() and offset > 0 and (passed := file.read(min(offset, MAX_TEXT_BYTES))):
        offset -= len(passed)


def _cut(piece: bytes) -> int:
    """Returns where a full piece ends, in bytes: after a blank line in its second half, else after a line, else between
    characters."""
    blank = piece.rfind(b"\n\n", len(piece) // 2)
    if blank >= 0:
        return blank + 2
    line = piece.rfind(b"\n")
    if line >= 0:
        return line + 1
    end = len(piece)
    while end > len(piece) - 4 and piece[end - 1] & 0xC0 == 0x80:  # step back over continuation bytes...
        end -= 1
    return end - 1 if piece[end - 1] & 0xC0 == 0xC0 else len(piece)  # ...and over the byte that opened the character


def _valid(
    piece: bytes, path: Path | RemoteFile, offset: int, reading: Reading, skip_invalid: bool = False
) -> bytes | str | None:
    """Returns the piece if it is UTF-8, repaired with consent; None when it is to be skipped."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        if skip_invalid:
            reading.note("files that are not UTF-8, left out")
            return None
        if reading.replace_invalid:
            reading.note("places of invalid UTF-8, replaced")
            return piece.decode("utf-8", errors="replace")
        raise UserError(
            f"{path} is not valid UTF-8",
            why=f"byte {offset + error.start:,} is 0x{piece[error.start]:02x}: {error.reason}",
            fix="convert it (iconv -t utf-8), or accept replacement marks: data prepare --invalid-utf8 replace",
            where=f"{path}:+{offset + error.start}",
        ) from None


def _json_lines(path: Path | RemoteFile, reading: Reading, number: int = 0, position: int = 0) -> Iterator[Document]:
    """Yields the rows of a file of lines, from the byte `position` on, behind `number` lines."""
    compressed = path.suffix in (".gz", ".zst")
    with path.open("rb") as file, _decompressed(file, path) as lines:
        if position:
            _enter(file, position)
        expanded = 0
        while True:
            try:
                line = lines.readline(columns.MAX_ROW + 1)
            except _damage() as error:
                raise UserError(
                    f"{path} is damaged", why=str(error), fix="fetch or compress it again", where=f"{path}:{number + 1}"
                ) from None
            if not line:
                return
            number += 1
            expanded += len(line)
            if len(line) > columns.MAX_ROW:
                raise too_large(path, number)
            if compressed and expanded > max(EXPANDED_UNSEEN, MAX_EXPANSION * file.tell()):
                raise UserError(
                    f"{path} expands without end",
                    why=f"{file.tell():,} bytes of it became {expanded:,}; text never compresses {MAX_EXPANSION}-fold",
                    fix="look inside (`zcat FILE | head -c 1000`, `zstdcat`); if it is right, decompress it",
                    where=f"{path}:{number}",
                )
            now = file.tell() if compressed else position + len(line)
            num_bytes, position = now - position, now
            if line.isspace():
                continue
            origin = f"{path}:{number}"
            yield reading.document(partial(_parse, line, path, number, reading), origin, num_bytes)


def _decompressed(file: IO[bytes], path: Path | RemoteFile) -> AbstractContextManager[Any]:
    """Returns the file's content as a stream of lines."""
    if path.suffix == ".gz":
        return gzip.open(file)
    if path.suffix != ".zst":
        return nullcontext(file)
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"cannot read {path}",
            why=".zst files need zstandard, which is not installed",
            fix="pip install 'shardwise[zstd]', or decompress it: zstd -d FILE",
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
    return io.BufferedReader(reader, MAX_TEXT_BYTES)


def _damage() -> tuple[type[Exception], ...]:
    """Returns what damaged compressed files raise; zstandard is loaded by now if a file needed it."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, gzip.BadGzipFile, zlib.error, *([] if zstandard is None else [zstandard.ZstdError]))


def _parse(line: bytes, path: Path | RemoteFile, number: int, reading: Reading) -> Any:
    try:
        return json.loads(line.decode("utf-8", errors="replace" if reading.replace_invalid else "strict"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not valid UTF-8",
            why=f"line {number}, byte {error.start:,} of the line is 0x{line[error.start]:02x}: {error.reason}",
            fix="convert it (iconv -t utf-8), or accept replacement marks: data prepare --invalid-utf8 replace",
            where=f"{path}:{number}",
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            "a line that is not JSON",
            why=f"{error}; it begins with {line[:40].decode('utf-8', errors='replace')!r}",
            fix="each line of a .jsonl file is one JSON object; repair or delete the line, or data.bad_rows=quarantine",
            where=f"{path}:{number}",
        ) from None


def _unreadable(path: Path | RemoteFile, error: OSError) -> UserError:
    return UserError(
        f"cannot read {error.filename or path}",
        why=error.strerror or str(error),
        fix="check the path and its permissions",
    )
