"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

torch is loaded only to move data. Owns their names and what of their options we can say. Invariants: an adapter that is
read computes what `peft` would compute with it, or is refused by the name of the option; one that is written is
complete or not there at all. Read next: targets.py, interop/huggingface/names.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError
from shardwise.files import appearing_at_once, write_tensors
from shardwise.foreign_json import read_object, read_safetensors_header
from shardwise.interop.peft.targets import Settings, linears_of, their_modules
from shardwise.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
REFUSED = (
    "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters",
    "use_qalora", "alora_invocation_tokens", "arrow_config", "use_bdlora", "layer_replication", "corda_config",
    "loftq_config", "eva_config",
)  # fmt: skip
FIRST_VALUES = (True, False, "gaussian", "orthogonal", "eva", None)
"""Values of `init_lora_weights` that leave the base as it is. PiSSA, OLoRA and LoftQ change it."""


@dataclass(frozen=True)
class PeftAdapter:
    """What a directory says about its adapter, in our words."""

    rank: int
    alpha: float  # such that the scale is alpha / rank, whatever PEFT divides by
    targets: tuple[str, ...]  # linear layers with an adapter
    train_also: tuple[str, ...]  # modules that are trained beside them
    tensors: dict[str, str]  # our parameter name -> theirs


def open_adapter(path: str | Path, spec: ModelSpec) -> PeftAdapter:
    """Returns what an adapter's directory says, checked against the model; no tensor is loaded."""
    directory = Path(path).expanduser()
    config = _read_config(directory)
    _refuse_options(config, directory)
    shapes = _read_shapes(directory / TENSORS)
    rank = int(config["r"])
    tensors: dict[str, str] = {}
    targets: dict[str, bool] = {}
    others: dict[str, bool] = {}
    unknown = []
    ours = _our_modules(spec)
    for name, shape in shapes.items():
        plain = name.removeprefix(PREFIX).replace(".modules_to_save", "").replace(".base_layer", "")
        leaf = next((ending for ending in LORA if plain.endswith(ending)), None)
        module = plain.removesuffix(leaf) if leaf else plain.rsplit(".", 1)[0]
        known = ours.get(module) if spec.is_ours else f"inner.{module}"
        if not name.startswith(PREFIX) or known is None or (leaf and not _fits(spec, known, leaf, rank, shape)):
            unknown.append(f"{plain} {list(shape)}")
            continue
        tensors[f"{known}{LORA[leaf]}" if leaf else f"{known}.{plain.rsplit('.', 1)[1]}"] = name
        (targets if leaf else others)[known] = True
    incomplete = [name for name in targets if any(f"{name}{leaf}" not in tensors for leaf in LORA.values())]
    if unknown or incomplete or not targets:
        raise UserError(
            f"the adapter in {directory} is for another model than {spec.name}",
            why=f"no place for {', '.join(unknown[:3])}" + (" …" if len(unknown) > 3 else "")
            if unknown
            else f"half of a pair is missing: {', '.join(incomplete[:3]) or 'all of them'}",
            fix=f"the model it was made for ({config.get('base_model_name_or_path')!r}), or another adapter.path",
        )
    root = math.sqrt(rank) if config.get("use_rslora") else 1.0
    return PeftAdapter(rank, float(config["lora_alpha"]) * root, tuple(targets), tuple(others), tensors)


def read_adapter(path: str | Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Returns the adapter's full tensors by our names."""
    from safetensors import safe_open

    found = open_adapter(path, spec)
    with safe_open(Path(path).expanduser() / TENSORS, framework="pt") as file:
        return {ours: file.get_tensor(theirs) for ours, theirs in found.tensors.items()}


def write_adapter(
    directory: Path, spec: ModelSpec, settings: Settings, tensors: Mapping[str, Tensor], base: str | None
) -> None:
    """Writes an adapter. `tensors` is everything that was trained, by our names; `base` is what the model is called,
    for those who load it."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} already exists", why="nothing is overwritten", fix="choose another directory")
    theirs = _their_modules(spec, tensors)
    named: dict[str, Tensor] = {}
    targets: list[str] = []
    others: list[str] = []
    for name, value in tensors.items():
        module, leaf = name.rsplit(".", 1)
        ending = {our: their for their, our in LORA.items()}.get(f".{leaf}")
        named[f"{PREFIX}{theirs[module]}{ending or f'.{leaf}'}"] = value.detach().cpu().contiguous()
        (targets if ending else others).append(theirs[module])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": _short(list(dict.fromkeys(targets)), spec),
        "modules_to_save": list(dict.fromkeys(others)) or None,
        "bias": "none",
        "fan_in_fan_out": spec.is_ours and spec.positions == "learned",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    with appearing_at_once(directory, replace=False) as scratch:
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(scratch / TENSORS, named, {"format": "pt"})


# Names
# ------------------------------------------------------------------------------------------------------------------


def _our_modules(spec: ModelSpec) -> dict[str, str]:
    return {theirs: ours for ours, theirs in their_modules(spec).items()} if spec.is_ours else {}


def _their_modules(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    modules = {name.rsplit(".", 1)[0] for name in tensors}
    if not spec.is_ours:
        return {module: module.removeprefix("inner.") for module in modules}
    theirs = dict(their_modules(spec))
    fused = sorted(modules - theirs.keys())
    if fused:
        raise UserError(
            f"{fused[0]} has no adapter in PEFT's format",
            why=f"Hugging Face's {spec.name} has this layer fused with others, so its own adapter has no name there",
            fix="`--merge-lora` writes the whole model",
        )
    if spec.tied and "embed" in modules:
        raise UserError(
            "a trained embedding that is also the head has no form in PEFT's files",
            why=f"{spec.name} ties the two, and `peft` would load the embedding alone",
            fix="`--merge-lora` writes the whole model",
        )
    return theirs


def _short(targets: list[str], spec: ModelSpec) -> list[str]:
    """Returns `q_proj` where all layers of that name are meant, else full names."""
    everything = [their_modules(spec).get(name, name) for name in linears_of(spec)] if spec.is_ours else targets
    last = {name.rsplit(".", 1)[-1] for name in targets}
    is_all = {name for name in everything if name.rsplit(".", 1)[-1] in last} == set(targets)
    return sorted(last) if is_all else targets


def _fits(spec: ModelSpec, module: str, leaf: str, rank: int, shape: tuple[int, ...]) -> bool:
    if not spec.is_ours:
        return True  # compared with the module itself when it is there
    if module not in linears_of(spec):
        return False
    outputs, inputs = linears_of(spec)[module]
    return shape == ((rank, inputs) if leaf == ".lora_A.weight" else (outputs, rank))


# Files
# ------------------------------------------------------------------------------------------------------------------


def _read_config(directory: Path) -> dict[str, Any]:
    for name in (CONFIG, TENSORS):
        if not (directory / name).is_file():
            raise UserError(
                f"no adapter in {directory}",
                why=f"PEFT writes {CONFIG} and {TENSORS}; there is no {name} (adapter_model.bin is a pickle)",
                fix="give the directory that both are in",
            )
    try:
        config = read_object(directory / CONFIG)
        _ = int(config["r"]), float(config["lora_alpha"])
        return config
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
        raise UserError(
            f"cannot read {directory / CONFIG}",
            why=f"{type(problem).__name__}: {problem}",
            fix="save the adapter again",
        ) from None


def _refuse_options(config: dict[str, Any], directory: Path) -> None:
    wrong = [f"{name} = {config[name]!r}" for name in REFUSED if config.get(name)]
    if config.get("peft_type") != "LORA":
        wrong.append(f"peft_type = {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        wrong.append(f"bias = {config['bias']!r}")
    if config.get("init_lora_weights", True) not in FIRST_VALUES:
        wrong.append(f"init_lora_weights = {config['init_lora_weights']!r}")
    if wrong:
        raise UserError(
            f"the adapter in {directory} has {wrong[0]}, which is not supported",
            why="it would compute something else here than in peft; plain LoRA, rsLoRA and modules_to_save are read",
            fix="merge it in peft (`merge_and_unload`) and give the result as model.path, or another adapter.path",
        )


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in a file by reading its table of contents: an 8-byte length, then JSON."""
    try:
        header, _ = read_safetensors_header(file)
        return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(
            f"cannot read {file}", why=f"{type(problem).__name__}: {problem}", fix="save the adapter again"
        ) from None
