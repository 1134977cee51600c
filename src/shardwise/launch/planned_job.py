"""Makes a `LaunchSpec` from plan files: asks the planner what each will take, and adds what a job needs around it.

A file of `shardwise plan` names its cluster in its second line; for others it is said with --cluster, or --nodes and
--time. Invariant: what no scheduler could run is refused here, before anything is queued. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.config.load import Loaded, load_config
from shardwise.config.units import format_bytes, format_seconds, parse_seconds
from shardwise.config.values import read_amount
from shardwise.errors import UserError
from shardwise.launch.spec import ENVIRONMENT, OF_LOGGERS, JobPart, LaunchSpec
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.prediction.predict import predict
from shardwise.plan.prediction.states import WEIGHT_BYTES, state_bytes
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.usual import constraints_of, job_of_run, plan_of
from shardwise.run.build import model_spec
from shardwise.spec.addresses import is_address
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction

ROW = re.compile(r"^# row \d+ of \d+, question [0-9a-f]+: .* on \d+ of (\S+)$", re.MULTILINE)

START_S = 600
"""Seconds beside the steps: containers, imports, the first data, checkpoints, the proof at the end."""

LEAST_START_S = 30
"""Seconds before the first step that no job does without."""

CHECK_S = 600
"""Seconds for a job that only checks its nodes."""

CPUS_PER_GPU = 6
"""The main thread, the loader, autograd's, NCCL's and the checkpoint's, and one to spare."""

PROCESS_MEMORY = 8 * 2**30
"""Bytes of CPU memory that a rank on a GPU takes: libraries, the driver's share, pinned buffers, the loader."""

WRITE_RATE = 500e6
"""Bytes per second at which a checkpoint reaches shared storage, where nobody has measured it."""

LEAST_GRACE_S, MOST_GRACE_S = 120, 3600
NAME_LENGTH = 40  # characters: a name of Kubernetes has 63, with an index and what the operator adds


@dataclass(frozen=True)
class Wanted:
    """What the person says about the job on the command line; None where the plan decides."""

    cluster: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_bytes: int | None = None
    time: str | None = None
    grace: str | None = None
    name: str | None = None
    env: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """One plan file, read and predicted."""

    file: Path
    loaded: Loaded
    spec: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    prediction: Prediction


def launch_spec(files: Sequence[str], words: Sequence[str], wanted: Wanted) -> LaunchSpec:
    """Returns what the job of one or several plan files needs. Several are the parts of a job array: each gets the
    nodes, memory and time of the largest."""
    jobs = [_read(Path(file), words, wanted) for file in files]
    first, largest = jobs[0], max(jobs, key=_seconds_of_steps)
    for job in jobs:
        if job.plan.world != first.plan.world or job.cluster.per_node != first.cluster.per_node:
            raise UserError(
                f"{job.file} is for {job.plan.world} ranks, and {first.file} for {first.plan.world}",
                why="all parts of a job array ask for the same nodes",
                fix="launch them one by one",
            )
    nodes, per_node, placed = _nodes(first, wanted)
    gpus = per_node if first.plan.device == "cuda" else 0
    grace, why_grace = _grace(largest, wanted)
    seconds, why_time = _time(largest, wanted, grace)
    cpus, why_cpus = _cpus(first, per_node, wanted)
    memory, why_memory = _memory(jobs, per_node, wanted)
    config = first.loaded.config
    named = [name for logger in config.run.loggers for name in OF_LOGGERS.get(logger, ())]
    parts = tuple(JobPart(str(job.file.resolve()), _run_name(job, wanted)) for job in jobs)
    if len({part.name for part in parts}) < len(parts):
        raise UserError("two parts of the job array have one name", why="each is a run", fix="rename a file")
    sources = (config.data.source,) if isinstance(config.data.source, str) else tuple(config.data.source)
    return LaunchSpec(
        parts=parts,
        name=parts[0].name,
        run_dir=str(Path(config.run.dir).absolute()),
        words=tuple(word for word in words if not word.startswith(("run.dir=", "run.name="))),
        nodes=nodes,
        ranks_per_node=per_node,
        gpus_per_node=gpus,
        gpu=first.cluster.device.name if gpus else "",
        cpus_per_node=cpus,
        memory_bytes=memory,
        seconds=seconds,
        step_s=largest.prediction.high,
        grace_s=grace,
        environment=tuple(dict.fromkeys((*ENVIRONMENT, *named, *wanted.env))),
        reads_network=bool(set(config.run.loggers) & set(OF_LOGGERS)) or any(map(is_address, map(str, sources))),
        why={
            "nodes": placed,
            "gpus": f"the plan has a rank on each: {first.plan.layout}",
            "cpus": why_cpus,
            "memory": why_memory,
            "time": why_time,
            "grace": why_grace,
        },
        predicted=_predicted(largest),
        plan_text=first.file.read_text(encoding="utf-8"),
    )


def checking(spec: LaunchSpec) -> LaunchSpec:
    """Returns the job that only checks the nodes of another."""
    why = {**spec.why, "time": "the checks take a minute and a half at most, starting not much more"}
    return replace(spec, is_check=True, seconds=CHECK_S, grace_s=LEAST_START_S, name=f"{spec.name}-check", why=why)


def _read(file: Path, words: Sequence[str], wanted: Wanted) -> _Job:
    loaded = load_config(str(file), list(words))
    spec = model_spec(loaded.config.model)
    cluster = _cluster(file, loaded, wanted)
    device = cluster.device
    is_gpu = device.kind == "cuda"
    gpu = Gpu(device.name, device.memory, device.capability, cluster.per_node - 1)
    machine = Machine(
        CPUS_PER_GPU * cluster.world if is_gpu else cluster.world,
        cluster.host_share * cluster.world,
        (gpu,) * cluster.world if is_gpu else (),
        "linux",
    )
    asked = Asked(loaded.config, spec, machine, None, cluster, place=cluster.name)
    plan = plan_of(asked, 1, loaded.origins)
    job = job_of_run(asked, plan.precision, constraints_of(loaded.config))
    if loaded.config.train.epochs and wanted.time is None:
        raise UserError(
            "how long this trains is not known here: train.epochs counts passes over data that is not read yet",
            why="the job must ask for a time",
            fix="--time 1d, or train.steps or train.tokens in place of train.epochs",
        )
    return _Job(file, loaded, spec, cluster, plan, predict(spec, cluster, job, plan))


def _cluster(file: Path, loaded: Loaded, wanted: Wanted) -> ClusterSpec:
    """Returns the cluster that the person names, or the one that the file was planned for."""
    row = ROW.search(file.read_text(encoding="utf-8")[:4000])
    name = wanted.cluster or (row[1] if row else None)
    if name is None:
        raise UserError(
            f"{file} does not say for which cluster it is",
            why="nodes, memory and time of a job follow from that; files of `shardwise plan` name theirs",
            fix="--cluster 4x8xh100, or --cluster cluster.toml of `shardwise doctor --out`",
        )
    try:
        cluster = read_cluster(name)
    except UserError:
        if wanted.cluster:
            raise
        raise UserError(
            f"{file} is for a cluster of the name {name}, which is a file of somebody's",
            why="what it holds is not in the plan",
            fix="--cluster FILE, the one that was given to `shardwise plan`",
        ) from None
    if wanted.nodes and wanted.nodes > cluster.nodes:
        raise UserError(
            f"--nodes {wanted.nodes} is more than the plan has",
            why=f"{file} is for {cluster.name}, {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}",
            fix=f"plan for them first: `shardwise plan MODEL --cluster {wanted.nodes}x{cluster.per_node}x"
            f"{cluster.device.name}`",
        )
    if wanted.gpus_per_node and wanted.gpus_per_node != cluster.per_node and cluster.device.kind == "cuda":
        raise UserError(
            f"--gpus-per-node {wanted.gpus_per_node} is not what the plan is for",
            why=f"{file} is for nodes of {cluster.per_node}: which ranks share a node decides what it costs",
            fix=f"--gpus-per-node {cluster.per_node}, or plan for nodes of {wanted.gpus_per_node}",
        )
    return cluster


def _nodes(job: _Job, wanted: Wanted) -> tuple[int, int, str]:
    """Returns the number of nodes, the ranks on each, and why. Where the ranks do not fill their last node, all nodes
    take as many as divides them."""
    world, most = job.plan.world, job.cluster.per_node
    per_node = next(count for count in range(min(world, most), 0, -1) if world % count == 0)
    nodes = world // per_node
    if wanted.nodes is not None and wanted.nodes != nodes:
        raise UserError(
            f"--nodes {wanted.nodes} does not fit the plan",
            why=f"its {world} ranks take {nodes} nodes of {per_node}",
            fix=f"--nodes {nodes}, or a plan for {wanted.nodes} nodes",
        )
    of_planned = f"{job.plan.layout} is {world} ranks, {per_node} to a node"
    return nodes, per_node, of_planned if per_node == most else f"{of_planned} of {most}"


def _seconds_of_steps(job: _Job) -> float:
    return job.plan.num_steps * job.prediction.high


def _time(job: _Job, wanted: Wanted, grace: int) -> tuple[int, str]:
    """Returns the seconds to ask for, and why: those that eight or nine of ten such jobs keep below, or the person's
    own. In any case there must be time for a step and for saving it."""
    step = job.prediction.high
    least = LEAST_START_S + step + grace
    steps = f"{job.plan.num_steps:,} step{'s' if job.plan.num_steps != 1 else ''}"
    wish = wanted.time or job.loaded.config.train.time_limit
    if wish is not None:
        seconds = float(wish) if isinstance(wish, int | float) else read_amount("--time", wish, parse_seconds, "12h")
        option = f"--time {wanted.time}" if wanted.time else f"train.time_limit = {format_seconds(seconds)}"
        if wanted.time and seconds < least:
            raise UserError(
                f"{option} is too short for one step",
                why=f"starting takes {format_seconds(LEAST_START_S)} or more, a step {format_seconds(step)}, saving it "
                f"{format_seconds(grace)}",
                fix=f"--time {int(-(-least // 60))}m or more",
            )
        if not wanted.time:
            seconds += START_S + grace
        all_of_it = format_seconds(_seconds_of_steps(job) + START_S)
        return int(seconds), f"{option}; all {steps} may take {all_of_it}: what is left goes on after a requeue"
    seconds = _seconds_of_steps(job) + START_S + grace
    return int(-(-seconds // 1)), (
        f"{steps} of {format_seconds(job.prediction.step_s)}, of {format_seconds(step)} if slow, "
        f"{format_seconds(START_S)} to start and {format_seconds(grace)} to save"
    )


def _grace(job: _Job, wanted: Wanted) -> tuple[int, str]:
    """Returns the seconds between the notice and the end of a job: a step, and the state to storage."""
    if wanted.grace:
        return int(-(-read_amount("--grace", wanted.grace, parse_seconds, "5m") // 1)), "as asked"
    size = _saved_bytes(job)
    needed = job.prediction.high + size / WRITE_RATE + 30
    grace = int(min(MOST_GRACE_S, max(LEAST_GRACE_S, needed)))
    return grace, (
        f"a step ends in {format_seconds(job.prediction.high)} or less, and {format_bytes(size)} of state "
        f"go to storage at {WRITE_RATE / 1e6:.0f} MB/s"
    )


def _saved_bytes(job: _Job) -> int:
    """Returns the bytes of a checkpoint: weights and optimizer state of what is trained; adapters are small."""
    if job.loaded.config.adapter.kind != "none":
        return 2**30
    precision = job.plan.precision
    per_parameter = WEIGHT_BYTES[precision] + state_bytes(job.loaded.config.optimizer.name, precision)
    return int(job.spec.num_parameters * per_parameter)


def _cpus(job: _Job, per_node: int, wanted: Wanted) -> tuple[int, str]:
    if wanted.cpus_per_node:
        return wanted.cpus_per_node, "as asked"
    if job.plan.device == "cpu":
        return per_node, "a core for each rank"
    return CPUS_PER_GPU * per_node, f"{CPUS_PER_GPU} for each rank: its threads, the loader's and NCCL's"


def _memory(jobs: Sequence[_Job], per_node: int, wanted: Wanted) -> tuple[int, str]:
    """Returns the bytes of CPU memory that a node needs, and why. Node 0 holds the whole state while it saves."""
    if wanted.memory_bytes:
        return wanted.memory_bytes, "as asked"
    needs = []
    for job in jobs:
        config, plan = job.loaded.config, job.plan
        saved = _saved_bytes(job)
        if plan.device == "cpu":
            rank, what = job.prediction.memory_bytes, "predicted"
        else:
            away = predict_elsewhere(job.spec, plan, config.optimizer.name, config.adapter)["host"]
            rank, what = PROCESS_MEMORY + away, "offloaded states and the process" if away else "for the process"
        reason = f"{per_node} x {format_bytes(rank)} ({what}), and {format_bytes(saved)} while rank 0 saves the state"
        needs.append((per_node * rank + saved, reason))
    return max(needs)


def _run_name(job: _Job, wanted: Wanted) -> str:
    """Returns the name of the run: the folder is part of it, so that 1.toml of two answers are two runs."""
    given = wanted.name or job.loaded.config.run.name
    file = job.file.resolve()
    folder = file.parent.name
    text = given or (f"{folder}-{file.stem}" if folder and file.stem.isdigit() else file.stem)
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:NAME_LENGTH].strip("-")
    if not name:
        raise UserError(f"no name can be made of `{text}`", why="names have a-z, 0-9 and -", fix="--name my-run")
    return name if name[0].isalpha() else f"run-{name}"


def _predicted(job: _Job) -> str:
    step = job.prediction
    return (
        f"{job.spec.name}, {job.plan.layout}: {format_seconds(step.step_s)} per step "
        f"({format_seconds(step.low)} to {format_seconds(step.high)}), "
        f"{format_bytes(step.memory_bytes)} of {format_bytes(job.cluster.device.memory)} per rank"
    )
