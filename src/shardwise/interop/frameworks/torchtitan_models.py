"""The models that torchtitan has, from torchtitan.toml, and in what they differ from one of ours. No torch. Part of
torchtitan.py."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from shardwise.spec.model import FIELD_NAMES, ModelSpec

DETAILS = (
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_seq_len",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_mscale",
    "rope_mscale_all_dim",
    "aux_loss_coef",
    "aux_loss_rule",
    "z_loss_coef",
    "bias_update_rate",
)
"""In these fields of a ModelSpec a flavor may differ; each difference is a line."""

FREE = ("name", "max_seq_len", "rope_interleaved", "rope_attention_factor")
"""Fields that are names, follow train.seq_len, or say how weights are stored."""

SIZES = tuple(name for name in FIELD_NAMES if name not in (*DETAILS, *FREE))
"""By these a model is told from another; a flavor has all of them, or it is not the model."""


class Flavor(NamedTuple):
    """A model that torchtitan has: its name there, and the fields of a ModelSpec."""

    name: str
    flavor: str
    pipelines: bool
    context: bool
    spec: ModelSpec


@cache
def flavors() -> tuple[Flavor, ...]:
    """Returns all models of the table."""
    table = tomllib.loads(files(__package__).joinpath("torchtitan.toml").read_text("utf-8"))
    return tuple(
        Flavor(name, flavor, model["pipelines"], model["context"], ModelSpec(**model["common"] | sizes))
        for name, model in table.items()
        for flavor, sizes in model["flavors"].items()
    )


@cache
def flavor_of(spec: ModelSpec) -> Flavor | None:
    """Returns its model with the same sizes and layers, of several the most alike; None: it has none."""
    same = [one for one in flavors() if all(getattr(one.spec, name) == getattr(spec, name) for name in SIZES)]
    return min(same, key=lambda one: len(differences(one, spec)), default=None)


def differences(flavor: Flavor, spec: ModelSpec) -> list[str]:
    """Returns what the flavor computes otherwise."""
    if spec.rope_scaling != flavor.spec.rope_scaling:
        its = f"{flavor.spec.rope_scaling} with factor {flavor.spec.rope_factor:g}"
        found = [f"cannot take rope_scaling={spec.rope_scaling}: its {flavor.name} always computes {its}"]
        names = [name for name in DETAILS if not name.startswith("rope_") or name == "rope_theta"]
    else:
        found, names = [], list(DETAILS)
    return found + [
        f"cannot take {name}={getattr(spec, name):g}: its flavor has {getattr(flavor.spec, name):g}"
        for name in names
        if getattr(spec, name) != getattr(flavor.spec, name)
    ]
