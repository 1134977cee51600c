"""What nodes of a job say of themselves, where they find each other, and what travels between their run directories."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.launch.join import _check_run
from shardwise.launch.local import next_attempt
from shardwise.launch.nodes import interfaces
from shardwise.launch.nodes.hello import check_nodes, config_digest, hello, machine_of
from shardwise.launch.nodes.interfaces import Interface, choose_interface, is_routable, local_interface, own_address
from shardwise.launch.nodes.mirror import (
    Outbox,
    check_is_no_mirror,
    digest_of,
    fetch,
    files_to_read,
    open_mirror,
    piece_of,
    take_in,
)
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir

HERE = [
    Interface("lo", "127.0.0.1"),
    Interface("docker0", "172.17.0.1"),
    Interface("eth0", "10.1.2.3"),
    Interface("ib0", "10.9.0.3"),
    Interface("eth0", "fe80::1"),
]


def said(*changes: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {index: hello(index, "asked", 0) | {"host": f"n{index}"} | change for index, change in enumerate(changes)}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"torch": "2.9.0"}, "node 2 (n2) has another torch than node 0 (n0)"),
        ({"code": "0.1.0 (abc)"}, "another code of shardwise"),
        ({"python": "3.14"}, "another Python"),
        ({"asked": "else"}, "another config"),
        ({"attempt": 1}, "another start"),
        ({"gpus": [["H100", 80, 9, 0, 1]]}, "has 0 GPUs, others have 1"),
    ],
)
def test_nodes_that_do_not_go_together_are_named(change: dict[str, Any], what: str):
    check_nodes(said({}, {}, {}))
    with pytest.raises(UserError) as error:
        check_nodes(said({}, {}, change))
    assert what in error.value.what and error.value.fix


def test_each_node_may_name_its_own_interface_and_nothing_else():
    plain, eth, other = (load_config(None, words).config for words in ([], ["comm.interface=eth0"], ["train.seed=1"]))
    assert config_digest(plain) == config_digest(eth) != config_digest(other)


def test_a_job_has_what_its_smallest_node_has_as_often_as_there_are_nodes():
    whole = machine_of(said({"cores": 8, "memory": 100}, {"cores": 4, "memory": 300}))
    assert (whole.nodes, whole.cores, whole.memory_bytes) == (2, 8, 200)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "fe80::1", "169.254.1.1", "n1", ""])
def test_no_other_node_reaches_a_loopback_address(address: str):
    assert not is_routable(address)


@pytest.mark.parametrize(
    ("asked", "name"),
    [("ib0", "ib0"), ("ens3,eth0", "eth0"), ("10.9.0.0/16", "ib0"), ("fd00::/8,10.1.0.0/16", "eth0")],
)
def test_one_config_names_the_interfaces_of_all_nodes(asked: str, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interfaces, "interfaces", lambda: HERE)
    assert choose_interface(asked, ["10.1.2.9"]).name == own_address(asked, []).name == local_interface(asked) == name


def test_without_one_it_is_the_way_to_the_head_or_a_refusal_that_says_what_was_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interfaces, "interfaces", lambda: HERE)
    monkeypatch.setattr(interfaces, "interface_towards", lambda address: HERE[3] if address == "10.9.0.1" else None)
    assert choose_interface(None, ["localhost", "10.9.0.1"]).name == "ib0"
    assert own_address(None, ["10.1.2.3"]).name == "eth0", "the head is where the scheduler says"
    for wrong in ("lo", "eth7", "127.0.0.0/8"):
        with pytest.raises(UserError, match="no such interface"):
            choose_interface(wrong, [])
    with pytest.raises(UserError) as error:
        choose_interface(None, ["localhost", "no-such-host.invalid"])
    assert error.value.code == Exit.HARDWARE
    assert "localhost (" in error.value.why and "no-such-host.invalid (nobody knows it)" in error.value.why
    assert "eth0 (10.1.2.3)" in error.value.why and socket.gethostname() in error.value.what


def test_a_mirror_has_what_ranks_read_and_returns_what_they_write(tmp_path: Path):
    run, path = RunDir(tmp_path / "run"), tmp_path / "elsewhere" / "run"
    run.path.mkdir()
    run.make_folders()
    run.config.write_text("[train]\n")
    run.plan.write_text("{}" * 3_000_000)  # more than one piece
    (run.path / "metrics.jsonl").write_text("not for others")
    files = files_to_read(run, None)
    assert set(files) == {"config.toml", "plan.json"}
    open_mirror(path, "n0", files)
    fetch(path, files, lambda name, offset: piece_of(run, files, name, offset))
    assert (path / "plan.json").read_text() == run.plan.read_text()
    assert piece_of(run, files, "metrics.jsonl", 0) == piece_of(run, files, "../secret", 0) == b""

    outbox = Outbox(path)
    for turn in ("one\n", "two\n"):
        for name in ("events/rank3.jsonl", "log/rank3.1.err"):
            with open(path / name, "a") as file:
                file.write(turn)
        (path / "events" / "notes").write_text("not ours")
        for name, offset, piece in outbox.pieces():
            take_in(run, {"name": name, "offset": offset}, piece)
    (path / "crash").mkdir(exist_ok=True)
    (path / "crash" / "rank3.txt").write_text("trace")
    assert not list(outbox.pieces()), "reports of crashes travel at the end"
    for name, offset, piece in outbox.pieces(is_last=True):
        take_in(run, {"name": name, "offset": offset}, piece)
    assert (run.path / "events" / "rank3.jsonl").read_text() == "one\ntwo\n"
    assert (run.path / "crash" / "rank3.txt").read_text() == "trace"
    assert not (run.path / "events" / "notes").exists()


@pytest.mark.parametrize(
    "name", ["../up", "config.toml", "/etc/passwd", "events/../config.toml", "events/rank1", 7, None]
)
def test_nothing_else_of_a_run_can_be_written_by_another_node(name: object, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    take_in(run, {"name": name, "offset": 0}, b"x")
    assert [file.name for file in tmp_path.rglob("*")] == ["run"]


def test_a_mirror_keeps_no_checkpoint_of_a_run_that_was_begun_anew_under_its_name(tmp_path: Path):
    """Files of two checkpoints of one step have the same names and sizes; their manifests differ."""
    asked: list[str] = []

    def mirrored(weights: bytes) -> bytes:
        run, path = RunDir(tmp_path / "run"), tmp_path / "elsewhere"
        folder = run.checkpoints / "step-20"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights.safetensors").write_bytes(weights)
        (folder / "manifest.json").write_text(f'{{"sha256": "{weights.hex()}"}}')
        names = ("checkpoints/step-20/weights.safetensors", "checkpoints/step-20/manifest.json")
        files = {name: (run.path / name).stat().st_size for name in names}
        asked.clear()
        open_mirror(path, "n0", files)
        fetch(path, files, lambda name, offset: (asked.append(Path(name).name), piece_of(run, files, name, offset))[1])
        return (path / names[0]).read_bytes()

    assert mirrored(b"old") == b"old"
    assert mirrored(b"old") == b"old" and asked == ["manifest.json"], "it is there already"
    assert mirrored(b"new") == b"new"


def test_nobody_goes_on_from_a_mirror_as_if_it_were_the_run(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    check_is_no_mirror(run)
    open_mirror(run.path, "n0:/disk/runs/tiny", {})
    with pytest.raises(UserError, match="is a mirror") as error:
        check_is_no_mirror(run)
    assert "n0:/disk/runs/tiny" in error.value.why


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "checkpoints/step-1/../../../up"])
def test_a_mirror_takes_no_file_outside_of_it(name: str, tmp_path: Path):
    with pytest.raises(UserError, match="none of a run"):
        open_mirror(tmp_path / "run", "n0", {"config.toml": 1, name: 1})
    assert not any(tmp_path.iterdir())


def test_each_start_has_logs_of_its_own_also_where_only_errors_were_printed(tmp_path: Path):
    run = RunDir(tmp_path)
    run.make_folders()
    assert next_attempt(run) == 1
    (run.log / "rank3.7.err").write_text("the only line")
    assert next_attempt(run) == 8


def test_a_log_that_is_begun_anew_is_sent_from_its_beginning(tmp_path: Path):
    log = tmp_path / "log" / "rank1.1.err"
    log.parent.mkdir()
    log.write_text("of a start before, and long")
    outbox = Outbox(tmp_path)
    assert not list(outbox.pieces())
    log.write_text("new")
    assert list(outbox.pieces()) == [("log/rank1.1.err", 0, b"new")]


def test_a_directory_that_is_no_mirror_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a mirror"):
        open_mirror(tmp_path, "n0", {})
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_rank_that_would_execute_another_plan_is_refused(tmp_path: Path):
    """Under torchrun as well, where ranks read the run's directory by themselves."""
    run = RunDir(tmp_path)
    run.config.write_text("[train]\n")
    run.plan.write_text('{"dp": 1}')
    announced = {"digest": digest_of(run), "text": "abc"}
    check = partial(_check_run, run, ranks=Ranks(), device=torch.device("cpu"), reads_text=False)
    check(announced)
    run.plan.write_text('{"dp": 2}')
    with pytest.raises(UserError, match="has another config or plan"):
        check(announced)
