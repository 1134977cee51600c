"""What `shardwise launch slurm` writes and refuses, by SLURM's own word; one SLURM for all of it."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
from nodes import finish
from slurm_cluster import CLOUD_GPUS, CLOUD_NODES, Slurm
from training import plan_file, run_of

from shardwise.cli.main import main
from shardwise.errors import Exit


def test_slurm_starts_a_task_on_each_node_and_knows_them_by_address(shared_slurm: Slurm):
    said = shared_slurm.tool(
        "srun", "--nodes=2", "--gpus-per-node=2", "--label", "sh", "-c", "hostname; getent hosts n1 n2; true"
    )
    assert set(said.splitlines()) == {"0: n1", "1: n2", "0: 127.0.1.1       n1", "1: 127.0.1.1       n2"}
    assert "NodeAddr=10.77.0.2" in shared_slurm.tool("scontrol", "show", "node", "n2")


def test_a_requeue_leaves_out_the_node_that_the_checks_have_named(shared_slurm: Slurm):
    """A job of one of the two nodes. Its process is killed from outside before it has loaded anything."""
    home = shared_slurm.controller
    plan_file(home.files / "tiny.toml", "1x2xcpu")
    job = shared_slurm.queue("tiny.toml")
    shared_slurm.wait_until(lambda: f"{job}.0" in shared_slurm.tool("squeue", "-hs"), "the job has begun")
    first = shared_slurm.job(job)["BatchHost"]
    run_of(home).mkdir(parents=True, exist_ok=True)
    (run_of(home) / "exclude").write_text(f"{first}\n")
    shared_slurm.tool("scancel", "--signal=KILL", f"{job}.0")
    shared_slurm.wait_until(
        lambda: f"starts again without {first}, which is slow" in shared_slurm.said(), "the requeue"
    )
    shared_slurm.wait_until(lambda: shared_slurm.job(job)["JobState"] == "RUNNING", "the job runs again")
    again = shared_slurm.job(job)
    assert again["ExcNodeList"] == first and {first, again["BatchHost"]} == {"n1", "n2"}
    shared_slurm.tool("scancel", job)
    shared_slurm.wait_for(job)


@pytest.mark.parametrize(
    "options, code",
    [
        (f"--nodes={CLOUD_NODES} --gpus-per-node={CLOUD_GPUS}", 0),
        (f"--nodes={CLOUD_NODES + 1} --gpus-per-node={CLOUD_GPUS}", 1),
        (f"--nodes=2 --gpus-per-node={CLOUD_GPUS + 1}", 1),
    ],
)
def test_slurm_says_what_it_would_do_on_nodes_that_are_not_there(shared_slurm: Slurm, options: str, code: int):
    (shared_slurm.controller.files / "job.sh").write_text("#!/bin/sh\nhostname\n")
    words = ["sbatch", "--test-only", "--partition=cloud", *options.split(), "job.sh"]
    assert finish([asked := shared_slurm.controller.start(*words, SLURM_CONF=shared_slurm.conf)]) == [code]
    assert ("to start at" in asked.output) == (code == 0), asked.output


ON_512_GPUS = """\
# row 1 of 1, question 000000000000: dp=512 zero=2 on 512 of {nodes}x8xh100
[model]
preset = "llama3-8b"
[train]
steps = 2000
global_batch = 2080
seq_len = 8192
micro_batch = 1
[parallel]
dp = {ranks}
zero = 2
tp = 1
cp = 1
pp = 1
ep = 1
[memory]
precision = "bf16"
recompute = "selective"
"""
VARIANTS = {
    "plain": "",
    "gres": "--gres gpu",
    "accounts": "--account lab --qos high",
    "a feature of nodes": "--constraint h100",
    "switches": "--switches 1@10:00",
    "alone": "--exclusive --no-kill",
    "a node left out": "--nodes 63 --exclude c7",
    "a reservation": "--nodes 4 --reservation mine",
    "pyxis": "--container registry#team/image:tag --mount /data:/data",
    "apptainer": "--container /images/train.sif --runtime apptainer",
    "prepared": "--prepare 'module load cuda' --env NCCL_DEBUG --at-once 2",
}


def plan_of(slurm: Slurm, nodes: int) -> str:
    """Writes a plan for so many nodes of 8 GPUs, and returns the name of the file."""
    text = ON_512_GPUS.format(nodes=nodes, ranks=8 * nodes)
    (slurm.controller.files / f"on-{nodes}.toml").write_text(text.replace("2080", str(32 * nodes)))
    return f"on-{nodes}.toml"


@pytest.mark.parametrize("variant", VARIANTS)
def test_slurm_takes_every_variant_of_the_script(shared_slurm: Slurm, variant: str, monkeypatch: pytest.MonkeyPatch):
    """The plain one is written where SLURM is asked what the partition has, the others here, without a process each."""
    words = shlex.split(VARIANTS[variant])
    nodes = int(words[words.index("--nodes") + 1]) if "--nodes" in words else CLOUD_NODES
    if "--reservation" in words:
        shared_slurm.tool("scontrol", "create", "reservation", "reservationname=mine", "starttime=now", "duration=900",
                          "users=root", f"nodes=c[1-{nodes}]")  # fmt: skip
    plans = [plan_of(shared_slurm, nodes)]
    if "--at-once" in words:
        plans.append("other.toml")
        (shared_slurm.controller.files / "other.toml").write_text(
            (shared_slurm.controller.files / plans[0]).read_text()
        )
    command = ["launch", "slurm", *plans, "--partition", "cloud", *words, "--out", "variant.sh"]
    if words:
        monkeypatch.chdir(shared_slurm.controller.files)
        monkeypatch.setenv("PATH", "")
        assert main(command) == Exit.DONE
    else:
        shared_slurm.tool("shardwise", *command)
    said = shared_slurm.tool("sbatch", "--test-only", "variant.sh")
    assert "to start at" in said and "in partition cloud" in said
    if "--reservation" in words:
        shared_slurm.tool("scontrol", "delete", "reservationname=mine")


@pytest.mark.parametrize(
    "nodes, words, what",
    [
        (CLOUD_NODES + 1, "--partition cloud", "64"),
        (2, "--partition clod", "cloud"),
        (2, "--partition short --time 3h", "its limit is 1:00:00"),
        (2, "--partition real", "nodes of partition real have 2"),
        (2, "--partition cloud --time 20s", "too short for one step"),
        (2, "--partition cloud --gpus-per-node 4", "not what the plan is for"),
    ],
)
def test_what_slurm_could_not_run_is_refused_before_it_is_queued(
    shared_slurm: Slurm, nodes: int, words: str, what: str
):
    command = ["shardwise", "launch", "slurm", plan_of(shared_slurm, nodes), *words.split(), "--submit"]
    asked = shared_slurm.controller.start(*command, SLURM_CONF=shared_slurm.conf)
    assert finish([asked]) == [Exit.USER_MISTAKE], asked.story()
    problem, why, fix = asked.output.splitlines()[-3:]
    assert problem.startswith("error: ") and why.startswith("  why  ") and fix.startswith("  fix  "), asked.story()
    assert re.search(what, asked.output), asked.story()
    assert not shared_slurm.tool("squeue", "--noheader").strip()


@pytest.mark.parametrize("seconds", [-400, 400])
def test_a_host_whose_clock_munge_does_not_accept_queues_nothing(shared_slurm: Slurm, seconds: int):
    """What it signs has expired on the controller, or is from the future."""
    if shutil.which("faketime") is None:
        pytest.skip("needs faketime: apt-get install faketime")
    conf = shared_slurm.conf_of_a_host_with_another_clock(seconds)
    command = ["shardwise", "launch", "slurm", plan_of(shared_slurm, 2), "--partition", "cloud", "--submit"]
    asked = shared_slurm.controller.start(*command, SLURM_CONF=conf)
    assert finish([asked]) == [Exit.USER_MISTAKE], asked.story()
    problem, why, fix = asked.output.splitlines()[-3:]
    assert problem.startswith("error: SLURM refuses what this host asks") and "good for 5 minutes" in why, asked.story()
    assert "chronyc makestep" in fix and not shared_slurm.tool("squeue", "--noheader").strip()
