"""Rows out of .json, .csv, .arrow and .zst files, patterns, and datasets that Hugging Face's library has saved."""

from __future__ import annotations

import json
import sys

import pytest

from shardwise.data.rows import Document
from shardwise.data.sources import find_source, read_documents
from shardwise.errors import UserError

ROWS = [{"text": f"row {number} é\n", "id": number} for number in range(40)]
TEXTS = [row["text"] for row in ROWS]


def texts(source: object) -> list:
    return [document.text for document in read_documents(str(source))]


def refusal(source: object) -> UserError:
    with pytest.raises(UserError) as caught:
        texts(source)
    return caught.value


@pytest.mark.parametrize("block", [7, 64, 2**20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows_is_read_piece_by_piece(tmp_path, monkeypatch, block, indent):
    monkeypatch.setattr("shardwise.data.tables.BLOCK", block)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=indent))
    assert texts(tmp_path / "a.json") == TEXTS
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert texts(tmp_path / "lines.json") == TEXTS


@pytest.mark.parametrize("damage", ['[{"text": "a"}, {"text"', '[{"text": "a"} x', '[{"text": "a"}', '{"text": '])
def test_damaged_json_names_the_row(tmp_path, damage):
    (tmp_path / "a.json").write_text(damage)
    error = refusal(tmp_path / "a.json")
    assert "is not a list of rows" in error.what and "a.json:" in str(error)


def test_rows_of_text_tables_have_a_largest_size_and_are_not_read_beyond_it(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.data.tables.MAX_ROW", 1000)
    monkeypatch.setattr("shardwise.data.tables.BLOCK", 100)
    (tmp_path / "line.csv").write_text("text\n" + "a" * 900 + "\n" + "a," * 600 + "\n")
    (tmp_path / "lines.csv").write_text("text\n" + "a" * 900 + "\n" + '"\n",' * 600 + "\n")
    (tmp_path / "names.csv").write_text("a," * 600)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a" * 900}, {"text": "a" * 5000}]))
    for name in ("line.csv", "lines.csv", "names.csv", "a.json"):
        error = refusal(tmp_path / name)
        assert "a row of more than" in error.what and f"{name}:" in str(error)
    (tmp_path / "blank.json").write_text("[" + " ," * 5000 + "]")
    assert texts(tmp_path / "blank.json") == []


def test_separated_values_are_rows_by_the_names_in_the_first_line(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"one, two\nthree",x\nfour,\n', encoding="utf-8-sig")
    assert texts(tmp_path / "a.csv") == ["one, two\nthree", "four"]
    (tmp_path / "b.tsv").write_text("instruction\tinput\toutput\nadd\t\t3\nadd\t1 2\t3\n")
    first, second = read_documents(str(tmp_path / "b.tsv"))
    assert [message["content"] for message in first.messages] == ["add", "3"]
    assert second.messages[0]["content"] == "add\n\n1 2"
    (tmp_path / "c.csv").write_text("text,label\na,b,c\n")
    error = refusal(tmp_path / "c.csv")
    assert "3 fields in a table of 2 columns" in error.what and "c.csv:2" in str(error)
    (tmp_path / "d.csv").write_text('text\n"open\n')
    assert "is not a table" in refusal(tmp_path / "d.csv").what
    (tmp_path / "e.csv").write_bytes(b"text\nfine\n\xff\n")
    assert "not valid UTF-8" in refusal(tmp_path / "e.csv").what


@pytest.mark.needs("pyarrow")
@pytest.mark.parametrize("kind", ["new_file", "new_stream"])
def test_arrow_files_and_streams_read_like_json_rows(tmp_path, kind):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with getattr(pyarrow.ipc, kind)(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    assert texts(tmp_path / "a.arrow") == TEXTS
    (tmp_path / "b.arrow").write_bytes(b"ARROW1 and nothing")
    assert "not a readable arrow file" in refusal(tmp_path / "b.arrow").what


@pytest.mark.needs("zstandard")
def test_lines_in_zstd_read_like_plain_ones(tmp_path):
    import zstandard

    raw = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    whole = zstandard.compress(raw[:500]) + zstandard.compress(raw[500:])
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert texts(tmp_path / "a.jsonl.zst") == TEXTS
    (tmp_path / "b.jsonl.zst").write_bytes(b"\0" + whole)
    assert "is damaged" in refusal(tmp_path / "b.jsonl.zst").what


def test_packages_that_are_missing_are_named_with_the_line_that_installs_them(tmp_path, monkeypatch):
    for name, package, extra in (("a.arrow", "pyarrow", "parquet"), ("a.jsonl.zst", "zstandard", "zstd")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, package, None)
        assert f"pip install 'shardwise[{extra}]'" in refusal(tmp_path / name).fix


def test_patterns_name_files_in_sorted_order(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "a/3.txt", "a/not.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert texts(f"{tmp_path}/*/*.jsonl") == ["a/1.jsonl", "b/2.jsonl"]
    assert len(texts(f"{tmp_path}/a/*")) == 2
    assert find_source(f"{tmp_path}/a/*").title == f"{tmp_path}/a/*"
    assert find_source(f"{tmp_path}/**/*.jsonl").files == find_source(f"{tmp_path}/*/*.jsonl").files
    error = refusal(f"{tmp_path}/*.jsonl")
    assert "no file is like" in error.what and "0 files match" in error.why


def test_settings_beside_the_text_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    (tmp_path / "b.json").write_text('[{"text": "b"}]')
    assert texts(tmp_path) == ["a", "b"]


@pytest.fixture
def saved(tmp_path, write_arrow):
    """What `DatasetDict.save_to_disk` leaves, in two splits and two files."""
    for split, number, rows in (("train", 0, ROWS[:20]), ("train", 1, ROWS[20:]), ("test", 0, ROWS[:1])):
        write_arrow(tmp_path / "saved" / split / f"data-{number:05}-of-00002.arrow", rows)
        (tmp_path / "saved" / split / "state.json").write_text("{}")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "saved"


@pytest.fixture
def write_arrow():
    pyarrow = pytest.importorskip("pyarrow")

    def write(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(path), table.schema) as file:
            file.write_table(table)

    return write


def test_a_saved_dataset_is_its_training_split(saved):
    assert texts(saved) == TEXTS and texts(saved / "test") == TEXTS[:1]
    (saved / "train").rename(saved / "training")
    error = refusal(saved)
    assert "no split `train`" in error.what and "test, training" in error.why


def test_a_dataset_of_the_hub_is_found_in_the_cache(tmp_path, monkeypatch, write_arrow):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    home = tmp_path / "owner___rows/default/0.0.0/abc"
    write_arrow(home / "rows-train-00000-of-00002.arrow", ROWS[:20])
    write_arrow(home / "rows-train-00001-of-00002.arrow", ROWS[20:])
    write_arrow(home / "rows-test.arrow", ROWS[:1])
    assert texts("owner/rows") == TEXTS and find_source("owner/rows").title == "owner/rows"
    assert "no dataset of that name" in refusal("owner/other").why
    write_arrow(tmp_path / "owner___rows/default/0.0.0/abd/rows-train.arrow", ROWS[:1])
    assert "more than once" in refusal("owner/rows").what


@pytest.mark.needs("datasets")
def test_what_the_datasets_library_saves_is_read_as_it_was(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list(ROWS).select(range(10, 30)).shuffle(seed=1)
    saved.save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved") == saved["text"][:]


def test_conversations_of_every_spelling(tmp_path):
    rows = [
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"conversations": [{"from": "human", "value": "add"}, {"from": "gpt", "value": "3"}]},
        {"prompt": "add", "completion": "3"},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    documents: list[Document] = list(read_documents(str(tmp_path / "a.json")))
    assert [document.messages[-1] for document in documents] == [{"role": "assistant", "content": "3"}] * 3
