"""What every contender shares: a step that takes tokens and targets, first weights, tokens, an optimizer.

Read next: with_ours.py, with_plain.py, with_transformers.py, with_torchtitan.py. A contender may differ only in how it
computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.shapes import Case
from torch import Tensor, nn

from shardwise.interop.huggingface.names import tensor_table
from shardwise.interop.huggingface.weights import gather
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import STD, initialize

BASES = {
    "ours": "gpu.with_ours",
    "plain": "gpu.with_plain",
    "transformers": "gpu.with_transformers",
    "peft": "gpu.with_transformers",
    "torchtitan": "gpu.with_torchtitan",
}


@dataclass
class Contender:
    step: Callable[[Tensor, Tensor], Tensor]
    """Tokens and targets in, one optimizer step, the mean loss out; nothing is waited for."""
    parameters: int
    notes: dict[str, Any] = field(default_factory=dict)


def build(case: Case) -> Contender:
    return importlib.import_module(BASES[case.base]).build(case)


def batches(case: Case, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens, the same for every contender; every token has a target."""
    draw = torch.Generator().manual_seed(1)
    size = (count, case.micro_batch, case.shape.seq_len + 1)
    tokens = torch.randint(0, case.shape.spec.vocab, size, generator=draw).to(case.device)
    return [(t_BT[:, :-1].contiguous(), t_BT[:, 1:].contiguous()) for t_BT in tokens]


def same_weights(case: Case, fused_experts: bool = True) -> dict[str, Tensor]:
    """Our first weights of the case's seed under Hugging Face's names."""
    assert case.seed is not None
    model = Decoder(case.shape.spec)
    initialize(model, case.seed)
    ours = model.state_dict()
    return {
        theirs.name: gather(theirs, ours, None) for theirs in tensor_table(case.shape.spec, fused_experts=fused_experts)
    }


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """First weights where they lie: matrices normal, vectors one."""
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, STD)


def adamw(case: Case, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Ours decays matrices only; so does everybody here whose own library does not say otherwise."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=case.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def clip(case: Case, parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, case.clip, foreach=True)
