"""Which scheduler started this process, and where it stands: environments as schedulers set them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.launch.place import NodePlace, RankPlace, idle_nodes, own_place

ADDRESS = "192.0.2.7"  # kept for documentation: a number is not looked up, and nothing is sent to it

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "node-that-is-not[1-2]",
    "SLURM_STEP_NODELIST": "node-that-is-not[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_END_TIME": "1800000000",
    "SLURM_RESTART_COUNT": "2",
    "SHARDWISE_HEAD": ADDRESS,
    "SHARDWISE_SECRET_FILE": "/shared/job.secret",
    "PATH": "",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def scontrol(folder: Path, address: str) -> str:
    """A directory for PATH with a scontrol that answers as SLURM's does, for any node."""
    script = folder / "scontrol"
    script.write_text(
        f'#!/bin/sh\necho "NodeName=$4 Arch=x86_64 CoresPerSocket=1 NodeAddr={address} NodeHostName=$4 Version=22.05"\n'
    )
    script.chmod(0o755)
    return str(folder)


def test_a_shell_is_nowhere():
    assert own_place({"PATH": "/usr/bin", "HOME": "/root"}) is None


def test_one_task_per_node_of_srun_is_a_node():
    place = own_place(SRUN)
    assert isinstance(place, NodePlace)
    assert (place.scheduler, place.job, place.index, place.count) == ("slurm", "4711", 1, 2)
    assert (place.heads, place.attempt, place.ends_at) == ((ADDRESS,), 2, 1.8e9)
    assert place.secret_file == "/shared/job.secret"


def test_all_nodes_of_a_job_find_the_same_port_and_other_jobs_another():
    places = [own_place(SRUN | {"SLURM_NODEID": str(node)}) for node in (0, 1)]
    other = own_place(SRUN | {"SLURM_JOB_ID": "4712"})
    assert places[0].port == places[1].port != other.port
    assert 1024 < other.port < 32_768
    assert own_place(SRUN | {"SHARDWISE_PORT": "7000"}).port == 7000


def test_one_task_per_gpu_of_srun_is_a_rank():
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    place = own_place(environ)
    assert isinstance(place, RankPlace)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (3, 6, 1, 4)
    assert place.master == ADDRESS


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_shell_and_an_allocation_without_srun_are_nowhere(step):
    """SLURM sets PROCID and NODEID there too; a batch shell's own step has a number of its own, or none."""
    environ = without(SRUN, "SLURM_STEP_ID") | ({} if step is None else {"SLURM_STEP_ID": step})
    assert own_place(environ) is None


def test_node_addr_of_scontrol_is_the_head(tmp_path):
    environ = without(SRUN, "SHARDWISE_HEAD") | {"PATH": scontrol(tmp_path, ADDRESS)}
    assert own_place(environ).heads == (ADDRESS,)


def test_names_that_do_not_resolve_are_left_out():
    environ = SRUN | {"SHARDWISE_HEAD": "no-such-host.invalid,192.0.2.9", "SLURM_LAUNCH_NODE_IPADDR": ADDRESS}
    assert own_place(environ).heads == ("192.0.2.9", ADDRESS)


def test_without_any_address_everything_tried_is_named(tmp_path):
    """No scontrol in a container, names that do not resolve, and an address of the loopback: never localhost."""
    environ = without(SRUN, "SHARDWISE_HEAD") | {"SLURM_LAUNCH_NODE_IPADDR": "127.0.1.1", "PATH": str(tmp_path)}
    with pytest.raises(UserError) as refused:
        own_place(environ)
    for tried in ("NodeAddr of scontrol", "node-that-is-not1 does not resolve", "127.0.1.1 is loopback"):
        assert tried in refused.value.why
    assert "SHARDWISE_HEAD" in refused.value.fix


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "LOCALHOST."])
def test_loopback_is_no_head_of_two_nodes(address, tmp_path):
    with pytest.raises(UserError, match="no address leads to node 0"):
        own_place(SRUN | {"SHARDWISE_HEAD": address, "PATH": scontrol(tmp_path, address)})
    with pytest.raises(UserError, match="SHARDWISE_HEAD"):
        own_place({"SHARDWISE_NODE": "1", "SHARDWISE_NODES": "2", "SHARDWISE_HEAD": address})


def test_a_head_whose_own_name_means_its_loopback_takes_its_address_towards_the_others():
    """Debian gives a machine's own name 127.0.1.1: other nodes know it by another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ADDRESS, 9))
        except OSError:
            pytest.skip("this machine has no way to any other")
        own = probe.getsockname()[0]
    head = SRUN | {"SLURM_NODEID": "0", "SHARDWISE_HEAD": "localhost", "SLURM_STEP_NODELIST": f"nowhere1,{ADDRESS}"}
    assert own_place(head).heads == (own,)
    with pytest.raises(UserError, match="no address"):
        own_place(head | {"SLURM_NODEID": "1"})


def test_a_step_of_one_node_needs_no_address():
    one = {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SHARDWISE_HEAD": ""}
    place = own_place(SRUN | one)
    assert (place.index, place.count, place.heads) == (0, 1, ("127.0.0.1",))


@pytest.mark.parametrize(
    "wrong",
    [{"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, {"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_NODEID": "2"},
     {"SLURM_NODEID": "one"}, {"SLURM_STEP_NODELIST": "node[1-"}, {"SHARDWISE_PORT": "70000"}],
)  # fmt: skip
def test_variables_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError):
        own_place(SRUN | wrong)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("inside", [{}, SRUN, {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_torchrun_comes_before_the_scheduler_in_whose_job_it_runs(inside):
    assert own_place(inside | TORCHRUN) == RankPlace("torchrun", "none", 3, 4, 1, 2, "10.0.0.1", 29500)


def test_ranks_by_hand_say_their_local_rank():
    by_hand = without(TORCHRUN, "TORCHELASTIC_RUN_ID")
    assert own_place(by_hand).scheduler == "by hand"
    assert own_place(without(by_hand, "LOCAL_RANK")) is None


POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "SHARDWISE_NODES": "2",
    "SHARDWISE_HEAD": "job-0.job",
    "SHARDWISE_PORT": "29400",
    "SHARDWISE_SECRET_FILE": "/secret/job",
}


def test_a_pod_of_an_indexed_job_is_a_node_and_its_head_is_not_looked_up_yet():
    place = own_place(POD)
    expected = NodePlace("kubernetes", "job-0.job", 1, 2, ("job-0.job",), 29400, secret_file="/secret/job")
    assert place == expected


def test_pods_of_kubeflow_are_nodes():
    train_job = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "t-node-0-0.t", "PET_MASTER_PORT": "29500"}
    place = own_place({"KUBERNETES_SERVICE_HOST": "10.96.0.1"} | train_job)
    assert (place.index, place.count, place.heads) == (1, 2, ("t-node-0-0.t",))
    operator = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "t-master-0", "MASTER_PORT": "23456"}
    assert own_place(without(POD, "JOB_COMPLETION_INDEX") | operator).index == 1


def test_a_pod_that_is_no_part_of_a_job_is_nowhere():
    assert own_place({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) is None


def test_an_indexed_job_that_does_not_say_how_many_is_refused():
    """Otherwise every pod would train a run of its own. Saying that there is one is how to ask for that."""
    with pytest.raises(UserError, match="SHARDWISE_NODES"):
        own_place(without(POD, "SHARDWISE_NODES"))
    assert own_place(POD | {"SHARDWISE_NODES": "1"}) is None


BY_SSH = {"SHARDWISE_NODE": "1", "SHARDWISE_NODES": "3", "SHARDWISE_HEAD": "10.0.0.1,fd00::1", "SHARDWISE_PORT": "5000"}


def test_a_node_of_ssh_and_one_of_ray():
    place = own_place(BY_SSH)
    assert place == NodePlace("ssh", "10.0.0.1", 1, 3, ("10.0.0.1", "fd00::1"), 5000)
    assert own_place(BY_SSH | {"RAY_JOB_ID": "02000000"}).scheduler == "ray"
    assert own_place(BY_SSH | SRUN).scheduler == "ssh", "what a person sets by hand comes first"


@pytest.mark.parametrize("wrong", [{"SHARDWISE_NODE": "3"}, {"SHARDWISE_NODES": ""}, {"SHARDWISE_NODE": "-1"}])
def test_a_node_that_cannot_be_is_refused(wrong):
    with pytest.raises(UserError):
        own_place(BY_SSH | wrong)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-n1-77@1",
    "SHARDWISE_HEAD": ADDRESS,
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": ADDRESS}


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA, SRUN | OPEN_MPI])
def test_processes_of_mpirun_are_ranks(environ):
    """Inside of a SLURM job too, where mpirun itself is started by srun."""
    place = own_place(environ)
    assert isinstance(place, RankPlace)
    assert (place.scheduler, place.rank, place.world, place.local_rank, place.local_world) == ("mpirun", 5, 8, 1, 4)
    assert place.master == ADDRESS


def test_one_process_of_mpirun_per_node_is_a_node():
    one_each = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    place = own_place(OPEN_MPI | one_each)
    assert isinstance(place, NodePlace)
    assert (place.index, place.count) == (5, 8)


def test_mpirun_on_one_machine_needs_no_address_and_on_several_it_does():
    alone = without(OPEN_MPI, "SHARDWISE_HEAD") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert own_place(alone).master == "127.0.0.1"
    with pytest.raises(UserError, match="no address leads to node 0"):
        own_place(without(OPEN_MPI, "SHARDWISE_HEAD"))


def test_the_pmi_of_srun_is_not_mpirun():
    assert own_place(SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}).scheduler == "slurm"


def test_a_task_of_blaunch_is_a_node_of_lsf():
    environ = {"LSB_JOBID": "88", "LSB_MCPU_HOSTS": "192.0.2.7 8 192.0.2.8 8", "LSF_PM_TASKID": "2"}
    place = own_place(environ)
    assert (place.scheduler, place.job, place.index, place.count) == ("lsf", "88", 1, 2)
    assert place.heads == (ADDRESS,)
    assert own_place(without(environ, "LSF_PM_TASKID")) is None, "the job's own shell"
    with pytest.raises(UserError, match="task 3 of blaunch"):
        own_place(environ | {"LSF_PM_TASKID": "3"})


def test_a_task_of_pbsdsh_is_a_node_of_pbs(tmp_path):
    own = socket.gethostname().split(".")[0]
    (tmp_path / "nodes").write_text(f"{ADDRESS}\n{ADDRESS}\n{own}.cluster\n{own}.cluster\n")
    environ = {"PBS_JOBID": "99.server", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_TASKNUM": "2"}
    place = own_place(environ)
    assert (place.scheduler, place.index, place.count, place.heads) == ("pbs", 1, 2, (ADDRESS,))
    assert own_place(environ | {"PBS_TASKNUM": "1"}) is None, "the job's own shell"
    (tmp_path / "nodes").write_text("elsewhere\n")
    with pytest.raises(UserError, match="not in the node file"):
        own_place(environ)


def test_nodes_that_are_left_idle_are_said():
    assert "this job has 2 nodes" in (idle_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) or "")
    assert idle_nodes({"SLURM_JOB_NODELIST": "n1"}) is idle_nodes({}) is None


def test_an_address_of_version_6_may_stand_in_brackets():
    place = own_place({"SHARDWISE_NODE": "1", "SHARDWISE_NODES": "2", "SHARDWISE_HEAD": "[fd77::1], n1"})
    assert isinstance(place, NodePlace) and place.heads == ("fd77::1", "n1")
