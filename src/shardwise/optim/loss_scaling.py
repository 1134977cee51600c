"""Loss scaling keeps small fp16 gradients from vanishing.

fp16 ends at 65504 and loses what is below 6e-8. So the loss is multiplied by `scale` before backward, every gradient
carries it through all sums, and the update divides it out again, in the one factor that also clips. Where the scale
was too large something overflows and the global norm is not finite. Every rank of every axis has that norm, so all of
them skip the step and halve the scale without another collective. Invariant: scales are powers of two where `auto`
chooses them, so scaling rounds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.spec.plan import Plan

FIRST = 2.0**16
LARGEST = 2.0**24
"""The largest scale: an fp32 sum of scaled gradients must not overflow where the gradients themselves do not."""
SMALLEST = 1.0
GROWS_AFTER = 2000  # good steps in a row until the scale doubles, as in torch's own scaler
PATIENCE = 16
"""How many steps in a row may be skipped with a scale that cannot fall. From FIRST to SMALLEST there are as many
halvings."""


@dataclass
class LossScaler:
    """Holds the loss scale. A `scale` of 1.0 without `is_active` is no scaling at all: nothing is looked at and nothing
    is skipped."""

    scale: float = 1.0
    is_active: bool = False
    is_dynamic: bool = False
    grows_after: int = GROWS_AFTER
    good_steps: int = 0  # steps since the scale last changed
    skipped_steps: int = 0  # steps that were skipped in a row

    def overflowed(self, norm: Tensor) -> bool:
        """Returns whether this step must be skipped. It looks at the norm, for which a GPU has to be waited."""
        return self.is_active and not bool(torch.isfinite(norm))

    def update(self, *, overflowed: bool) -> None:
        """Adapts the scale after a step; called after every step, on every rank alike."""
        self.skipped_steps = self.skipped_steps + 1 if overflowed else 0
        if not self.is_dynamic:
            return
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, SMALLEST)
        elif self.good_steps == self.grows_after:
            self.scale, self.good_steps = min(self.scale * 2, LARGEST), 0

    @property
    def is_stuck(self) -> bool:
        """Returns whether step after step overflows and no smaller scale is left to try: then it is not the scale."""
        return self.skipped_steps > PATIENCE and (not self.is_dynamic or self.scale <= SMALLEST)

    # In checkpoints -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, float]:
        """Returns what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def restore(self, saved: dict[str, float]) -> None:
        """Takes over a checkpoint's values. A fixed scale stays what the config says; a run without scaling has saved
        none."""
        if self.is_dynamic and saved:
            self.scale, self.good_steps = float(saved["scale"]), int(saved["good_steps"])
            self.skipped_steps = int(saved["skipped_steps"])


def scaler_of(plan: Plan) -> LossScaler:
    """Returns the scaler that a plan asks for: fixed, dynamic, or one that does nothing."""
    if plan.loss_scale != "auto":
        return LossScaler(float(plan.loss_scale), is_active=True)
    return LossScaler(FIRST, is_active=True, is_dynamic=True) if plan.scales_loss else LossScaler()


def clip_factor(norm: Tensor, largest: float | None, scale: float) -> Tensor:
    """Returns what gradients are multiplied by, as a tensor on the device of `norm`: it clips to a norm of `largest`
    and divides by the loss scale. `norm` is the gradient norm without the scale."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0) if largest else torch.ones_like(norm)
    return factor / scale


def unscaled(gradient: Tensor, scale: float) -> Tensor:
    """Returns a new tensor: the gradient divided by the loss scale, for people and proofs. fp16 becomes fp32, or the
    division would lose what the scale had saved."""
    if scale == 1.0:
        return gradient.clone()
    in_fp32 = gradient if math.log2(torch.finfo(gradient.dtype).max) > 16 else gradient.float()
    return in_fp32 / scale
