"""Splits a module that has its weights, in place: fp8, recompute and offload of its blocks, then replicas or shards.

Nothing inside of a layer is cut. `parallelize` does this for any module, and apply.py for models of the transformers
library.
"""

from __future__ import annotations

from torch import nn

from shardwise.kernels.float8 import Float8Layers, apply_float8
from shardwise.memory.activation_offload import apply_activation_offload
from shardwise.memory.recompute import apply_recompute
from shardwise.parallel.data.replicas import DataParallelWrapper, Replicated
from shardwise.parallel.fsdp2 import fix_memory
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.traffic import Traffic
from shardwise.parallel.zero.sharding import Groups, Sharded, buffers_to


def float8_in_place(module: nn.Module, groups: Groups, mesh: Mesh) -> Float8Layers | None:
    """Converts the blocks' linear layers to fp8 and returns them, or None where the plan does not use fp8. Called
    before the module is split."""
    if not mesh.plan.formats.is_fp8:
        return None
    blocks = [block for group in groups for block in group]
    found = apply_float8(module, blocks, mesh.plan.fp8_recipe, emulate=mesh.device.type == "cpu")
    found.quantize_frozen()
    return found


def split_in_place(
    module: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, bucket_bytes: int
) -> DataParallelWrapper:
    """Replicates or shards a module that has its weights and returns its data-parallel wrapper. The groups stand in the
    order of a forward pass; `bucket_bytes` are the bytes of gradients per all-reduce of replicas."""
    blocks = [block for group in groups for block in group]
    apply_recompute(blocks, mesh.plan.recompute)
    if mesh.plan.activation_offload:
        apply_activation_offload(blocks, mesh.device)
    if mesh.fsdp is None:
        if any(tensor.device != mesh.device for tensor in (*module.parameters(), *module.buffers())):
            module.to(mesh.device)  # tensors without values could not even be moved to where they are
        return (
            Replicated(module, mesh.dp, bucket_bytes, traffic) if mesh.dp is not None else DataParallelWrapper(module)
        )
    if mesh.plan.offload == "all":
        module.to("cpu")
    wrapper = Sharded(module, groups, mesh, traffic, num_kept=1)
    buffers_to(module, mesh.device)
    fix_memory(wrapper.root)
    return wrapper
