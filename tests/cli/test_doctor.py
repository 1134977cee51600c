"""`shardwise doctor` measures this very machine; one real run serves all tests."""

import json
import subprocess
import sys
import tomllib

import pytest

from shardwise.cli.doctor import render
from shardwise.cli.main import main
from shardwise.cluster.describe.read import read_cluster


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    command = [sys.executable, "-m", "shardwise", "doctor", "--json", "--out", str(folder / "cluster.toml")]
    done = subprocess.run([*command, f"run.dir={folder}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder


def test_report(outcome):
    report, progress, folder = outcome
    assert report["schema"] == 1
    assert report["cores"] >= 1 and report["memory_bytes"] > 2**28
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["flops_per_s"]["fp32"] > 1e8 and cpu["copy_bytes_per_s"] > 1e8
    assert ("bf16" in cpu["flops_per_s"]) != ("bf16" in cpu["problems"])  # measured, or said why not
    assert report["disk"]["path"] == str(folder) and report["disk"]["write_bytes_per_s"] > 0
    assert report["link"]["alpha_s"] >= 0 and len(report["link"]["points"]) >= 4
    assert progress.count("measuring ") == 3


def test_cluster_file(outcome):
    report, _, folder = outcome
    cluster = read_cluster(str(folder / "cluster.toml"))
    if len(report["devices"]) == 1:  # no GPU: a device is one core
        assert (cluster.per_node, cluster.device.kind) == (report["cores"], "cpu")
        assert cluster.device.flops["fp32"] == pytest.approx(
            report["devices"][0]["flops_per_s"]["fp32"] / report["cores"], rel=1e-5
        )  # the file keeps six digits
        assert cluster.tiers[0].alpha == report["link"]["alpha_s"] and cluster.origins["flops"] == "measured"
    assert tomllib.loads((folder / "cluster.toml").read_text())["machine"]["cores"] == report["cores"]
    assert [path.name for path in folder.iterdir()] == ["cluster.toml"]


def test_text_names_each_thing(outcome):
    report, _, _ = outcome
    text = render(report)
    for label in ("machine", "system", "cpu", "disk", "link", "libraries", "ports"):
        assert any(line.startswith(label) for line in text.splitlines()), label


def test_a_kernel_that_does_not_run_here_is_a_finding(outcome):
    report = json.loads(json.dumps(outcome[0]))
    report["devices"][0]["problems"] = {"bf16": "illegal instruction"}
    text = render(report)
    assert "bf16 does not work here (illegal instruction)" in text
    assert 'keep memory.precision = "fp32"' in text


def test_libraries_that_open_models_and_adapters_are_listed(outcome):
    names = {entry["name"] for entry in outcome[0]["libraries"] + outcome[0]["optional"]}
    assert {"jinja2", "transformers", "peft", "torchao"} <= names


@pytest.mark.parametrize("word", ["train.steps=3", "memory.limit=1GiB", "steps=3"])
def test_words_that_it_does_not_use_are_refused(word, capsys):
    assert main(["doctor", word]) == 2
    assert "cannot be used with `doctor`" in capsys.readouterr().err


def test_out_is_never_overwritten_by_accident(outcome, capsys):
    path = outcome[2] / "cluster.toml"
    before = path.read_text()
    assert main(["doctor", "--out", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == before
