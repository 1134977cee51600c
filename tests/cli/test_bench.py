"""`shardwise bench` on this very machine: what it prints, and the cluster file it makes."""

import json

import pytest
from commands import SMALL

from shardwise.cli.main import main
from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import this_machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.errors import Exit


def test_layers_go_into_a_cluster_file(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    assert main(["bench", "layers", "--json", "--out", str(path)]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    for name in ("elementwise", "matmul/fp32", "attention/fp32", "attention-backward/fp32"):
        sizes = [size for size, _ in report["curves"][name]]
        assert len(sizes) >= 3 and sizes == sorted(sizes)
        assert all(rate > 1e6 for _, rate in report["curves"][name]), name
    assert 1e-7 < report["launch_s"] < 1e-2
    assert ("matmul/bf16" in report["curves"]) != ("bf16" in report["problems"])  # measured, or said why not
    cluster = read_cluster(str(path))
    assert cluster.world == this_cluster(this_machine()).world
    assert len(cluster.device.curves["attention/fp32"]) == len(report["curves"]["attention/fp32"])
    assert cluster.device.kind == "cuda" or len(cluster.device.curves["matmul/fp32"]) >= 3
    assert cluster.device.launch == report["launch_s"] and cluster.origins["launch"] == "measured"


def test_collectives_join_the_file_that_is_there(tmp_path, capsys):
    machine = this_machine()
    if machine.cores < 2 or len(machine.gpus) == 1:
        assert main(["bench", "collectives"]) == Exit.USER_MISTAKE
        return
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "own"\nnodes = 1\nper_node = 2\n[device]\nname = "cpu"\nkind = "cpu"\nmemory = "1GB"\nbandwidth = '
        '"1GB/s"\n'
        'flops = { fp32 = 1e10 }\n[[tier]]\nbandwidth = "1GB/s"\n[machine]\ncpu = "mine"\n'
    )
    if machine.gpus:
        assert main(["bench", "collectives", "--out", str(path)]) == Exit.USER_MISTAKE  # another machine's
        return
    assert main(["bench", "collectives", "--out", str(path)]) == Exit.DONE
    text = capsys.readouterr().out
    assert "all-to-all" in text and "GB/s" in text
    cluster = read_cluster(str(path))
    assert cluster.name == "own" and cluster.tiers[0].bandwidth != 1e9 and cluster.origins["link"] == "measured"
    assert '"mine"' in path.read_text()


def test_a_step_measured_beside_predicted(capsys):
    assert main(["bench", "step", "--json", "--steps", "4", *SMALL, "parallel.dp=1"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    step = report["step"]["step"]
    assert report["steps"] >= 1 and step["measured"] > 0 and step["predicted"] > 0
    for side in ("measured", "predicted"):
        parts = [row[side] for name, row in report["step"].items() if name != "step"]
        assert sum(parts) == pytest.approx(step[side], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layer"], "did you mean `layers`"),
        (["layers", "train.steps=3"], "cannot be used with `bench layers`"),
        (["layers", "--out", "elsewhere.toml"], "describes another machine"),
        (["layers", "--out", "broken.toml"], "no TOML"),
        (["step", "--out", "new.toml"], "writes no cluster file"),
        (["step", "--steps", "1"], "too few"),
        (["step", "model.preset=tinny"], "tinny"),
    ],
)
def test_bad_input(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere.toml").write_text('gpu = "mi300x"\n')
    (tmp_path / "broken.toml").write_text("nodes = = 1\n")
    assert main(["bench", *words]) == Exit.USER_MISTAKE
    assert said in capsys.readouterr().err
