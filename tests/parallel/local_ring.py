"""A ring inside one process: a thread per rank, sends through queues. What a test without peers (one GPU) can
run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from shardwise.model.attention_kernels import KERNELS, attend
from shardwise.model.masking import MaskBuilder
from shardwise.parallel.context.attention_blocks import Score
from shardwise.parallel.context.ring import ring_backward, ring_forward
from shardwise.parallel.context.zigzag import AttentionView, Zigzag
from shardwise.spec.layers import FEEDFORWARD
from shardwise.spec.model import LayerSpec

WAIT_S = 60


@dataclass
class LocalRing:
    """Has what `shardwise.parallel.context.ring.Ring` has."""

    size: int
    index: int
    boxes: list[Queue[Tensor]]
    sent: list[Tensor] = field(default_factory=list)

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        self.sent.append(x)
        self.boxes[(self.index + 1) % self.size].put(x.clone())
        return lambda: self.boxes[self.index].get(timeout=WAIT_S)


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    window: int | None = None
    softcap: float = 0.0
    math: bool = False

    @property
    def score(self) -> Score:
        return Score(self.width**-0.5, self.softcap, self.math)


def draw(shape: Shape, dtype: torch.dtype, device: str = "cpu", documents: bool = False) -> tuple[list[Tensor], Any]:
    """q, k, v and the gradient of the output; document ids that change inside pieces, rows of one document among
    them."""
    torch.manual_seed(0)
    sizes = [(shape.heads, shape.width), (shape.kv_heads, shape.width), (shape.kv_heads, shape.value_width)]
    sizes += [(shape.heads, shape.value_width)]
    tensors = [torch.randn(shape.batch, shape.tokens, *size, dtype=torch.float64).to(device, dtype) for size in sizes]
    ids = None
    if documents:
        ids = (torch.rand(shape.batch, shape.tokens) < 3 / shape.tokens).cumsum(1).to(device)
    return tensors, ids


def plain(shape: Shape, tensors: list[Tensor], documents: Tensor | None, kernel: str = "math") -> list[Tensor]:
    """Output and gradients by the model's own attention over whole rows."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    layer = LayerSpec(0, shape.window, FEEDFORWARD["dense"], 1, 1e4, True)
    builder = MaskBuilder(shape.tokens, 0, q.device, documents)
    mask = builder.build((layer,), flex=False)[builder.key(layer)]
    out = attend(q, k, v, mask, KERNELS[kernel], shape.score.scale, shape.softcap)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def through_ring(
    shape: Shape, size: int, tensors: list[Tensor], documents: Tensor | None
) -> tuple[list[Tensor], list[LocalRing]]:
    """Output and gradients of all ranks, back in the order of the row."""
    boxes: list[Queue[Tensor]] = [Queue() for _ in range(size)]
    rings = [LocalRing(size, index, boxes) for index in range(size)]

    def one(ring: LocalRing) -> list[Tensor]:
        view = view_of(shape, size, ring.index, documents, tensors[0].device)
        q, k, v, grad = (view.place.take(x) for x in tensors)
        out, lse = ring_forward(q, k, v, ring, view, shape.score)
        return [out, *ring_backward(grad, q, k, v, out, lse, ring, view, shape.score)]

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(one, rings))
    return [back_in_order([rank[i] for rank in by_rank]) for i in range(4)], rings


def view_of(shape: Shape, size: int, index: int, documents: Tensor | None, device: torch.device) -> AttentionView:
    window = shape.window if shape.window is not None and shape.window < shape.tokens else None
    return AttentionView(Zigzag(size, index, shape.tokens), window, documents, device)


def back_in_order(parts: list[Tensor]) -> Tensor:
    """Rank i has pieces i and 2P - 1 - i: written down here once more, by hand."""
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=1)


def ring_bytes(size: int, num_elements: int, element_bytes: int, work_bytes: int) -> tuple[int, int]:
    """Bytes that one rank should send in forward and in backward, of one layer and micro-batch."""
    forward = (size - 1) * num_elements * element_bytes
    return forward, forward + (size - 1) * num_elements * work_bytes
