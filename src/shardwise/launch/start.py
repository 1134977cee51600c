"""Leads from a command line to a running job: resolves the config, makes or finds the run directory, starts the ranks.

Used by `train` and `resume`. Everything that can be refused is refused here, before torch is imported. Config, shapes
and corpus are read once: a run of one process gets what was read here, the ranks of a larger one read the run directory
(worker.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cluster.describe.machine import Machine, this_machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.config.job import check_length, settle_job
from shardwise.config.load import Loaded, find_key, load_config
from shardwise.config.reopen import planner_origins, reopen
from shardwise.config.write import write_config
from shardwise.errors import Exit, UserError
from shardwise.files import cannot_write, write_atomically
from shardwise.launch.allocator import set_allocator
from shardwise.launch.nodes.interfaces import local_interface
from shardwise.launch.nodes.mirror import check_is_no_mirror
from shardwise.launch.smaller_micro_batch import with_smaller_micro_batch
from shardwise.optim.offload.disk import check_directory
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.resolve.resolve import resolve
from shardwise.private_names import check_private_names
from shardwise.run.build import copy_tokenizer, corpus_of, model_spec
from shardwise.run.loggers import check_loggers
from shardwise.run.own_parts import OwnParts
from shardwise.run.ranks import Ranks, ranks_from_environment
from shardwise.run.rundir import FREE_TO_CHANGE, RunDir, create_run_dir
from shardwise.run.session import RunInputs
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config
from shardwise.terminal import is_live, patience, say, say_error

if TYPE_CHECKING:
    from shardwise.spec.model import ModelSpec


@dataclass
class PlannedRun(RunInputs):
    """A run that is ready to start: its config has every `auto` resolved."""

    origins: Mapping[str, str]  # where each key of the config came from
    machine: Machine


def plan_run(
    loaded: Loaded,
    nproc: int | None,
    progress: bool,
    cluster: str | None = None,
    is_new: bool = True,
    own: OwnParts | None = None,
    machine: Machine | None = None,
) -> PlannedRun:
    """Resolves every `auto` and returns the run that is ready to start. Raw text is tokenised here, once, so that the
    ranks only map the result. `cluster` is a file with what was measured of this machine. A run that has begun
    (`is_new` false) goes on with the sequences it had. `own` is what a Python program brings. `machine`: what all
    nodes of a job have together; None: this one alone."""
    own = own or OwnParts()
    machine = machine or this_machine()
    if machine.gpu_problem:
        say_error(f"gpu      {machine.gpu_problem}; this run is on CPUs")
    measured = None if cluster is None else measured_file(cluster, machine)
    check_loggers(loaded.config.run.loggers)
    spec = model_spec(loaded.config.model)
    if is_new:
        check_length(loaded.config, spec, loaded.origins)
    with patience("reading  the text ..."):
        corpus = own.corpus(loaded.config, spec) if own.corpus else corpus_of(loaded.config, spec, progress=progress)
    config, of_job = settle_job(loaded.config, spec, corpus.document_mask, corpus.packing)
    with patience("planning what is left open ..."):
        resolved = resolve(config, spec, machine, nproc, corpus.train.num_sequences, loaded.origins, measured)
    check_offload_dir(resolved.config, resolved.plan, spec)
    if not progress:  # a terminal has seen them with the progress bar
        for note in corpus.notes:
            say_error(f"data     {note}")
    origins = {**loaded.origins, **of_job, **planner_origins(resolved.chosen)}
    return PlannedRun(resolved.config, spec, corpus, resolved.plan, origins, machine, own=own, known_origins=origins)


def measured_file(path: str, machine: Machine) -> ClusterSpec:
    """Returns the cluster of a file that `shardwise doctor --out` or `bench layers --out` wrote, for devices like this
    machine's."""
    cluster = read_cluster(path)
    kind = "cuda" if machine.gpus else "cpu"
    if cluster.device.kind != kind:
        has, says = (
            ("GPUs" if machine.gpus else "no GPU"),
            ("GPUs" if cluster.device.kind == "cuda" else "processor cores"),
        )
        raise UserError(
            f"--cluster {path} describes another machine",
            why=f"it describes {says}, and this machine has {has}",
            fix="`shardwise doctor --out cluster.toml` measures this one; `shardwise plan` plans for others",
        )
    return cluster


def check_offload_dir(config: Config, plan: Plan, spec: ModelSpec) -> None:
    """Refuses an offload directory that cannot serve, before torch is loaded; every rank of this machine reserves its
    part later."""
    if plan.offload_to != "nvme":
        return
    directory = Path(plan.offload_dir)
    if config.memory.offload_dir is None:  # the runs' own directory may not be there yet
        directory = next(path for path in (directory, *directory.resolve().parents) if path.is_dir())
    needed = plan.world * predict_elsewhere(spec, plan, config.optimizer.name)["disk"]
    check_directory(directory, needed, memory_is_fine=config.memory.offload_tmpfs)


def new_run(planned: PlannedRun) -> RunDir:
    """Makes a run directory and returns it; what is half made is removed again."""
    run = create_run_dir(planned.config.run.dir, planned.config.run.name, planned.spec.name)
    try:
        write_run(run, planned)
        if (tokenizer := planned.corpus.tokenizer).path:
            copy_tokenizer(tokenizer.path.parent, run.tokenizer)
            (run.tokenizer / "tokenizer.json").write_bytes(tokenizer.content)
    except BaseException as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot_write(run.path, error) from None
        raise
    return run


def write_run(run: RunDir, planned: PlannedRun) -> None:
    """Writes the config and the plan of a run into its directory, and removes a stop request from before."""
    write_config(planned.config, planned.origins, run.config)
    write_atomically(run.plan, json.dumps(planned.plan.to_dict(), indent=1) + "\n")
    run.stop_request.unlink(missing_ok=True)
    if planned.own.names:
        write_atomically(run.own_parts, json.dumps({"parts": planned.own.names}) + "\n")


def start(
    run: RunDir,
    planned: PlannedRun,
    from_step: int | None = None,
    verify: bool = True,
    attend: Callable[[], None] = lambda: None,
) -> int:
    """Holds the run, brings its files up to date, trains and returns the exit code. A run of one process is trained in
    this one, which reads nothing again. `attend` is called again and again while other processes train."""
    had_torch = "torch" in sys.modules  # loaded by whose program this is
    run.check_step(from_step)
    say(starting_line(planned.plan.world))  # before torch is loaded, which takes seconds
    if planned.plan.device == "cuda":
        set_allocator(planned.plan.allocator, os.environ)
    with run.lock():
        check_private_names()
        while True:
            write_run(run, planned)
            num_starts = run.num_starts() if from_step is not None else 0
            code = _train(run, planned, from_step, verify, attend, had_torch)
            smaller = with_smaller_micro_batch(run, planned) if code == Exit.OUT_OF_MEMORY else None
            if smaller is None:
                return code
            planned = smaller
            from_step = None if from_step is None or run.num_starts() > num_starts else from_step


def _train(
    run: RunDir, planned: PlannedRun, from_step: int | None, verify: bool, attend: Callable[[], None], had_torch: bool
) -> int:
    if planned.plan.world == 1:
        from shardwise.launch.worker import run_worker

        return run_worker(run, Ranks(), planned, from_step, verify=verify)
    from shardwise.launch.local import start_ranks

    if planned.own != OwnParts():
        return _start_forked(run, planned, from_step, verify, attend, had_torch)
    options = [] if verify else ["--no-verify"]
    plan, most = planned.plan, planned.config.run.max_restarts
    interface = local_interface(plan.interface)
    return start_ranks(
        run, plan.world, plan.threads_per_rank, interface, options, from_step=from_step, max_restarts=most
    )


def starting_line(world: int) -> str:
    """Returns the first line of whatever starts ranks."""
    return f"starting {world} processes ..." if world > 1 else "starting in this process ..."


def _start_forked(
    run: RunDir, planned: PlannedRun, from_step: int | None, verify: bool, attend: Callable[[], None], had_torch: bool
) -> int:
    """Trains in copies of this process, which have the functions and the data of its program; returns the exit code.
    Matmuls of several threads hang in a copy of a process that has computed with them already (GNU OpenMP)."""
    plan, launcher = planned.plan, os.getpid()
    if had_torch and plan.device == "cpu" and plan.threads_per_rank > 1:
        say_error("threads  1 per rank: copies of a process that has loaded torch cannot have more")
        planned.plan = plan = replace(plan, threads_per_rank=1)
        write_run(run, planned)
    if plan.device == "cuda" and had_torch and sys.modules["torch"].cuda.is_initialized():
        raise UserError(
            "this program has used the GPU before it trains on several",
            why="ranks are copies of it (fork), and CUDA cannot be copied",
            fix="train before anything else is put on a GPU, or start the program with torchrun",
        )
    from shardwise.launch.local import start_ranks

    def body(from_step: int | None) -> int:
        from shardwise.launch.worker import for_launcher, run_worker

        return for_launcher(run_worker(run, ranks_from_environment(), planned, from_step, launcher, verify))

    interface, most = local_interface(plan.interface), planned.config.run.max_restarts
    return start_ranks(
        run,
        plan.world,
        plan.threads_per_rank,
        interface,
        body=body,
        attend=attend,
        from_step=from_step,
        max_restarts=most,
    )


def continue_run(
    run: RunDir,
    overrides: Sequence[str],
    allow: Sequence[str],
    nproc: int | None,
    own: OwnParts | None = None,
    machine: Machine | None = None,
) -> PlannedRun:
    """Returns an existing run that is ready to start once more, with what may change changed."""
    check_own_parts(run, own or OwnParts())
    check_is_no_mirror(run)
    if run.is_locked():
        run.lock()  # raises, naming the holder
    for key in allow:
        find_key(key)
    before = load_config(run.config).config
    loaded = reopen(run.config, overrides, nproc)
    changed = [
        f"{section.name}.{key.name}"
        for section in fields(before)
        if section.name not in FREE_TO_CHANGE
        for key in fields(getattr(before, section.name))
        if getattr(getattr(before, section.name), key.name) != getattr(getattr(loaded.config, section.name), key.name)
    ]
    if {"model.preset", "model.overrides"} & set(changed):
        raise UserError(
            "a run cannot go on with another model",
            why="its checkpoints hold tensors of the shapes it began with",
            fix="leave the model as it is, or start a new run",
        )
    refused = [key for key in changed if key not in allow]
    if refused:
        raise UserError(
            f"resuming with another `{refused[0]}` changes what this run computes",
            why=f"free to change are {', '.join(FREE_TO_CHANGE)}",
            fix=f"add --allow {refused[0]} if you mean it, or start a new run",
        )
    # The run stays where it is, wherever it was started from.
    moved = replace(loaded.config, run=replace(loaded.config.run, dir=str(run.path.parent), name=run.name))
    return plan_run(replace(loaded, config=moved), nproc, is_live(), is_new=False, own=own, machine=machine)


def check_own_parts(run: RunDir, own: OwnParts) -> None:
    """Refuses to go on with a run without what a Python program brought to it."""
    if missing := [name for name in run.parts_of_a_program() if name not in own.names]:
        raise UserError(
            f"run `{run.name}` was started by a Python program with its own {' and '.join(missing)}",
            why="without it the run would go on computing something else",
            fix=run.how_to_resume(),
        )
