"""`shardwise export`: a run's weights as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.errors import Exit, UserError

HELP = "Write a run's weights as a Hugging Face directory that transformers loads."
DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run, `last`, or a checkpoint directory")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the format (default: hf)")
    parser.add_argument("--out", required=True, metavar="DIR", help="a directory that does not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="number format (default: as trained)")
    parser.add_argument("--merge-lora", action="store_true", help="not available yet")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.convert import convert
    from shardwise.run.weights import find_weights

    if args.merge_lora:
        raise UserError("`--merge-lora` is not available yet", why="there are no adapters yet", fix="leave it out")
    weights = find_weights(args.run, args.runs)
    convert(weights, "hf", Path(args.out), args.dtype)
    return Exit.DONE
