"""`shardwise launch explain`: every mistake that is put into a good script is found in its line, and none is found in
what `launch` itself writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_files import plan_file

from shardwise.errors import UserError
from shardwise.launch.mistakes.of_kubernetes import mistakes_of_kubernetes
from shardwise.launch.mistakes.of_slurm import mistakes_of_slurm
from shardwise.launch.planned_job import Wanted, checking, launch_spec
from shardwise.launch.schedulers.kubernetes_jobs import KINDS
from shardwise.launch.schedulers.kubernetes_manifest import manifest
from shardwise.launch.schedulers.kubernetes_pod import PodOptions
from shardwise.launch.schedulers.slurm_script import SlurmOptions, script
from shardwise.launch.spec import LaunchSpec

BATCH = """#!/bin/bash
#SBATCH --job-name=good
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=48
#SBATCH --mem=400G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -o pipefail
export MASTER_ADDR=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
srun --cpus-per-task=48 shardwise train job.toml run.dir=/shared/runs \\
  --resume auto &
step=$!
trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1
wait $step; wait $step; code=$?
[ $code = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""

SRUN = "srun --cpus-per-task=48 shardwise train job.toml run.dir=/shared/runs \\\n  --resume auto &"
TORCHRUN = "srun --cpus-per-task=6 torchrun --nnodes 4 --nproc-per-node 8 -m shardwise train job.toml --resume auto &"
ADDRESS = """$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"""

SEEDED = {  # name -> (what is replaced, by what, what is said, in which line)
    "tasks and torchrun": ([("per-node=1", "per-node=8"), (SRUN, TORCHRUN)], "srun starts 8 tasks per node", 4),
    "no signal": ([("#SBATCH --signal=B:USR1@600\n", "")], "no --signal", 8),
    "signal past the shell": ([("=B:USR1", "=USR1")], "does not reach the batch shell", 9),
    "signal without a trap": ([("trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1\n", "")], "nothing in the script", 9),
    "notice too late": ([("USR1@600", "USR1@20")], "the notice comes 20 s before the end", 9),
    "trap behind srun": ([("auto &", "auto"), ("step=$!\n", "")], "srun runs in the foreground", 14),
    "no requeue": ([("#SBATCH --requeue\n", ""), ("#SBATCH --open-mode=append\n", ""), (
        '[ $code = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] && scontrol requeue $SLURM_JOB_ID\n', "")],
        "no --requeue", 8),
    "requeue whatever comes": ([('[ $code = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] && ', ""), (
        "; code=$?", ""), ("exit $code", "")], "whatever its exit code is", 19),
    "requeue on any failure": ([('[ $code = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] && ', "false || ")],
        "whatever its exit code is", 19),
    "requeue for ever": ([('[ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] && ', "")], "nothing limits how often", 19),
    "output cut": ([("#SBATCH --open-mode=append\n", "")], "no --open-mode=append", 10),
    "runs on /tmp": ([("/shared/runs", "/tmp/runs")], "runs go to /tmp/runs", 14),
    "runs on TMPDIR": ([("/shared/runs", "$TMPDIR/runs")], "runs go to $TMPDIR/runs", 14),
    "runs on local scratch": ([("/shared/runs", "/scratch/local/me")], "runs go to /scratch/local/me", 14),
    "runs in memory": ([("/shared/runs", '"${SLURM_TMPDIR}/r"')], "which every node has for itself", 14),
    "cd to scratch": ([("run.dir=/shared/runs ", ""), ("set -o", "cd $SLURM_TMPDIR\nset -o")], "runs go to $SLURM", 12),
    "little memory": ([("--mem=400G", "--mem=64G")], "64.0 GiB of memory per node", 7),
    "little memory per gpu": ([("--mem=400G", "--mem-per-gpu=8G")], "64.0 GiB of memory per node", 7),
    "fallback to localhost": ([(ADDRESS, ADDRESS[:-1] + " || echo localhost)")], "falls back to localhost", 13),
    "default of localhost": ([(ADDRESS, "${HEAD:-localhost}")], "falls back to localhost", 13),
    "head is localhost": ([(ADDRESS, "localhost")], "MASTER_ADDR is localhost", 13),
    "head is 127": ([(ADDRESS, "127.0.0.1")], "MASTER_ADDR is 127.0.0.1", 13),
    "head by hostname": ([(ADDRESS, "$(hostname --ip-address)")], "is asked from `hostname`", 13),
    "head by hostname -i": ([(ADDRESS, "$(hostname -i)")], "is asked from `hostname`", 13),
    "head by each task": ([(SRUN, "srun -c 48 bash -c 'MASTER_ADDR=$(hostname) shardwise train job.toml "
        "--resume auto' &")], "computed by every task", 14),
    "time below a step": ([("--time=12:00:00", "--time=1")], "is less than a step and saving", 8),
    "other GPUs": ([("--gpus-per-node=8", "--gpus-per-node=4")], "4 GPUs per node are asked for", 5),
    "other GPUs in gres": ([("--gpus-per-node=8", "--gres=gpu:h100:4")], "4 GPUs per node are asked for", 5),
    "no GPUs": ([("#SBATCH --gpus-per-node=8\n", "")], "no GPUs per node are asked for", 2),
    "other nodes": ([("--nodes=4", "-N 2")], "--nodes=2", 3),
    "loopback interface": ([("set -o", "export NCCL_SOCKET_IFNAME=lo\nset -o")], "NCCL_SOCKET_IFNAME is lo", 12),
    "a secret": ([("set -o", "export WANDB_API_KEY=0123456789\nset -o")], "value of WANDB_API_KEY is written", 12),
    "not resumed": ([("--resume auto", "")], "no --resume auto", 14),
    "on one node": ([("srun --cpus-per-task=48 ", "")], "the first of 4 nodes alone", 14),
    "code swallowed": ([("auto &", "auto || true &")], "exit code of the training is lost", 14),
    "code behind tee": ([("auto &", "auto | tee log &"), ("set -o pipefail\n", "")], "exit code of the training", 13),
    "one core per task": ([("srun --cpus-per-task=48", "srun")], "srun does not say --cpus-per-task", 14),
    "no environment": ([("#SBATCH --requeue", "#SBATCH --requeue --export=NONE")], "ranks get no environment", 14),
    "late directive": ([("step=$!", "#SBATCH --partition=gpu\nstep=$!")], "behind the first command", 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> LaunchSpec:
    """Its runs are on a disk that nodes share, wherever this tree lies."""
    return launch_spec([str(plan_file(tmp_path_factory.mktemp("plan")))], ["run.dir=/shared/runs"], Wanted())


def changed(text: str, replacements: list[tuple[str, str]]) -> str:
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_a_good_batch_script_has_no_mistakes(plan):
    assert mistakes_of_slurm(BATCH, plan) == []


@pytest.mark.parametrize("name", SEEDED)
def test_a_mistake_of_a_batch_script_is_found_in_its_line(plan, name):
    replacements, what, line = SEEDED[name]
    found = mistakes_of_slurm(changed(BATCH, replacements), plan)
    assert [one.line for one in found if what in one.what] == [line], found
    assert all(one.why and one.fix for one in found)
    assert len(found) == 1, "and nothing else is said of it"


def test_without_a_plan_only_what_it_would_say_is_missing(plan):
    assert mistakes_of_slurm(BATCH, None) == []
    assert mistakes_of_slurm(BATCH.replace("--mem=400G", "--mem=1G"), None) == []


@pytest.mark.parametrize(
    "options",
    [SlurmOptions(), SlurmOptions(gres="gpu:h100", exclusive=True), SlurmOptions(no_kill=True, prepare=("module x",)),
     SlurmOptions(container="x.sif", runtime="apptainer"), SlurmOptions(container="a#b")],
)  # fmt: skip
def test_nothing_is_found_in_our_own_batch_scripts(plan, options):
    array = replace(plan, parts=(plan.parts[0], replace(plan.parts[0], name="b", file="/b.toml")))
    assert mistakes_of_slurm(script(plan, options, "made"), plan) == []
    assert mistakes_of_slurm(script(array, options, "made"), plan) == []
    assert mistakes_of_slurm(script(checking(plan), options, "made"), checking(plan)) == []


@given(st.lists(st.sampled_from([*BATCH.split(), "'", '"', "\\\n", "#SBATCH -", "--mem=", "$(", "\n#SBATCH --gpus="])))
def test_scripts_of_any_kind_are_read(words):
    """What somebody has half written is no crash."""
    assert isinstance(mistakes_of_slurm(" ".join(words), None), list)


# Manifests -----------------------------------------------------------------------------------------------------------

POD = {  # name -> (what is replaced, by what, what is said, what is in its line)
    "shm": (
        [("            - name: shm\n              mountPath: /dev/shm\n", "")],
        "/dev/shm is the container's own",
        "volumeMounts:",
    ),
    "shm on disk": (
        [("          emptyDir:\n            medium: Memory\n            sizeLimit: 16384Mi", "          emptyDir: {}")],
        "/dev/shm is the container's own",
        "volumeMounts:",
    ),
    "OnFailure": (
        [("restartPolicy: Never", "restartPolicy: OnFailure")],
        "restartPolicy is not Never",
        "restartPolicy: OnFailure",
    ),
    "75 fails": ([("            - 6\n", "            - 75\n")], "exit code 75 fails the job", "- action: FailJob"),
    "2 starts again": (
        [("values:\n            - 75", "values:\n            - 2")],
        "exit code 2 starts again for ever",
        "- action: Ignore",
    ),
    "NotIn fails 5": (
        [("operator: In\n          values:\n            - 1", "operator: NotIn\n          values:\n            - 75")],
        "exit code 5 fails the job",
        "- action: FailJob",
    ),
    "no second try": ([("backoffLimit: 20", "backoffLimit: 0")], "backoffLimit: 0", "backoffLimit: 0"),
    "one at a time": ([("parallelism: 4", "parallelism: 1")], "1 of 4 pods run at a time", "parallelism: 1"),
    "no numbers": (
        [("completionMode: Indexed", "completionMode: NonIndexed")],
        "pods have no number",
        "completionMode: NonIndexed",
    ),
    "other nodes": (
        [("completions: 4", "completions: 2"), ("parallelism: 4", "parallelism: 2"), ('value: "4"', 'value: "2"')],
        "completions: 2",
        "completions: 2",
    ),
    "short grace": (
        [("terminationGracePeriodSeconds: GRACE", "terminationGracePeriodSeconds: 20")],
        "killed 20 s after",
        "terminationGracePeriodSeconds: 20",
    ),
    "deadline": (
        [("  backoffLimit", "  activeDeadlineSeconds: 60\n  backoffLimit")],
        "the job fails after 60 s",
        "activeDeadlineSeconds: 60",
    ),
    "other GPUs": ([('nvidia.com/gpu: "8"', 'nvidia.com/gpu: "4"')], "4 GPUs per pod", "limits:"),
    "little memory": ([("memory: NEEDED", "memory: 64Gi")], "a pod has 64.0 GiB of memory", "memory: 64Gi"),
    "runs in the pod": (
        [("run.dir=/runs", "run.dir=/home/me")],
        "on no volume that outlives the pod",
        "- run.dir=/home/me",
    ),
    "runs on /tmp": ([("run.dir=/runs", "run.dir=/tmp/runs")], "runs go to /tmp/runs", "- run.dir=/tmp/runs"),
    "volume goes": (
        [("persistentVolumeClaim:\n            claimName: shardwise-runs", "emptyDir: {}")],
        "on no volume that outlives the pod",
        "- run.dir=/runs",
    ),
    "a secret": (
        [("- name: HOME", "- name: HF_TOKEN\n              value: hf_abc\n            - name: HOME")],
        "the value of HF_TOKEN is written",
        "value: hf_abc",
    ),
    "head is localhost": (
        [("value: job-0.job", "value: localhost")],
        "SHARDWISE_HEAD is localhost",
        "value: localhost",
    ),
    "no count": (
        [('            - name: SHARDWISE_NODES\n              value: "4"\n', "")],
        "SHARDWISE_NODES is not set",
        "env:",
    ),
    "no head": (
        [("            - name: SHARDWISE_HEAD\n              value: job-0.job\n", "")],
        "SHARDWISE_HEAD is not",
        "env:",
    ),
    "service address": ([('  clusterIP: "None"\n', "")], "the Service has an address of its own", "spec:"),
    "not ready": ([("  publishNotReadyAddresses: true\n", "")], "not found before they are ready", "spec:"),
    "no subdomain": ([("      subdomain: job\n", "")], "subdomain is not set", "spec:"),
    "root": ([("runAsNonRoot: true", "runAsNonRoot: false")], "pods may run as root", "securityContext:"),
    "host network": (
        [("      enableServiceLinks", "      hostNetwork: true\n      enableServiceLinks")],
        "use their machine's network",
        "hostNetwork: true",
    ),
    "privileged": (
        [("allowPrivilegeEscalation: false", "privileged: true")],
        "the container is privileged",
        "privileged: true",
    ),
    "not resumed": ([("            - --resume\n            - auto\n", "")], "no --resume auto", "args:"),
    "secret beside": (
        [
            (
                "apiVersion: networking",
                "apiVersion: v1\nkind: Secret\nstringData:\n  secret: abc\n---\napiVersion: networking",
            )
        ],
        "a Secret stands beside the job",
        "stringData:",
    ),
}


@pytest.fixture(scope="module")
def text(plan: LaunchSpec) -> str:
    """A manifest of ours as a person would write it: without quotes that are not needed."""
    made = manifest(plan, PodOptions(image="registry/shardwise:1"), "made")
    lines = [line for line in made.splitlines() if not line.lstrip().startswith("#")]
    for number, line in enumerate(lines):
        head, found, quoted = line.partition('"')
        if found and quoted.endswith('"') and quoted[:-1] not in ("None", "4", "8", "True", "48"):
            lines[number] = head + quoted[:-1]
    return "\n".join(lines) + "\n"


pytestmark_yaml = pytest.mark.needs("yaml")


@pytestmark_yaml
@pytest.mark.parametrize("name", POD)
def test_a_mistake_of_a_manifest_is_found_in_its_line(plan, text, name):
    assert mistakes_of_kubernetes(text, plan, "job.yaml") == []
    replacements, what, where = POD[name]
    needed = next(line for line in text.splitlines() if re.fullmatch(r" +memory: \d{5,}Mi", line)).split()[-1]
    known = {"GRACE": str(plan.grace_s), "NEEDED": needed}
    filled = [(re.sub("GRACE|NEEDED", lambda match: known[match[0]], old), new) for old, new in replacements]
    wrong = changed(text, filled)
    found = mistakes_of_kubernetes(wrong, plan, "job.yaml")
    assert len(found) == 1 and what in found[0].what, found
    assert wrong.splitlines()[found[0].line - 1].strip() == where


@pytestmark_yaml
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_in_our_own_manifests(plan, kind):
    made = manifest(plan, PodOptions(image="registry/shardwise:1", kind=kind), "made")
    assert mistakes_of_kubernetes(made, plan, "job.yaml") == []
    check = manifest(checking(plan), PodOptions(image="registry/shardwise:1", kind=kind), "made")
    assert mistakes_of_kubernetes(check, checking(plan), "job.yaml") == []


@pytestmark_yaml
def test_a_job_without_a_failure_policy_is_found(plan, text):
    begin, end = text.index("  podFailurePolicy:"), text.index("  template:")
    (found,) = mistakes_of_kubernetes(text[:begin] + text[end:], plan, "job.yaml")
    assert found.what == "no podFailurePolicy"


@pytestmark_yaml
def test_text_that_is_no_yaml_is_refused_with_its_line():
    with pytest.raises(UserError, match="is no YAML") as refused:
        mistakes_of_kubernetes("kind: Job\nspec: [1,\n", None, "job.yaml")
    assert refused.value.where.startswith("job.yaml:")


@pytestmark_yaml
@given(st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["Job", "Service", "None", "train", "Indexed"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["kind", "spec", "template", "containers", "command", "args", "env", "value", "name", "completions",
         "completionMode", "parallelism", "podFailurePolicy", "rules", "onExitCodes", "values", "volumes",
         "volumeMounts", "emptyDir", "securityContext", "resources", "limits", "metadata"]), inner, max_size=5),
    max_leaves=40,
))  # fmt: skip
def test_manifests_of_any_shape_are_read(tree):
    made = {"kind": "Job", "spec": tree}
    assert isinstance(mistakes_of_kubernetes(json.dumps(made), None, "job.yaml"), list)


# The verb ------------------------------------------------------------------------------------------------------------


def test_the_verb_finds_the_plan_that_the_script_trains(run_here, workdir: Path, capsys):
    plan_file(workdir)
    (workdir / "good.sbatch").write_text(BATCH)
    (workdir / "bad.sbatch").write_text(BATCH.replace("--gpus-per-node=8", "--gpus-per-node=4"))
    assert run_here("launch", "explain", "good.sbatch") == 0
    assert "found    0 mistakes in good.sbatch" in capsys.readouterr().out
    assert run_here("launch", "explain", "bad.sbatch") == 1
    said = capsys.readouterr().out
    assert "bad.sbatch:5  4 GPUs per node are asked for, and the plan has 8" in said and "plan     not" not in said
    assert run_here("launch", "explain", "bad.sbatch", "--json") == 1
    (mistake,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert mistake["line"] == 5 and mistake.keys() == {"line", "what", "why", "fix"}


def test_a_script_without_a_plan_says_so(run_here, workdir: Path, capsys):
    (workdir / "good.sbatch").write_text(BATCH)
    assert run_here("launch", "explain", "good.sbatch") == 0
    assert "plan     not read: --plan" in capsys.readouterr().out
    assert run_here("launch", "explain", "good.sbatch", "--plan", "nope.toml") == 2
    assert run_here("launch", "explain", "nope.sbatch") == 2
