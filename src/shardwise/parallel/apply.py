"""How one model becomes many: where this rank stands, the transforms in their order, memory, weights, the engine.

    1. mesh.py            where this rank stands, and with whom it talks
    2. pipeline/          which layers this rank has
    3. transforms.py      what becomes of the plain decoder: adapters, kernels, context, expert and tensor parallelism,
                          fp8, compiled blocks, recomputation
    4. zero/              which rows of each parameter; number formats       (ZeRO 1, 2, 3, hybrid)
    5. weights            drawn or read at full shape and cut to what this rank holds, one layer at a time
    6. data/              replicas with summed gradients, or low-precision weights on one rank
    7. shards.py          the table of what came out of it

Once low-precision weights are there, a second, short list of transforms.py runs. any_module/ does 4 and 6 for modules
that are not ours; traffic.py times the collectives of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch

from shardwise.adapters.lora import Adapters, adapt, adapt_whole, decoder_adapters
from shardwise.interop.transformers.model import TransformersModel
from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.kernels.flash4 import kernel_named
from shardwise.kernels.float8 import Float8Layers
from shardwise.model.decoder import Decoder
from shardwise.model.dtypes import COMPUTED, KEPT
from shardwise.model.experts import moe_layers
from shardwise.parallel.any_module.in_place import float8_in_place, split_in_place
from shardwise.parallel.data.low_precision_weights import LowPrecisionWeights
from shardwise.parallel.data.replicas import BUCKET_BYTES, DataParallelWrapper, Replicated, SummedAtEnd
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp2 import fix_memory
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.pipeline.execute import Stage
from shardwise.parallel.shards import shards_of
from shardwise.parallel.tensor.collectives import TensorParallel
from shardwise.parallel.traffic import Traffic
from shardwise.parallel.transforms import ModelPart, transform, transform_weights
from shardwise.parallel.zero.sharding import Sharded, buffers_to, decoder_groups
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import stage_owners
from shardwise.spec.schema import AdapterConfig

InitWeights = Callable[[Decoder], None]
"""Puts weights into a plain part of the model on the CPU: drawn from the seed, or read from files."""


def parallelize_decoder(
    spec: ModelSpec,
    plan: Plan,
    rank: int,
    device: torch.device,
    attention: str,
    init_weights: InitWeights | None,
    *,
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008  (frozen)
    seed: int = 0,
    through_fsdp: bool = False,
    memory: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Engine:
    """Collective. Returns the model as this rank holds it, with its weights. `through_fsdp` shards by FSDP2 whatever
    the precision is, as mixed precision would. `seed` draws the adapters' first values.

    `memory` is opened around everything that takes memory, and without `init_weights` nothing is written to it: a
    rehearsal (rehearse/) has tensors that are sizes only."""
    uses_fsdp = plan.uses_fsdp or through_fsdp
    mesh = build_mesh(plan, spec, rank, device, fsdp=uses_fsdp)
    size, traffic = bucket_bytes(plan), Traffic()
    owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
    if isinstance(spec, TransformersSpec):
        theirs = cast(Decoder, TransformersModel(spec, attention, KEPT[plan.precision]))  # it has the decoder's calls
        init_weights = partial(_init_foreign, init_weights or _draw, adapter, seed, plan.precision)
        with memory():
            stage, float8 = _whole_stage(theirs, mesh, init_weights, size, traffic)
            return Engine(spec, [stage], mesh, COMPUTED[plan.precision], size, traffic, float8)
    adapters = decoder_adapters(spec, adapter, seed, plan.precision)
    stages, float8 = [], None
    for index, layers in enumerate(stage_layers(plan, spec.num_layers)):
        if owners[index] != mesh.at.pp:
            continue
        with torch.device("meta"):
            model = Decoder(spec, kernel_named(attention), layers).to(KEPT[plan.precision])
        tp = TensorParallel(mesh.tp, plan.sequence, traffic.on("tp")) if plan.tp > 1 else None
        part = ModelPart(model, layers, mesh, attention, traffic, adapters, tp, float8)
        transform(part)
        float8 = part.float8
        wrapper = None
        if uses_fsdp:
            num_kept = (plan.pp == 1) + (model.is_last and not spec.tied)  # the last block; the head
            wrapper = Sharded(model, decoder_groups(model), mesh, traffic, num_kept)
        with memory():
            model.to_empty(device=plan.parameter_home(device.type))
            buffers_to(model, device)
            if wrapper is not None:
                fix_memory(wrapper.root)
            if init_weights is not None:
                init_stage_weights(model, mesh, init_weights, layers, adapters)
            if float8 is not None:
                float8.quantize_frozen()
            stages.append(Stage(index, model, wrapper or _replicate(model, mesh, size, traffic)))
            transform_weights(part)
    with memory():
        return Engine(spec, stages, mesh, COMPUTED[plan.precision], size, traffic, float8)


def _whole_stage(
    model: Decoder, mesh: Mesh, init_weights: InitWeights, size: int, traffic: Traffic
) -> tuple[Stage, Float8Layers | None]:
    """Returns the one stage of a model of the transformers library, and its fp8 layers: the model is read whole, then
    replicated or sharded in place."""
    init_weights(model)
    groups = [[block] for block in cast(TransformersModel, model).blocks()]
    float8 = float8_in_place(model, groups, mesh)
    return Stage(0, model, split_in_place(model, groups, mesh, traffic, size)), float8


def _draw(model: Decoder) -> None:
    cast(TransformersModel, model).draw()


def _init_foreign(
    init_weights: InitWeights, settings: AdapterConfig, seed: int, precision: str, model: Decoder
) -> None:
    init_weights(model)
    adapt_whole(model, settings, seed, precision)


def _replicate(model: Decoder, mesh: Mesh, size: int, traffic: Traffic) -> DataParallelWrapper:
    """Returns the data-parallel wrapper of whole replicas. An expert has fewer of them, so its gradients are summed
    apart."""
    if mesh.plan.copies:
        return LowPrecisionWeights(model, COMPUTED[mesh.plan.precision])
    experts = {name: p for name, p in model.named_parameters() if mesh.expert is not None and ".experts." in name}
    others = [p for name, p in model.named_parameters() if name not in experts]
    uses_ddp = mesh.dp is not None and mesh.plan.pp == 1
    at_end = [(mesh.dp, others)] if mesh.dp is not None and not uses_ddp else []
    if mesh.expert is not None and mesh.expert.replicas is not None:
        at_end.append((mesh.expert.replicas, list(experts.values())))
    if uses_ddp:
        return Replicated(model, mesh.dp, size, traffic, apart=list(experts), at_end=at_end)
    return SummedAtEnd(model, at_end, size, traffic) if at_end else DataParallelWrapper(model)


def stage_layers(plan: Plan, num_layers: int) -> list[range]:
    """Returns the range of layers of each stage, in model order."""
    return [plan.layers_of(stage) for stage in range(plan.num_stages)] if plan.pp > 1 else [range(num_layers)]


def init_stage_weights(
    model: Decoder, mesh: Mesh, init_weights: InitWeights, layers: range, adapters: Adapters | None = None
) -> None:
    """Puts weights into a stage, layer by layer: no rank ever holds more than one layer beside its own share."""
    plain = mesh.plan.tp == mesh.plan.ep == 1 and not mesh.fsdp and adapters is None
    if plain:
        init_weights(model)
        return
    table = {shard.name: shard for shard in shards_of(model, mesh, model.spec)}
    buffers = dict(model.named_buffers())
    for index in layers:
        with torch.device("meta"):
            piece = Decoder(model.spec, "math", range(index, index + 1)).to(KEPT[mesh.plan.precision])
        init_weights(piece.to_empty(device="cpu"))
        if adapters is not None:
            adapt(piece.to(mesh.device), adapters)  # a GPU quantizes billions of weights in seconds
        for name, value in piece.state_dict().items():
            if name in table:
                table[name].put(value)
            elif name in buffers:
                buffers[name].copy_(value)
    for layer in moe_layers(model):
        layer.tokens_per_expert.zero_()


def bucket_bytes(plan: Plan) -> int:
    """Returns how many bytes of gradients each all-reduce sums."""
    return BUCKET_BYTES[plan.device] if plan.bucket == "auto" else int(plan.bucket)
