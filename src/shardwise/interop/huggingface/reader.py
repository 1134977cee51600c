"""Reads one config.json with care: defaults for what is missing, shared parts read once, every complaint names the
field.

Owns what the architectures have in common (sizes, activations, rotary scaling, windows). No torch. Read next:
`config.py`, which says what each architecture adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Reader:
    """A config with the architecture's own defaults for what is missing; every complaint names the field."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def get(self, name: str, default: Any) -> Any:
        """Returns the value, or the default where the config is silent or null."""
        value = self.config.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        if self.config.get(name) is None:
            raise UserError(
                f"config.json has no `{name}`",
                why=f"a {self.config.get('model_type')} model cannot be built without it",
                fix="take the config.json that belongs to the weights",
            )
        return self.config[name]

    def activation(self, name: str = "hidden_act", default: str = "silu") -> str:
        value = self.get(name, default)
        if value not in ACTIVATION_NAMES:
            raise refused(name, value, f"activations are: {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[value]

    def sizes(self) -> dict[str, Any]:
        """Returns the fields that the whole Llama family calls the same."""
        heads = self.need("num_attention_heads")
        return {
            "num_layers": self.need("num_hidden_layers"),
            "hidden": self.need("hidden_size"),
            "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads", heads),
            "head_dim": self.get("head_dim", self.need("hidden_size") // heads),
            "ffn": self.need("intermediate_size"),
            "vocab": self.need("vocab_size"),
            "norm_eps": float(self.get("rms_norm_eps", 1e-6)),
        }

    def rope(self, default_theta: float = 10000.0) -> dict[str, Any]:
        """Returns theta and scaling, from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`."""
        values = {**self.get("rope_scaling", {}), **self.get("rope_parameters", {})}
        return self.scaling(values, float(values.get("rope_theta") or self.get("rope_theta", default_theta)))

    def scaling(self, values: Mapping[str, Any], theta: float) -> dict[str, Any]:
        kind = values.get("rope_type") or values.get("type") or "default"
        if values.get("partial_rotary_factor") not in (None, 1.0):
            raise refused("partial_rotary_factor", values["partial_rotary_factor"], "whole heads are rotated here")
        original = values.get("original_max_position_embeddings") or self.get("max_position_embeddings", 0)
        fields: dict[str, Any] = {"rope_theta": theta}
        if kind == "default":
            return fields
        if kind == "linear":
            return {**fields, "rope_scaling": "linear", "rope_factor": float(values["factor"])}
        if kind == "llama3":
            return {
                **fields,
                "rope_scaling": "llama3",
                "rope_factor": float(values["factor"]),
                "rope_low_freq_factor": float(values["low_freq_factor"]),
                "rope_high_freq_factor": float(values["high_freq_factor"]),
                "rope_original_max_seq_len": int(original),
            }
        if kind == "yarn":
            if values.get("truncate") is False:
                raise refused("rope_scaling.truncate", False, "only YaRN's rounded ramp is built")
            optional = {
                "mscale": 0.0,
                "mscale_all_dim": 0.0,
                "attention_factor": 0.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
            fields |= {f"rope_{key}": float(values.get(key) or default) for key, default in optional.items()}
            factor = values.get("factor") or self.need("max_position_embeddings") / original
            return {
                **fields,
                "rope_scaling": "yarn",
                "rope_factor": float(factor),
                "rope_original_max_seq_len": int(original),
            }
        raise refused("rope_scaling", kind, "rotary scalings are: default, linear, llama3, yarn")

    def window(self, pattern: list[bool], default: int) -> dict[str, Any]:
        """Returns the spec's window fields, from a list that says which layers are windowed; the pattern must be one
        that the spec can say."""
        types = self.config.get("layer_types")
        if types is not None:
            unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
            if unknown or len(types) != self.need("num_hidden_layers"):
                raise refused("layer_types", unknown or types, "one full_attention or sliding_attention per layer")
            pattern = [kind == "sliding_attention" for kind in types]
        if not any(pattern):
            return {}
        size = {"sliding_window": int(self.get("sliding_window", default))}
        first = pattern.index(True)
        if all(pattern[first:]):
            return {**size, "window_from": first}
        every = pattern.index(False) + 1
        if pattern == [(index + 1) % every != 0 for index in range(len(pattern))]:
            return {**size, "global_every": every}
        raise refused("layer_types", types, "windows from one layer on, or on all but every n-th layer")


class NotOurs(UserError):
    """A model that our decoder would compute otherwise. transformers' own code may still run it."""


def refused(field: str, value: Any, why: str) -> NotOurs:
    return NotOurs(
        f"config.json: `{field}` = {value!r} is not supported",
        why=f"the decoder would compute something else; {why}",
        fix="use a model without this option",
    )


# Each architecture, config to spec ---------------------------------------------------------------------------------
