"""The engine: the model as this rank holds it, in whatever layout, behind one interface for the training loop.

The loop hands in micro-batches and gets back what one process would have: the loss over all ranks, the global
gradient norm, gradients ready for the optimizer. Only apply.py knows which axes are at work behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.kernels.float8 import Float8Layers
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.model.experts import MixtureOfExperts, balancing_weights, counting_first, update_router_bias
from shardwise.optim.build import build_optimizer
from shardwise.optim.loss_scaling import clip_factor, scaler_of
from shardwise.optim.offload.buffer import Disk
from shardwise.optim.offload.choose import offloaded_optimizer
from shardwise.optim.offload.nvme_model import NvmeModel
from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.optim.overflow import Overflow, first_overflow
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import forward_only
from shardwise.parallel.pipeline.execute import Pipeline, Stage
from shardwise.parallel.shards import shards_of, squared_norm, sum_tensors
from shardwise.parallel.traffic import Traffic
from shardwise.parallel.zero.sharding import serve_parameters
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import OptimizerConfig


class Engine:
    """The model as this rank holds it: its stages, and all that a step does with them. Methods that say "collective"
    are called by every rank together."""

    def __init__(
        self,
        spec: ModelSpec,
        stages: list[Stage],
        mesh: Mesh,
        dtype: torch.dtype,
        bucket_bytes: int,
        traffic: Traffic,
        float8: Float8Layers | None = None,
    ):
        self.spec, self.stages, self.mesh = spec, stages, mesh
        self.bucket_bytes, self.traffic = bucket_bytes, traffic
        self.scaler, self.float8 = scaler_of(mesh.plan), float8
        self.pipeline = Pipeline(stages, mesh, dtype, traffic)
        self.shards = [
            shard for stage in stages for shard in shards_of(stage.model, mesh, spec if spec.is_ours else None)
        ]
        rows = [layer.index for layer in spec.layers if layer.is_moe] if spec.is_ours else []
        self._num_routed = len(rows)
        blocks = {int(index): block for model in self.models if rows for index, block in model.layers.items()}
        self._routed = {
            row: cast(MixtureOfExperts, blocks[index].feedforward) for row, index in enumerate(rows) if index in blocks
        }
        self.squared_norm = torch.zeros(())  # of the last step's gradients as they are, over all ranks
        self.expert_counts = torch.zeros(0)  # of the last step, over all ranks: tokens by routed layer and expert

    @property
    def models(self) -> list[Decoder]:
        """Returns the part of the model of each of this rank's stages."""
        return [stage.model for stage in self.stages]

    @property
    def is_whole(self) -> bool:
        """Returns whether this rank alone has all of the model."""
        return self.plan.tp == self.plan.pp == self.plan.ep == 1 and not any(shard.rows for shard in self.shards)

    def locals(self) -> list[nn.Parameter]:
        """Returns this rank's share of the parameters, which the optimizer updates. A rank may have a tied weight
        twice; both are updated alike."""
        return [shard.local for shard in self.shards]

    def optimizer(
        self,
        config: OptimizerConfig,
        own: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        disk: Disk | None = None,
    ) -> torch.optim.Optimizer:
        """Returns an optimizer of what this rank holds. Its state lies where the plan puts it: on the device, in CPU
        memory or on a disk, by default the plan's. `own` makes another one from the parameters that are trained."""
        if own is not None:
            return own([local for local in self.locals() if local.requires_grad] or [nn.Parameter(torch.empty(0))])
        build = partial(build_optimizer, config)
        if self.plan.offload == "none":
            return build(self.locals(), {s.local: s.low_precision for s in self.shards if s.low_precision is not None})
        optimizer = offloaded_optimizer(self.shards, build, self.plan, self.mesh.device, disk)
        self.stream_gradients(optimizer)
        return optimizer

    def stream_gradients(self, optimizer: OffloadedOptimizer) -> None:
        """Lets an optimizer on the CPU have gradients while backward still runs: those to which nothing is added
        later."""
        tied = {"embed.weight"} if self.spec.tied and self.plan.pp > 1 else set()
        for stage in self.stages:
            mine = {id(parameter) for parameter in stage.model.parameters()}
            shards = [s for s in self.shards if id(s.parameter) in mine]
            if stage.wrapper.completes_in_backward:
                final = [s for s in shards if s.sum_over is None and s.name not in tied]
                optimizer.stream_gradients(final, lambda stage=stage: stage.in_last_backward)  # type: ignore[misc]
            if isinstance(optimizer, NvmeModel):
                serve_parameters(optimizer, stage.model, shards)

    @property
    def plan(self) -> Plan:
        """Returns the plan of the mesh: there is one, and no part keeps its own."""
        return self.mesh.plan

    def follow(self, plan: Plan) -> None:
        """Replaces the plan by one of the same layout that cuts the batch differently."""
        self.mesh.plan = plan
        self.pipeline.expect(plan.num_microbatches)

    def as_written(self) -> AbstractContextManager[Any]:
        """Returns a context in which compiled blocks run operation by operation, for whoever must see each of them."""
        return torch.compiler.set_stance("force_eager") if self.plan.compile != "none" else nullcontext()

    def probe(self, micro: Any, clock: Any) -> None:
        """Collective. Runs forward and backward of one micro-batch and drops its gradients."""
        self.pipeline.probe(micro, clock)
        self.zero_grad()

    # One step --------------------------------------------------------------------------------------------------------

    def gradients(self, microbatches: Sequence[Any], num_targets: int, clock: Any) -> Tensor:
        """Collective. Runs forward and backward of a whole step and returns this rank's summed losses, of shape (3,):
        cross-entropy, auxiliary, z. Afterwards gradients are summed over all ranks that have a part of them, times the
        loss scale."""
        self.pipeline.loss_scale = self.scaler.scale
        if self._num_routed and self.spec.needs_counts_first:
            with clock.span("compute", "count experts"):
                self._count_experts_first(microbatches, num_targets, clock)
        sums = self.pipeline.train(microbatches, num_targets, clock)
        if self.mesh.tp is not None or self.plan.pp > 1:
            with clock.span("compute", "replicated gradients"):
                self._sum_tied()
                self.sum_partial()
        for shard in self.shards:
            if shard.rows is not None:
                shard.local.grad = shard.gradient_here
        return self._counted(sums)

    def norm_and_sums(self, sums: Tensor, *, agreed: bool = False) -> tuple[Tensor, Callable[[], Tensor]]:
        """Collective. Returns the global gradient norm (`grad_norm`) without the loss scale, and a function that waits
        for `sums` (losses and other sums of the step) over all ranks: one small all-reduce. Whole replicas need no
        other rank for the norm, and the all-reduce runs while they update, unless the norm decides about the update and
        is to be `agreed`: a gradient may be damaged on one rank alone. The tokens that each expert got are summed by
        the same all-reduce: afterwards every layer has its counts over all ranks."""
        squared, counts = squared_norm(self.shards).to(sums.device).view(1), self._expert_counts()
        both = torch.cat([squared, sums, counts.flatten()])
        pending = [dist.all_reduce(both, async_op=True)] if self.plan.world > 1 else []
        self.squared_norm = both[0]  # once it is waited for

        def wait() -> Tensor:
            if pending:
                with self.traffic.wait("all-reduce", "world", both.nbytes):
                    pending.pop().wait()
            return both[1 : 1 + len(sums)]

        if not agreed and not counts.numel() and all(shard.replicas == self.plan.world for shard in self.shards):
            return (squared * self.plan.world).sqrt()[0] / self.scaler.scale, wait
        wait()
        self.expert_counts = both[1 + len(sums) :].view_as(counts)
        for row, layer in self._routed.items():
            layer.tokens_per_expert.copy_(self.expert_counts[row])
        return both[0].sqrt() / self.scaler.scale, wait

    def factor(self, norm: Tensor, largest: float | None) -> Tensor | None:
        """Returns what the gradients must be multiplied by before an update, to clip them to a norm of `largest` and to
        divide them by the loss scale; None for 1. On a GPU, reading the norm would cost more than multiplying."""
        is_small = not largest or (not norm.is_cuda and float(norm) + 1e-6 <= largest)
        return None if is_small and self.scaler.scale == 1.0 else clip_factor(norm, largest, self.scaler.scale)

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """Multiplies all gradients by a factor, in place."""
        gradients = [gradient for shard in self.shards if (gradient := shard.gradient) is not None]
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))

    def zero_grad(self) -> None:
        """Drops all gradients, also those that have left the device."""
        for shard in self.shards:
            shard.forget_gradient()

    def first_overflow(self, microbatches: Sequence[Any], num_targets: int, clock: Any) -> Overflow | None:
        """Collective. Computes these micro-batches again and returns the first value that is not finite, None if there
        is none. Gradients are dropped afterwards."""
        with self.as_written():
            found = first_overflow(
                [(stage.index, stage.model) for stage in self.stages],
                lambda: self.gradients(microbatches, num_targets, clock),
                lambda: [(shard.name, shard.gradient) for shard in self.shards if shard.gradient is not None],
                self.mesh.device,
                self.plan.world,
            )
        self.zero_grad()
        return found

    def balance_experts(self, *, moves: bool = True) -> None:
        """Moves router biases by how many tokens each expert got, and counts anew. Called after `norm_and_sums`, which
        sums the counts over all ranks."""
        for model in self.models:
            update_router_bias(model, moves=moves)

    def _count_experts_first(self, microbatches: Sequence[Any], num_targets: int, clock: Any) -> None:
        """Collective. Runs a step's micro-batches forward only, for the tokens each expert gets in all of them: what
        transformers' balancing loss weighs every token with, also those of the first micro-batch and stage."""
        self.traffic.clock = clock
        with counting_first(self._routed.values()) as weigh:
            forward_only.evaluate(self.pipeline, microbatches)
            counts = self._expert_counts()
            if self.plan.world > 1:
                with self.traffic.wait("all-reduce", "world", counts.nbytes):
                    dist.all_reduce(counts)
            weigh(balancing_weights(self.spec, counts, num_targets))

    def _expert_counts(self) -> Tensor:
        """Returns how many of this rank's tokens each expert got, by layer with experts of the whole model and expert.
        Tensor-parallel ranks route the same tokens, so only the first of them counts, unless experts are spread over
        them."""
        counts = torch.zeros(self._num_routed, self.spec.num_experts, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.at.tp == 0 or self.plan.ep > 1:
            for row, layer in self._routed.items():
                counts[row] = layer.tokens_per_expert
        return counts

    def _counted(self, sums: Tensor) -> Tensor:
        """Returns the losses that this rank reports, of shape (3,). Tensor-parallel ranks have the same losses, so only
        one of them reports, but for those of routers whose tokens they share."""
        if not self.mesh.counts_loss:
            # In place: a list of factors would have to be waited for on a GPU.
            sums[: 1 if self.plan.ep > 1 else 3] = 0.0
        return sums

    def sum_partial(self) -> None:
        """Collective. Sums gradients of replicated tensors inside a tensor-parallel region: each rank has a part."""
        for group in {id(s.sum_over): s.sum_over for s in self.shards if s.sum_over is not None}.values():
            gradients = [g for s in self.shards if s.sum_over is group and (g := s.gradient) is not None]
            self.traffic.num_bytes += sum_tensors(
                gradients, group, self.bucket_bytes, self.traffic.on("tp"), self.mesh.device
            )

    def _sum_tied(self) -> None:
        """Collective. Sums the two gradients of a tied embedding, which is on the first and on the last stage."""
        if not self.spec.tied or self.plan.pp == 1:
            return
        gradients = [shard.gradient for shard in self.shards if shard.name == "embed.weight"]
        if len(gradients) == 2:  # a V-shaped pipeline has both ends on one rank
            first, last = gradients
            if first is not None and last is not None:  # else frozen
                first += last
                last.copy_(first)
        elif gradients and self.mesh.ends is not None:
            found = [gradient for gradient in gradients if gradient is not None]
            sum_tensors(found, self.mesh.ends, self.bucket_bytes, self.traffic.on("pp"), self.mesh.device)

    # Without training ------------------------------------------------------------------------------------------------

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """Collective. Returns this rank's summed losses, of shape (3,), without gradients; the caller adds them up over
        all ranks."""
        return self._counted(forward_only.evaluate(self.pipeline, microbatches))

    def logits(self, tokens_BT: Tensor, caches: dict[int, KeyValueCache]) -> Tensor:
        """Collective. Returns the logits (B, V) of the last token of every row, on every rank."""
        return forward_only.logits(self.pipeline, tokens_BT, caches)

    def new_caches(self, max_len: int) -> dict[int, KeyValueCache]:
        """Returns empty key-value caches for `max_len` tokens, by stage of this rank."""
        return forward_only.new_caches(self.pipeline, max_len)

    def train(self, mode: bool = True) -> None:
        """Sets the training mode of all stages, as `nn.Module.train` does."""
        for model in self.models:
            model.train(mode)

    # Whole tensors by global name ------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, Tensor]:
        """Returns the persistent buffers (router biases) by name, whole on every rank of their stage."""
        values = ((name, value) for model in self.models for name, value in model.state_dict(keep_vars=True).items())
        return {name: value for name, value in values if not isinstance(value, nn.Parameter)}
