"""Names that differ between torch 2.11 and later, in one place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of one module: 2.11 has at most one, later versions a list."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
