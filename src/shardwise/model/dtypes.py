"""torch's dtypes for the precisions of `spec/precisions.py`: of the weights that are kept, of what is computed, of gradients that are reduced."""

from __future__ import annotations

import torch

from shardwise.spec.precisions import PRECISIONS

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By number format."""
KEPT = {name: DTYPES[precision.kept] for name, precision in PRECISIONS.items()}
COMPUTED = {name: DTYPES[precision.computed] for name, precision in PRECISIONS.items()}
SUMMED = {name: DTYPES[name] for name in ("fp32", "bf16", "fp16")}
"""By the names of `memory.reduce_dtype`."""
