"""Datasets of the hub, from a server on this machine that answers as the hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("datasets")

SHA = "a" * 40
ROWS = [{"text": f"row {number}"} for number in range(600)]
FILES = {
    "data/train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "data/validation.jsonl": b'{"text": "held out"}\n' * 3,
    "README.md": b"# no settings\n",
}


class Hub(BaseHTTPRequestHandler):
    """Has one dataset, `owner/rows`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *about: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].replace("%2F", "/")
        parts = path.strip("/").split("/")
        if parts[1:4] == ["datasets", "owner", "rows"]:
            self._say(self._below("/".join(parts[6:])) if parts[4:5] == ["tree"] else self._about())
        elif parts[:4] == ["datasets", "owner", "rows", "resolve"]:
            self._send_file("/".join(parts[5:]))
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say([])

    @staticmethod
    def _about() -> dict[str, Any]:
        return {"id": "owner/rows", "sha": SHA, "private": False, "tags": [], "downloads": 0, "likes": 0}

    @staticmethod
    def _below(folder: str) -> list[dict[str, Any]]:
        if not folder:
            return [{"type": "directory", "path": "data", "oid": SHA}]
        names = [name for name in FILES if name.startswith(f"{folder}/")]
        return [{"type": "file", "path": name, "size": len(FILES[name]), "oid": SHA} for name in names]

    def _say(self, what: Any) -> None:
        self._send(200, json.dumps(what).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str) -> None:
        if name not in FILES:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content, headers = (
            FILES[name],
            {"ETag": f'"{len(FILES[name])}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"},
        )
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(206 if "Range" in self.headers else 200, part, headers)

    def _send(self, code: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


PROGRAM = """
import json, sys
from itertools import islice

from shardwise.data.hub import open_hub
from shardwise.data.sources import Reading
from shardwise.errors import UserError

for name in sys.argv[1:]:
    try:
        rows = open_hub(name, Reading())
        found = list(rows.read(None))
        place = json.loads(json.dumps(found[len(found) // 2][1]))
        behind = list(islice(rows.read(place), 1))
        said = [len(found), found[0][0].text, found[-1][0].origin, found[len(found) // 2 + 1][0] == behind[0][0]]
    except UserError as error:
        said = [int(error.code), str(error)]
    print(json.dumps(said))
"""


def opened(*names: str, home: Path, **environment: str) -> list[Any]:
    """What a program of its own finds: the libraries read their settings when they are imported."""
    environment |= {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    others = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}  # of tests with transformers
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], env=others | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_dataset_of_the_hub_is_read_and_entered_again_without_a_word_of_its_libraries(hub, tmp_path):
    names = ("owner/rows", "owner/rows::validation", "owner/rows::none", "owner/rows:none", "owner/other")
    train, validation, no_split, no_config, no_dataset = opened(*names, home=tmp_path, HF_ENDPOINT=hub)
    assert train == [600, "row 0", "owner/rows:600", True]
    assert validation == [3, "held out", "owner/rows::validation:3", True]
    for (code, said), word in ((no_split, "none"), (no_config, "none"), (no_dataset, "has another name or is private")):
        assert code == 2 and len(said.splitlines()) == 3 and word in said


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path):
    [[code, said]] = opened("owner/rows", home=tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 5 and len(said.splitlines()) == 3 and "refused" in said
    [[code, said]] = opened("owner/rows", home=tmp_path, HF_ENDPOINT="http://127.0.0.1:1", HF_DATASETS_OFFLINE="1")
    assert code == 2 and "HF_DATASETS_OFFLINE" in said
