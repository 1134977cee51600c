"""What a job asks for follows from its plan file; what no scheduler could run is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_files import ON_32_GPUS, plan_file

from shardwise.errors import UserError
from shardwise.launch.planned_job import LEAST_START_S, START_S, Wanted, launch_spec

WANTED = Wanted()


def test_a_job_takes_the_nodes_and_gpus_of_its_plan(workdir):
    spec = launch_spec([str(plan_file(workdir))], [], WANTED)
    assert (spec.nodes, spec.ranks_per_node, spec.gpus_per_node, spec.world) == (4, 8, 8, 32)
    assert set(spec.why) == {"nodes", "gpus", "cpus", "memory", "time", "grace"} and all(spec.why.values())


def test_ranks_that_do_not_fill_their_nodes_are_spread_evenly(workdir):
    twelve = ON_32_GPUS.replace("dp = 32", "dp = 12").replace("128", "120")
    spec = launch_spec([str(plan_file(workdir, text=twelve))], [], WANTED)
    assert (spec.nodes, spec.gpus_per_node) == (2, 6)


def test_time_is_what_the_steps_take_where_they_are_slow_and_what_is_around_them(workdir):
    file = str(plan_file(workdir))
    spec, twice = launch_spec([file], [], WANTED), launch_spec([file], ["train.steps=4000"], WANTED)
    assert twice.seconds - spec.seconds == pytest.approx(2000 * spec.step_s, abs=2)
    assert spec.seconds == pytest.approx(2000 * spec.step_s + START_S + spec.grace_s, abs=2)


def test_memory_holds_the_state_while_it_is_saved(workdir):
    """fp32 weights and two moments of 8.03 B parameters are 89.7 GiB."""
    spec = launch_spec([str(plan_file(workdir))], [], WANTED)
    assert spec.memory_bytes > 12 * 8.03e9 + 8 * 2**30
    assert launch_spec([str(plan_file(workdir))], [], replace(WANTED, memory_bytes=2**39)).memory_bytes == 2**39


def test_the_line_to_run_is_the_same_at_every_start(workdir):
    spec = launch_spec([str(plan_file(workdir))], ["optimizer.lr=1e-4", "run.dir=/shared/runs"], WANTED)
    words = spec.command(spec.parts[0])
    assert words[:3] == ("shardwise", "train", str(workdir / "job.toml"))
    assert words[3:] == ("run.dir=/shared/runs", "run.name=job", "optimizer.lr=1e-4", "--resume", "auto")


def test_files_of_one_name_in_two_folders_are_two_runs(workdir):
    names = []
    for folder in ("a-plan", "b-plan"):
        (workdir / folder).mkdir()
        file = plan_file(workdir / folder, name="1.toml")
        names.append(launch_spec([str(file)], [], WANTED).name)
    assert names == ["a-plan-1", "b-plan-1"]


def test_ranks_see_few_variables_and_those_of_their_loggers(workdir):
    spec = launch_spec([str(plan_file(workdir))], ["run.loggers=jsonl,wandb"], replace(WANTED, env=("MY_OWN",)))
    assert {"PATH", "HOME", "WANDB_API_KEY", "MY_OWN"} <= set(spec.environment)
    assert not {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"} & set(spec.environment)
    assert spec.reads_network and not launch_spec([str(plan_file(workdir))], [], WANTED).reads_network


def test_a_cluster_of_cpus_has_no_gpus(workdir):
    """The plan is of gloo ranks on two machines without a card."""
    (workdir / "cluster.toml").write_text(
        'schema = 1\nname = "two"\nnodes = 2\nper_node = 2\n'
        '[device]\nname = "core"\nkind = "cpu"\nmemory = "8GiB"\nbandwidth = "10GB/s"\nachievable = 0.9\n'
        '[device.flops]\nfp32 = 1e11\n[[tier]]\nname = "loopback"\nspan = 2\nbandwidth = "2GB/s"\n'
        '[[tier]]\nname = "nic"\nspan = 4\nbandwidth = "1GB/s"\n'
    )
    text = '[model]\npreset = "tiny"\n[train]\nsteps = 20\nglobal_batch = 8\nseq_len = 64\n[parallel]\ndp = 4\n'
    spec = launch_spec([str(plan_file(workdir, text=text))], [], replace(WANTED, cluster="cluster.toml"))
    assert (spec.nodes, spec.ranks_per_node, spec.gpus_per_node, spec.cpus_per_node) == (2, 2, 0, 2)


@pytest.mark.parametrize(
    "wanted, what, fix",
    [
        (Wanted(time="1m"), "too short for one step", "--time"),
        (Wanted(time="soon"), "cannot be read", "--time"),
        (Wanted(nodes=65), "more than the plan has", "shardwise plan"),
        (Wanted(nodes=2), "does not fit the plan", "--nodes 4"),
        (Wanted(gpus_per_node=4), "not what the plan is for", "--gpus-per-node 8"),
        (Wanted(cluster="4x8xh1000"), "unknown GPU", "h100"),
        (Wanted(name="..."), "no name", "--name"),
    ],
)
def test_what_cannot_run_is_refused(workdir, wanted, what, fix):
    with pytest.raises(UserError, match=what) as refused:
        launch_spec([str(plan_file(workdir))], [], wanted)
    assert fix in refused.value.fix


def test_a_time_for_one_step_is_enough(workdir):
    file = str(plan_file(workdir))
    spec = launch_spec([file], [], Wanted(time="2m", grace="30s"))
    assert spec.seconds == 120 > LEAST_START_S + spec.step_s + spec.grace_s
    with pytest.raises(UserError, match="too short"):
        launch_spec([file], [], Wanted(time="1m", grace="30s"))


def test_a_file_of_no_plan_needs_a_cluster(workdir):
    (workdir / "own.toml").write_text(ON_32_GPUS)
    with pytest.raises(UserError, match="does not say for which cluster"):
        launch_spec(["own.toml"], [], WANTED)
    assert launch_spec(["own.toml"], [], Wanted(cluster="4x8xh100")).nodes == 4


def test_parts_of_an_array_need_the_same_nodes(workdir):
    small = ON_32_GPUS.replace("dp = 32", "dp = 16")
    files = [str(plan_file(workdir)), str(plan_file(workdir, text=small, name="small.toml"))]
    with pytest.raises(UserError, match="for 16 ranks"):
        launch_spec(files, [], WANTED)
