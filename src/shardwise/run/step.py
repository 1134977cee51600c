"""One optimizer step: accumulate, sum, clip, update.

The sum rule: a micro-batch's loss is its token *sum* over the step's *global* target-token count, which is known before the
first forward pass. Then gradients only ever need adding, over micro-batches and over ranks, and any split of the same
batch gives the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.data.loader import StepBatch
from shardwise.model.experts import moe_layers, update_router_bias
from shardwise.parallel.data import Replicas
from shardwise.run.clock import Clock
from shardwise.run.optimizer import set_learning_rate


@dataclass(frozen=True)
class StepResult:
    loss: float  # global mean cross-entropy over the step's target tokens
    aux_loss: float
    z_loss: float
    grad_norm: float
    skipped: bool = False


def run_step(
    replicas: Replicas,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    num_targets: int,  # of the whole step, over all ranks
    lr: float,
    clip: float | None,
    clock: Clock,
    device: torch.device,
    skip_non_finite: bool = False,
) -> StepResult:
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # cross-entropy, auxiliary, z
    last = len(batch.microbatches) - 1
    for index, micro in enumerate(batch.microbatches):
        micro = micro.to(device)
        with replicas.accumulate(last=index == last):
            with clock.span("compute", "forward", microbatch=index):
                losses = replicas.forward(micro.tokens, micro.targets, documents_BT=micro.documents)
            with clock.span("compute", "backward", microbatch=index):
                (sum(losses) / max(num_targets, 1)).backward()
        backward_end = time.perf_counter()
        sums += torch.stack([part.detach().double() for part in losses])
    clock.move(replicas.exposed_seconds(backward_end), "comm_exposed", "gradient all-reduce", replicas.take_bytes())

    with clock.span("optimizer", "clip and update"):
        gradients = [p.grad for p in replicas.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip:
            torch.nn.utils.clip_grads_with_norm_(replicas.model.parameters(), clip, norm)
        set_learning_rate(optimizer, lr)
        skip = skip_non_finite and not bool(torch.isfinite(norm))
        if not skip:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not replicas.is_distributed)  # DDP's gradients are views of its buckets

    if replicas.is_distributed:
        with clock.span("comm_exposed", "loss all-reduce"):
            dist.all_reduce(sums)
            for layer in moe_layers(replicas.model):
                dist.all_reduce(layer.tokens_per_expert)
    update_router_bias(replicas.model)
    cross_entropy, aux, z = (sums / max(num_targets, 1)).tolist()
    return StepResult(cross_entropy, aux, z, float(norm), skip)
