"""`shardwise launch`: prints by default, writes where --out says, submits only when told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.launch.schedulers.ray_driver import check_same

PLAN = """
[model]
preset = "llama3-70b"
[train]
steps = 1000
global_batch = 512
seq_len = 8192
micro_batch = 1
[parallel]
dp = 16
zero = 1
tp = 4
pp = 8
cp = 1
ep = 1
schedule = "1f1b"
[memory]
precision = "bf16"
recompute = "selective"
"""


@pytest.fixture
def plan(workdir: Path) -> str:
    (workdir / "big.toml").write_text(f"# row 1 of 1, question 0123456789ab: dp=16 on 512 of 64x8xh100\n{PLAN}")
    return "big.toml"


def stub(folder: Path, name: str, body: str) -> None:
    """A command of a scheduler that notes what it is given."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_a_script_for_512_ranks_is_printed_within_a_second_and_without_torch(plan, workdir):
    program = (
        "import sys\nfrom shardwise.cli.main import main\nmain(sys.argv[1:])\nprint('LOADED', 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, "launch", "slurm", plan]
    before = os.times()
    done = subprocess.run(words, cwd=workdir, capture_output=True, text=True)
    after = os.times()
    assert "#SBATCH --nodes=64" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED False", done.stderr
    taken = after.children_user + after.children_system - before.children_user - before.children_system
    assert taken < 1.0, "seconds of processor time: the machine may be busy with other things"


def test_out_writes_for_its_owner_alone_and_prints_what_comes_next(plan, run_here, workdir, capsys):
    assert run_here("launch", "slurm", plan, "--out", "job.sbatch") == 0
    assert (workdir / "job.sbatch").stat().st_mode & 0o777 == 0o700
    assert "next     sbatch job.sbatch" in capsys.readouterr().out
    assert subprocess.run(["bash", "-n", "job.sbatch"], cwd=workdir).returncode == 0


def test_submit_hands_over_what_would_be_printed(plan, run_here, workdir, capsys, monkeypatch):
    assert run_here("launch", "slurm", plan) == 0
    printed = capsys.readouterr().out
    stub(workdir / "bin", "sbatch", 'echo "$@" >words; cat >script; echo "4711;cluster"')
    monkeypatch.setenv("PATH", f"{workdir}/bin:/usr/bin:/bin")
    assert run_here("launch", "slurm", plan, "--submit") == 0
    assert (workdir / "script").read_text() == printed
    assert (workdir / "words").read_text().strip() == "--parsable"
    assert "job 4711, 64 nodes" in capsys.readouterr().out


def test_follow_shows_the_logs_of_all_ranks_until_the_job_is_gone(plan, run_here, workdir, capsys, monkeypatch):
    log = workdir / "runs" / "big" / "log"
    log.mkdir(parents=True)
    (log / "rank3.1.out").write_text("loaded\nstep 1\n")
    (log / "rank10.1.err").write_text("a warning without an end")
    stub(workdir / "bin", "sbatch", "cat >/dev/null; echo 4711")
    stub(workdir / "bin", "squeue", 'if [ -e asked ]; then exit 1; fi; touch asked; echo "4711 gpu big"')
    monkeypatch.setenv("PATH", f"{workdir}/bin:/usr/bin:/bin")
    assert run_here("launch", "slurm", plan, "--submit", "--follow") == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-3:] == [
        "rank   3 | loaded",
        "rank   3 | step 1",
        "rank  10 | a warning without an end",
    ]
    assert "never started" in said.err


@pytest.mark.parametrize(
    "words, what",
    [
        (["--submit"], "there is no `sbatch` here"),
        (["--follow"], "--follow follows what --submit has queued"),
        (["--env", "KEY=value"], "--env KEY is not the name of a variable"),
        (["--nodes", "65"], "--nodes 65 is more than the plan has"),
        (["--gpus-per-node", "4"], "--gpus-per-node 4 is not what the plan is for"),
        (["--time", "1m"], "--time 1m is too short for one step"),
        (["--memory", "lots"], "`--memory lots` cannot be read"),
        (["--cpus-per-node", "0"], "--cpus-per-node 0 asks for nothing"),
    ],
)
def test_mistakes_are_answered_in_three_lines(plan, run_here, workdir, capsys, monkeypatch, words, what):
    monkeypatch.setenv("PATH", str(workdir))
    assert run_here("launch", "slurm", plan, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and what in lines[0], lines


def test_what_sbatch_complains_about_is_passed_on(plan, run_here, workdir, capsys, monkeypatch):
    stub(workdir / "bin", "sbatch", 'cat >/dev/null; echo "sbatch: error: invalid account" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{workdir}/bin:/usr/bin:/bin")
    assert run_here("launch", "slurm", plan, "--submit") == 2
    assert "sbatch: error: invalid account" in capsys.readouterr().err


K8S = ["--image", "registry/shardwise:1"]


def test_a_manifest_is_printed_and_kubectl_gets_secrets_on_its_standard_input_alone(
    plan, run_here, workdir, capsys, monkeypatch
):
    assert run_here("launch", "k8s", plan, *K8S) == 0
    printed = capsys.readouterr().out
    assert "kind: Job" in printed
    stub(workdir / "bin", "kubectl", 'echo "$@" >>words; cat >>given; echo applied')
    monkeypatch.setenv("PATH", f"{workdir}/bin:/usr/bin:/bin")
    assert run_here("launch", "k8s", plan, *K8S, "--namespace", "ml", "--submit") == 0
    given, words = (workdir / "given").read_text(), (workdir / "words").read_text()
    secret = re.search('"stringData": {"secret": "([0-9a-f]{32})"}', given)
    assert secret is not None and secret[1] not in words + capsys.readouterr().out
    assert set(words.splitlines()) == {"--namespace ml apply -f -"}
    assert printed.split("---\n")[2].replace("  labels", "  namespace: ml\n  labels", 1) in given


@pytest.mark.parametrize(
    "words, what",
    [
        ([], "no image is named"),
        ([*K8S, "--pvc", "runs:data"], "`--pvc runs:data` cannot be read"),
        ([*K8S, "--pvc", "runs", "--pvc", "text"], "`--pvc text without a path` cannot be read"),
        ([*K8S, "--node-selector", "gpu"], "`--node-selector gpu` cannot be read"),
        ([*K8S, "--kind", "mpijob"], "invalid choice: 'mpijob'"),
        ([*K8S, "--submit"], "there is no `kubectl` here"),
    ],
)
def test_mistakes_about_pods_are_answered_in_three_lines(plan, run_here, workdir, capsys, monkeypatch, words, what):
    monkeypatch.setenv("PATH", str(workdir))
    assert run_here("launch", "k8s", plan, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and what in lines[0], lines


def test_a_driver_for_ray_says_what_the_job_needs(plan, run_here, workdir, capsys, monkeypatch):
    assert run_here("launch", "ray", plan) == 0
    printed = capsys.readouterr().out
    found: dict = {}
    exec(compile(printed, "driver.py", "exec"), found)  # its imports are there, and nothing starts
    job = found["JOB"]
    assert (job["nodes"], job["gpus"], job["command"][:2]) == (64, 8, ["shardwise", "train"])
    stub(workdir / "bin", "ray", 'echo "$@" >words')
    monkeypatch.setenv("PATH", f"{workdir}/bin:/usr/bin:/bin")
    assert run_here("launch", "ray", plan, "--submit", "--address", "http://head:8265") == 0
    words = (workdir / "words").read_text().split()
    assert words[:7] == ["job", "submit", "--address", "http://head:8265", "--no-wait", "--", "python"]
    assert Path(words[7]).read_text() == printed and Path(words[7]).stat().st_mode & 0o777 == 0o600


def test_nodes_of_ray_with_other_versions_are_named():
    about = [{"same": {"shardwise": "0.1.0", "Python": "3.11.2", "Ray": "2.9"}, "host": "a"}]
    check_same(about * 2)
    other = {"same": {**about[0]["same"], "Python": "3.12.1"}, "host": "b"}
    with pytest.raises(UserError, match=r"b has Python 3\.12\.1, and a has 3\.11\.2"):
        check_same([*about, other])


def test_hosts_get_what_is_printed_and_nothing_starts_without_submit(plan, run_here, capsys, monkeypatch, workdir):
    monkeypatch.setenv("PATH", str(workdir))
    hosts = ",".join(f"h{number}" for number in range(64))
    assert run_here("launch", "ssh", hosts, plan) == 0
    said = capsys.readouterr().out
    assert "-m shardwise train" in said and "--resume auto" in said
    assert run_here("launch", "ssh", "h1,h2", plan) == 2
    assert "2 hosts for 64 nodes" in capsys.readouterr().err
    assert run_here("launch", "ssh", hosts, plan, "--submit") == 2
    assert "there is no `ssh` here" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["slurm"], ["k8s", "--image", "a/b:1"], ["ray"]])
def test_a_preflight_checks_the_nodes_and_trains_nothing(plan, run_here, capsys, words):
    assert run_here("launch", words[0], plan, *words[1:], "--preflight") == 0
    said = capsys.readouterr().out
    assert "--preflight" in said
    if words == ["ray"]:
        assert '"restarts": 0' in said
    if words[0] == "k8s":
        assert "backoffLimit: 0" in said
    if words == ["slurm"]:
        assert "#SBATCH --time=00:10:00" in said and "#SBATCH --no-requeue" in said and "scontrol requeue" not in said
