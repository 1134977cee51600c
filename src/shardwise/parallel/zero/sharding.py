"""ZeRO as one table over FSDP2, not three implementations; mixed precision is FSDP2's policy on every layout.

    stage 1    parameters stay gathered from the first forward of a step, gradients are reduced at the last micro-batch
    stage 2    the same, gradients are reduced at every micro-batch: no full gradient outlives its backward
    stage 3    parameters are gathered block by block, for forward and again for backward, and dropped in between
    hybrid     shards within `shard` ranks, replicas between: their all-reduce happens at the last micro-batch only

The flags are set before every backward, also inside pipelines, where torch's own stage would turn all of them into
stage 1. Gradients are summed (divide factor 1).

    split    every parameter by rows over the ranks that share a replica's states (shards and context together)
    held     a rank's rows of parameters, gradients and optimizer state; whole blocks only while a stage needs them
    sent     all-gathers of parameters, reduce-scatters of gradients, all-reduces between a hybrid's replicas
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardwise.model.decoder import Decoder
from shardwise.model.dtypes import COMPUTED, SUMMED
from shardwise.optim.offload.nvme_model import NvmeModel
from shardwise.parallel.data.replicas import DataParallelWrapper
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.parallel.fsdp2 import end_backward, gather_ahead, parameter_groups, sharded_modules
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.traffic import Traffic
from shardwise.parallel.zero.collectives import CountedAllGather, ExactReduceScatter, time_waits
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import splits_backward
from shardwise.spec.zero import ZERO

if TYPE_CHECKING:
    from shardwise.parallel.shards import Shard

Groups = list[list[nn.Module]]
"""Modules whose parameters are gathered, and whose gradients are reduced, together."""


class Sharded(DataParallelWrapper):
    """A stage whose parameters, gradients and optimizer state are spread over the data-parallel ranks."""

    def __init__(self, model: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, num_kept: int):
        super().__init__(model)
        # Parameters that live in CPU memory come block by block and go again: stage 3, on one device too.
        self.stage = ZERO[3] if mesh.plan.offload == "all" else mesh.plan.stage
        self.reduction = ExactReduceScatter(traffic)
        self.root: FSDPModule = shard_groups(model, groups, mesh, traffic, self.reduction, num_kept)
        # FSDP2 keeps a hybrid's sums between micro-batches in one flat buffer, which only fits while every reduction
        # has the same parameters. After a split backward it has not: then replicas meet at every reduction.
        self._meets_always = mesh.plan.pp > 1 and splits_backward(mesh.plan.schedule)
        # With replicas an all-reduce reads the result at once; so does the cast of sums in another format.
        on_disk = (
            mesh.plan.offload == "all" and mesh.plan.offload_to == "nvme"
        )  # gradients too, as soon as there is one
        at_once = mesh.plan.replicate > 1 or mesh.plan.rounds_sums or on_disk
        self._can_overlap = self.stage.shards_states and not at_once
        self.completes_in_backward = mesh.device.type == "cuda" or not self._can_overlap
        self._is_first_reduction = True

    def before_backward(self, kind: str, *, last: bool) -> None:
        reduce = kind == "B" and (self.stage.reduces_every_microbatch or last)
        self._set(reduce=reduce, last=last, finish=kind == "B" and last)
        # Into empty gradients a result may arrive later; onto others FSDP2 adds it right away.
        self.reduction.overlaps = reduce and self._can_overlap and self._is_first_reduction
        self._is_first_reduction = self._is_first_reduction and not reduce

    def after_backward(self, kind: str, *, last: bool) -> None:
        if kind != "W":
            return
        self.reduction.overlaps = self._is_first_reduction = False
        # No backward pass ran here, so FSDP2's hooks did not either: fold the new gradients in, then reduce if it is
        # time.
        self._set(reduce=False, last=last, finish=False)
        groups = parameter_groups(self.model)
        for group in groups:
            group.reduce_gradients()
        if self.stage.reduces_every_microbatch and not last:
            self._set(reduce=True, last=last, finish=False)
            for group in groups:
                group.reduce_gradients()
        for group in groups:
            group.end_pass()

    def finish(self) -> None:
        """Reduces what is still local (after a last W), drops gathered parameters and waits for all collectives."""
        self._set(reduce=True, last=True, finish=True)
        end_backward(self.root)
        self.reduction.complete()
        self._is_first_reduction = True

    def forget_gathered(self) -> None:
        """Drops the gathered parameters that a forward pass without backward has left behind."""
        for module in sharded_modules(self.model):
            module.reshard()

    def _set(self, *, reduce: bool, last: bool, finish: bool) -> None:
        self.root.set_requires_gradient_sync(reduce)
        self.root.set_requires_all_reduce(last or self._meets_always)
        self.root.set_reshard_after_backward(self.stage.drops_parameters or finish)
        self.root.set_is_last_backward(finish)


def decoder_groups(model: Decoder) -> Groups:
    """Returns the groups of a decoder: one per block and one for each end. A tied weight belongs to no group: it stays
    with the root, whole."""
    blocks: Groups = [[block] for block in model.layers.values()]
    if model.spec.tied:
        return blocks
    first: list[nn.Module] = [module for module in (model.embed, model.position_embed) if module is not None]
    last: list[nn.Module] = [module for module in (model.norm, model.head) if module is not None]
    return [group for group in [first, *blocks, last] if group]


def shard_groups(
    model: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, reduction: ExactReduceScatter, num_kept: int
) -> FSDPModule:
    """Shards a model by FSDP2, in place, on `meta` or with memory, and returns it. The groups stand in the order of a
    forward pass; the rest belongs to the root.

    `num_kept` is how many of the last groups stay gathered between forward and backward, which begins with them."""
    plan = mesh.plan
    computed = COMPUTED[plan.precision]
    policy = MixedPrecisionPolicy(computed if plan.is_mixed else None, reduced_dtype(plan))
    is_away = plan.offload == "all"
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if is_away else OffloadPolicy()
    # Where FSDP2 is only there to cast, it has nothing to do with what is frozen: that is kept in the low precision.
    idle = {p for p in model.parameters() if not p.requires_grad} if plan.zero == 0 and not is_away else None
    options: Any = dict(mp_policy=policy, offload_policy=offload, ignored_params=idle)
    lookups = groups[0] if all(isinstance(module, nn.Embedding) for module in groups[0]) else []
    for number, group in enumerate(groups):
        drops = (plan.stage.drops_parameters or is_away) and number < len(groups) - num_kept
        # Fewer ranks have the same experts than the same block: a group of their own inside the block's.
        for experts in _spread_experts(group):
            assert mesh.expert is not None
            fully_shard(experts, mesh=mesh.expert.fsdp, reshard_after_forward=drops, **options)
        unit = group if len(group) > 1 else group[0]
        fully_shard(unit, mesh=mesh.fsdp, reshard_after_forward=drops, **options)
    for lookup in lookups:
        cast(FSDPModule, lookup).set_unshard_in_backward(False)  # the gradient of a lookup needs no table
    root = fully_shard(model, mesh=mesh.fsdp, reshard_after_forward=False, **options)
    on_gloo = mesh.device.type == "cpu"
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if on_gloo:
            module.set_custom_all_gather(cast(Any, CountedAllGather(traffic)))
            module.set_custom_reduce_scatter(cast(Any, reduction))
    if on_gloo:
        gather_ahead(root)
    for parameters in parameter_groups(model) if plan.world > 1 else ():
        time_waits(parameters, traffic, reduction if on_gloo else None)
    _prefetch([[group[0], *_spread_experts(group)] for group in groups])
    return root


def reduced_dtype(plan: Plan) -> torch.dtype | None:
    """Returns the dtype in which gradients are reduced; None for their own."""
    if plan.rounds_sums or plan.is_mixed:
        return SUMMED["fp32" if plan.reduce_dtype == "auto" else plan.reduce_dtype]
    return None


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of a model to the device, where they are even if parameters are offloaded to CPU memory."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _spread_experts(group: list[nn.Module]) -> list[nn.Module]:
    return [module for top in group for module in top.modules() if isinstance(module, SpreadExperts)]


def _prefetch(units: list[list[Any]]) -> None:
    """Lets the parameters of the next block, with those of its experts, be gathered while a block computes. A module
    that has nothing to prefetch names itself: FSDP2's own guess would be wrong when several micro-batches are under
    way."""
    for here, following in itertools.pairwise(units):
        here[0].set_modules_to_forward_prefetch([*here[1:], *following])
        following[0].set_modules_to_backward_prefetch([*following[1:], *here])
    units[0][0].set_modules_to_backward_prefetch([*units[0][1:], units[0][0]])
    for experts in (module for unit in units for module in unit[1:]):
        experts.set_modules_to_backward_prefetch([experts])


def serve_parameters(optimizer: NvmeModel, model: nn.Module, shards: Iterable[Shard]) -> None:
    """Lets FSDP2 gather parameters that lie on a disk: they are read just before, and dropped after."""
    names = {id(shard.parameter): shard for shard in shards}
    for group in parameter_groups(model):
        found = [(sharded, names[id(sharded.parameter)]) for sharded in group.parameters]
        optimizer.serve(group, [(sharded, shard) for sharded, shard in found if shard.local.requires_grad])
