"""Describes a model that our decoder does not: transformers builds it, and the planner still gets its sizes.

No torch here. Parameters are counted on the real modules, built without memory. What else the planner asks for (widths,
heads) is read from the config where it has a usual name and guessed where it has not: predictions are rougher than for
our own models. Invariant: nothing of a model directory is ever executed; a model that comes with its own code is
refused. Read next: model.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.huggingface.config import MOST_MODULES
from shardwise.interop.huggingface.reader import refused
from shardwise.spec.model import LayerSpec, ModelSpec

COUNTED = re.compile("(^|_)(layers?|experts?|blocks?)$")
INSTALL = 'pip install "transformers>=5.0"'


@dataclass(frozen=True)
class TransformersSpec(ModelSpec):
    """The sizes of such a model. `tied` is always set: everything outside of the blocks stays together, as a tied
    embedding does in our own decoder."""

    config_json: str = "{}"  # all of config.json: enough to build the model again
    blocks: str = ""  # the dotted name of the module that is the list of blocks
    block_parameters: tuple[int, ...] = ()
    other_parameters: int = 0
    why_not_ours: str = ""  # what our decoder lacks, where it knows the architecture

    def __post_init__(self) -> None:
        """Completes the sizes. What our own decoder could not be built from is no mistake here."""
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.num_heads)
        object.__setattr__(self, "block_parameters", tuple(self.block_parameters))

    @property
    def is_ours(self) -> bool:
        return False

    # Counted, not derived: blocks by their index, all the rest as one table ----------------------------------------

    @property
    def num_embedding_parameters(self) -> int:
        return self.other_parameters

    @property
    def num_attention_parameters(self) -> int:
        return 0

    @property
    def num_norm_parameters(self) -> int:
        return 0

    def num_feedforward_parameters(self, layer: LayerSpec, active_only: bool = False) -> int:
        return self.block_parameters[layer.index]

    def with_overrides(self, overrides: Mapping[str, Any]) -> ModelSpec:
        name = next(iter(overrides))
        raise UserError(
            f"model.{name} cannot be set for {self.name}",
            why="transformers builds this model from its own config.json",
            fix="change config.json in a copy of the directory, or leave it out",
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TransformersSpec:
        return cls(**values)


def spec_from_transformers(config: Mapping[str, Any], why_not_ours: str = "") -> TransformersSpec:
    """Returns the sizes of a model that only transformers can run. Loads torch and transformers."""
    check_native(config)
    if config.get("quantization_config"):
        raise refused("quantization_config", config["quantization_config"], "only plain numbers are trained")
    from shardwise.interop.transformers.model import build_without_memory, find_block_list

    try:
        _check_counts(config)
        model = build_without_memory(config)
    except UserError:
        raise
    except Exception as problem:  # transformers raises whatever its config classes come across
        raise UserError(
            "transformers cannot build a model from this config.json",
            why=" ".join(str(problem).split())[:200] or type(problem).__name__,
            fix="take the config.json that belongs to the weights",
        ) from problem
    path, blocks = find_block_list(model)
    about = model.config.get_text_config()
    hidden, heads = _size(about, "hidden_size"), _size(about, "num_attention_heads") or 1
    sizes = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
    return TransformersSpec(
        name=str(config.get("_name_or_path") or config["model_type"]).rstrip("/").rsplit("/", 1)[-1],
        num_layers=len(blocks),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_size(about, "num_key_value_heads") or heads,
        ffn=_size(about, "intermediate_size") or _size(about, "ffn_dim") or 4 * hidden,
        vocab=_size(about, "vocab_size"),
        tied=True,
        max_seq_len=longest if (longest := _size(about, "max_position_embeddings")) > 0 else 2**30,
        positions="learned" if _learns_positions(model) else "rope",
        config_json=json.dumps({key: value for key, value in config.items() if key != "auto_map"}),
        blocks=path,
        block_parameters=sizes,
        other_parameters=sum(p.numel() for p in model.parameters()) - sum(sizes),
        why_not_ours=why_not_ours,
    )


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuses more layers or experts than anybody has: transformers would build them one by one."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif COUNTED.search(key) and isinstance(value, int | float):
            most = MOST_MODULES * (10 if "expert" in key else 1)  # Doge has 16,384 experts, rows of a table
            if value > most:
                raise ValueError(f"{key} = {value} is more than {most}")


def spec_from_dict(values: Mapping[str, Any]) -> ModelSpec:
    """Returns a stored spec, of either kind."""
    return (TransformersSpec if "config_json" in values else ModelSpec).from_dict(values)


def check_native(config: Mapping[str, Any]) -> None:
    """Refuses a kind of model that transformers' own code does not know: code that comes with the directory is never
    run."""
    kind = config.get("model_type")
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NATIVE
    except ImportError as problem:
        raise UserError(
            f"config.json: model_type {kind!r} is not one of ours, and transformers is not installed",
            why=f"transformers' own code would build it ({problem})",
            fix=INSTALL,
        ) from problem
    if kind in NATIVE:
        return
    from transformers import __version__

    if config.get("auto_map"):
        raise UserError(
            f"config.json: model_type {kind!r} is not supported, it comes with code of its own",
            why="`auto_map` names Python files of the model directory, which are never run; "
            f"transformers {__version__} has no {kind!r}",
            fix="a model whose code is part of transformers, or a newer transformers that has it",
        )
    raise UserError(
        f"config.json: model_type {kind!r} is not supported",
        why=f"neither this package nor transformers {__version__} has a causal language model of that type",
        fix="use a causal language model (Gemma 3 only as its text model), or a newer transformers",
    )


def can_mask(spec: ModelSpec) -> bool:
    """Returns whether a model can be told which tokens of a row belong together. Of a model of transformers a small one
    is asked, which takes a second or two."""
    if not isinstance(spec, TransformersSpec):
        return True
    from shardwise.interop.transformers.apart import keeps_apart

    return keeps_apart(spec)


def no_document_mask(name: str, where: str | None = None) -> UserError:
    return UserError(
        f"data.document_mask does not work with {name}",
        why="transformers builds this model and cannot tell it which tokens of a row belong together",
        fix="data.document_mask=false, or data.packing=single, which gives every document a row of its own",
        where=where,
    )


def _size(about: Any, name: str) -> int:
    """Returns a size from a config of transformers: the largest where it has one for each layer, 0 where it has
    none."""
    found = getattr(about, name, None)
    return int(max(found, default=0) if isinstance(found, list | tuple) else found or 0)


def _learns_positions(model: Any) -> bool:
    """Returns whether a model has a second table of embeddings, besides that of the tokens: that one has an end."""
    from torch import nn

    tokens = model.get_input_embeddings()
    return any(isinstance(module, nn.Embedding) and module is not tokens for module in model.modules())
