"""Preparing: what is written, that it does not depend on workers, and that it appears complete or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import prepare as preparing
from shardwise.data.chat import ChatTemplate
from shardwise.data.prepare import is_held_out, prepare
from shardwise.data.shards import TokenStore
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import UserError

TALK = [{"role": "user", "content": "the quick?"}, {"role": "assistant", "content": "brown fox"}]


def documents_of(split) -> list[list[int]]:
    return [split.tokens(int(a), int(b)).tolist() for a, b in zip(split.documents[:-1], split.documents[1:])]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_documents_come_back_in_order_and_the_splits_are_disjoint(rows_file, bpe, tmp_path):
    prepare([str(rows_file)], bpe, tmp_path / "out", validation_fraction=0.2)
    store = TokenStore(tmp_path / "out", verify=True)
    expected = [[*bpe.encode(json.loads(line)["text"]), bpe.separator] for line in rows_file.read_text().splitlines()]
    held = is_held_out(np.arange(len(expected)), 0.2, 0)
    assert 30 < held.sum() < 90
    assert documents_of(store.train) == [ids for ids, out in zip(expected, held) if not out]
    assert documents_of(store.validation) == [ids for ids, out in zip(expected, held) if out]
    assert store.max_token == max(max(ids) for ids in expected)


def test_result_is_the_same_for_any_number_of_workers_and_batch_size(rows_file, bpe, tmp_path, monkeypatch):
    prepare([str(rows_file)], bpe, tmp_path / "a", workers=1)
    monkeypatch.setattr(preparing, "MAX_BATCH_DOCUMENTS", 7)
    prepare([str(rows_file)], bpe, tmp_path / "b", workers=4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_small_shards_are_one_stream(rows_file, tmp_path):
    prepare([str(rows_file)], ByteTokenizer(), tmp_path / "one")
    prepare([str(rows_file)], ByteTokenizer(), tmp_path / "many", shard_bytes=100)
    one, many = TokenStore(tmp_path / "one").train, TokenStore(tmp_path / "many").train
    assert len(list((tmp_path / "many").glob("train-*.tokens"))) > 50
    assert (one.tokens(0, one.num_tokens) == many.tokens(0, many.num_tokens)).all()
    assert (one.tokens(95, 312) == many.tokens(95, 312)).all()


def test_loss_mask_is_written_only_where_a_token_has_none(lines_file, bpe, chatml, tmp_path):
    path = lines_file([{"text": "plain text"}, {"messages": TALK}, {"text": "more"}])
    prepare([str(path)], bpe, tmp_path / "out", template=ChatTemplate(chatml, {}, origin="t"), validation_fraction=0.0)
    store = TokenStore(tmp_path / "out")
    tokens, mask = store.train.tokens(0, store.train.num_tokens), store.train.mask(0, store.train.num_tokens)
    trained = bpe.decode(tokens[mask], keep_special=True)
    assert trained == "plain text<|endoftext|>brown fox<|im_end|>more<|endoftext|>"
    assert store.is_chat and store.train.num_trained == mask.sum() < store.train.num_tokens
    assert not (tmp_path / "out" / "validation-00000.mask").exists()


def test_mask_of_small_shards_lines_up(lines_file, tmp_path):
    path = lines_file([{"text": "x" * 50}, {"messages": TALK}] * 4)
    for name, size in (("one", 2**20), ("many", 33)):
        prepare([str(path)], ByteTokenizer(), tmp_path / name, shard_bytes=size, validation_fraction=0.0)
    one, many = (TokenStore(tmp_path / name).train for name in ("one", "many"))
    assert (one.mask(0, one.num_tokens) == many.mask(0, many.num_tokens)).all()
    assert 0 < one.num_trained < one.num_tokens


def test_prepared_data_carries_its_tokenizer(rows_file, bpe, tmp_path):
    prepare([str(rows_file)], bpe, tmp_path / "out")
    again = TokenStore(tmp_path / "out").tokenizer()
    assert (again.digest, again.separator, again.special_strings) == (bpe.digest, bpe.separator, bpe.special_strings)


def test_existing_directory_is_kept_unless_forced(rows_file, tmp_path):
    out = tmp_path / "out"
    prepare([str(rows_file)], ByteTokenizer(), out)
    before = contents(out)
    with pytest.raises(UserError, match="exists already"):
        prepare([str(rows_file)], ByteTokenizer(), out)
    assert contents(out) == before
    prepare([str(rows_file)], ByteTokenizer(), out, validation_fraction=0.5, force=True)
    assert contents(out) != before


def test_force_never_replaces_other_peoples_files(rows_file, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(UserError, match="not a prepared directory"):
        prepare([str(rows_file)], ByteTokenizer(), tmp_path / "photos", force=True)


def test_a_mistake_in_the_last_line_leaves_nothing_behind(lines_file, tmp_path):
    path = lines_file([{"text": "fine"}] * 50 + [{"body": "not"}])
    with pytest.raises(UserError):
        prepare([str(path)], ByteTokenizer(), tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_killed_in_the_middle_leaves_no_directory(rows_file, tmp_path):
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom shardwise.data.prepare import prepare\nfrom "
        "shardwise.data.tokenizer import ByteTokenizer\n"
        "def wait(done, total):\n    print('writing', flush=True)\n    sys.stdin.read()\n"
        f"prepare([{str(rows_file)!r}], ByteTokenizer(), Path({str(tmp_path / 'out')!r}), progress=wait)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (tmp_path / "out").exists()
    left = list(tmp_path.glob(".out.partial-*"))
    assert len(left) == 1
    old = time.time() - 2 * 24 * 3600
    for path in [*left[0].iterdir(), left[0]]:
        os.utime(path, (old, old))
    prepare([str(rows_file)], ByteTokenizer(), tmp_path / "out")  # and what it left is swept when it is old
    assert not left[0].exists() and TokenStore(tmp_path / "out").train.num_tokens


def test_interruption_removes_the_scratch_directory(rows_file, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(rows_file)], ByteTokenizer(), tmp_path / "out", progress=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == [rows_file.name]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files the POSIX way")
def test_no_room_on_the_disk_is_a_user_error(rows_file, tmp_path):
    script = (
        "import resource, signal\nfrom pathlib import Path\nfrom shardwise.data.prepare import prepare\nfrom "
        "shardwise.data.tokenizer import ByteTokenizer\n"
        "from shardwise.errors import UserError\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"try:\n    prepare([{str(rows_file)!r}], ByteTokenizer(), Path({str(tmp_path / 'out')!r}))\nexcept UserError "
        "as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "no room to write" in said and len(said.splitlines()) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == [rows_file.name]


def test_directory_that_cannot_be_made_is_a_user_error(rows_file, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        prepare([str(rows_file)], ByteTokenizer(), tmp_path / "file" / "out")


@pytest.mark.parametrize("content", ["", "  \n \n"])
def test_empty_corpus_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match="no text in"):
        prepare([str(tmp_path / "a.txt")], ByteTokenizer(), tmp_path / "out")


def test_chat_data_that_loses_every_answer_is_refused(lines_file, tmp_path):
    path = lines_file([{"messages": [{"role": "assistant", "content": "unasked"}]}])
    template = ChatTemplate("{{ messages[0].content }}", {}, origin="t")
    with pytest.raises(UserError, match="nothing to learn"):
        prepare([str(path)], ByteTokenizer(), tmp_path / "out", template=template)


def test_notes_say_what_was_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"has\0nul")
    (tmp_path / "b.txt").write_bytes(b" ")
    info = prepare([str(tmp_path)], ByteTokenizer(), tmp_path.parent / "notes-out")
    assert any("NUL" in note for note in info.notes) and any("1 empty" in note for note in info.notes)


def test_truncated_shard_names_file_and_sizes(rows_file, tmp_path):
    prepare([str(rows_file)], ByteTokenizer(), tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.tokens"
    size = shard.stat().st_size
    os.truncate(shard, size - 10)
    with pytest.raises(UserError) as caught:
        TokenStore(tmp_path / "out")
    assert "train-00000.tokens is truncated" in str(caught.value)
    assert f"{size:,} bytes, the file has {size - 10:,}" in str(caught.value)


def test_flipped_byte_is_found_on_request(rows_file, tmp_path):
    prepare([str(rows_file)], ByteTokenizer(), tmp_path / "out")
    shard = tmp_path / "out" / "train-00000.tokens"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        TokenStore(tmp_path / "out", verify=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "does not describe"), ('{"format": "shardwise-tokens", "schema": 99}', "another version")],
)
def test_bad_index_is_a_user_error(tmp_path, content, message):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(UserError, match=message):
        TokenStore(tmp_path)
