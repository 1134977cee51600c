"""Says who owns which memory of a rank: the engine's parameters and gradients, FSDP2's gathered parameters, the
optimizer's state.

memory/account.py asks it, and the demos add it up. Nothing is computed here, and nothing kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.kernels.quantized_weight import LEAVES
from shardwise.memory.account import OwnedTensor, Owners, plain_parts
from shardwise.optim.offload.nvme import NvmeOptimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp2 import ParameterGroup, parameter_groups


def owners_of(engine: Engine, optimizer: torch.optim.Optimizer | None) -> Owners:
    """Returns a function that yields the tensors that one rank owns. A storage belongs to the owner that names it
    first."""
    groups = [group for model in engine.models for group in parameter_groups(model)]
    names = {id(shard.local): shard.name for shard in engine.shards}

    def held(everything: bool) -> Iterator[OwnedTensor]:
        for shard in engine.shards if everything else ():
            yield OwnedTensor("parameters", shard.name, shard.local)  # no view of it: it may be without memory
            if shard.low_precision is not None:
                yield OwnedTensor("parameters", f"low-precision {shard.name}", shard.low_precision.detach())
        for group in groups:
            yield from _gathered(group)
        for model in engine.models if everything else ():
            for name, value in model.named_buffers():
                yield OwnedTensor("parameters" if name.rpartition(".")[2] in LEAVES else "buffers", name, value)
        for shard in engine.shards:
            if (gradient := shard.gradient_here) is not None:  # what has left the device is not its memory
                yield OwnedTensor("gradients", f"gradient of {shard.name}", gradient)
        for parameter, state in optimizer.state.items() if everything and optimizer is not None else ():
            for key, value in state.items():
                if torch.is_tensor(value):
                    yield OwnedTensor("optimizer", f"{key} of {names.get(id(parameter), 'a parameter')}", value)
        for buffer in optimizer.buffers() if isinstance(optimizer, NvmeOptimizer) else ():
            yield OwnedTensor("optimizer", "a buffer of states on a disk", buffer.memory)

    return held


def _gathered(group: ParameterGroup) -> Iterator[OwnedTensor]:
    """Yields what FSDP2 holds itself: gathered parameters on their way and in use, and gradients that are not reduced
    yet."""
    if (buffer := group.gather_buffer) is not None:
        yield OwnedTensor("buffers", "gathered parameters", buffer)
    for parameter in group.parameters:
        for output in parameter.gathered:
            yield OwnedTensor("buffers", f"gathered {parameter.name}", output)
        for gradient in parameter.unreduced_gradients():
            yield OwnedTensor("gradients", f"gradient of {parameter.name}", gradient)


def kept_bytes(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns the bytes that this rank keeps between the last backward and the update, by kind of state, tensor by
    tensor; step counters are left out."""
    kept = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for held in owners_of(engine, optimizer)(True):
        if held.category in kept and held.tensor.ndim:
            kept[held.category] += sum(part.nbytes for part in plain_parts(held.tensor))
    return kept
