"""What a layout is made of. No torch.

    grid    degrees of all axes: dp x cp x tp x pp = GPUs        pace     micro-batch and pipeline schedule
    states  ZeRO stage and replicas                              saving   what is computed again or waits elsewhere

A layout is one of each; space.py says which of them there are.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.recompute import recompute_of


class Grid(NamedTuple):
    """The degrees of all axes: how many ranks there are, and along which lines they stand."""

    dp: int
    tp: int
    sequence: bool
    cp: int
    cp_kind: str
    pp: int
    ep: int

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp


class Pace(NamedTuple):
    """How a step goes through the pipeline: sequences per micro-batch, and the schedule."""

    micro_batch: int
    schedule: str
    virtual_stages: int


class States(NamedTuple):
    """Who keeps parameters, gradients and optimizer state: the ZeRO stage, and replicas of the sharded whole."""

    zero: int
    replicate: int


class Saving(NamedTuple):
    """What is done for memory at the price of time."""

    recompute: str
    offload: str
    activation_offload: bool


def never_faster(saving: Saving, than: Saving) -> bool:
    """Returns whether `saving` does all the extra work of `than`, and perhaps more. What is computed again is not
    moved, so of two layouts that move activations the one that computes more again may be faster."""
    if than.activation_offload and saving.recompute != than.recompute:
        return False
    return (
        than.offload in ("none", saving.offload)
        and than.activation_offload <= saving.activation_offload
        and _repeats_all_of(saving.recompute, than.recompute)
    )


def _repeats_all_of(mode: str, other: str) -> bool:
    """Returns whether `mode` computes every block again that `other` does: every second contains every fourth."""
    step, of = (recompute_of(word).every or 0 for word in (mode, other))
    return other in ("none", mode) or (step > 0 and of % step == 0 and of > 0)
