"""`shardwise resume` goes on from a run's newest good checkpoint, on the same or another number of processes."""

from __future__ import annotations

import argparse

from shardwise.errors import Exit, UserError
from shardwise.terminal import counted, say

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
    from shardwise.launch.start import continue_run, start
    from shardwise.report.summary import longer_command
    from shardwise.run.rundir import find_run

    if args.exclude:
        raise UserError(
            "`--exclude` is not available yet", why="runs use one machine in this version", fix="leave it out"
        )
    if args.nproc is not None:
        check_nproc(args.nproc)
    found = find_run(args.run, args.runs)
    if args.from_step:  # 0: from the beginning
        at_step(found.checkpoints, args.from_step)  # refused here, before anything is written
    for key in args.allow:
        if "=" in key:
            name = key.partition("=")[0]
            why = "--allow names a key; its value is a word of its own"
            raise UserError(f"`--allow {key}` has a value", why=why, fix=f"--allow {name} {key}")
    planned = continue_run(found, args.overrides, args.allow, args.nproc)
    last = max(found.steps(), default=0)
    if found.state() == "finished" and last >= planned.plan.num_steps and args.from_step is None:
        say(f"run      {found.path} has finished its {counted(last, 'step')}")
        say(f"next     {longer_command(found, planned.config.train, last)}")
        return Exit.DONE
    return start(found, planned, args.from_step, verify=not args.no_verify)
