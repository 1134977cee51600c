"""Rows that cannot be used: left out by id and listed, in prepared and in streamed data; all others as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.corpus import open_corpus
from shardwise.data.quarantine import Quarantine
from shardwise.data.sources import Reading, find_source, read_documents
from shardwise.errors import UserError
from shardwise.spec.schema import DataConfig

BAD = {7: "{not json", 31: "[1, 2]", 32: '{"text": 5}', 55: '{"other": "field"}'}


def good_rows(count: int = 60) -> list[str]:
    return [json.dumps({"text": f"row {number} " + "la " * (number % 9 + 3)}) for number in range(count)]


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, Path]:
    """A file with bad rows, and one from which they were deleted."""
    good = good_rows()
    lines = [BAD.get(number, line) for number, line in enumerate(good, 1)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "good.jsonl").write_text("\n".join(line for line in lines if line not in BAD.values()) + "\n")
    return tmp_path / "bad.jsonl", tmp_path / "good.jsonl"


def batches(source: Path, cache: Path, **more: Any) -> tuple[list[np.ndarray], Any]:
    data = replace(DataConfig(), source=str(source), tokenizer="bytes", validation_fraction=0.1, held_out=4, **more)
    common: dict[str, Any] = dict(seq_len=16, seed=1, vocab=256, model_dir=None, cache_dir=cache, progress=False)
    corpus = open_corpus(data, **common)
    return [corpus.train.batch(step, range(4), 4).tokens for step in range(1, 60)], corpus


@pytest.mark.parametrize("streaming", [False, True])
def test_all_others_keep_their_order(rows: tuple[Path, Path], tmp_path: Path, streaming: bool) -> None:
    """As if the bad ones had been deleted; each is listed once, with its place and what is wrong with it."""
    bad, good = rows
    with pytest.raises(UserError, match="not JSON"):
        batches(bad, tmp_path / "cache", streaming=streaming, bad_rows="refuse")
    found, corpus = batches(bad, tmp_path / "cache", streaming=streaming, bad_rows="quarantine")
    expected, _ = batches(good, tmp_path / "cache", streaming=streaming)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    said: list[str] = []
    if streaming:  # the list is the run's
        listed = tmp_path / "quarantine.jsonl"
        corpus.train.quarantine.list_in(listed, said.append)
        corpus.train.quarantine.list_in(listed, said.append)  # a resumed run
        assert len(said) == 4 and said[0].startswith(f"data     {bad}:7 cannot be used and is left out: a line that")
    else:
        listed = corpus.stores[0].directory / "quarantine.jsonl"
        note = f"4 rows left out that cannot be used, listed in {listed}"
        assert note in corpus.notes
        assert note in batches(bad, tmp_path / "cache", bad_rows="quarantine")[1].notes  # also from the cache
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [line["row"] for line in lines] == [f"{bad}:{number}" for number in BAD]
    assert all(line["what"] and line["why"] for line in lines)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_rows_of_every_kind_of_table(suffix: str, tmp_path: Path) -> None:
    import pyarrow.parquet

    path, texts = tmp_path / f"table{suffix}", ["one", None, "three"]
    if suffix == ".parquet":
        answer = [{"role": "assistant", "content": "a"}]
        table = {"text": [*texts, None], "messages": [None, [{"role": "user", "content": "q"}], None, answer]}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    elif suffix == ".json":
        path.write_text(json.dumps([{"text": "one"}, {"text": 2}, {"text": "three"}, {"text": "four"}]))
    else:
        path.write_text('text,x\none,1\n"",2\nthree,3\nfour,4\n')
    quarantine = Quarantine()
    found = [document.text for document in read_documents(find_source(str(path)), Reading(quarantine=quarantine))]
    assert found[0] == "one" and found[1] == "" and found[2] == "three" and len(found) == 4
    assert [*quarantine.lines] == ([] if suffix == ".csv" else [f"{path}:2"])  # an empty field is no bad row


def test_more_than_a_few_are_a_wrong_setting(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"body": "text"}'] * 5))
    with pytest.raises(UserError, match="1 row of 1 cannot be used") as problem:
        list(read_documents(find_source(str(path)), Reading(quarantine=Quarantine())))
    assert "data.text_field=NAME" in problem.value.fix
    path.write_text("\n".join([*good_rows(100), *["nonsense"] * 30]))
    with pytest.raises(UserError, match="21 rows of 121 cannot be used"):
        list(read_documents(find_source(str(path)), Reading(quarantine=Quarantine())))
