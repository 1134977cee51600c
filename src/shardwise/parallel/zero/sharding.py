"""ZeRO as one table over FSDP2, not three implementations; mixed precision is FSDP2's policy on every layout.

    stage 1    parameters stay gathered from the first forward of a step, gradients are reduced at the last micro-batch only
    stage 2    the same, gradients are reduced at every micro-batch: no full gradient outlives its backward
    stage 3    parameters are gathered block by block, for forward and again for backward, and dropped in between
    hybrid     shards within `shard` ranks, replicas between: their all-reduce happens at the last micro-batch only

The flags are set before every backward, also inside pipelines, where torch's own stage would turn all of them into stage 1.
Gradients are summed (divide factor 1). On gloo the reduce-scatter is an all-to-all and a local sum in rank order: exact, and a
fraction of the time of gloo's own, which is an all-reduce and a slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardwise.model.decoder import Decoder
from shardwise.model.dtypes import COMPUTED, SUMMED
from shardwise.optim.offload.nvme_model import NvmeModel
from shardwise.parallel.compat import all_gather_single, fsdp_groups
from shardwise.parallel.data.replicas import GradientSums
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.traffic import Traffic
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import splits_backward

if TYPE_CHECKING:
    from shardwise.parallel.shards import Shard

Groups = list[list[nn.Module]]
"""Modules whose parameters travel together."""


class Sharded(GradientSums):
    """A stage whose parameters, gradients and optimizer state are spread over the data-parallel ranks."""

    def __init__(self, model: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, num_kept: int):
        super().__init__(model)
        # Parameters that live in CPU memory come block by block and go again: stage 3, on one device too.
        self.zero = 3 if mesh.plan.offload == "all" else mesh.plan.zero
        self.reduction = ExactReduceScatter(traffic)
        self.root: FSDPModule = shard_groups(model, groups, mesh, traffic, self.reduction, num_kept)
        # FSDP2 keeps a hybrid's sums between micro-batches in one flat buffer, which only fits while every reduction has the same
        # parameters. After a split backward it has not: then replicas meet at every reduction.
        self._meets_always = mesh.plan.pp > 1 and splits_backward(mesh.plan.schedule)
        # With replicas an all-reduce reads the result at once; so does the cast of sums in another format.
        on_disk = (
            mesh.plan.offload == "all" and mesh.plan.offload_to == "nvme"
        )  # gradients too, as soon as there is one
        at_once = mesh.plan.replicate > 1 or mesh.plan.rounds_sums or on_disk
        self._can_overlap = self.zero > 0 and not at_once
        self.completes_in_backward = mesh.device.type == "cuda" or not self._can_overlap
        self._is_first_reduction = True

    def before_backward(self, kind: str, *, last: bool) -> None:
        reduce = kind == "B" and (self.zero >= 2 or last)
        self._set(reduce=reduce, last=last, finish=kind == "B" and last)
        # Into empty gradients a result may arrive later; onto others FSDP2 adds it right away.
        self.reduction.overlaps = reduce and self._can_overlap and self._is_first_reduction
        self._is_first_reduction = self._is_first_reduction and not reduce

    def after_backward(self, kind: str, *, last: bool) -> None:
        if kind != "W":
            return
        self.reduction.overlaps = self._is_first_reduction = False
        # No backward pass ran here, so FSDP2's hooks did not either: fold the new gradients in, then reduce if it is time.
        self._set(reduce=False, last=last, finish=False)
        groups = list(parameter_groups(self.model))
        for group in groups:
            group.post_backward()
        if self.zero >= 2 and not last:
            self._set(reduce=True, last=last, finish=False)
            for group in groups:
                group.post_backward()
        for group in groups:
            group._training_state = TrainingState.IDLE

    def finish(self) -> None:
        """Reduce what is still local (after a last W), let go of gathered parameters, wait for everything."""
        self._set(reduce=True, last=True, finish=True)
        self.root._get_fsdp_state()._root_post_backward_final_callback()
        self.reduction.complete()
        self._is_first_reduction = True

    def forget_gathered(self) -> None:
        """Let go of gathered parameters that a forward pass without backward has left behind."""
        for module in _fsdp_modules(self.root):
            module.reshard()

    def _set(self, *, reduce: bool, last: bool, finish: bool) -> None:
        self.root.set_requires_gradient_sync(reduce)
        self.root.set_requires_all_reduce(last or self._meets_always)
        self.root.set_reshard_after_backward(self.zero == 3 or finish)
        self.root.set_is_last_backward(finish)


def decoder_groups(model: Decoder) -> Groups:
    """One group per block, one for each end; a tied weight stays with the root, whole."""
    blocks: Groups = [[block] for block in model.layers.values()]
    if model.spec.tied:
        return blocks
    first: list[nn.Module] = [module for module in (model.embed, model.position_embed) if module is not None]
    last: list[nn.Module] = [module for module in (model.norm, model.head) if module is not None]
    return [group for group in [first, *blocks, last] if group]


def shard_groups(
    model: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, reduction: ExactReduceScatter, num_kept: int
) -> FSDPModule:
    """In place, on `meta` or with memory. The groups stand in the order of a forward pass; the rest belongs to the root.

    `num_kept`: backward begins where forward ended, so the last of them are not dropped in between."""
    plan = mesh.plan
    computed = COMPUTED[plan.precision]
    policy = MixedPrecisionPolicy(computed if plan.is_mixed else None, reduced_dtype(plan))
    is_away = plan.offload == "all"
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if is_away else OffloadPolicy()
    # Where FSDP2 is only there to round, it has nothing to do with what is frozen: that is kept in the narrow format.
    idle = {p for p in model.parameters() if not p.requires_grad} if plan.zero == 0 and not is_away else None
    options: Any = dict(mp_policy=policy, offload_policy=offload, ignored_params=idle)
    lookups = groups[0] if all(isinstance(module, nn.Embedding) for module in groups[0]) else []
    for number, group in enumerate(groups):
        drops = (plan.zero == 3 or is_away) and number < len(groups) - num_kept
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
    for module in _fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if on_gloo:
            module.set_custom_all_gather(CountedAllGather(traffic))
            module.set_custom_reduce_scatter(reduction)
    if on_gloo:
        root._set_unshard_async_op(True)
    for parameters in parameter_groups(model) if plan.world > 1 else ():
        _time_waits(parameters, traffic, reduction if on_gloo else None)
    _prefetch([[group[0], *_spread_experts(group)] for group in groups])
    return root


def reduced_dtype(plan: Plan) -> torch.dtype | None:
    """The format in which gradients travel; None for their own."""
    if plan.rounds_sums or plan.is_mixed:
        return SUMMED["fp32" if plan.reduce_dtype == "auto" else plan.reduce_dtype]
    return None


def buffers_to(model: nn.Module, device: torch.device) -> None:
    """Offloaded parameters stay in CPU memory; what is no parameter is always on the device."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _spread_experts(group: list[nn.Module]) -> list[nn.Module]:
    return [module for top in group for module in top.modules() if isinstance(module, SpreadExperts)]


def _prefetch(units: list[list[Any]]) -> None:
    """While a block computes, the next one's parameters travel, with those of its experts. Who has nothing to prefetch names
    itself: FSDP2's own guess would be wrong when several micro-batches are under way."""
    for here, following in itertools.pairwise(units):
        here[0].set_modules_to_forward_prefetch([*here[1:], *following])
        following[0].set_modules_to_backward_prefetch([*following[1:], *here])
    units[0][0].set_modules_to_backward_prefetch([*units[0][1:], units[0][0]])
    for experts in (module for unit in units for module in unit[1:]):
        experts.set_modules_to_backward_prefetch([experts])


def _fsdp_modules(root: FSDPModule) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))  # type: ignore[attr-defined]


def parameter_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups, the root's too; a group may serve several modules."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return iter({id(group): group for module in modules for group in fsdp_groups(module)}.values())


def serve_parameters(optimizer: NvmeModel, model: nn.Module, shards: Iterable[Shard]) -> None:
    """FSDP2 gathers from parameters that lie on a disk: they are read just before, and forgotten after."""
    names = {id(shard.parameter): shard for shard in shards}
    for group in parameter_groups(model):
        found = [(param, names[id(param.sharded_param)]) for param in group.fsdp_params]
        optimizer.serve(group, [(param, shard) for param, shard in found if shard.local.requires_grad])


def _time_waits(group: Any, traffic: Traffic, reduction: ExactReduceScatter | None) -> None:
    """FSDP2 waits where no line of ours stands. Each place waits here first, inside of a span, and then finds nothing left to wait for."""
    wait_for_unshard, finalize_backward = group.wait_for_unshard, group.finalize_backward

    def gathered() -> None:
        result = group._all_gather_result
        if result is not None and result.all_gather_output.numel():  # a group of one rank gathers nothing
            with traffic.wait("all-gather", "shard", result.all_gather_output.nbytes):
                if isinstance(result.all_gather_work, dist.Work):
                    result.all_gather_work.wait()
                elif result.all_gather_event is not None:
                    group.device_handle.current_stream().wait_event(result.all_gather_event)
        wait_for_unshard()

    def reduced() -> None:
        with traffic.wait("reduce-scatter", "shard", 0):
            finalize_backward()

    group.wait_for_unshard = gathered
    if reduction is None:
        group.finalize_backward = reduced
    elif group._is_hsdp:  # else the hook would be called after other things
        group._all_reduce_hook = reduction.replicas_met


class _Buffers:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Buffers, AllGather):
    def __init__(self, traffic: Traffic):
        self.traffic = traffic

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.traffic.gathers += 1
        self.traffic.num_bytes += output_tensor.nbytes
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ExactReduceScatter(_Buffers, ReduceScatter):
    """For gloo. Every rank adds the parts in rank order, so the sum does not depend on timing or ring position.

    With `overlaps` the exchange goes on while backward computes the next block, and is completed when that one comes to be
    reduced: one block's gradients are under way at a time.
    """

    def __init__(self, traffic: Traffic):
        self.traffic, self.overlaps = traffic, False
        self._pending: tuple[Any, Tensor, Tensor, Tensor] | None = None
        self._ready: Any = None  # the moment at which replicas could begin to meet

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ready = self.traffic.moment()  # with one shard, nothing else of this class is called
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are only ever summed, not {op}"
        self.complete()
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        self._pending = (work, parts.view(dist.get_world_size(group), -1), input_tensor, output_tensor)
        self.traffic.reductions += 1
        self.traffic.num_bytes += input_tensor.nbytes
        if not self.overlaps:
            self.complete()

    def complete(self) -> None:
        if self._pending is None:
            return
        work, parts, _, output = self._pending
        self._pending = None
        with self.traffic.wait("reduce-scatter", "shard", parts.nbytes):
            work.wait()
        torch.sum(parts, 0, out=output)
        self._ready = self.traffic.moment()

    def replicas_met(self, output: Tensor) -> None:
        """FSDP2 calls it right after the all-reduce of a hybrid's replicas."""
        self.traffic.waited("all-reduce", "replicate", output.nbytes, self._ready, self.traffic.moment())
