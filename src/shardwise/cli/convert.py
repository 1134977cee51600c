"""`shardwise convert` turns weights of one format into another. Both directions stream tensor by tensor and end in one
rename."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import say, shell_word

if TYPE_CHECKING:
    import torch

    from shardwise.run.weights import StoredWeights

HELP = "Turn a Hugging Face directory into Shardwise's own format, or a run or checkpoint into Hugging Face's."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a run, a checkpoint directory, a model directory or a hub id")
    parser.add_argument(
        "--to", choices=["hf", "shardwise"], required=True, help="a Hugging Face directory, or a checkpoint of ours"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a directory that does not exist yet")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], default=None, help="number format (default: unchanged)"
    )
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.weights import find_weights

    convert(find_weights(args.source, args.runs), args.to, Path(args.out), args.dtype)
    return Exit.DONE


def stored_as(weights: StoredWeights, dtype_name: str | None) -> torch.dtype:
    """Returns the number format to write: the one that was asked for, or the weights' own."""
    import torch

    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return names[dtype_name] if dtype_name else weights.stored_dtype()


def convert(weights: StoredWeights, to: str, out: Path, dtype_name: str | None, *, verify: bool = False) -> None:
    """Writes weights in another format; with `verify` another process reads a Hugging Face directory back."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists", why="nothing is overwritten", fix="choose another --out")
    import torch

    from shardwise.checkpoint import store
    from shardwise.config.units import format_bytes, format_count
    from shardwise.interop.huggingface.load_save import save_model
    from shardwise.run.build import TOKENIZER_FILES, copy_tokenizer

    dtype, folder = stored_as(weights, dtype_name), weights.tokenizer_dir
    if to == "hf":
        extra = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()] if folder else []
        with weights.streamed() as (model, tensors):
            model = weights.load(torch.device("cpu"), dtype) if model is None else model
            save_model(model, out, dtype=dtype, extra_files=extra, source=tensors)
    else:
        model = weights.load(torch.device("cpu"), dtype)
        state = {"model": weights.spec.to_dict()}
        tensors = model.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(tensors.items())}  # a tied weight is written once
        whole = {name: value.detach() for name, value in tensors.items() if first[id(value)] == name}
        store.write(out, 0, {"weights": whole}, state)
        if folder:
            copy_tokenizer(folder, out / "tokenizer")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    say(
        f"wrote    {out}: {weights.spec.name}, {format_count(weights.spec.num_parameters)} parameters, "
        f"{format_bytes(size)}"
    )
    if verify:
        from shardwise.prove.exported import prove_export, wrong_export

        proof = prove_export(weights, out, dtype)
        if not proof.holds:
            raise wrong_export(proof, out)
        say(f"proof    {proof}")
    if not folder:
        say("note     the model reads bytes, so there is no tokenizer to write")
    say(f'next     shardwise generate {shell_word(out)} --prompt "..."')
