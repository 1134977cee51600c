"""Rows as config files: they load to the plan they were made from, and nobody's file is overwritten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster.describe.machine import Machine
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.answer.plan_files import config_of, is_ours, row_text, write_rows
from shardwise.plan.answer.question import ask
from shardwise.plan.resolve.resolve import resolve
from shardwise.plan.resolve.speed import with_speed
from shardwise.spec.plan import Plan
from shardwise.spec.schema import SpeedConfig

LAYOUTS = [
    {},
    {"dp": 4, "zero": 3},
    {"dp": 8, "zero": 2, "replicate": 2},
    {"dp": 2, "zero": 1, "tp": 2, "sequence": True, "pp": 2, "split": (2, 4), "schedule": "zero-bubble"},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "split": (2, 1, 2, 1), "recompute": "selective"},
    {"dp": 2, "cp": 2, "cp_kind": "ulysses", "zero": 3, "recompute": "full", "offload": "optimizer"},
]


def plan(**changes: object) -> Plan:
    values = dict(device="cpu", precision="fp32", seq_len=256, global_batch=16, micro_batch=2, num_steps=1)
    return Plan(**values | {"threads_per_rank": 1, "reason": "", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", LAYOUTS, ids=lambda changes: " ".join(changes) or "one")
def test_a_row_is_resolved_to_the_plan_it_was_made_from(changes, tmp_path):
    question, made = ask("tiny", "8xh100", seq="256", batch="4k", tokens="1M"), plan(**changes)
    (file,) = write_rows(tmp_path, {"1.toml": row_text(question, made, ["why", ""])})
    loaded = load_config(file)
    assert loaded.config == config_of(question, made)
    machine = Machine(cores=16, memory_bytes=2**40, gpus=(), platform="linux")
    resolved = resolve(loaded.config, question.spec, machine, None, 10**6, loaded.origins).plan
    same = replace(
        made, num_steps=resolved.num_steps, threads_per_rank=resolved.threads_per_rank, reason=resolved.reason
    )
    assert resolved == with_speed(same, SpeedConfig(), question.spec)


def test_what_was_typed_is_in_every_row():
    question = ask("tiny", "8xh100", seq="256", batch="4k", words=["optimizer.lr=1e-4", "model.num_layers=4"])
    text = row_text(question, plan(), [])
    assert "lr = 0.0001" in text and "num_layers = 4" in text


def test_our_rows_are_replaced_and_those_of_a_longer_answer_go(tmp_path):
    question = ask("tiny", "8xh100", seq="256", batch="4k")
    write_rows(tmp_path, {f"{n}.toml": row_text(question, plan(), [str(n)]) for n in (1, 2, 3)})
    write_rows(tmp_path, {"1.toml": row_text(question, plan(), ["again"])})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.toml"]
    assert "# again" in (tmp_path / "1.toml").read_text()


@pytest.mark.parametrize("touch", [lambda text: text + "# mine\n", lambda text: "[model]\npreset = 'tiny'\n"])
def test_a_file_that_a_person_wrote_or_changed_stays(touch, tmp_path: Path):
    question = ask("tiny", "8xh100", seq="256", batch="4k")
    rows = {"1.toml": row_text(question, plan(), []), "2.toml": row_text(question, plan(), [])}
    write_rows(tmp_path, rows)
    mine = touch((tmp_path / "2.toml").read_text())
    (tmp_path / "2.toml").write_text(mine)
    assert not is_ours(tmp_path / "2.toml")
    with pytest.raises(UserError, match=r"2\.toml is not as"):
        write_rows(tmp_path, {name: text + "\n" for name, text in rows.items()})
    assert (tmp_path / "2.toml").read_text() == mine and is_ours(tmp_path / "1.toml")
    write_rows(tmp_path, {"1.toml": rows["1.toml"]})  # fewer rows: what is no longer ours is no longer ours to remove
    assert (tmp_path / "2.toml").read_text() == mine
    write_rows(tmp_path, rows, force=True)
    assert is_ours(tmp_path / "2.toml")
