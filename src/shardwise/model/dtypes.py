"""torch's dtypes for the precisions of spec/precisions.py: of weights that are kept, of what is computed, of
gradients."""

from __future__ import annotations

import torch

from shardwise.spec.precisions import PRECISIONS

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtype of each number format."""
KEPT = {name: DTYPES[precision.kept] for name, precision in PRECISIONS.items()}
COMPUTED = {name: DTYPES[precision.computed] for name, precision in PRECISIONS.items()}
SUMMED = {name: DTYPES[name] for name in ("fp32", "bf16", "fp16")}
"""The dtypes in which gradients may be summed, by the names of `memory.reduce_dtype`."""
