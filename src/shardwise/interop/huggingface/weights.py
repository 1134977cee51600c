"""Reads and writes weights in Hugging Face's safetensors, one tensor at a time.

Owns reading (headers first, so a wrong checkpoint is refused before anything changes) and writing (complete or not at
all). Invariant: besides the model, at most one shard is in memory.
Read next: `names.py`, the table both directions follow.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.errors import UserError
from shardwise.files import appearing_at_once, check_regular, write_tensors
from shardwise.foreign_json import need, read_object, read_safetensors_header
from shardwise.interop.huggingface.export import config_from_spec
from shardwise.interop.huggingface.names import Part, TheirTensor, is_ignorable, tensor_table
from shardwise.interop.transformers.model import TransformersModel
from shardwise.model.decoder import Decoder
from shardwise.model.experts import moe_layers
from shardwise.spec.model import ModelSpec
from shardwise.terminal import counted

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GIB = 2**30
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# Reading -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(model: Decoder, directory: Path) -> None:
    """Loads the model's weights from a checkpoint, on whatever device and dtype it is. A part of a model takes only its
    own."""
    targets = model_tensors(model)
    with translate_read_errors(directory):
        files = list_files(directory)
        shapes = {name: shape for path in files for name, shape in read_shapes(path).items()}
        table = match_table(model.spec, shapes, targets, directory)
        for path in files:
            load_file(path, table, targets)
        if model.spec.tied and model.embed is not None:
            _check_tied(model.embed.weight, files, directory)
    for layer in moe_layers(model):
        layer.tokens_per_expert.zero_()


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """Returns everything a checkpoint holds: parameters and persistent buffers, by our names."""
    return model.state_dict(keep_vars=True)


def select(tensors: Mapping[str, Tensor], part: Part) -> Tensor:
    whole = tensors[part.ours].detach()
    return whole if part.expert is None else whole[part.expert]


def list_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = _indexed_files(directory)
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise UserError(
            f"no weights in {directory}",
            why=f"neither {SINGLE} nor {INDEX} is there (other formats, such as pytorch_model.bin, are pickles)",
            fix="fetch or convert the model's safetensors",
        )
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise UserError(
            f"{len(absent)} of {len(names)} weight files are missing in {directory}",
            why=f"{INDEX} lists {shorten(absent)}",
            fix="fetch the model again, completely",
        )
    for name in names:
        _check_inside(directory, directory / name)
    return [directory / name for name in names]


def _indexed_files(directory: Path) -> list[str]:
    """Returns the files that the index lists: names of files that lie in the directory, or below it."""
    try:
        named = need(read_object(directory / INDEX), "weight_map", dict).values()
        odd = [name for name in named if not isinstance(name, str) or not _is_below(name)]
        if odd:
            raise ValueError(f"`weight_map` names {str(odd[0])[:80]!r}, which is no file of this directory")
        return sorted(set(named))
    except (OSError, ValueError) as problem:
        raise UserError(
            f"cannot read {directory / INDEX}", why=f"it is damaged: {problem}", fix="fetch the model again"
        ) from None


def _is_below(name: str) -> bool:
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _check_inside(directory: Path, file: Path) -> None:
    """Refuses a link that leads out of the model. In the hub's cache all files are links into the model's own folder of
    blobs, two levels above a snapshot."""
    home = directory.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    if not file.resolve().is_relative_to(home):
        raise UserError(
            f"{file} leads out of the model's directory",
            why=f"it is a link to {file.resolve()}",
            fix="copy the file into the directory, if it belongs there",
        )
    check_regular(file)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor in a file, by its name there."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def match_table(
    spec: ModelSpec, shapes: dict[str, tuple[int, ...]], targets: dict[str, Tensor], directory: Path
) -> dict[str, TheirTensor]:
    """Returns their names with our parts, after checking that every tensor is there, fits, and nothing is left over."""
    fused = any(name.endswith("experts.gate_up_proj") for name in shapes)
    every = {tensor.name: tensor for tensor in tensor_table(spec, fused)}
    # A checkpoint saved from the bare transformer (the hub's gpt2, for one) lacks the outer prefix.
    prefix = next(iter(every)).split(".", 1)[0] + "."
    bare = {} if any(name.startswith(prefix) for name in shapes) else {n.removeprefix(prefix): n for n in every}
    named = {bare.get(name, name): name for name in shapes}

    wanted = [tensor for tensor in every.values() if all(part.ours in targets for part in tensor.parts)]
    missing = [tensor.name for tensor in wanted if tensor.name not in named]
    extra = [
        name
        for name in named
        if name not in every and not is_ignorable(name, spec) and not (spec.tied and name == "lm_head.weight")
    ]
    misfit = [
        f"{tensor.name} {list(shapes[named[tensor.name]])} instead of {list(their_shape(tensor, targets))}"
        for tensor in wanted
        if tensor.name in named and shapes[named[tensor.name]] != their_shape(tensor, targets)
    ]
    for problems, what in ((missing, "missing"), (extra, "unexpected"), (misfit, "wrongly shaped")):
        if problems:
            raise UserError(
                f"{counted(len(problems), f'{what} tensor')} in {directory}",
                why=shorten(problems),
                fix="check that config.json (and [model] overrides) belong to these weights",
            )
    return {named[tensor.name]: tensor for tensor in wanted}


def their_shape(tensor: TheirTensor, ours: dict[str, Tensor]) -> tuple[int, ...]:
    """Returns the shape that the tensor must have on disk, by the shapes of our parts."""
    shapes = [list(select(ours, part).shape) for part in tensor.parts]
    whole = shapes[0]
    if len(shapes) > 1:
        whole[tensor.cat_dim] = sum(shape[tensor.cat_dim] for shape in shapes)
    return tuple(reversed(whole)) if tensor.transposed else tuple(whole)


def load_file(path: Path, table: dict[str, TheirTensor], ours: dict[str, Tensor]) -> None:
    """Copies one file's tensors, in the order they lie in it, into ours."""
    header, data_start = read_safetensors_header(path)
    names = sorted(table.keys() & header.keys(), key=lambda name: header[name]["data_offsets"])
    with safe_open(path, framework="pt") as mapped, path.open("rb", buffering=0) as raw:
        for name in names:
            tensor, targets = table[name], [select(ours, part) for part in table[name].parts]
            if is_same_bytes(tensor, targets[0], header[name]["dtype"]):
                raw.seek(data_start + header[name]["data_offsets"][0])
                read_straight(raw, targets[0])
                continue
            data = mapped.get_tensor(name)
            data = data.t() if tensor.transposed else data
            sizes = [target.shape[tensor.cat_dim] for target in targets]
            pieces = data.split(sizes, tensor.cat_dim) if len(targets) > 1 else [data]
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)


def is_same_bytes(tensor: TheirTensor, target: Tensor, stored: str) -> bool:
    """Returns whether the file's bytes are the tensor's bytes, so that they can be read into place without a copy
    between."""
    as_is = len(tensor.parts) == 1 and not tensor.transposed and sys.byteorder == "little"
    on_cpu = type(target) is Tensor and target.device.type == "cpu" and target.is_contiguous()
    return as_is and on_cpu and STORED_DTYPES.get(stored) == target.dtype


def read_straight(file: BinaryIO, target: Tensor) -> None:
    """Reads as fast as a file can be read; copying from a mapped file reached 0.65 of that, for a page fault every 4
    KiB."""
    buffer = target.view(-1).view(torch.uint8).numpy().data
    while buffer.nbytes:
        count = file.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file ends inside a tensor")
        buffer = buffer[count:]


def _check_tied(table: Tensor, files: list[Path], directory: Path) -> None:
    """Refuses a checkpoint of a tied model that stores two different tables: it may store the one twice."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            if "lm_head.weight" not in file.keys():  # noqa: SIM118
                continue
            stored = file.get_tensor("lm_head.weight").to(table)
            if not torch.equal(stored, table):
                raise UserError(
                    f"the head in {directory} is not the embedding",
                    why="config.json says tie_word_embeddings, but lm_head.weight differs from the embedding table",
                    fix="set model.tied = false (or tie_word_embeddings to false in config.json)",
                )


@contextmanager
def translate_read_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError) as problem:
        raise UserError(
            f"cannot read the weights in {directory}",
            why=f"a file is damaged, cut short or unreadable: {problem}",
            fix="fetch the model again",
        ) from problem


def shorten(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


# Writing -----------------------------------------------------------------------------------------------------------


def save_model(
    model: Decoder | TransformersModel,
    directory: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    extra_files: Iterable[Path],
    source: Mapping[str, Tensor] | None,
) -> None:
    """Writes config.json, safetensors and the extra files (tokenizer), complete or not at all. The elements are those
    of `source`, if it is given."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"{directory} already exists",
            why="nothing is ever overwritten",
            fix="choose another directory, or remove it",
        )
    with appearing_at_once(directory, replace=False) as scratch:  # an empty directory gives way to the rename
        for file in extra_files:
            shutil.copy2(file, scratch / Path(file).name)
        if isinstance(model, TransformersModel):
            model.save(scratch, dtype, max_shard_bytes)
            return
        weight_dtype = dtype or next(model.parameters()).dtype
        config = config_from_spec(model.spec) | {"dtype": str(weight_dtype).removeprefix("torch.")}
        write_json(scratch / "config.json", config)
        write_weights(model, scratch, dtype, max_shard_bytes, source)


def write_weights(
    model: Decoder,
    directory: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    source: Mapping[str, Tensor] | None,
) -> None:
    ours = model_tensors(model)
    held = ours if source is None else source
    shards = plan_shards(tensor_table(model.spec), ours, dtype, max_shard_bytes)
    total = sum(size for shard in shards for _, size in shard)
    free = shutil.disk_usage(directory).free
    if total > free:
        raise UserError(
            f"not enough disk space at {directory.parent}",
            why=f"the weights need {total / GIB:.2f} GiB, {free / GIB:.2f} GiB are free",
            fix="free some space or choose another directory",
        )
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(directory / name, {t.name: gather(t, held, dtype) for t, _ in shard}, {"format": "pt"})
        weight_map |= {tensor.name: name for tensor, _ in shard}
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def plan_shards(
    table: list[TheirTensor], ours: dict[str, Tensor], dtype: torch.dtype | None, max_bytes: int
) -> list[list[tuple[TheirTensor, int]]]:
    """Returns the tensors of each file with their bytes, in order; a new file begins whenever the next tensor would not
    fit."""
    shards: list[list[tuple[TheirTensor, int]]] = [[]]
    used = 0
    for tensor in table:
        parts = [select(ours, part) for part in tensor.parts]
        size = sum(part.numel() for part in parts) * stored_dtype(tensor, parts[0], dtype).itemsize
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append((tensor, size))
        used += size
    return shards


def gather(tensor: TheirTensor, ours: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns our parts as their tensor: a fresh, contiguous copy on the CPU."""
    parts = [select(ours, part) for part in tensor.parts]
    data = torch.cat(parts, tensor.cat_dim) if len(parts) > 1 else parts[0]
    data = data.t() if tensor.transposed else data
    return data.to(device="cpu", dtype=stored_dtype(tensor, parts[0], dtype), copy=True).contiguous()


def stored_dtype(tensor: TheirTensor, data: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the format in which a tensor is stored. Router biases stay in fp32: transformers keeps them so, and bf16
    would round their steps away."""
    is_router_bias = tensor.parts[0].ours.endswith("router.bias")
    return data.dtype if dtype is None or is_router_bias else dtype


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
