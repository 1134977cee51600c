"""`shardwise export` writes a run's weights as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import say, shell_word

if TYPE_CHECKING:
    from shardwise.run.weights import StoredWeights
    from shardwise.spec.schema import AdapterConfig

HELP = "Write a run's weights as a Hugging Face directory that transformers loads, adapters as one that peft loads."
DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run, `last`, or a checkpoint directory")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the format (default: hf)")
    parser.add_argument("--out", required=True, metavar="DIR", help="a directory that does not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="number format (default: as trained)")
    parser.add_argument(
        "--merge-lora",
        action="store_true",
        help="adapter runs: the whole model, with the adapters added to its weights",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the result back in another process and compare its logits"
    )
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.weights import find_weights

    weights, out = find_weights(args.run, args.runs), Path(args.out)
    export(weights, out, merge_lora=args.merge_lora, dtype=args.dtype, verify=not args.no_verify)
    return Exit.DONE


def export(weights: StoredWeights, out: Path, *, merge_lora: bool, dtype: str | None, verify: bool = True) -> None:
    """Writes the whole model, or of a run with adapters the adapters alone, unless they are to be merged. A whole model
    is read back by another process, which must come to the same logits."""
    from shardwise.cli.convert import convert

    if weights.adapter is None and merge_lora:
        raise UserError(
            f"{weights.name} has no adapters to merge", why="all of its weights were trained", fix="drop --merge-lora"
        )
    if weights.adapter is None or merge_lora:
        convert(weights, "hf", out, dtype, verify=verify)
    else:
        _export_adapter(weights, weights.adapter, out, dtype)


def _export_adapter(weights: StoredWeights, adapter: AdapterConfig, out: Path, dtype_name: str | None) -> None:
    from shardwise.config.units import format_bytes, format_count
    from shardwise.interop.peft.format import write_adapter

    tensors = weights.trained()
    if dtype_name:
        import torch

        names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        tensors = {name: value.to(names[dtype_name]) for name, value in tensors.items()}
    assert weights.config is not None
    write_adapter(out, weights.spec, adapter, tensors, weights.config.model.path)
    count = format_count(sum(value.numel() for value in tensors.values()))
    size = format_bytes(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()))
    say(f"wrote    {out}: adapters of {weights.spec.name} in PEFT's format, {count} parameters, {size}")
    words = f"adapter.kind=lora adapter.path={shell_word(out)}"
    say(f"next     {words} starts a run from them; --merge-lora writes the whole model")
