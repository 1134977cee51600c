"""The models that torchtitan has, from torchtitan.toml, and in what they differ from one of ours. No torch. Part of
torchtitan.py."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import NamedTuple

from shardwise.spec.model import FIELD_NAMES, ModelSpec

DETAILS = ("norm_eps", "rope_theta", "aux_loss_coef", "z_loss_coef", "bias_update_rate")
"""In these fields of a ModelSpec a flavor may differ; each difference is a line."""

SCALING = {
    "none": (),
    "linear": ("rope_factor",),
    "llama3": ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_seq_len"),
    "yarn": (
        *("rope_factor", "rope_original_max_seq_len", "rope_beta_fast", "rope_beta_slow"),
        *("rope_mscale", "rope_mscale_all_dim", "rope_attention_factor"),
    ),
}
"""The same of rotary positions, by how they are scaled: the other fields say nothing then."""

FREE = ("name", "max_seq_len", "rope_interleaved", "rope_scaling", "aux_loss_rule")
"""Fields that are names, follow train.seq_len, say how weights are stored, or have lines of their own."""

SIZES = tuple(name for name in FIELD_NAMES if name not in (*DETAILS, *FREE, *chain(*SCALING.values())))
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
    return min(same, key=lambda one: len(differences(one, spec, spec.max_seq_len)), default=None)


def differences(flavor: Flavor, spec: ModelSpec, seq_len: int) -> list[str]:
    """Returns what the flavor computes otherwise."""
    its = _scaling(flavor, seq_len)
    found, names = [], [*DETAILS]
    if spec.rope_scaling == its:
        names += SCALING[its]
    elif its == "none":
        why = "its flavor has none"
        if flavor.spec.rope_scaling == "yarn":
            why = (
                f"its {flavor.name} stretches frequencies and scales attention only for sequences of more than "
                f"{flavor.spec.rope_original_max_seq_len} tokens"
            )
        found.append(f"cannot take rope_scaling={spec.rope_scaling} at seq_len={seq_len}: {why}")
    else:
        found.append(
            f"cannot take rope_scaling={spec.rope_scaling}: its {flavor.name} computes {its} with factor "
            f"{flavor.spec.rope_factor:g} at this length"
        )
    return found + [
        f"cannot take {name}={getattr(spec, name):g}: its flavor has {getattr(flavor.spec, name):g}"
        for name in names
        if getattr(spec, name) != getattr(flavor.spec, name)
    ]


def _scaling(flavor: Flavor, seq_len: int) -> str:
    """Returns how the flavor scales rotary positions. It leaves YaRN out where sequences are no longer than those that
    it stretches from."""
    its = flavor.spec
    return "none" if its.rope_scaling == "yarn" and seq_len <= its.rope_original_max_seq_len else its.rope_scaling
