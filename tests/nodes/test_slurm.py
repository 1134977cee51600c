"""Jobs of `shardwise launch slurm` on two nodes whose names do not resolve: they train, end and go on."""

from __future__ import annotations

import sys

from slurm_cluster import Slurm
from training import STEPS, check_same_losses, plan_file, run_of, steps_of


def test_an_array_of_two_trains_as_one_process_on_two_nodes(slurm: Slurm, one_process):
    home = slurm.controller
    files = [plan_file(home.files / "tiny.toml"), plan_file(home.files / "short.toml", "2x1xcpu", "train.steps=20")]
    job = slurm.queue(*(file.name for file in files))
    for part in (0, 1):
        assert slurm.wait_for(f"{job}_{part}")["ExitCode"] == "0:0", slurm.said()
    check_same_losses(home, one_process)
    check_same_losses(home, one_process, 20, "short")
    said = slurm.said()
    assert "nodes    2 by slurm" in said and f"this is node 0, at eth0 ({slurm.nodes[0].address})" in said
    assert not list((home.files / "runs").glob(".secret*")), "a secret outlives its job"


def test_a_notice_before_the_time_is_over_commits_the_job_goes_on_and_scancel_leaves_nothing(slurm, one_process):
    """A slow link keeps the run from ending before SLURM looks for jobs whose time ends, which it does twice a
    minute."""
    home = slurm.controller
    plan_file(home.files / "tiny.toml")
    slurm.nodes[1].limit("8mbit")
    home.run("shardwise", "launch", "slurm", "tiny.toml", "--out", "job.sh", SLURM_CONF=slurm.conf)
    job = slurm.submit("job.sh", "--time=10", "--signal=B:USR1@119")
    slurm.wait_until(lambda: steps_of(home) > 10, "step 10", 120)
    hours, minutes, _ = slurm.job(job)["RunTime"].split(":")
    slurm.tool("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * int(hours) + int(minutes) + 2}")  # it begins now
    slurm.wait_until(lambda: "starts again" in slurm.said(), "the job asks to be started again", 90)
    slurm.tool("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    stopped_at = steps_of(home)
    assert 0 < stopped_at < STEPS and (run_of(home) / "checkpoints" / f"step-{stopped_at}").is_dir(), slurm.said()
    assert "exit code 75 after 0 restarts" in slurm.said()
    slurm.wait_until(lambda: steps_of(home) > stopped_at + 5, "the job goes on", 90)
    slurm.nodes[1].limit("1gbit")
    slurm.tool("scancel", job)
    assert slurm.wait_for(job)["JobState"] == "CANCELLED"
    started = [sys.executable, "shardwise"]
    slurm.wait_until(
        lambda: not any(word in line for node in slurm.nodes for line in node.processes() for word in started),
        "no orphans",
    )
    check_same_losses(home, one_process, steps_of(home))
    assert not list((home.files / "runs").glob(".secret*"))


def test_a_node_that_crashes_leaves_the_job_to_the_other_which_has_it_started_again(slurm: Slurm, one_process):
    home, (_, lost) = slurm.controller, slurm.nodes
    plan_file(home.files / "tiny.toml", "2x1xcpu", "checkpoint.every=20")
    job = slurm.queue("tiny.toml", "--no-kill")
    slurm.wait_until(lambda: steps_of(home) > 25, "a checkpoint", 120)
    lost.kill_all()
    slurm.wait_until(lambda: "starts again" in slurm.said(), "the job asks to be started again", 60)
    assert "node 1 (n2) is gone" in slurm.said()
    slurm.bring_back(lost)
    assert slurm.wait_for(job, 120)["ExitCode"] == "0:0", slurm.said()
    check_same_losses(home, one_process)
