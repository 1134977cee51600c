"""Reads rows out of .parquet and .arrow files, which store columns, within limits that a small hostile file cannot
break.

Both kinds can say in a few bytes what fills a machine: a value that stands in every row, a list of a billion nulls,
pages that expand a thousandfold. What a row will weigh is counted before it is made. Invariant: rows come in the
file's own order, at most about MAX_ROW of them at once. Rows are understood in `rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.data.remote import RemoteFile
from shardwise.data.rows import ROW_FIELDS
from shardwise.errors import UserError

Row = tuple[dict[str, Any], int]  # and its share of the file's bytes

ROWS_AT_ONCE = 256
MAX_ROW = 64 * 2**20  # bytes of a row, which is read whole: 64 MiB are thirty thousand pages
VALUE_BYTES = 64  # that a value of Python takes beside its content
PLAIN_BYTES = 256 * 2**20  # of a column of .parquet, if every value were as large as all of them together
MAX_HELD = 64 * 2**20  # bytes of the values of one column in lists, in one group of rows
MAX_PAGES = 64 * 2**20  # bytes of one column of one group of rows, beyond which its expansion is looked at
PAGES_EXPANSION = 250  # text becomes 3 to 30 bytes of one
EXPANDED_UNSEEN = 2**30  # bytes of rows before the expansion of the whole file is looked at
FILE_EXPANSION = 10_000  # more than of a page: an instruction that stands in every row is stored once


def parquet_rows(path: Path | RemoteFile, text_field: str, first: int = 0) -> Iterator[Row]:
    """Yields the rows of a file behind the first ones."""
    with _refusals(path, "parquet"):
        import pyarrow.parquet

        size = _size_of(path)
        source = path if isinstance(path, Path) else pyarrow.PythonFile(path.open("rb"))
        file = pyarrow.parquet.ParquetFile(source)
        about = file.metadata
        columns = _wanted(file.schema_arrow.names, text_field)
        leaves = [file.schema.column(number) for number in range(about.num_columns)]
        # What stands in lists is left as it is stored, or a value that is stored once would be written out in each.
        # The values of a group are then held, and copied with each batch: of large groups few rows are read at once.
        large = {chunk.path_in_schema for chunk in _chunks(about, columns) if chunk.total_uncompressed_size > MAX_HELD}
        in_lists = [
            leaf.path
            for leaf in leaves
            if leaf.max_repetition_level and leaf.physical_type == "BYTE_ARRAY" and leaf.converted_type != "DECIMAL"
            if leaf.path not in large
        ]
        file = pyarrow.parquet.ParquetFile(source, metadata=about, read_dictionary=in_lists)
        count = _Expansion(path, size)
        count.check(VALUE_BYTES * sum(chunk.num_values for chunk in _chunks(about, columns)))
        per_row = size / max(1, about.num_rows)
        number = 0
        for group in range(about.num_row_groups):
            begin, num_rows = number, about.row_group(group).num_rows
            if number + num_rows <= first:
                number += num_rows
                continue
            read = list(_chunks(about, columns, group))
            _check_pages(path, begin, read)
            plain = [chunk.total_uncompressed_size for chunk in read if chunk.path_in_schema not in in_lists]
            at_once = max(1, min(ROWS_AT_ONCE, PLAIN_BYTES // max(1, *plain))) if plain else 16 * ROWS_AT_ONCE
            batches = file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns or None)
            for row, _ in _rows_of(batches, count, begin, first):
                number = max(number, first)
                yield row, int((number + 1) * per_row) - int(number * per_row)
                number += 1


def arrow_rows(path: Path | RemoteFile, text_field: str) -> Iterator[Row]:
    """Yields the rows of a file or stream of Arrow's own format."""
    with _refusals(path, "arrow"):
        import pyarrow
        import pyarrow.ipc

        opened_file = pyarrow.memory_map(str(path)) if isinstance(path, Path) else pyarrow.PythonFile(path.open("rb"))
        with opened_file as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
            kept = _wanted(opened.schema.names, text_field)
            yield from _rows_of((_valid(batch, kept) for batch in batches), _Expansion(path, _size_of(path)))


def too_large(path: Path | RemoteFile, number: int) -> UserError:
    return UserError(
        f"a row of more than {MAX_ROW >> 20} MiB",
        why="rows are read whole, and many at a time",
        fix="cut it into several rows, or write long documents as .txt files, which have no limit",
        where=f"{path}:{number}",
    )


def _rows_of(batches: Iterator[Any], count: _Expansion, number: int = 0, first: int = 0) -> Iterator[Row]:
    """Yields the rows of batches behind the first ones, so few at once that they fit into memory."""
    for batch in batches:
        if number + batch.num_rows <= first:
            number += batch.num_rows
            continue
        count.check(batch.num_rows * VALUE_BYTES)
        at = max(0, first - number)
        number += at
        while at < batch.num_rows:
            part = batch.slice(at, ROWS_AT_ONCE)
            while (weight := sum(map(_weight, part.columns))) > MAX_ROW and part.num_rows > 1:
                part = batch.slice(at, part.num_rows // 2)
            if weight > MAX_ROW:
                raise too_large(count.path, number + 1)
            count.check(weight)
            count.num_bytes += weight
            each = part.nbytes // part.num_rows
            yield from ((row, each) for row in part.to_pylist())
            at, number = at + part.num_rows, number + part.num_rows


def _valid(batch: Any, kept: list[str]) -> Any:
    """Returns the wanted columns of a batch of .arrow, whose offsets nobody has looked at; those of .parquet pyarrow
    makes itself."""
    chosen = batch.select(kept) if kept else batch
    chosen.validate(full=True)
    return chosen


def _weight(array: Any) -> int:
    """Returns about how many bytes an array has as values of Python."""
    import pyarrow.compute
    from pyarrow import types

    kind, own = array.type, len(array) * VALUE_BYTES
    if types.is_dictionary(kind):
        if not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
            return own + len(array) * _weight(array.dictionary)
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return own + int(pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0)
    if types.is_fixed_size_list(kind):
        return own + len(array) * kind.list_size * VALUE_BYTES + _weight(array.values)
    if types.is_list(kind) or types.is_large_list(kind):
        return own + _weight(array.flatten())
    if types.is_map(kind):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return own + sum(_weight(part.slice(begin, end - begin)) for part in (array.keys, array.items))
    if types.is_struct(kind):
        return own + sum(_weight(array.field(number)) for number in range(kind.num_fields))
    if types.is_null(kind) or types.is_primitive(kind) or types.is_decimal(kind):
        return own
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return own + int(array.nbytes)
    if types.is_fixed_size_binary(kind):
        return own + len(array) * int(kind.byte_width)
    raise pyarrow.ArrowInvalid(f"a column of the kind {kind}, which neither text nor conversations are")


class _Expansion:
    """Counts what a file has become, and refuses one that grows without end."""

    def __init__(self, path: Path | RemoteFile, size: int):
        self.path, self.num_bytes = path, 0
        self._size, self._most = size, max(EXPANDED_UNSEEN, FILE_EXPANSION * size) if size else None

    def check(self, more: int) -> None:
        if self._most is not None and self.num_bytes + more > self._most:
            raise _expands(self.path, self._size, self.num_bytes + more)


def _chunks(about: Any, columns: list[str], only: int | None = None) -> Iterator[Any]:
    """Yields what a footer says of the columns that are read, of every group of rows or of one."""
    for group in range(about.num_row_groups) if only is None else (only,):
        for number in range(about.num_columns):
            chunk = about.row_group(group).column(number)
            if not columns or chunk.path_in_schema.split(".")[0] in columns:
                yield chunk


def _check_pages(path: Path | RemoteFile, begin: int, chunks: list[Any]) -> None:
    """Refuses what a footer declares to be beyond the limits, before it is read."""
    for chunk in chunks:
        size = chunk.total_uncompressed_size
        if size > max(MAX_PAGES, PAGES_EXPANSION * chunk.total_compressed_size):
            raise _expands(path, chunk.total_compressed_size, size)
        if size // max(1, chunk.num_values) > MAX_ROW:
            raise too_large(path, begin + 1)


def _expands(path: Path | RemoteFile, size: int, expanded: int) -> UserError:
    return UserError(
        f"{path} expands without end",
        why=f"{size:,} bytes of it become {expanded:,} bytes of rows",
        fix="look inside; if it is right, write it as .jsonl",
    )


def _wanted(names: list[str], text_field: str) -> list[str]:
    """Returns the columns that rows are made of; none where the table has none of them, and its rows are refused."""
    return [name for name in names if name == text_field or name in ROW_FIELDS]


def _size_of(path: Path | RemoteFile) -> int:
    return path.num_bytes if isinstance(path, RemoteFile) else path.stat().st_size


def _of_pyarrow() -> tuple[type[Exception], ...]:
    """Returns what pyarrow raises, which is loaded by now; values that Python cannot hold are among it."""
    import pyarrow

    return (pyarrow.ArrowException, ValueError, OverflowError, MemoryError, LookupError, OSError)


@contextmanager
def _refusals(path: Path | RemoteFile, kind: str) -> Iterator[None]:
    """Says in three lines what pyarrow raises about a file."""
    try:
        yield
    except ImportError:
        raise UserError(
            f"cannot read {path}",
            why=f"{kind} files need pyarrow, which is not installed",
            fix="pip install 'shardwise[parquet]'",
        ) from None
    except _of_pyarrow() as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"{path} is not a readable {kind} file",
            why=(lines[0] if lines else "it does not fit into memory")[:300],
            fix="write it again, or fetch it again",
        ) from None
