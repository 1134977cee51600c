"""`shardwise verify` proves that a layout computes what one process computes, on this machine, without a GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.terminal import counted, patience, say

HELP = (
    "Train a small model of the config's kind in its layout and in one process, in fp64, and compare losses, gradients "
    "and parameters. Exit 1 if they differ."
)
CONFIG = True
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a TOML file; without one, the default run")
    parser.add_argument("--nproc", "--nproc-per-node", type=int, metavar="N", help="processes of the real job")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="optimizer steps to compare (default: 8)")


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.train import check_nproc
    from shardwise.config.load import load_config
    from shardwise.launch.start import starting_line
    from shardwise.launch.verify import plan_to_prove, verify_layout
    from shardwise.prove.shrink import left_out, shrink_plan, shrink_spec
    from shardwise.run.build import model_spec

    if args.nproc is not None:
        check_nproc(args.nproc)
    if args.steps < 1:
        raise UserError(f"--steps {args.steps} compares nothing", why="a proof needs a step", fix="--steps 8")
    loaded = load_config(args.config, args.overrides)
    spec = model_spec(loaded.config.model)
    resolved = plan_to_prove(loaded, spec, args.nproc)
    plan = resolved.plan
    small = shrink_plan(plan)
    missing, shape = left_out(plan, small), shrink_spec(spec, small)
    if not args.json:
        count = plan.num_microbatches
        say(f"layout   {plan.layout}, {count} micro-batch{'es' if count > 1 else ''} per step")
        if small.world < plan.world:
            same = f"the same axes but {', '.join(missing)}" if missing else "the same axes"
            say(f"proving  {small.layout}: {same}, on {small.world} processes instead of {plan.world}")
        say(
            f"model    {spec.name} shrunk to {counted(shape.num_layers, 'layer')} x {shape.hidden}, "
            f"{shape.num_heads} heads ({shape.num_kv_heads} of keys and values), vocabulary {shape.vocab}",
        )
        say(starting_line(small.world))
    with patience(f"proving  {args.steps} steps in this layout and in one process ...", after_s=5.0):
        found = verify_layout(spec, small, resolved.config, args.steps)
    if args.json:
        print(json.dumps({"schema": 1, **found, "layout": plan.layout, "proven": small.layout, "left_out": missing}))
    else:
        _print(found, "this layout" if small.world == plan.world else small.layout)
        if missing:
            print(f"open     {', '.join(missing)}: no part of the proof; with fewer other axes it is")
    return Exit.DONE if found["same"] else Exit.FOUND_WRONG


def _print(found: dict[str, Any], layout: str) -> None:
    steps = counted(found["steps"], "step")
    say(f"trained  {steps} in fp64, in {layout} and in one process; {found['seconds']:.1f} s")
    for key in ("losses", "norms", "gradients", "parameters"):
        say(f"         {key:<11} largest difference {found[key]:.1e}")
    if found["same"]:
        say(f"SAME     every number within {found['limit']:.0e}: {layout} computes what one process computes")
    else:
        say(
            f"WRONG    {found['largest']:.1e} is more than {found['limit']:.0e}, most of all "
            f"{found['worst'] or 'the losses'}"
        )
        say("  why    rounding in fp64 stays below 1e-12: this is a mistake, not noise")
        say("  do     please report this with the layout above; do not train with it")
