"""The mistakes of batch scripts for SLURM, one function each. With a plan the script is compared with what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from shardwise.config.units import format_bytes, format_seconds
from shardwise.launch.mistakes.batch_script import BatchScript, ShellLine
from shardwise.launch.mistakes.mistake import Mistake, local_run_dir, loopback_head, not_resumed, written_secret
from shardwise.launch.spec import LaunchSpec

Check = Callable[[BatchScript, LaunchSpec | None], Iterator[Mistake]]
TRAINS = ("shardwise", "torchrun", "accelerate", "deepspeed")


def mistakes_of_slurm(text: str, plan: LaunchSpec | None) -> list[Mistake]:
    """Returns the mistakes of a batch script in the order of their lines."""
    script = BatchScript(text)
    return sorted({found for check in CHECKS for found in check(script, plan)}, key=lambda one: (one.line, one.what))


def _training(script: BatchScript) -> list[ShellLine]:
    """Returns the lines that start the training."""
    named = [line for line in script.lines if re.search(r"\b(?:shardwise|torchrun|python\d?\S*)\b.*\btrain", line.text)]
    return named or script.calling(*TRAINS)


def two_launchers(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    tasks, gpus = script.value("ntasks-per-node"), script.gpus_per_node
    for line in script.calling("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        if tasks and tasks.isdecimal() and int(tasks) > 1 and line.starts("srun"):
            yield Mistake(
                script.line_of("ntasks-per-node"),
                f"srun starts {tasks} tasks per node, and torchrun in line {line.number} starts ranks in each",
                f"{int(tasks) * (gpus or int(tasks))} processes share {gpus or tasks} GPUs of a node",
                "--ntasks-per-node=1",
            )


def late_directives(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for name, number in script.late:
        yield Mistake(
            number,
            f"#SBATCH --{name} stands behind the first command",
            "sbatch stops reading there: it is a comment",
            "move it above the first command",
        )


def no_notice(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    signal, traps = script.value("signal"), [line for line in script.lines if line.starts("trap")]
    grace = plan.grace_s if plan else 120
    if signal is None:
        yield Mistake(
            script.line_of("time"),
            "no --signal: nothing is told before the time is over",
            "the job is killed in the midst of a step, and everything since the last checkpoint is lost",
            f"#SBATCH --signal=B:USR1@{grace}, and a trap that passes it on to the steps",
        )
        return
    name = re.sub(r"^[BR]+:|@.*$", "", signal).removeprefix("SIG") or "USR1"
    trapped = any(re.search(rf"\b(?:SIG)?{name}\b", line.text) for line in traps)
    if not signal.startswith("B") and trapped:
        yield Mistake(
            script.line_of("signal"),
            f"--signal={signal} does not reach the batch shell",
            "without B: it goes to the steps alone, so the trap below never runs",
            f"#SBATCH --signal=B:{name}@{grace}",
        )
    if signal.startswith("B") and not trapped:
        yield Mistake(
            script.line_of("signal"),
            f"nothing in the script answers the {name} of --signal",
            "it ends the batch shell, and with it the job, at once",
            f"trap 'scancel --signal=TERM $SLURM_JOB_ID' {name}, and wait for srun",
        )
    notice = re.search(r"@(\d+)", signal)
    if plan and notice and int(notice[1]) < plan.grace_s:
        yield Mistake(
            script.line_of("signal"),
            f"the notice comes {notice[1]} s before the end",
            f"{plan.why['grace']}: {plan.grace_s} s",
            f"#SBATCH --signal=B:{name}@{plan.grace_s}",
        )


def trap_never_runs(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    traps = [line for line in script.lines if line.starts("trap") and re.search(r"\b(?:USR1|USR2|TERM)\b", line.text)]
    for line in script.calling("srun"):
        if traps and not re.search(r"&\s*$", line.text) and "exec" not in line.words[:1]:
            yield Mistake(
                line.number,
                "srun runs in the foreground, and the script has a trap",
                "bash runs a trap only when the command in the foreground has ended: too late",
                "srun ... & and then wait for it",
            )


def no_requeue(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    requeues = [line for line in script.calling("scontrol") if "requeue" in line.text]
    only_checks = any("--preflight" in line.text for line in script.lines)
    if "requeue" not in script.asked and not requeues and not only_checks:
        yield Mistake(
            script.line_of("no-requeue", "time"),
            "no --requeue",
            "a lost node or the end of the time ends the training; somebody has to notice and submit it again",
            "#SBATCH --requeue, with --resume auto in the line that trains",
        )
    for line in requeues:
        before = "\n".join(one.text for one in script.lines if one.number <= line.number)
        if not re.search(r"\b(?:75|case|-eq|==|\$\?)", before.split("srun")[-1]) or re.search(
            r"\|\|\s*scontrol", line.text
        ):
            yield Mistake(
                line.number,
                "the job is requeued whatever its exit code is",
                "a mistake in the config, memory that is not enough or a diverged loss fail again and again",
                "requeue after 75 (stopped on purpose) and 5 (hardware, network) alone",
            )
        elif "SLURM_RESTART_COUNT" not in before:
            yield Mistake(
                line.number,
                "nothing limits how often the job is requeued",
                "a job that fails at once would go round for as long as nobody looks",
                '[ "${SLURM_RESTART_COUNT:-0}" -lt 5 ] && scontrol requeue $SLURM_JOB_ID',
            )


def output_is_cut(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    again = "requeue" in script.asked or any("requeue" in line.text for line in script.calling("scontrol"))
    if again and script.value("open-mode") != "append":
        yield Mistake(
            script.line_of("requeue", "output"),
            "no --open-mode=append",
            "a requeue writes over the output that says why the first attempt ended",
            "#SBATCH --open-mode=append",
        )


def starts_on_one_node(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    if script.nodes < 2:
        return
    for line in _training(script):
        if not line.starts("srun", "mpirun", "mpiexec", "clush", "pdsh", "ssh"):
            yield Mistake(
                line.number,
                f"this line runs on the first of {script.nodes} nodes alone",
                "a batch script is one shell on one node; srun starts something on all of them",
                f"srun --ntasks-per-node=1 {line.text.rstrip(' &')[:60]}",
            )


def head_is_each_node(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for line in script.lines:
        if re.search(r"\|\|\s*(?:echo\s+)?[\"']?(?:localhost|127\.0\.0\.1)", line.text) or re.search(
            r":-(?:localhost|127\.0\.0\.1)\}", line.text
        ):
            yield Mistake(
                line.number,
                "the address of node 0 falls back to localhost",
                "where scontrol is missing, as in a container, every node trains a world of its own and says nothing",
                "let it fail, or compute the address in the batch shell and export it",
            )
    if script.nodes < 2:
        return
    for number, name, value in script.assignments():
        yield from loopback_head(number, name, value)
        if name in ("MASTER_ADDR", "SHARDWISE_HEAD") and re.search(
            r"hostname\s+(?:--ip-address|-i\b|--fqdn|-f\b)|getfqdn|gethostbyname", value
        ):
            yield Mistake(
                number,
                f"{name} is asked from `hostname`",
                "many systems have 127.0.1.1 for their own name, which leads nowhere from other nodes",
                f'{name}=$(scontrol show node "$SLURMD_NODENAME" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p")',
            )
    for line in script.calling("srun"):
        inside = re.search(r"(?:ba)?sh\s+-\w*c\s+'([^']*)'", line.text)
        if inside and re.search(r"MASTER_ADDR=\$\(hostname", inside[1]):
            yield Mistake(
                line.number,
                "MASTER_ADDR is computed by every task",
                "each node names itself, so no two find each other",
                "compute it once in the batch shell, before srun, and export it",
            )


def network_is_loopback(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for number, name, value in script.assignments():
        if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and value.strip("\"'=") == "lo" and script.nodes > 1:
            yield Mistake(
                number, f"{name} is lo", "nodes cannot reach each other over it", f"{name}=the interface of the network"
            )


def local_directory(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for line in script.lines:
        for path in re.findall(r"\brun\.dir=(\S+)", line.text):
            yield from local_run_dir(line.number, path)
        relative = line.starts("cd") and not any("run.dir=" in one.text for one in script.lines)
        if relative and len(line.words) > 1 and _training(script):
            yield from local_run_dir(line.number, line.words[1])


def secrets_in_text(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for number, name, value in script.assignments():
        yield from written_secret(number, name, value)


def begins_anew(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for line in script.lines:
        if re.search(r"\bshardwise\b(?:\s+-\S+)*\s+train\b", line.text):
            yield from not_resumed(line.number, line.text)


def code_is_lost(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    has_pipefail = any("pipefail" in line.text for line in script.lines)
    for line in {*script.calling("srun"), *_training(script)}:
        swallowed = re.search(r"\|\|\s*(?:true|:)(?:\s|$)", line.text)
        piped = re.search(r"(?<!\|)\|(?!\|)\s*tee\b", line.text) and not has_pipefail
        if swallowed or piped:
            yield Mistake(
                line.number,
                "the exit code of the training is lost",
                "SLURM and whoever waits for the job take it for finished",
                "end the script with that code" if swallowed else "set -o pipefail, or --output in place of tee",
            )


def few_cores(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    cpus = script.value("cpus-per-task")
    is_said = any(name == "SRUN_CPUS_PER_TASK" for _, name, _ in script.assignments())
    for line in script.calling("srun"):
        if cpus and not is_said and not re.search(r"\s(?:--cpus-per-task|-c)\b", line.text):
            yield Mistake(
                line.number,
                "srun does not say --cpus-per-task",
                "since SLURM 22.05 it no longer takes it from sbatch: each task gets one core",
                f"srun --cpus-per-task={cpus} ...",
            )


def environment_is_lost(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    if (script.value("export") or "").upper() != "NONE":
        return
    for line in script.calling("srun"):
        if "--export" not in line.text:
            yield Mistake(
                line.number,
                "the ranks get no environment: --export=NONE reaches srun as well",
                "what the script sets, such as PATH, is missing on the nodes",
                "srun --export=ALL ...",
            )


def unlike_the_plan(script: BatchScript, plan: LaunchSpec | None) -> Iterator[Mistake]:
    if plan is None:
        return
    gpus, memory, seconds = script.gpus_per_node, script.memory_bytes, script.seconds
    if "nodes" in script.asked and script.nodes != plan.nodes:
        yield Mistake(
            script.line_of("nodes"), f"--nodes={script.nodes}", plan.why["nodes"], f"#SBATCH --nodes={plan.nodes}"
        )
    if plan.gpus_per_node and gpus != plan.gpus_per_node:
        yield Mistake(
            script.line_of("gpus-per-node", "gres", "gpus", "gpus-per-task"),
            f"{gpus or 'no'} GPUs per node are asked for, and the plan has {plan.gpus_per_node}",
            plan.why["gpus"],
            f"#SBATCH --gpus-per-node={plan.gpus_per_node}",
        )
    if memory is not None and memory < plan.memory_bytes:
        yield Mistake(
            script.line_of("mem", "mem-per-gpu", "mem-per-cpu"),
            f"{format_bytes(memory)} of memory per node are asked for, and the plan needs "
            f"{format_bytes(plan.memory_bytes)}",
            plan.why["memory"],
            f"#SBATCH --mem={-(-plan.memory_bytes // 2**20)}M",
        )
    if seconds is not None and seconds < (plan.step_s or 0) + plan.grace_s:
        yield Mistake(
            script.line_of("time"),
            f"{format_seconds(seconds)} is less than a step and saving it take",
            f"a step takes {format_seconds(plan.step_s or 0)}, saving {format_seconds(plan.grace_s)}: no restart would "
            "ever come further",
            f"#SBATCH --time={-(-plan.seconds // 60)}",
        )


CHECKS: tuple[Check, ...] = (
    two_launchers,
    late_directives,
    no_notice,
    trap_never_runs,
    no_requeue,
    output_is_cut,
    starts_on_one_node,
    head_is_each_node,
    network_is_loopback,
    local_directory,
    secrets_in_text,
    begins_anew,
    code_is_lost,
    few_cores,
    environment_is_lost,
    unlike_the_plan,
)
