"""The engine: the model as this rank holds it, in whatever layout, behind one interface for the training loop.

The loop hands in micro-batches and gets back what one process would have: the loss over all ranks, the global gradient norm,
gradients ready for the optimizer. Which axes are at work behind it is nobody's business but apply.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.model.experts import MixtureOfExperts, update_router_bias
from shardwise.model.spec import ModelSpec
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline, Stage
from shardwise.parallel.shards import shards_of, squared_norm, sum_tensors
from shardwise.parallel.traffic import Traffic
from shardwise.plan.plan import Plan


class Engine:
    def __init__(
        self, spec: ModelSpec, stages: list[Stage], mesh: Mesh, dtype: torch.dtype, bucket_bytes: int, traffic: Traffic
    ):
        self.spec, self.stages, self.mesh, self.plan = spec, stages, mesh, mesh.plan
        self.bucket_bytes, self.traffic = bucket_bytes, traffic
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
        self.expert_counts = torch.zeros(0)  # of the last step, over all ranks: tokens by routed layer and expert

    @property
    def models(self) -> list[Decoder]:
        return [stage.model for stage in self.stages]

    @property
    def is_whole(self) -> bool:
        """One rank alone has all of the model."""
        return self.plan.tp == self.plan.pp == self.plan.ep == 1 and not any(shard.rows for shard in self.shards)

    def locals(self) -> list[nn.Parameter]:
        """What the optimizer updates. A rank may have two copies of a tied weight; both are updated alike."""
        return [shard.local for shard in self.shards]

    def follow(self, plan: Plan) -> None:
        """The same layout, with the batch cut as `plan` says."""
        self.plan = plan
        self.pipeline.follow(plan)

    def try_out(self, micro: Any, clock: Any) -> None:
        """Collective. One micro-batch forward and backward, of which nothing is left."""
        self.pipeline.try_out(micro, clock)
        self.zero_grad()

    # One step -----------------------------------------------------------------------------------------------------

    def gradients(self, microbatches: Sequence[Any], num_targets: int, clock: Any) -> Tensor:
        """Gradients of a whole step, summed over everybody who has a part of them; returns this rank's loss sums."""
        sums = self.pipeline.train(microbatches, num_targets, clock)
        if self.mesh.tp is not None or self.plan.pp > 1:
            with clock.span("compute", "replicated gradients"):
                self._sum_tied()
                self._sum_partial()
        for shard in self.shards:
            if shard.local is not shard.parameter:
                shard.local.grad = shard.gradient
        return self._counted(sums)

    def norm_and_sums(self, sums: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The global gradient norm, and later `sums` (losses and what else there is) over all ranks: one small all-reduce. Whole
        replicas need nobody for the norm, and the message travels while they update. The tokens that each expert got travel with
        it: from here on every layer has its count over all ranks."""
        squared, counts = squared_norm(self.shards).to(sums.device).view(1), self._expert_counts()
        both = torch.cat([squared, sums, counts.flatten()])
        pending = [dist.all_reduce(both, async_op=True)] if self.plan.world > 1 else []

        def wait() -> Tensor:
            if pending:
                with self.traffic.wait("all-reduce", "world", both.nbytes):
                    pending.pop().wait()
            return both[1 : 1 + len(sums)]

        if not counts.numel() and all(shard.copies == self.plan.world for shard in self.shards):
            return (squared * self.plan.world).sqrt()[0], wait
        wait()
        self.expert_counts = both[1 + len(sums) :].view_as(counts)
        for row, layer in self._routed.items():
            layer.tokens_per_expert.copy_(self.expert_counts[row])
        return both[0].sqrt(), wait

    @torch.no_grad()
    def clip(self, norm: Tensor, largest: float) -> None:
        if not norm.is_cuda and float(norm) + 1e-6 <= largest:
            return  # the factor would be 1; on a GPU, looking would cost more than multiplying
        gradients = [gradient for shard in self.shards if (gradient := shard.gradient) is not None]
        factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.local.grad = shard.parameter.grad = None

    def balance_experts(self) -> None:
        """After `norm_and_sums`, which has summed the counts."""
        for model in self.models:
            update_router_bias(model)

    def _expert_counts(self) -> Tensor:
        """Tokens of this rank by routed layer of the whole model and expert. Tensor-parallel ranks route the same tokens, unless
        experts are spread over them."""
        counts = torch.zeros(self._num_routed, self.spec.num_experts, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.at.tp == 0 or self.plan.ep > 1:
            for row, layer in self._routed.items():
                counts[row] = layer.tokens_per_expert
        return counts

    def _counted(self, sums: Tensor) -> Tensor:
        """What this rank reports: tensor-parallel ranks have the same losses, but for those of routers whose tokens they share."""
        reports_routers = self.mesh.counts_loss or self.plan.ep > 1
        return sums * sums.new_tensor([self.mesh.counts_loss, reports_routers, reports_routers])

    def _sum_partial(self) -> None:
        """Replicated tensors inside a tensor-parallel region have a part of their gradient on each rank."""
        for group in {id(s.sum_over): s.sum_over for s in self.shards if s.sum_over is not None}.values():
            gradients = [g for s in self.shards if s.sum_over is group and (g := s.gradient) is not None]
            self.traffic.num_bytes += sum_tensors(gradients, group, self.bucket_bytes, self.traffic.on("tp"))

    def _sum_tied(self) -> None:
        """A tied embedding on first and last stage: two copies, one gradient."""
        if not self.spec.tied or self.plan.pp == 1:
            return
        gradients = [shard.gradient for shard in self.shards if shard.name == "embed.weight"]
        if len(gradients) == 2:  # a V-shaped pipeline has both ends on one rank
            first, last = gradients
            assert first is not None and last is not None
            first += last
            last.copy_(first)
        elif gradients and self.mesh.ends is not None:
            found = [gradient for gradient in gradients if gradient is not None]
            sum_tensors(found, self.mesh.ends, self.bucket_bytes, self.traffic.on("pp"))

    # Without training ---------------------------------------------------------------------------------------------

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """Loss sums of this rank; add them up over all ranks."""
        return self._counted(self.pipeline.evaluate(microbatches))

    def logits(self, tokens_BT: Tensor, caches: dict[int, KeyValueCache]) -> Tensor:
        return self.pipeline.logits(tokens_BT, caches)

    def new_caches(self, max_len: int) -> dict[int, KeyValueCache]:
        return self.pipeline.new_caches(max_len)

    def train(self, mode: bool = True) -> None:
        for model in self.models:
            model.train(mode)

    # Whole tensors by global name ---------------------------------------------------------------------------------

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers (router biases), whole on every rank of their stage."""
        values = ((name, value) for model in self.models for name, value in model.state_dict(keep_vars=True).items())
        return {name: value for name, value in values if not isinstance(value, nn.Parameter)}
