"""`shardwise resume` goes on from a run's newest good checkpoint, on the same or another number of processes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import counted, say

if TYPE_CHECKING:
    from shardwise.cluster.describe.machine import Machine
    from shardwise.launch.place import NodePlace
    from shardwise.launch.start import PlannedRun
    from shardwise.run.rundir import RunDir

HELP = (
    "Go on from the newest good checkpoint. parallel, memory, speed, comm, run and checkpoint keys may change freely."
)
CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory, a name, or `last`")
    parser.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="the checkpoint to go on from (default: the newest good one); 0: start anew",
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY", help="a key that may change, such as train.steps"
    )
    parser.add_argument("--nproc", "--nproc-per-node", type=int, metavar="N", help="processes on this machine")
    parser.add_argument("--no-verify", action="store_true", help="do not prove a layout that was never proven here")
    parser.add_argument("--exclude", metavar="HOST", help="leave a machine out (multi-node runs; not available yet)")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.checkpoint.listing import at_step
    from shardwise.cli.train import check_nproc
    from shardwise.config.load import load_config
    from shardwise.launch.place import NodePlace, RankPlace, own_place
    from shardwise.launch.start import continue_run, start
    from shardwise.report.summary import longer_command
    from shardwise.run.rundir import find_run

    if args.exclude:
        raise UserError(
            "`--exclude` is not available yet", why="runs use one machine in this version", fix="leave it out"
        )
    if args.nproc is not None:
        check_nproc(args.nproc)
    for key in args.allow:
        if "=" in key:
            name = key.partition("=")[0]
            why = "--allow names a key; its value is a word of its own"
            raise UserError(f"`--allow {key}` has a value", why=why, fix=f"--allow {name} {key}")
    place = own_place(os.environ)
    if isinstance(place, NodePlace) and place.count > 1:
        return _on_nodes(args, place)
    found = find_run(args.run, args.runs)
    if args.from_step:  # 0: from the beginning
        at_step(found.checkpoints, args.from_step)  # refused here, before anything is written
    if isinstance(place, RankPlace):
        from shardwise.launch.join import join, take_place

        take_place(place)
        loaded = load_config(found.config, args.overrides)
        return join(
            lambda world, machine: (found, continue_run(found, args.overrides, args.allow, world, machine=machine)),
            loaded,
            verify=not args.no_verify,
            from_step=args.from_step,
        )
    planned = continue_run(found, args.overrides, args.allow, args.nproc)
    last = max(found.steps(), default=0)
    if found.state() == "finished" and last >= planned.plan.num_steps and args.from_step is None:
        say(f"run      {found.path} has finished its {counted(last, 'step')}")
        say(f"next     {longer_command(found, planned.config.train, last)}")
        return Exit.DONE
    return start(found, planned, args.from_step, verify=not args.no_verify)


def _on_nodes(args: argparse.Namespace, place: NodePlace) -> int:
    """Goes on with a run on several nodes, and returns the exit code. Only the first node must see it."""
    import hashlib

    from shardwise.config.load import load_config
    from shardwise.launch.nodes.agent import work_on_node
    from shardwise.launch.nodes.job import NodeJob
    from shardwise.launch.start import continue_run
    from shardwise.run.rundir import find_run

    def prepare(machine: Machine) -> tuple[RunDir, PlannedRun]:
        found = find_run(args.run, args.runs)
        found.check_step(args.from_step)
        nproc = args.nproc and args.nproc * machine.nodes
        return found, continue_run(found, args.overrides, args.allow, nproc, machine=machine)

    asked = repr((args.run, args.overrides, args.allow, args.nproc, args.from_step))
    return work_on_node(
        NodeJob(
            place,
            asked=hashlib.sha256(asked.encode()).hexdigest()[:16],
            interface=load_config(None, args.overrides).config.comm.interface,
            runs=Path(args.run).parent if os.sep in args.run else Path(args.runs),  # a name, or `last`
            prepare=prepare,
            options=("--no-verify",) if args.no_verify else (),
            from_step=args.from_step,
        )
    )
