"""Splits layers over pipeline stages by measured time: one layer of each kind, the embedding and the head, forward and
backward.

Every rank measures at once, as busy as they will be, and all take the average, so all choose the same split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.kernels.flash4 import kernel_named
from shardwise.kernels.fused_head import FusedHead
from shardwise.kernels.timing import median_seconds
from shardwise.model.decoder import Decoder
from shardwise.model.dtypes import COMPUTED
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.split import balanced_split

TURNS = 5


def measured_split(spec: ModelSpec, plan: Plan, attention: str, device: torch.device) -> tuple[int, ...]:
    """Collective. Returns how many layers each stage has. `plan.split` only says how many stages there are. With
    context parallelism a rank times its own tokens only: those that they attend to on other ranks are left out, as they
    would not fit here."""
    plan = replace(plan, seq_len=plan.seq_len // plan.cp)
    kinds = [replace(layer, index=0) for layer in spec.layers]
    first_of = {kind: kinds.index(kind) for kind in kinds}
    seconds = {kind: _layer_seconds(spec, index, plan, attention, device) for kind, index in first_of.items()}
    ends = [_embedding_seconds(spec, plan, device), _head_seconds(spec, plan, device)]
    measured = torch.tensor([*seconds.values(), *ends], dtype=torch.float64, device=device)
    dist.all_reduce(measured)
    *layers, embedding, head = (measured / plan.world).tolist()
    by_kind = dict(zip(seconds, layers, strict=True))
    return balanced_split([by_kind[kind] for kind in kinds], embedding, head, plan.num_stages)


def _layer_seconds(spec: ModelSpec, index: int, plan: Plan, attention: str, device: torch.device) -> float:
    part = _ready(Decoder, spec, kernel_named(attention), range(index, index + 1), plan=plan, device=device)
    positions = torch.arange(plan.seq_len, device=device)[None]
    inputs = part.prepare_attention(COMPUTED[plan.precision], positions, None, None)[index]
    targets = torch.full((plan.micro_batch,), plan.seq_len, device=device)

    def once() -> None:
        out, _ = part.layers[str(index)](_hidden(spec, plan, device), inputs, targets)
        out.sum().backward()

    return _seconds(once, device)


def _embedding_seconds(spec: ModelSpec, plan: Plan, device: torch.device) -> float:
    table = _ready(torch.nn.Embedding, spec.vocab, spec.hidden, plan=plan, device=device)
    tokens = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.long, device=device)
    return _seconds(lambda: table(tokens).sum().backward(), device)


def _head_seconds(spec: ModelSpec, plan: Plan, device: torch.device) -> float:
    head = _ready(FusedHead, spec.with_overrides({"tied": False}), plan=plan, device=device)
    targets = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.long, device=device)
    return _seconds(lambda: head(_hidden(spec, plan, device), targets).backward(), device)


def _hidden(spec: ModelSpec, plan: Plan, device: torch.device) -> torch.Tensor:
    shape = (plan.micro_batch, plan.seq_len, spec.hidden)
    return torch.zeros(shape, dtype=COMPUTED[plan.precision], device=device, requires_grad=True)


def _ready(kind: Callable, *arguments: object, plan: Plan, device: torch.device) -> Any:
    """Returns a module with memory and zeros in it: how long it takes does not depend on the values."""
    with torch.device("meta"):
        module = kind(*arguments).to(COMPUTED[plan.precision])
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    return module


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of a few runs, after one that warms up. There are more of them than the fastest would
    need: the median of five leaves out two that met somebody else's work."""
    return median_seconds([action], device, turns=TURNS)[0]
