"""`shardwise launch explain SCRIPT` names the mistakes of a batch script or a manifest, with lines and fixes."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.files import read_text
from shardwise.terminal import say

if TYPE_CHECKING:
    from shardwise.launch.spec import LaunchSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, help="a batch script for sbatch, or a manifest for kubectl")
    parser.add_argument("--plan", metavar="PLAN", help="the config file of the job; default: the one that it trains")
    parser.add_argument("--cluster", metavar="CLUSTER", help="what the plan is for, where it does not say so")
    parser.add_argument("--json", action="store_true", help="machine-readable report")


def run(args: argparse.Namespace) -> int:
    from shardwise.launch.mistakes.of_kubernetes import mistakes_of_kubernetes
    from shardwise.launch.mistakes.of_slurm import mistakes_of_slurm

    try:
        text = read_text(args.script)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {args.script}", why=getattr(error, "strerror", None) or "it is no text", fix="name a script"
        ) from None
    plan = _plan(args, text)
    if _is_manifest(text):
        found = mistakes_of_kubernetes(text, plan, str(args.script))
    else:
        found = mistakes_of_slurm(text, plan)
    if args.json:
        listed = [asdict(one) for one in found]
        print(json.dumps({"schema": 1, "script": str(args.script), "plan": plan is not None, "mistakes": listed}))
        return Exit.FOUND_WRONG if found else Exit.DONE
    for one in found:
        say(f"{args.script}:{one.line}  {one.what}")
        say(f"  why    {one.why}")
        say(f"  fix    {one.fix}")
    if plan is None:
        say("plan     not read: --plan PLAN.toml compares nodes, GPUs, memory and time with what it needs")
    say(f"found    {len(found)} mistake{'s' if len(found) != 1 else ''} in {args.script}")
    return Exit.FOUND_WRONG if found else Exit.DONE


def _is_manifest(text: str) -> bool:
    return (
        not text.startswith("#!")
        and re.search(r"^\s*[\"']?(?:apiVersion|kind)[\"']?\s*:", text, re.MULTILINE) is not None
    )


def _plan(args: argparse.Namespace, text: str) -> LaunchSpec | None:
    """Returns what the job of the script needs: of the plan that is named, or of the one that the script trains."""
    from shardwise.launch.planned_job import Wanted, launch_spec

    named = re.search(r"\btrain\s+[\"']?([^\s\"'$]+\.toml)", text)
    beside = args.script.parent / named[1] if named else None
    file = args.plan or next(
        (str(path) for path in (beside, named and Path(named[1])) if path and path.is_file()), None
    )
    if file is None:
        return None
    try:
        return launch_spec([file], [], Wanted(cluster=args.cluster))
    except UserError:
        if args.plan:
            raise
        return None
