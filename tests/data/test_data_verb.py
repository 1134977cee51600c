"""`shardwise data prepare` and `shardwise data show`, as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise.cli.main import main


def test_prepare_then_show(rows_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "prepare", str(rows_file), "--tokenizer", "bytes", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "300 documents" not in said and f"shardwise train data.source={out}" in said
    assert main(["data", "show", str(out), "--json", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1 and report["documents"] == 300 and report["dtype"] == "uint8"


@pytest.mark.parametrize(
    ("row", "written"),
    [({"text": "é" * 49, "about": "x" * 500}, 0), ({"prompt": "why?" * 20, "response": "because", "about": "x"}, 1)],
)
def test_bytes_per_token_are_of_text_and_not_of_files(row, written, lines_file, tmp_path, capsys):
    """With bytes as tokens a document of n bytes has n + 1 tokens, or n where the chat template writes the last one,
    whatever else stands in its file."""
    main(["data", "prepare", str(lines_file([row] * 10)), "--out", str(tmp_path / "out")])
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tokens = sum(split["tokens"] for split in report["splits"].values())
    assert report["text_bytes"] == tokens - 10 * (1 - written)


def test_rendered_rows_mark_what_carries_loss(lines_file, tmp_path, capsys):
    path = lines_file([{"prompt": "why?", "response": "because"}] * 10)
    main(["data", "prepare", str(path), "--out", str(tmp_path / "out"), "data.validation_fraction=0"])
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "out"), "--rendered", "--seq-len", "40", "--num", "1"]) == 0
    assert "### user\nwhy?\n### assistant\n⟦because␀⟧" in capsys.readouterr().out
    main(["data", "show", str(tmp_path / "out"), "--rendered", "--seq-len", "40", "--num", "1", "--json"])
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert [run["loss"] for run in sample["runs"]] == [False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data", "prepare", "nowhere.txt", "--out", "x"], "no such data"),
        (["data", "prepare", "python", "--out", "x", "--validation-fraction", "0.9"], "--validation-fraction 0.9"),
        (["data", "prepare", "python", "--out", "x", "--workers", "0"], "--workers 0"),
        (["data", "prepare", "python", "--out", "x", "train.steps=3"], "cannot be used with `data prepare`"),
        (["data", "show", "nowhere"], "is not a prepared directory"),
    ],
)
def test_mistakes_are_three_lines_and_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 3
    assert not list(tmp_path.iterdir())


def test_no_torch_is_imported(rows_file, tmp_path):
    script = (
        "import sys\nfrom shardwise.cli.main import main\n"
        f"assert main(['data', 'prepare', {str(rows_file)!r}, '--out', {str(tmp_path / 'out')!r}]) == 0\n"
        f"assert main(['data', 'show', {str(tmp_path / 'out')!r}, '--rendered']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
