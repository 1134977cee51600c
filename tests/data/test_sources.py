"""Where documents come from: kinds of files, stable order, bounded memory, and every kind of bad input."""

from __future__ import annotations

import gzip
import json
import os
import sys

import pytest

from shardwise.data import columns, sources
from shardwise.data.sources import Reading, find_source, read_documents
from shardwise.errors import UserError


def texts(name, **settings):
    return [document.text for document in read_documents(find_source(str(name)), Reading(**settings))]


def refusal(name, **settings) -> str:
    with pytest.raises(UserError) as caught:
        texts(name, **settings)
    return str(caught.value)


def test_directory_is_read_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b.py", ".git/x.txt", "a/.hidden.txt", "c.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert texts(tmp_path) == ["a/b.py", "a/z.md", "b.txt"]


def test_directory_with_a_link_to_itself_ends(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.symlink(tmp_path, tmp_path / "again")
    assert texts(tmp_path) == ["a"]


def test_python_is_the_standard_library_without_tests():
    source = find_source("python")
    names = {path.relative_to(source.root).as_posix() for path in source.files}
    assert "heapq.py" in names and "json/decoder.py" in names
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in names)
    assert source.num_bytes > 4e6 and find_source("python").listing_digest == source.listing_digest


def test_long_text_is_cut_at_line_ends_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 64)
    content = "".join(f"line {i} é\n" + ("\n" if i % 5 == 0 else "") for i in range(60))
    (tmp_path / "long.txt").write_text(content)
    pieces = texts(tmp_path / "long.txt")
    assert "".join(pieces) == content
    assert len(pieces) > 5 and all(piece.endswith("\n") and len(piece.encode()) <= 64 for piece in pieces)


def test_text_without_line_ends_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_TEXT_BYTES", 50)
    (tmp_path / "one.txt").write_text("漢" * 100)
    assert "".join(texts(tmp_path / "one.txt")) == "漢" * 100


def test_rows_of_every_shape(lines_file):
    path = lines_file(
        [
            {"text": "plain"},
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "text": "ignored"},
            {"prompt": "q", "completion": "a"},
            {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
            {"instruction": "do", "input": "this", "output": "done"},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        ]
    )
    documents = list(read_documents(find_source(str(path))))
    assert documents[0].text == "plain"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert [document.messages for document in documents[1:4]] == [talk] * 3
    assert documents[4].messages[0]["content"] == "do\n\nthis"
    assert documents[5].messages == talk
    assert sum(document.num_bytes for document in documents) == path.stat().st_size


def test_compressed_lines_read_like_plain_ones(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    assert texts(path) == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-12])
    assert "is damaged" in refusal(path)


def test_parquet_rows_read_like_json_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"body": "a", "messages": None, "size": 1},
        {"body": None, "messages": [{"role": "assistant", "content": "x", "name": None}], "size": 2},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read_documents(find_source(str(tmp_path / "rows.parquet")), Reading(text_field="body"))
    assert first.text == "a" and second.messages == [{"role": "assistant", "content": "x"}]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'shardwise[parquet]'" in refusal(tmp_path / "rows.parquet")


def test_damaged_parquet_is_a_user_error(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really")
    assert "rows.parquet" in refusal(tmp_path / "rows.parquet")


def test_missing_file():
    assert "no such data: nowhere.txt" in refusal("nowhere.txt")


def test_unreadable_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    source = find_source(str(path))
    path.unlink()
    path.mkdir()  # opening it now fails with the system's own error, for root too
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl"):
        list(read_documents(source))


def test_unknown_kind_and_directory_without_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    assert "unknown kind of file" in refusal(tmp_path / "a.bin")
    assert "it holds .bin" in refusal(tmp_path)


def test_invalid_utf8_names_the_byte_and_is_replaced_only_with_consent(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")
    assert "byte 3 is 0xe9" in refusal(path)
    assert texts(path, replace_invalid=True) == ["caf\ufffd au lait"]
    assert texts(path, raw_bytes=True) == [b"caf\xe9 au lait"]


def test_invalid_utf8_in_a_row_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    assert "a.jsonl:2" in refusal(path)
    assert texts(path, replace_invalid=True)[1] == "caf\ufffd"


def test_bad_json_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    error = refusal(path)
    assert "not JSON" in error and "a.jsonl:2" in error and len(error.splitlines()) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x", "id": 1}, "its fields are body, id"),
        ([1, 2], "not an object"),
        ({"text": 7}, "not text but int"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "needs a `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "part that is not text: image"),
        ({"messages": [{"role": "user", "content": [7]}]}, "part that is not text: int"),
        ({"messages": [{"role": "user", "content": "x"}]}, "without an answer"),
        ({"conversations": "x"}, "list of turns"),
    ],
)
def test_rows_that_cannot_be_understood(lines_file, row, message):
    error = refusal(lines_file([{"text": "fine"}, row]))
    assert message in error and "rows.jsonl:2" in error


def test_lone_surrogates_become_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\ud800b"}) + "\n")
    assert texts(path) == ["a?b"]


def test_content_in_parts_gives_its_text(lines_file):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    path = lines_file(
        [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"text": "runs"}]}]}]
    )
    [document] = read_documents(str(path))
    assert [message["content"] for message in document.messages] == ["the fox", "runs"]


# What never ends, or expands --------------------------------------------------------------------------------------


def test_pipes_and_devices_are_refused_before_they_are_read(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert "it is a pipe, not a regular file" in refusal(tmp_path / "a.jsonl")
    assert "it is a pipe, not a regular file" in refusal(tmp_path)
    assert "it is a device, not a regular file" in refusal("/dev/zero")
    (tmp_path / "b.txt").symlink_to("/dev/zero")
    assert "it is a device" in refusal(tmp_path / "b.txt")


def test_a_compressed_file_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "EXPANDED_UNSEEN", 2**20)
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb") as file:
        for _ in range(8):
            file.write(b"\n" * 2**20)
    assert "expands without end" in refusal(tmp_path / "bomb.jsonl.gz")
    with gzip.open(tmp_path / "text.jsonl.gz", "wb") as file:  # as well as text can be compressed
        for number in range(20_000):
            file.write(b'{"text": "%06d the same again, and the same again"}\n' % (number**2 % 999_983))
    assert len(texts(tmp_path / "text.jsonl.gz")) == 20_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_row_has_a_largest_size_and_is_not_read_beyond_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(columns, "MAX_ROW", 1000)
    with gzip.open(tmp_path / name, "wb") if name.endswith("gz") else (tmp_path / name).open("wb") as file:
        file.write(b'{"text": "' + b"a" * 900 + b'"}\n{"text": "' + b"a" * 1000 + b'"}\n')
    assert "a row of more than" in refusal(tmp_path / name)
    assert f"{name}:2" in refusal(tmp_path / name)


@pytest.mark.needs("pyarrow")
def test_a_value_that_is_stored_once_and_stands_in_every_row_is_read_few_rows_at_a_time(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(columns, "PLAIN_BYTES", 4 * 2**20)
    once = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["a" * 2**20]))
    pyarrow.parquet.write_table(pyarrow.table({"text": once}), tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 5000
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    documents = read_documents(find_source(str(tmp_path / "bomb.parquet")), Reading())
    for _ in range(20):
        assert next(documents).num_bytes >= 0
        assert pool.bytes_allocated() - before < 32 * 2**20
    monkeypatch.setattr(columns, "MAX_ROW", 1000)
    assert "a row of more than" in refusal(tmp_path / "bomb.parquet")
