"""Reads config.json of the Hugging Face world into a `ModelSpec`. No torch.

Invariant: a field that would change the computed function is either represented in the spec or refused by name. Read
next: `architectures.py`, which says what each architecture means, `export.py` for the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.huggingface.architectures import ARCHITECTURES
from shardwise.interop.huggingface.reader import Reader, refused
from shardwise.spec.model import ModelSpec

# What a field must be where the decoder has no equivalent; None stands for "absent, null or false".
COMMON_REQUIREMENTS: dict[str, Any] = {"quantization_config": None, "partial_rotary_factor": 1.0}


SIZES = {"num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "num_experts"}
THEIR_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
LARGEST_SIZE = 2**31
MOST_MODULES = 10_000
"""Of layers, and of experts in a layer: each is built one by one, which a damaged number would make endless."""


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the spec that computes what transformers computes from this config."""
    kind = config.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise UserError(
            f"config.json: model_type {kind!r} is not supported",
            why=f"supported are: {', '.join(ARCHITECTURES)}",
            fix="use a model of one of these architectures (Gemma 3 only as its text model)",
        )
    for field, wanted in {**COMMON_REQUIREMENTS, **architecture.requires}.items():
        value = config.get(field)
        if value not in (None, wanted) and not (wanted is None and value is False):
            raise refused(field, value, f"only {wanted!r} is built" if wanted is not None else "it must be off")
    name = str(config.get("_name_or_path") or kind).rstrip("/").rsplit("/", 1)[-1]
    try:
        values = architecture.read(Reader(config))
        for field in SIZES & values.keys():
            if type(values[field]) is not int or not 0 <= values[field] < LARGEST_SIZE:
                raise ValueError(f"{field} = {str(values[field])[:40]} is no size")
        for field in ("num_layers", "num_experts"):
            if values.get(field, 0) > MOST_MODULES:
                raise ValueError(f"{field} = {values[field]} is more than {MOST_MODULES}")
        return ModelSpec.from_dict({"name": name, **values})
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        odd = [
            field for field in THEIR_SIZES if field in config and (type(config[field]) is not int or config[field] < 1)
        ]
        what = f"{odd[0]} = {config[odd[0]]!r:.40} is no size" if odd else problem
        raise UserError(
            "config.json cannot be understood",
            why=f"a {kind} config with a missing or malformed value: {what}",
            fix="take the config.json that belongs to the weights",
        ) from problem
