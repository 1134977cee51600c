"""Sources behind addresses: the same documents as on a disk, storages that fail, and credentials that nobody sees."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import sys
import threading

import fsspec
import pytest

from shardwise.config.load import load_config
from shardwise.data import remote
from shardwise.data.sources import Place, Reading, find_source, read_documents, read_from
from shardwise.errors import Exit, UserError

ROWS = [{"text": f"row {number} é\n"} for number in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SECRET = "sk-0123456789"


def texts(source: object) -> list:
    return [document.text for document in read_documents(str(source))]


def refusal(source: str) -> UserError:
    with pytest.raises(UserError) as caught:
        texts(source)
    assert len(str(caught.value).splitlines()) == 3 and SECRET not in str(caught.value)
    return caught.value


@pytest.fixture
def memory():
    """The storage behind memory://, empty."""
    storage = fsspec.filesystem("memory")
    for path in storage.ls("/"):
        storage.rm(path["name"], recursive=True)
    return storage


FILES = {
    "a.jsonl": LINES,
    "b.jsonl.gz": gzip.compress(LINES),
    "c/long.txt": b"a line\n" * 300_000,
    "d.json": json.dumps(ROWS).encode(),
    "e.csv": b"text,label\none,1\ntwo,2\n",
    ".hidden/f.txt": b"hidden",
    "config.json": b'{"hidden_size": 4}',
    "picture.png": b"\x89PNG",
}


def tables() -> dict[str, bytes]:
    """The rows in .parquet and .arrow, where there is pyarrow."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    table, parquet, arrow = pyarrow.Table.from_pylist(ROWS), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet, row_group_size=7)
    with pyarrow.ipc.new_stream(arrow, table.schema) as file:
        file.write_table(table, max_chunksize=9)
    return {"g.parquet": parquet.getvalue(), "h.arrow": arrow.getvalue()}


@pytest.mark.needs("pyarrow")
def test_a_folder_a_pattern_and_a_file_behind_an_address_read_like_those_of_a_disk(memory, tmp_path):
    for name, content in (FILES | tables()).items():
        memory.pipe(f"/data/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert texts("memory://data") == texts(tmp_path)
    source, local = find_source("memory://data"), find_source(str(tmp_path))
    assert [source.relative(file) for file in source.files] == [local.relative(file) for file in local.files]
    assert source.num_bytes == local.num_bytes and source.title == "memory://data"
    assert texts("memory://data/*.jsonl") == texts("memory://data/a.jsonl") == [row["text"] for row in ROWS]
    assert texts(f"file://{tmp_path}/e.csv") == ["one", "two"]


@pytest.mark.needs("pyarrow")
def test_reading_goes_on_at_any_place_of_any_kind_of_file(tmp_path, memory):
    for name, content in (FILES | tables()).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        memory.pipe(f"/data/{name}", content)
    for source in (find_source(str(tmp_path)), find_source("memory://data")):
        found = list(read_from(source, Reading(), Place()))
        for at in (*range(0, len(found), 5), len(found) - 1):
            rest = read_from(source, Reading(), found[at][1])
            assert [(one.text, one.origin) for one, _ in rest] == [(one.text, one.origin) for one, _ in found[at + 1 :]]


def test_a_file_that_changes_behind_its_address_is_another_source(memory):
    memory.pipe("/a.jsonl", LINES)
    before = find_source("memory://a.jsonl").listing_digest
    assert find_source("memory://a.jsonl").listing_digest == before
    memory.pipe("/a.jsonl", LINES.replace(b"row 7", b"row 8"))
    assert find_source("memory://a.jsonl").listing_digest != before


class FlakyStorage(fsspec.AbstractFileSystem):
    """Has one file, says nothing of it but its size, and fails as often as `failures` says."""

    protocol = "flaky"
    cachable = False
    failures = 0
    content = LINES
    error: type[Exception] = ConnectionError

    def info(self, path, **settings):
        if self.failures == "always":
            raise self.error(f"GET https://me:{SECRET}@host/a?token={SECRET} failed")
        return {"name": path, "size": len(self.content), "type": "file"}

    def _open(self, path, mode="rb", **settings):
        content, storage = io.BytesIO(self.content), type(self)

        class File(io.BytesIO):
            def read(self, count=-1):
                if storage.failures and self.tell() > 100:
                    storage.failures -= 1
                    raise storage.error(f"the line broke, key {SECRET}")
                return super().read(min(count, 64))

        return File(content.getvalue())


@pytest.fixture
def flaky(monkeypatch):
    fsspec.register_implementation("flaky", FlakyStorage, clobber=True)
    monkeypatch.setenv("STORAGE_KEY", SECRET)
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(FlakyStorage, "failures", 0)
    return FlakyStorage


def test_a_read_that_fails_goes_on_where_it_was(flaky):
    flaky.failures = 3
    assert texts("flaky://a.jsonl") == [row["text"] for row in ROWS] and flaky.failures == 0
    flaky.failures = 4
    error = refusal("flaky://a.jsonl")
    assert error.code == Exit.HARDWARE and "ConnectionError: the line broke, key ***" in error.why


@pytest.mark.parametrize(
    ("raised", "what"),
    [(ConnectionError, "cannot read"), (PermissionError, "may not read"), (FileNotFoundError, "no such data")],
)
def test_a_storage_that_cannot_be_reached_is_three_lines_without_credentials(flaky, monkeypatch, raised, what):
    monkeypatch.setattr(flaky, "error", raised)
    flaky.failures = "always"
    assert what in refusal("flaky://a.jsonl").what


def test_a_storage_that_says_nothing_is_known_by_the_beginning_of_its_file(flaky, monkeypatch):
    before = find_source("flaky://a.jsonl").listing_digest
    monkeypatch.setattr(flaky, "content", LINES.replace(b"row 7", b"row 8"))
    assert find_source("flaky://a.jsonl").listing_digest != before


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense://a.txt", "no protocol that fsspec knows"),
        ("zip://a.txt::s3://bucket/a.zip", "addresses inside of addresses"),
        ("s3://[bucket/a.txt", "Invalid IPv6"),
        ("memory://nothing.txt", "nothing of that name"),
        ("memory://*.png", "it has 0 files"),
        (f"https://me:{SECRET}@host/a.txt", "it holds a password"),
        (f"https://host/a.txt?X-Amz-Signature={SECRET}", "`X-Amz-Signature`"),
    ],
)
def test_addresses_that_cannot_be_read(memory, address, said):
    assert said in refusal(address).why


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_package_that_is_missing_is_named(protocol, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    error = refusal(f"{protocol}://bucket/a.txt")
    assert error.fix == f"pip install {package}" and f"{protocol}:// needs {package}" in error.why


def test_a_config_with_credentials_is_refused_before_anything_repeats_it():
    with pytest.raises(UserError) as caught:
        load_config(None, [f"data.source=https://me:{SECRET}@host/a.txt"])
    assert SECRET not in str(caught.value)


@pytest.mark.needs("aiohttp")
def test_files_of_the_web_are_read_and_what_is_not_there_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        assert texts(f"{home}/a.jsonl") == texts(f"{home}/a.jsonl?download=true") == [row["text"] for row in ROWS]
        before = find_source(f"{home}/a.jsonl").listing_digest
        os.utime(tmp_path / "a.jsonl", (1e9, 1e9))
        assert find_source(f"{home}/a.jsonl").listing_digest != before
        assert "no such data" in refusal(f"{home}/b.jsonl").what
        server.shutdown()
    assert "Connect" in refusal(f"{home}/a.jsonl").why
