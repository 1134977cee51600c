"""`shardwise train` starts the default run without a config, or the run that a config describes."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import counted, is_live, patience, say, say_error

if TYPE_CHECKING:
    from shardwise.cluster.describe.machine import Machine
    from shardwise.launch.start import PlannedRun
    from shardwise.run.rundir import RunDir

HELP = (
    "Plan what is left open, start the local processes and train. Without a config: a small model on Python's own "
    "library."
)
CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a TOML file; `shardwise init` writes one")
    parser.add_argument("--nproc", "--nproc-per-node", type=int, metavar="N", help="processes on this machine")
    parser.add_argument("--cluster", metavar="FILE", help="plan with this machine as `doctor --out` measured it")
    parser.add_argument("--dry-run", action="store_true", help="resolve, plan and show the first sample; train nothing")
    parser.add_argument("--no-verify", action="store_true", help="do not prove a layout that was never proven here")
    parser.add_argument("--preflight", action="store_true", help="check the nodes of a job against each other, and end")
    parser.add_argument("--resume", choices=["auto"], help="auto: go on if this run has a checkpoint, else start it")


def run(args: argparse.Namespace) -> int:
    with patience("loading  ...", 0.5):
        from shardwise.config.load import load_config
        from shardwise.launch.place import RankPlace, idle_nodes, own_place
        from shardwise.launch.start import continue_run, new_run, plan_run, start

    if args.nproc is not None:
        check_nproc(args.nproc)
    loaded = load_config(args.config, args.overrides)
    if args.resume and loaded.config.run.name is None:  # one line must always mean the same run
        name = Path(args.config).stem if args.config else "default"
        loaded = replace(loaded, config=replace(loaded.config, run=replace(loaded.config.run, name=name)))

    def prepare(nproc: int | None, machine: Machine | None = None) -> tuple[RunDir, PlannedRun]:
        if args.resume:
            found = _existing(loaded.config.run.dir, loaded.config.run.name or "")
            if found:
                return found, continue_run(found, args.overrides, allow=(), nproc=nproc, machine=machine)
        planned = plan_run(loaded, nproc, is_live(), args.cluster, machine=machine)
        return new_run(planned), planned

    place = own_place(os.environ)
    if isinstance(place, RankPlace):
        from shardwise.launch.join import join, take_place

        if args.preflight or args.dry_run:
            raise UserError(
                f"{'--preflight' if args.preflight else '--dry-run'} does not go with one process per rank",
                why=f"{place.scheduler} started this as rank {place.rank} of {place.world}, and ranks only train",
                fix="one task per node (srun --ntasks-per-node=1) checks the nodes; --dry-run is for a shell",
            )
        take_place(place)
        return join(prepare, loaded, verify=not args.no_verify)
    if args.dry_run:
        return _dry_run(plan_run(loaded, args.nproc, is_live(), args.cluster))
    if place is not None and place.count > 1:
        from shardwise.launch.nodes.agent import work_on_node
        from shardwise.launch.nodes.hello import config_digest
        from shardwise.launch.nodes.job import NodeJob

        return work_on_node(
            NodeJob(
                place,
                asked=config_digest(loaded.config),
                interface=loaded.config.comm.interface,
                runs=Path(loaded.config.run.dir),
                prepare=lambda machine: prepare(args.nproc and args.nproc * machine.nodes, machine),
                options=("--no-verify",) if args.no_verify else (),
                only_checks=args.preflight,
            )
        )
    if args.preflight:
        raise UserError(
            "--preflight has nothing to compare",
            why="it checks the nodes of a job against each other, and this is one process on one machine",
            fix="`shardwise doctor` looks at this machine; a scheduler starts the line once on each node",
        )
    if place is None and (line := idle_nodes(os.environ)):
        say_error(f"nodes    {line}")
    found, planned = prepare(args.nproc)
    if found.state() == "finished":
        say(f"run      {found.path} is finished; nothing to do")
        return Exit.DONE
    return start(found, planned, verify=not args.no_verify)


def check_nproc(nproc: int) -> None:
    if nproc < 1:
        raise UserError(f"--nproc {nproc} starts nothing", why="a run needs at least one process", fix="--nproc 1")


def _existing(parent: str, name: str) -> RunDir | None:
    from shardwise.run.rundir import RunDir

    run = RunDir(Path(parent) / name)
    return run if run.config.is_file() else None


def _dry_run(planned: PlannedRun) -> int:
    """Prints everything that would happen, without torch: resolved config, plan, predicted memory, the first sample."""
    from shardwise.config.job import warmup_lines
    from shardwise.config.units import format_bytes, format_count
    from shardwise.config.write import resolved_text
    from shardwise.data.show import about_row, print_row, render_rows
    from shardwise.plan.prediction.memory import predict_memory
    from shardwise.plan.resolve.fit import rank_memory_limit

    plan, spec, config = planned.plan, planned.spec, planned.config
    print(resolved_text(config, planned.origins))
    memory = predict_memory(spec, plan, config.optimizer.name, config.adapter)
    limit = rank_memory_limit(config, planned.machine, plan)
    say(f"model    {spec.name}, {format_count(spec.num_parameters)} parameters, {counted(spec.num_layers, 'layer')}")
    say(f"plan     {plan.layout} {plan.precision}: {plan.reason}")
    say(f"batch    {plan.batch_in_words}; {counted(plan.num_steps, 'step')}")
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items() if size)
    say(f"memory   {format_bytes(sum(memory.values()))} of {format_bytes(limit)} per rank predicted: {parts}")
    say(f"corpus   {planned.corpus.description}")
    for line in (
        *planned.corpus.about(plan.num_steps * plan.global_batch),
        *warmup_lines(config.optimizer.warmup, plan.num_steps),
    ):
        say(line)
    for row in render_rows(planned.corpus.train, planned.corpus.tokenizer, 1):
        say(f"sample   the first sequence of step 1: {about_row(row)}")
        print_row(row)
    return Exit.DONE
