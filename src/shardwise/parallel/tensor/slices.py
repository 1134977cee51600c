"""Tensor and sequence parallelism: every rank holds a slice of each matrix, and explicit borders sum the results.

Owns which rank holds what (`placement`) and the rewiring of a plain decoder (`apply_tensor_parallel`). Parameters stay
ordinary local tensors under their global names, so whatever comes after (recomputation, sharding, optimizers) sees a
smaller plain model. Invariant: matrices that begin a region are cut by output (column parallel: whole heads,
feed-forward channels), those that end it by input (row parallel); everything else is whole on every rank. Megatron-LM,
arXiv 1909.08053 section 3; sequence parallelism, arXiv 2205.05198 section 4.2.2. Read next: collectives.py, then
vocabulary.py.

    split    attention by whole heads, feed-forward layers by channels, embedding and head by rows of the vocabulary
    held     1/P of those matrices, their gradients and optimizer state; norms and routers whole
    sent     collectives at the borders (collectives.py); gradients of what is whole inside of regions, once per step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.lora import adapted_linear
from shardwise.adapters.nf4 import LEAVES, PAIR
from shardwise.errors import UserError
from shardwise.kernels.quantized_weight import weight_of
from shardwise.model.decoder import Block, Decoder
from shardwise.model.experts import MixtureOfExperts, Routing
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.parallel.tensor.collectives import TensorParallel, enter, leave, scale_gradient, share
from shardwise.parallel.tensor.vocabulary import VocabEmbedding, VocabHead
from shardwise.spec.model import ModelSpec

# Who holds what ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The part of a full tensor that a rank holds."""

    dim: int
    start: int
    stop: int


class Placement(NamedTuple):
    """`replicas` neighbouring ranks hold the same elements; if `partial`, their gradients are parts that must be
    summed."""

    slice: Slice | None  # None: the whole tensor
    replicas: int
    partial: bool


def placement(
    spec: ModelSpec, name: str, tp: int, index: int, sequence: bool, ep: int = 1, expert_index: int = 0
) -> Placement:
    """Returns what rank `index` of `tp` holds of the parameter or buffer with this global name, if it has the experts
    of rank `expert_index` of `ep`. `sequence` is whether sequence parallelism is on."""
    if ep > 1 and ".experts." in name:
        return Placement(Slice(0, *share(spec.num_experts, ep, expert_index)), 1, False)
    if tp == 1:
        return Placement(None, 1, False)
    if (leaf := name.rsplit(".", 1)[1]) in BESIDE_WEIGHT:
        beside = f"{name.removesuffix(leaf)}weight"
        return _beside(placement(spec, beside, tp, index, sequence, ep, expert_index), leaf, tp)
    weight = spec.weights.get(name)
    if weight is None:
        if name.endswith(BUFFERS):
            return Placement(None, tp, False)  # all ranks route and count the same tokens
        raise LookupError(f"{name} is not a tensor of {spec.name}")
    if weight.cut is None:  # within a region each rank's gradient is a part; outside where it sees its own tokens only
        is_inside = weight.is_inside and not (ep > 1 and name.endswith(".router.weight"))  # each routes its own tokens
        return Placement(None, tp, is_inside or sequence)
    # Whole heads or channels. With fewer of them than ranks, tp / units neighbours hold the same one.
    dim, units, width = weight.cut
    replicas = max(1, tp // units)
    assert width == 1 or units % tp == 0 or tp % units == 0, f"{units} units of {name} over {tp} ranks"
    start, stop = share(units, tp // replicas, index // replicas)
    return Placement(Slice(dim, start * width, stop * width), replicas, replicas > 1)


BUFFERS = (".router.bias", ".tokens_per_expert")


BESIDE_WEIGHT = ("lora_a", "lora_b", *LEAVES)


def _beside(weight: Placement, leaf: str, tp: int) -> Placement:
    """Returns the placement of an adapter's matrix, or of a tensor of a quantized weight, from that of the weight."""
    cut = weight.slice
    if cut is None:
        return weight
    if leaf == ("lora_a" if cut.dim == 0 else "lora_b"):
        return Placement(None, tp, True)  # whole; each rank has a part of what it is multiplied with
    if cut.dim == 0 or leaf == "lora_a":
        return weight
    if leaf == "weight_scale":  # of whole rows
        return Placement(None, tp, False)
    # Columns of whole pairs of blocks: where the slice begins or ends inside of one, two ranks have it.
    first, last = cut.start // PAIR, -(-cut.stop // PAIR)
    width = 1 if leaf == "weight_absmax" else PAIR // 4
    return Placement(Slice(1, first * width, last * width), 1, False)


def take(full: Tensor, slice: Slice | None) -> Tensor:
    """Returns the slice as a view of the full tensor."""
    return full if slice is None else full.narrow(slice.dim, slice.start, slice.stop - slice.start)


# Rewiring a decoder --------------------------------------------------------------------------------------------------

FORWARD = signature(Decoder.forward)


def apply_tensor_parallel(model: Decoder, tp: TensorParallel) -> None:
    """Keeps this rank's slices and puts borders around the regions, in place. The model may be a part, or on `meta`."""
    if tp.size == 1:
        return
    slice_parameters(model, tp)
    model.register_forward_pre_hook(partial(_begin_pass, tp), with_kwargs=True)
    if model.embed is not None:
        model.embed = VocabEmbedding(model.spec, model.embed.weight, tp)
    if model.position_embed is not None:
        model.position_embed.register_forward_pre_hook(lambda _, args: tp.split(args[0]))
    for block in model.layers.values():
        assert isinstance(block, Block)
        _border_block(block, tp)
    if model.head is not None:
        model.head = VocabHead(model.spec, model.head.weight, tp)


@torch.no_grad()
def slice_parameters(model: Decoder, tp: TensorParallel) -> None:
    """Replaces each parameter by this rank's slice of it, in place."""
    for module_name, module in model.named_modules():
        if isinstance(module, SpreadExperts):
            continue  # already cut, by experts
        for name, parameter in module.named_parameters(recurse=False):
            where = placement(model.spec, f"{module_name}.{name}", tp.size, tp.index, tp.sequence).slice
            if where is not None:
                own = take(parameter, where).clone(memory_format=torch.contiguous_format)
                setattr(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        if isinstance(module, nn.Linear):
            where = placement(model.spec, f"{module_name}.weight", tp.size, tp.index, tp.sequence).slice
            if where is not None and where.dim == 0:
                module.out_features = where.stop - where.start
            elif where is not None:
                module.in_features = where.stop - where.start
                module.first_input = where.start  # type: ignore[assignment]  # for adapters


def _begin_pass(tp: TensorParallel, model: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Decides for this pass whether ranks share the tokens outside regions."""
    given = FORWARD.bind(model, *args, **kwargs).arguments
    num_tokens = given["tokens_BT"].shape[1]
    tp.active = tp.sequence and num_tokens % tp.size == 0 and given.get("cache") is None
    if tp.sequence and not tp.active and torch.is_grad_enabled() and given.get("targets_BT") is not None:
        # Gradients outside regions would be whole, but with `sequence` whoever sums them takes them for parts.
        raise UserError(
            f"{num_tokens} tokens cannot be trained with sequence parallelism over {tp.size} ranks",
            why=f"{num_tokens} / {tp.size} is not whole: each rank takes an equal stretch of every sequence",
            fix=f"choose train.seq_len divisible by {tp.size}, or parallel.sequence = false",
        )


def _border_block(block: Block, tp: TensorParallel) -> None:
    def enter_first(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return enter(args[0], tp), *args[1:]

    def border(part: nn.Module, last: str) -> None:
        part.register_forward_pre_hook(enter_first)
        setattr(part, last, RowLinear(cast(nn.Linear, getattr(part, last)), tp))

    border(block.attention, "o")
    feedforward = block.feedforward
    if isinstance(feedforward, MixtureOfExperts) and not isinstance(feedforward.experts, SpreadExperts):
        feedforward.register_forward_pre_hook(enter_first)
        feedforward.register_forward_hook(partial(_leave_experts, tp))
        return
    # Experts that are spread take tokens from wherever they are; the shared ones are a feed-forward part like any
    # other.
    dense = feedforward.shared if isinstance(feedforward, MixtureOfExperts) else feedforward
    if dense is not None:
        border(dense, "down")


class RowLinear(nn.Linear):
    """The linear layer at the end of a region: the sum of all ranks' matmuls, and the bias once."""

    matmul = staticmethod(F.linear)  # fp8 has its own

    def __init__(self, linear: nn.Linear, tp: TensorParallel):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.__dict__.update(linear.__dict__)  # with what an adapter has added
        self.tp = tp

    def forward(self, x_BTF: Tensor) -> Tensor:
        is_adapted = hasattr(self, "dropout")
        part = adapted_linear(self, x_BTF) if is_adapted else self.matmul(x_BTF, weight_of(self))
        x_BTD = leave(part, self.tp)
        return x_BTD if self.bias is None else x_BTD + self.bias


def _leave_experts(
    tp: TensorParallel, module: nn.Module, args: tuple[Any, ...], result: tuple[Tensor, Routing | None]
) -> tuple[Tensor, Routing | None]:
    """Ends the region of routed and shared experts together. Every rank has computed the router's losses in full, so
    their gradients are scaled to count once."""
    out_BTD, routing = result
    if routing is not None:
        aux, z = (scale_gradient(loss, 1 / tp.size) for loss in (routing.aux, routing.z))
        routing = routing._replace(aux=aux, z=z)
    return leave(out_BTD, tp), routing
