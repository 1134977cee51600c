"""Batch scripts for SLURM: what they ask for, that a shell reads them, and what they do with exit codes and signals.

They are run by bash with commands in place of SLURM's that note how they are called: SLURM itself is for the tests on
nodes (`make test-cluster`).
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from plan_files import plan_file

from shardwise.errors import UserError
from shardwise.launch.planned_job import Wanted, launch_spec
from shardwise.launch.schedulers.slurm_partition import fitted
from shardwise.launch.schedulers.slurm_script import MOST_FAILURES, MOST_RESTARTS, SlurmOptions, script
from shardwise.launch.spec import LaunchSpec
from shardwise.run.rundir import RunDir

VARIANTS = {
    "plain": SlurmOptions(),
    "gres": SlurmOptions(gres="gpu:h100"),
    "accounts": SlurmOptions(
        passed_on=(("partition", "gpu"), ("account", "lab"), ("qos", "high"), ("reservation", "tuesday"))
    ),
    "places": SlurmOptions(passed_on=(("constraint", "ib&h100"), ("switches", "1@10:00"), ("nodelist", "n[1-4]"))),
    "exclusive": SlurmOptions(exclusive=True, no_kill=True),
    "pyxis": SlurmOptions(container="registry#team/image:tag", mounts=("/data:/data",)),
    "apptainer": SlurmOptions(container="/images/train.sif", runtime="apptainer"),
    "prepared": SlurmOptions(prepare=("module load cuda", 'export NOTE="a b"')),
}


@pytest.fixture
def spec(workdir: Path) -> LaunchSpec:
    words = [f"run.dir={workdir}/the runs", "data.source=/data/it's here"]
    return launch_spec([str(plan_file(workdir))], words, Wanted())


def directives(text: str) -> dict[str, str]:
    """What sbatch is asked for, by name."""
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def srun(text: str) -> list[str]:
    """The words of the line that is run on every node."""
    line = re.search(r"^srun \\\n(?:.*\\\n)*.*&$", text, re.MULTILINE)
    assert line is not None
    return shlex.split(line[0].replace("\\\n", " "))[:-1]


def test_sbatch_is_asked_for_what_the_plan_needs(spec):
    asked = directives(script(spec, SlurmOptions(), "made"))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "1", "8")
    assert int(asked["mem"].removesuffix("M")) * 2**20 >= spec.memory_bytes
    hours, minutes, seconds = (int(part) for part in asked["time"].split(":"))
    assert spec.seconds <= (hours * 60 + minutes) * 60 + seconds < spec.seconds + 60
    assert asked["signal"] == f"B:USR1@{spec.grace_s}"
    assert "requeue" in asked and asked["open-mode"] == "append"


def test_every_line_has_its_reason(spec):
    lines = script(spec, VARIANTS["accounts"], "made").splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(at) > 10 and all(re.match(r"# \w", lines[number - 1]) for number in at)


def test_variants_ask_in_slurms_words(spec):
    texts = {name: script(spec, options, "made") for name, options in VARIANTS.items()}
    assert directives(texts["gres"])["gres"] == "gpu:h100:8" and "gpus-per-node" not in directives(texts["gres"])
    assert directives(texts["accounts"]).items() >= {"account": "lab", "qos": "high", "partition": "gpu"}.items()
    assert directives(texts["places"])["switches"] == "1@10:00"
    assert directives(texts["exclusive"]).items() >= {"mem": "0", "exclusive": "", "no-kill": ""}.items()
    pyxis, apptainer = srun(texts["pyxis"]), srun(texts["apptainer"])
    assert "--container-image=registry#team/image:tag" in pyxis
    mounts = next(word for word in pyxis if word.startswith("--container-mounts=")).partition("=")[2].split(",")
    assert f"{spec.run_dir}:{spec.run_dir}" in mounts and "/data:/data" in mounts
    at = apptainer.index("apptainer")
    assert apptainer[at : at + 3] == ["apptainer", "exec", "--nv"]
    assert apptainer.index("/images/train.sif") < apptainer.index("shardwise")


def test_every_node_runs_the_one_line(spec):
    words = srun(script(spec, SlurmOptions(), "made"))
    assert tuple(words[words.index("shardwise") :]) == spec.command(spec.parts[0])
    assert "--ntasks-per-node=1" in words and "--nodes=4" in words


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(spec, variant):
    both = replace(spec, parts=(spec.parts[0], replace(spec.parts[0], name="other", file="/plans/other.toml")))
    for one in (spec, both):
        done = subprocess.run(
            ["shellcheck", "-"], input=script(one, VARIANTS[variant], "made"), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("value", ["gpu\n#SBATCH --uid=0", "gpu\x07"])
def test_an_option_cannot_become_a_second_line(value):
    with pytest.raises(UserError, match="--partition has a line break"):
        SlurmOptions(passed_on=(("partition", value),))


def test_the_person_s_secrets_are_not_in_the_text(spec, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    text = script(replace(spec, environment=(*spec.environment, "WANDB_API_KEY")), SlurmOptions(), "made")
    assert "WANDB_API_KEY" in text and "0123456789abcdef" not in text


# Run by bash ---------------------------------------------------------------------------------------------------------

STUBS = {
    "srun": 'stat -c %a "$SHARDWISE_SECRET_FILE" >"$NOTES/mode"; cp "$SHARDWISE_SECRET_FILE" "$NOTES/secret"\n'
    'echo "${SHARDWISE_HEAD-unset}" >"$NOTES/head"; printf "%s\\n" "$@" >"$NOTES/srun"\n'
    '[ -z "$SLOW" ] || while [ ! -e "$NOTES/told" ]; do sleep 0.05; done\nexit "$CODE"',
    "scontrol": """case "$1 $2" in
        "requeue "*) echo "$2" >"$NOTES/requeued" ;;
        "update "*) echo "$3" >"$NOTES/out" ;;
        "show hostnames") echo "$3" | tr , "\\n" ;;
        *) [ "$3" = job ] && echo "A=1 ExcNodeList=$EXCLUDED B=2" || echo "NodeName=n1 NodeAddr=$ADDRESS Arch=x" ;;
    esac""",
    "sinfo": """case "$*" in
        *--nodes=*) echo " a gpu:8" ;;
        *) printf "n%d a gpu:8\\n" 1 2 3 4 5 5; echo "n6 b gpu:8" ;;
    esac""",
    "scancel": 'echo "$@" >"$NOTES/told"',
}


@pytest.fixture
def batch(spec, workdir):
    """Starts the script as SLURM does, with the variables that it sets."""
    tools, notes = workdir / "bin", workdir / "notes"
    tools.mkdir()
    notes.mkdir()
    for name, body in STUBS.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)

    def start(text: str | None = None, code: int = 0, **variables: str) -> subprocess.Popen:
        (workdir / "job.sh").write_text(text or script(spec, SlurmOptions(), "made"))
        environ = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "NOTES": str(notes),
            "CODE": str(code),
            "SLOW": "",
            "ADDRESS": "10.0.0.1",
            "SLURM_JOB_ID": "77",
            "SLURMD_NODENAME": "n1",
            "SLURM_JOB_PARTITION": "gpu",
            "EXCLUDED": "(null)",
        }
        return subprocess.Popen(["bash", "job.sh"], env=environ | variables, cwd=workdir, stderr=subprocess.PIPE)

    start.notes = notes
    return start


def test_the_secret_is_there_while_the_job_runs_for_its_owner_alone(batch, spec):
    assert batch().wait() == 0
    assert (batch.notes / "mode").read_text().strip() == "600"
    assert re.fullmatch(r"[0-9a-f]{32}", (batch.notes / "secret").read_text())
    assert list(Path(spec.run_dir).iterdir()) == []
    first = (batch.notes / "secret").read_text()
    assert batch().wait() == 0 and (batch.notes / "secret").read_text() != first


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1", ""])
def test_the_head_is_never_localhost(batch, address):
    assert batch(ADDRESS=address).wait() == 0
    assert (batch.notes / "head").read_text().strip() == "unset"
    assert batch(ADDRESS="10.0.0.1").wait() == 0
    assert (batch.notes / "head").read_text().strip() == "10.0.0.1"


@pytest.mark.parametrize(
    "code, restarts, again",
    [
        (0, 0, False), (1, 0, False), (2, 0, False), (3, 0, False), (4, 0, False), (6, 0, False), (130, 0, False),
        (127, 0, False), (5, 0, True), (5, MOST_FAILURES - 1, True), (5, MOST_FAILURES, False), (137, 0, True),
        (75, MOST_FAILURES, True), (75, MOST_RESTARTS, False),
    ],
)  # fmt: skip
def test_a_requeue_follows_75_and_5_alone_and_only_so_often(batch, code, restarts, again):
    """What was killed from outside counts as hardware."""
    assert batch(code=code, SLURM_RESTART_COUNT=str(restarts)).wait() == code
    assert (batch.notes / "requeued").exists() == again
    assert not again or (batch.notes / "requeued").read_text().strip() == "77"


def test_a_run_that_a_person_has_stopped_is_not_started_again(batch, spec):
    stop = spec.run_of(spec.parts[0]) / "stop"
    stop.parent.mkdir(parents=True)
    stop.touch()
    assert batch(code=75).wait() == 75
    assert not (batch.notes / "requeued").exists()


@pytest.mark.parametrize(
    "slow, before, out",
    [("n2", "(null)", "n2"), ("n2", "n9", "n9,n2"), ("n2,n3", "(null)", None), ("", "(null)", None)],
)
def test_a_requeue_leaves_out_what_the_checks_have_named_where_enough_others_are_there(batch, spec, slow, before, out):
    """The partition has five nodes of this kind, and the job takes four."""
    if slow:
        run = RunDir(spec.run_of(spec.parts[0]))
        run.path.mkdir(parents=True)
        run.exclude.write_text(f"{slow}\n")
    assert batch(code=75, EXCLUDED=before).wait() == 75
    assert (batch.notes / "requeued").exists()
    assert (batch.notes / "out").exists() == (out is not None)
    assert out is None or (batch.notes / "out").read_text() == f"ExcNodeList={out}\n"


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_the_notice_before_the_end_reaches_the_steps_and_the_shell_waits_for_them(batch):
    job = batch(code=75, SLOW="yes")
    wait_for(batch.notes / "srun")
    time.sleep(0.2)  # the shell has set its traps
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 75
    assert (batch.notes / "told").read_text().split() == ["--signal=TERM", "77"]
    assert (batch.notes / "requeued").exists()


def test_a_cancelled_job_waits_for_its_steps_and_is_not_started_again(batch):
    """SLURM itself has sent TERM to the steps: a second one would end them at once."""
    job = batch(code=75, SLOW="yes")
    wait_for(batch.notes / "srun")
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert job.poll() is None and not (batch.notes / "told").exists()
    (batch.notes / "told").touch()
    assert job.wait(20) == 75
    assert not (batch.notes / "requeued").exists()


def test_each_part_of_an_array_runs_its_own_file_and_is_requeued_alone(batch, spec, workdir):
    other = replace(spec.parts[0], name="other", file="/plans/other file.toml")
    both = replace(spec, parts=(spec.parts[0], other))
    text = script(both, SlurmOptions(at_once=1), "made")
    assert directives(text)["array"] == "0-1%1"
    for number, part in enumerate(both.parts):
        job = batch(text, code=5, SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID=str(number))
        assert job.wait() == 5
        words = (batch.notes / "srun").read_text().splitlines()
        assert tuple(words[words.index("shardwise") :]) == both.command(part)
        assert (batch.notes / "requeued").read_text().strip() == f"70_{number}"


# Partitions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sinfo(workdir: Path) -> dict[str, str]:
    """An environment whose sinfo answers as SLURM's does for two partitions."""
    tools = workdir / "sinfo-bin"
    tools.mkdir()
    (tools / "sinfo").write_text(
        '#!/bin/sh\nprintf "gpu*|2|1-00:00:00|gpu:h100:8(S:0-1)\\ngpu*|62|1-00:00:00|gpu:8\\n"\n'
        'printf "small|2|infinite|gpu:2\\nshort|64|2:00:00|gpu:8\\ncpu|9|infinite|(null)\\n"\n'
    )
    (tools / "sinfo").chmod(0o755)
    return {"PATH": f"{tools}:/usr/bin:/bin"}


def test_a_job_that_its_partition_can_run_stays_as_it_is(spec, sinfo):
    assert fitted(spec, "gpu", False, sinfo) == spec == fitted(spec, None, False, sinfo)
    assert fitted(spec, "anything", False, {"PATH": ""}) == spec, "without SLURM nothing is known"


@pytest.mark.parametrize(
    "partition, what, fix",
    [
        ("gpus", "no partition `gpus`", "--partition gpu"),
        ("small", "takes 4 nodes, and partition small has 2", "--partition gpu"),
        ("cpu", "8 GPUs to a node", "--partition gpu"),
    ],
)
def test_what_a_partition_cannot_run_is_refused(spec, sinfo, partition, what, fix):
    with pytest.raises(UserError, match=what) as refused:
        fitted(spec, partition, False, sinfo)
    assert refused.value.fix == fix


@pytest.mark.parametrize(
    "said, why",
    [
        ("slurm_load_partitions: Zero Bytes were transmitted or received", "good for 5 minutes"),
        (
            "sinfo: error: Munge encode failed: no\nslurm_load_partitions: Protocol authentication error",
            "munged",
        ),
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", "Unable to contact"),
    ],
)
def test_a_slurm_that_does_not_answer_is_no_slurm_without_partitions(spec, sinfo, said, why, workdir, capsys):
    (workdir / "sinfo-bin" / "sinfo").write_text(f"#!/bin/sh\nprintf '{said}\n' >&2\nexit 1\n")
    with pytest.raises(UserError, match="SLURM refuses what this host asks: ") as refused:
        fitted(spec, "gpu", False, sinfo, is_submitted=True)
    assert why in refused.value.why and "\n" not in str(refused.value.why)
    assert fitted(spec, "gpu", False, sinfo) == spec
    assert "is not compared with its partition" in capsys.readouterr().err


def test_65_nodes_are_more_than_the_default_partition_has(spec, sinfo):
    with pytest.raises(UserError, match="takes 65 nodes, and partition gpu has 64"):
        fitted(replace(spec, nodes=65), None, False, sinfo)


def test_a_partition_s_time_limit_cuts_what_was_predicted_and_refuses_what_was_asked(spec, sinfo):
    assert spec.seconds > 7200
    cut = fitted(spec, "short", False, sinfo)
    assert cut.seconds == 7200 and "requeues" in cut.why["time"]
    with pytest.raises(UserError, match="longer than partition short"):
        fitted(spec, "short", True, sinfo)
