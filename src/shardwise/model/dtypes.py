"""Number formats by the name that `memory.precision` has: what parameters are kept in, and what is computed in.
And the formats in which gradients may travel."""

from __future__ import annotations

import torch

KEPT = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "bf16-true": torch.bfloat16,
    "fp16": torch.float32,
    "fp16-true": torch.float16,
    "fp8": torch.float32,
}
SUMMED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names of `memory.reduce_dtype`."""
COMPUTED = KEPT | {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
