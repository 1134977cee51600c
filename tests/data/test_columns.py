"""Small .parquet and .arrow files that would become large, and damaged ones: each is refused before it fills memory."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import columns
from shardwise.data.sources import read_documents
from shardwise.errors import UserError

pytestmark = pytest.mark.needs("pyarrow")

KINDS = ("parquet", "arrow")
MIB = 2**20


def write(path: Path, table: Any, compression: str | None = "zstd", **options: Any) -> Path:
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression=compression, **options)
        return path
    with pyarrow.ipc.new_file(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression=compression)) as file:
        file.write_table(table)
    return path


def repeated(value: str, count: int) -> Any:
    """An array that stores a value once."""
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([value]))


def in_one_list(values: Any) -> Any:
    """An array of one row, which is the list of all values."""
    import pyarrow

    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int32()), values)


def refusal(path: Path) -> str:
    """What is said, in three lines; the file may take no more memory than a few of the largest rows."""
    import pyarrow

    pool = pyarrow.default_memory_pool()
    before = pool.max_memory()
    with pytest.raises(UserError) as caught:
        for _ in read_documents(str(path)):
            pass
    assert pool.max_memory() - before < 400 * MIB
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_once_and_stands_in_every_row_or_list_is_counted_as_often(tmp_path, kind):
    import pyarrow

    path = tmp_path / f"bomb.{kind}"
    write(path, pyarrow.table({"text": repeated("a" * (8 * MIB), 100_000)}))
    assert path.stat().st_size < 5000
    assert "expands without end" in refusal(path)
    write(path, pyarrow.table({"messages": in_one_list(repeated("a" * MIB, 2000))}))
    assert path.stat().st_size < 5000
    assert "a row of more than 64 MiB" in refusal(path)
    path.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_values_that_are_only_declared_are_counted(tmp_path, kind):
    import pyarrow

    nulls = pyarrow.nulls(40_000_000, pyarrow.null() if kind == "arrow" else pyarrow.int8())
    options = {"row_group_size": 10**9} if kind == "parquet" else {}
    path = write(tmp_path / f"bomb.{kind}", pyarrow.table({"text": nulls}), **options)
    assert path.stat().st_size < 100_000
    assert "expands without end" in refusal(path)
    path = write(tmp_path / f"list.{kind}", pyarrow.table({"messages": in_one_list(nulls)}))
    assert "expands without end" in refusal(path) if kind == "parquet" else "a row of more than" in refusal(path)


@pytest.mark.parametrize("compression", ["zstd", "gzip", "brotli", "snappy"])
def test_pages_that_expand_are_refused_by_what_the_footer_says_of_them(tmp_path, monkeypatch, compression):
    import pyarrow

    monkeypatch.setattr(columns, "MAX_PAGES", 8 * MIB)
    monkeypatch.setattr(columns, "MAX_ROW", 4 * MIB)
    table = pyarrow.table({"text": ["a" * (16 * MIB)]})
    path = write(tmp_path / "bomb.parquet", table, compression, use_dictionary=False, write_statistics=False)
    said = refusal(path)
    assert ("a row of more than" if compression == "snappy" else "expands without end") in said


def values() -> dict[str, Any]:
    """Columns that are not text."""
    import decimal

    import pyarrow

    offsets = pyarrow.py_buffer(struct.pack("<ii", 0, 2))
    nested: Any = pyarrow.string()
    for _ in range(40):
        nested = pyarrow.struct([("a", nested)])
    return {
        "bytes": pyarrow.array([b"\xff\xfe"]),
        "decimals": pyarrow.array([decimal.Decimal("1.5")]),
        "maps": pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
        "structs": pyarrow.array([{"a": 1}]),
        "lists": pyarrow.array([["a"]]),
        "times": pyarrow.array([2**50], pyarrow.timestamp("s")),  # later than Python can say
        "not utf-8": pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")]),
        "deep": pyarrow.nulls(1, nested),
    }


@pytest.mark.parametrize("field", ["text", "messages"])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_other_types_are_refused(tmp_path, kind, field):
    import pyarrow

    for name, array in values().items():
        path = write(tmp_path / f"{name}.{kind}", pyarrow.table({field: array}))
        if name == "deep" and field == "text":  # a null is an empty document
            assert len(list(read_documents(str(path)))) == 1
        else:
            assert str(path) in refusal(path)


def test_maps_in_rows_are_counted_where_they_are(tmp_path):
    import pyarrow

    arrays = pyarrow.array([[("a", "b")]] * 1000, pyarrow.map_(pyarrow.string(), pyarrow.string()))
    assert columns._weight(arrays.slice(500, 10)) < columns._weight(arrays) / 50


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read_and_end_no_process(tmp_path, kind):
    import pyarrow

    path = write(tmp_path / f"good.{kind}", pyarrow.table({"text": [f"row {number}" for number in range(500)]}), None)
    good = path.read_bytes()
    draw = random.Random(1)
    damaged = [good[: len(good) // 2], good[len(good) // 2 :], b"", good[:8]]
    if kind == "parquet":
        damaged += [good[:-8] + struct.pack("<I", size) + b"PAR1" for size in (2**31 - 1, 2**32 - 1, len(good) - 12)]
    else:
        damaged += [b"\xff\xff\xff\xff" + struct.pack("<i", size) + b"x" * 99 for size in (2**31 - 1, -5)]
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(3):
            changed[draw.choice([draw.randrange(len(good)), len(good) - 1 - draw.randrange(400)])] = draw.randrange(256)
        damaged.append(bytes(changed))
    num_refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert len(list(read_documents(str(path)))) <= 500
        except UserError as error:
            assert len(str(error).splitlines()) == 3
            num_refused += 1
    assert num_refused > 20
