"""Writes the batch script of a job for SLURM: what `sbatch` is asked for with a reason per line, and the shell that
starts one process per node with srun, passes notices on and asks for a requeue.

Invariants: no secret is in the text; the head's address is never localhost; a requeue follows the exit codes 75 and 5
alone, and only so often. Read next: slurm.py, which finds the started processes' places.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.errors import Exit, UserError
from shardwise.launch.spec import OURS, LaunchSpec, clock, in_shell

MOST_RESTARTS = 100
"""Requeues of a job that stops on time, with its work saved: each goes on where the last one ended."""

MOST_FAILURES = 5
"""Restarts of any kind after which hardware or network that fails is left to a person."""

PASSED_ON = ("partition", "account", "qos", "constraint", "reservation", "switches", "nodelist", "exclude")
"""Options that sbatch has under the same names; their values are passed on as they are."""


@dataclass(frozen=True)
class SlurmOptions:
    """What a person says about the job that only SLURM knows."""

    passed_on: tuple[tuple[str, str], ...] = ()  # names of PASSED_ON and their values
    exclusive: bool = False
    gres: str | None = None  # how this cluster calls its GPUs, such as gpu or gpu:h100; None: --gpus-per-node
    no_kill: bool = False
    container: str | None = None  # an image
    runtime: str = "pyxis"  # who runs it: pyxis | apptainer
    mounts: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()  # lines of the person's for the batch shell, such as `module load cuda`
    at_once: int | None = None  # parts of a job array that run at a time

    def __post_init__(self) -> None:
        mounts = [("mount", value) for value in self.mounts]
        for name, value in (*self.passed_on, *mounts, ("gres", self.gres), ("container", self.container)):
            if value and not value.isprintable():
                raise UserError(
                    f"--{name} has a line break or a control character",
                    why="it becomes a line of a script that a shell runs",
                    fix="give it as one line",
                )


def script(spec: LaunchSpec, options: SlurmOptions, origin: str) -> str:
    """Returns the text of the script. `origin` is the command line that it was made by."""
    lines = ["#!/bin/bash", f"# Written by `{origin}`.", f"# {spec.predicted}", ""]
    for word, why in _directives(spec, options):
        lines += [f"# {why}", f"#SBATCH {word}"]
    return "\n".join([*lines, "", *_body(spec, options)]) + "\n"


def _directives(spec: LaunchSpec, options: SlurmOptions) -> Iterator[tuple[str, str]]:
    """Yields what sbatch is asked for, each with its reason."""
    why, several = spec.why, len(spec.parts) > 1
    yield f"--job-name={spec.name}", "the name of the run"
    yield f"--nodes={spec.nodes}", why["nodes"]
    yield "--ntasks-per-node=1", "one process per node, which starts the ranks of its node itself"
    if spec.gpus_per_node and options.gres:
        yield f"--gres={options.gres}:{spec.gpus_per_node}", why["gpus"]
    elif spec.gpus_per_node:
        yield f"--gpus-per-node={spec.gpus_per_node}", why["gpus"]
    yield f"--cpus-per-task={spec.cpus_per_node}", why["cpus"]
    mebibytes = -(-spec.memory_bytes // 2**20)
    if options.exclusive:
        yield "--exclusive", "no other job on these nodes, as asked"
        yield "--mem=0", f"all memory of a node that is ours alone; needed are {mebibytes} MiB: {why['memory']}"
    else:
        yield f"--mem={mebibytes}M", why["memory"]
    yield f"--time={clock(spec.seconds)}", why["time"]
    yield f"--signal=B:USR1@{spec.grace_s}", f"so many seconds before the end the shell below is told: {why['grace']}"
    if spec.is_check:
        yield "--no-requeue", "the nodes are checked, once"
    else:
        yield (
            "--requeue",
            "SLURM starts the job again when a node is lost; `--resume auto` goes on from the newest commit",
        )
    if options.no_kill:
        yield "--no-kill", "a lost node does not end the job, as asked: the others say what was lost, and exit with 5"
    yield "--open-mode=append", "a requeue goes on in the same file"
    if several:
        last = len(spec.parts) - 1
        limit = f"%{options.at_once}" if options.at_once else ""
        yield f"--array=0-{last}{limit}", f"{last + 1} config files, one each"
    yield f"--output={spec.name}-{'%A_%a' if several else '%j'}.out", "where the first rank of the job prints"
    for name, value in options.passed_on:
        yield f"--{name}={value}", "as asked"


def _body(spec: LaunchSpec, options: SlurmOptions) -> Iterator[str]:
    """Yields the lines of the shell, which runs on the first node of the job."""
    yield "set -u"
    yield from options.prepare
    yield f"run_dir={shlex.quote(spec.run_dir)}"
    yield from _parts(spec)
    yield _HEAD
    yield _SECRET
    yield from _step(spec, options)
    yield _NOTICE
    yield _WAIT
    if spec.is_check:
        yield 'echo "job $job: exit code $code${notice:+, ended by $notice}" >&2\nexit "$code"'
        return
    yield _AGAIN.format(
        stopped=int(Exit.STOPPED),
        hardware=int(Exit.HARDWARE),
        most_restarts=MOST_RESTARTS,
        most_failures=MOST_FAILURES,
    )
    if "nodelist" not in dict(options.passed_on):  # whoever has named nodes wants these
        yield _LEAVE_OUT.format(nodes=spec.nodes)
    yield 'exit "$code"'


def _parts(spec: LaunchSpec) -> Iterator[str]:
    if len(spec.parts) == 1:
        yield f"name={shlex.quote(spec.parts[0].name)}"
        yield "job=$SLURM_JOB_ID"
        return
    yield f"names=({in_shell(tuple(part.name for part in spec.parts))})"
    yield f"files=({in_shell(tuple(part.file for part in spec.parts))})"
    yield "name=${names[$SLURM_ARRAY_TASK_ID]}"
    yield "file=${files[$SLURM_ARRAY_TASK_ID]}"
    yield "# The number of one part of an array may be that of the whole array: a part is named by both."
    yield "job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"


_HEAD = """
# This shell runs on the first node of the job, the head. The others reach it under its NodeAddr; where that is missing
# or means each node itself, it stays unset, and every node looks for another address or says what it has tried.
SHARDWISE_HEAD=$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
case "$SHARDWISE_HEAD" in
  "" | localhost | localhost.* | 127.* | ::1 | 0.0.0.0) unset SHARDWISE_HEAD ;;
  *) export SHARDWISE_HEAD ;;
esac"""

_SECRET = """
# 128 random bits that every process shows before it is let in; only their owner may read the file.
export SHARDWISE_SECRET_FILE="$run_dir/.secret-slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
mkdir -p "$run_dir" && rm -f "$SHARDWISE_SECRET_FILE" || exit 2
(umask 077 && set -o noclobber && od -An -N16 -tx1 /dev/urandom | tr -d ' \\n' >"$SHARDWISE_SECRET_FILE") || exit 2
trap 'rm -f "$SHARDWISE_SECRET_FILE"' EXIT"""

_NOTICE = """
# USR1 comes before the time is over and is passed on as TERM: the step ends, its state is saved. When the job is
# cancelled or preempted, SLURM itself sends TERM to all processes; a cancelled job is not started again, a preempted
# one is, by SLURM.
notice=
# shellcheck disable=SC2317 # the traps call it
time_is_over() {
  notice=USR1
  echo "job $job: the time is nearly over; the run saves its state and ends" >&2
  for _ in 1 2 3; do
    if scancel --signal=TERM "$job"; then break; fi
    sleep 5
  done
}
trap time_is_over USR1
trap 'notice=TERM' TERM"""

_WAIT = """
# wait returns early when a signal comes in.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?"""

_AGAIN = """
restarts=${{SLURM_RESTART_COUNT:-0}}
again=
if [ "$notice" != TERM ] && [ ! -e "$run_dir/$name/stop" ]; then
  case $code in
    {stopped}) [ "$restarts" -lt {most_restarts} ] && again=yes ;; # stopped on purpose, to go on
    {hardware} | 129 | 13[1-9] | 14[0-9] | 15[0-9]) # hardware, network, or killed from outside
      [ "$restarts" -lt {most_failures} ] && again=yes ;;
  esac
fi
echo "job $job: exit code $code after $restarts restarts${{again:+, starts again}}" >&2
rm -f "$SHARDWISE_SECRET_FILE"
if [ -n "$again" ]; then
  trap '' TERM # SLURM ends this shell when the job is queued again
  scontrol requeue "$job"
fi"""

_LEAVE_OUT = """
# Nodes that the checks have named (the file `exclude` of the run) stay out of the next start, where the partition has
# enough others of this node's kind.
slow=$(cat "$run_dir/$name/exclude" 2>/dev/null)
if [ -n "$again" ] && [ -n "$slow" ]; then
  ask() {{ sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" "$@"; }}
  kind=$(ask --nodes="$SLURMD_NODENAME" --format=' %f %G')
  others=$(ask --states=idle,alloc,mix,comp --format='%N %f %G' | sort -u | grep -F -- "$kind" | cut -d ' ' -f 1 |
    grep -cvxF -- "$(scontrol show hostnames "$slow")")
  before=$(scontrol --oneliner show job "$job" | sed -n 's/.* ExcNodeList=\\([^ (]\\+\\).*/\\1,/p')
  if [ "$others" -lt {nodes} ]; then
    echo "job $job: $slow is slow, but without it there are $others nodes of {nodes}" >&2
  elif scontrol update JobId="$job" ExcNodeList="$before$slow"; then
    echo "job $job: starts again without $slow, which is slow" >&2
  fi
fi"""


def _step(spec: LaunchSpec, options: SlurmOptions) -> Iterator[str]:
    """Yields the lines that start one process per node."""
    part = spec.parts[0]
    words = ["srun", f"--nodes={spec.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={spec.cpus_per_node}"]
    words += ["--mpi=none", "--label", "--kill-on-bad-exit=0", "--wait=600"]
    words += ["--no-kill"] if options.no_kill else []
    words.append("--export=" + ",".join((*spec.environment, *OURS)))
    if options.container and options.runtime == "pyxis":
        words.append(f"--container-image={options.container}")
        words.append("--container-mounts=" + ",".join(_mounts(spec, options)))
        words.append("--no-container-mount-home")
    command = list(spec.command(part))
    if options.container and options.runtime == "apptainer":
        binds = [word for mount in _mounts(spec, options) for word in ("--bind", mount)]
        command = ["apptainer", "exec", *(["--nv"] if spec.gpus_per_node else []), *binds, options.container, *command]
    text = " \\\n  ".join(map(shlex.quote, words))
    line = in_shell(tuple(command))
    if len(spec.parts) > 1:
        line = line.replace(f" {shlex.quote(part.file)} ", ' "$file" ')
        line = line.replace(f" {shlex.quote(f'run.name={part.name}')} ", ' run.name="$name" ')
    yield ""
    yield "# The one line of every node, at the start and after every restart."
    yield "# Of this shell's variables, ranks see those that are named here."
    yield f"{text} \\"
    yield f"  {line} &"
    yield "step=$!"


def _mounts(spec: LaunchSpec, options: SlurmOptions) -> tuple[str, ...]:
    """Returns what a container must see under the same path: the runs and the config files."""
    folders = [spec.run_dir, *(part.file.rpartition("/")[0] or "/" for part in spec.parts)]
    return tuple(dict.fromkeys([*(f"{folder}:{folder}" for folder in folders), *options.mounts]))
