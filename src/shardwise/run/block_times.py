"""Times the model's own blocks on random data while all ranks are busy; the predicted step is scaled by the result.

Blocks run as in a step: one behind the other, each keeping what its backward needs, with the model's ends before and
after. The same block run again and again would find its tensors in the caches and come out a fifth too fast. Invariant:
no rank waits for another in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.kernels.flash4 import kernel_named
from shardwise.kernels.fused_head import FusedHead
from shardwise.kernels.timing import median_seconds
from shardwise.model.decoder import Decoder
from shardwise.model.dtypes import COMPUTED, KEPT
from shardwise.optim.build import TakesFactor, build_optimizer
from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.schema import OptimizerConfig
from shardwise.spec.split import estimated_costs, tensor_slice

MAX_BLOCKS = {"cpu": 8, "cuda": 1}  # on a GPU caches make no difference, and memory may be short
MAX_ELEMENTS = 2**23  # parameters that the optimizer is timed on
BUDGET_S, TURNS = 0.7, 3  # seconds that a measurement takes, and the fewest runs it has


def block_times(
    spec: ModelSpec, plan: Plan, attention: str, optimizer: OptimizerConfig, device: torch.device
) -> BlockTimes:
    """Returns the seconds that one micro-batch and one update take on this rank, with the model and the plan they were
    measured for."""
    part, alone = _slice(spec, plan), _alone(plan, attention)
    # No more than a step holds at once, so that what fits does not run out of memory here.
    count = min(-(-part.num_layers // plan.pp), MAX_BLOCKS[device.type]) if plan.recomputes.is_none else 1
    kinds = [replace(layer, index=0) for layer in part.layers]
    spread = (round(n * (part.num_layers - 1) / max(1, count - 1)) for n in range(count))
    chosen = sorted({kinds.index(kind) for kind in kinds} | (set(spread) if count > 1 else set()))
    chain = _Chain(part, alone, attention, chosen, device)
    long, short = median_seconds(
        [partial(chain.run, chosen), partial(chain.run, [])], device, turns=TURNS, budget_s=BUDGET_S
    )
    costs = estimated_costs(part, alone.seq_len)[0]
    blocks = max(0.0, long - short) * sum(costs) / sum(costs[index] for index in chosen)
    shapes = [parameter.shape for parameter in chain.block(chosen[0]).parameters()]
    shapes *= max(1, min(count, MAX_ELEMENTS // sum(shape.numel() for shape in shapes)))
    del chain
    is_here = plan.offload == "none" and not OPTIMIZERS[optimizer.name].is_low_bit
    update = _optimizer_seconds(shapes, plan, optimizer, device) if is_here else None
    return BlockTimes(part, alone, short + blocks, update, sum(shape.numel() for shape in shapes))


def _slice(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """Returns the model that one rank computes: each layer cut by tensor parallelism, and with expert parallelism fewer
    experts, each with more tokens."""
    part = tensor_slice(spec, plan.tp if plan.ep == 1 else 1) if spec.is_moe else tensor_slice(spec, plan.tp)
    if plan.ep > 1 and spec.num_expert_groups == 1:
        part = replace(part, num_experts=max(spec.experts_per_token, spec.num_experts // plan.ep))
    return part


def _alone(plan: Plan, attention: str) -> Plan:
    """Returns a plan of one micro-batch in one process whose parameters need no cast on the way. Which attention kernel
    `auto` takes has not been measured yet, so it is sdpa."""
    precision = plan.formats.alone or plan.precision
    return Plan(
        device=plan.device,
        precision=precision,
        seq_len=plan.seq_len // plan.cp,
        global_batch=plan.micro_batch,
        micro_batch=plan.micro_batch,
        num_steps=1,
        threads_per_rank=plan.threads_per_rank,
        reason="",
        attention=plan.attention if attention == "flash4" else "sdpa",
    )


class _Chain:
    """Some layers of a model between its embedding and its head, run one after the other."""

    def __init__(self, spec: ModelSpec, plan: Plan, attention: str, layers: list[int], device: torch.device):
        dtype, shape = COMPUTED[plan.precision], (plan.micro_batch, plan.seq_len)
        self.kinds = {index: replace(spec.layers[index], index=0) for index in layers}
        self.parts: dict[LayerSpec, tuple[nn.Module, Any]] = {}  # one of each kind stands for all of them
        positions = torch.arange(plan.seq_len, device=device)[None]
        for kind, index in {kind: index for index, kind in self.kinds.items()}.items():
            decoder = _with_random_weights(
                Decoder, spec, kernel_named(attention), range(index, index + 1), dtype=dtype, device=device
            )
            inputs = decoder.prepare_attention(dtype, positions, None, None)[index]
            self.parts[kind] = decoder.layers[str(index)], inputs
        self.embedding = _with_random_weights(nn.Embedding, spec.vocab, spec.hidden, dtype=dtype, device=device)
        self.head = _with_random_weights(FusedHead, spec.with_overrides({"tied": False}), dtype=dtype, device=device)
        self.tokens_BT = torch.randint(0, spec.vocab, shape, device=device)
        self.targets_B = torch.full(shape[:1], plan.seq_len, device=device)

    def block(self, index: int) -> nn.Module:
        return self.parts[self.kinds[index]][0]

    def run(self, layers: list[int]) -> None:
        x_BTD: Tensor = self.embedding(self.tokens_BT)
        for index in layers:
            block, inputs = self.parts[self.kinds[index]]
            x_BTD, _ = block(x_BTD, inputs, self.targets_B)
        self.head(x_BTD, self.tokens_BT).backward()
        for module in (self.embedding, *(block for block, _ in self.parts.values()), self.head):
            module.zero_grad()


def _with_random_weights(kind: Callable, *arguments: object, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a module with random weights: a router of zeros would send all tokens to one expert."""
    with torch.device("meta"):
        module = kind(*arguments).to(dtype)
    module.to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02)
        for buffer in module.buffers():
            buffer.zero_()
    return module


def _optimizer_seconds(shapes: list[torch.Size], plan: Plan, config: OptimizerConfig, device: torch.device) -> float:
    """Returns the seconds that the norm of the gradients, clipping and the update take together."""
    kept, computed = KEPT[plan.precision], COMPUTED[plan.precision]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=kept, device=device)) for shape in shapes]
    low_precision_of = {p: nn.Parameter(p.detach().to(computed)) for p in parameters if plan.copies}
    with_gradient = list(low_precision_of.values()) if low_precision_of and plan.num_microbatches == 1 else parameters
    optimizer = build_optimizer(config, parameters, low_precision_of)

    def gradients_only() -> list[Tensor]:
        for parameter in with_gradient:
            parameter.grad = torch.full_like(parameter, 1e-3)
        return [parameter.grad for parameter in with_gradient if parameter.grad is not None]

    def once() -> None:
        gradients = gradients_only()
        factor = 1 / (1 + torch.stack(torch._foreach_norm(gradients, dtype=kept)).norm())
        if isinstance(optimizer, TakesFactor):
            optimizer.grad_factor = factor
        else:
            torch._foreach_mul_(gradients, factor)  # clipping
        optimizer.step()

    whole, without = median_seconds([once, gradients_only], device, turns=TURNS, budget_s=BUDGET_S)
    return max(whole - without, 1e-9)
