"""Computes the matmuls of blocks in fp8, over bf16 copies of fp32 weights.

Both factors of every matmul, forward and backward, are quantized to fp8 (`float8_matmul.py`); everything else is as
with bf16. Layers that would lose stay in bf16 and are named: those whose sides no fp8 kernel takes, and small ones,
where quantizing costs more than the matmul saves. Weights, names and shapes stay what they are, so ZeRO, tensor
parallelism and checkpoints see plain linears. What is frozen beside adapters is quantized once instead, as soon as it
is there, and the weight is let go (`Float8Layers.quantize_frozen`): only replicas hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from shardwise.kernels.float8_matmul import Float8HeadMatmuls, float8_linear, frozen_linear, quantize_weight
from shardwise.kernels.fused_head import FusedHead
from shardwise.kernels.quantized_weight import hold_quantized, weight_of
from shardwise.model.decoder import Decoder, Head
from shardwise.model.replacement import become
from shardwise.spec.fp8 import why_not

FUSED = (("q", "k", "v"), ("gate", "up"))  # layers that `speed.fuse` makes one matmul of


@dataclass
class Float8Layers:
    """Notes what became of the linear layers of a model, for the line that a run prints."""

    recipe: str
    num_converted: int = 0
    num_frozen: int = 0  # those of them that are frozen, and quantized once
    waiting: list[nn.Linear | Head] = field(default_factory=list)  # frozen ones whose weights are not there yet
    kept: dict[str, str] = field(default_factory=dict)  # name, with * for layer numbers -> why it stays in bf16
    has_head: bool = False  # whether the head is in fp8 too

    def __str__(self) -> str:
        reasons = sorted(set(self.kept.values()))
        lists = [f"{', '.join(n for n, why in self.kept.items() if why == reason)} ({reason})" for reason in reasons]
        always = "embeddings, norms, routers and experts (always)"
        bf16 = "; ".join([always if self.has_head or "head" in self.kept else f"head, {always}", *lists])
        frozen = f" ({self.num_frozen} of them frozen, quantized once)" if self.num_frozen else ""
        matrices = f"{self.num_converted} matrices{frozen}{' and the head' if self.has_head else ''}"
        return f"{matrices} in fp8, {self.recipe} scales; in bf16: {bf16}"

    def quantize_frozen(self) -> None:
        """Quantizes frozen weights, once they are there."""
        while self.waiting:
            layer = self.waiting.pop()
            assert layer.weight is not None, "it is let go once"
            hold_quantized(layer, quantize_weight(layer.weight, self.recipe))


def apply_float8(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    recipe: str,
    *,
    emulate: bool,
    fused: bool = False,
    found: Float8Layers | None = None,
) -> Float8Layers:
    """Puts linear layers into fp8 in place, on `meta` or with weights; frozen ones wait for `quantize_frozen`. With
    `emulate` the same quantization runs where the hardware has no fp8; it is slow, for tests, whatever the size. With
    `fused` q, k and v are one matmul and gate and up another, so that it is their sum which has a size. Returns what
    became of each linear layer."""
    found = found or Float8Layers(recipe)
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        for parent in block.modules():
            for child, linear in parent.named_children():
                if not isinstance(linear, nn.Linear):
                    continue
                outputs, inputs = linear.weight.shape
                together, is_frozen = outputs, not linear.weight.requires_grad
                if fused and not is_frozen:
                    group = next((group for group in FUSED if child in group), (child,))
                    parts = [getattr(parent, name, None) for name in group]
                    together = sum(part.weight.shape[0] for part in parts if isinstance(part, nn.Linear))
                why = why_not(outputs, inputs, recipe, together=None if emulate else together, is_frozen=is_frozen)
                if why:
                    found.kept.setdefault(re.sub(r"\.\d+\.", ".*.", f"{names[id(parent)]}.{child}"), why)
                    continue
                found.num_converted += 1
                matmul = (frozen_linear if is_frozen else float8_linear)(recipe)
                # A slice by input and a layer with an adapter have a matmul; what comes after it stays theirs.
                become(linear, type(linear) if hasattr(linear, "matmul") else Float8Linear, matmul=matmul)
                if is_frozen:
                    found.num_frozen += 1
                    found.waiting.append(linear)
    return found


def apply_float8_head(model: Decoder, found: Float8Layers, *, compiled: bool) -> None:
    """Puts the head's matmuls into fp8 too, in place, on whatever part of a model has one; before `quantize_frozen`,
    which takes a frozen one too, if the embedding is another. With `compiled` its quantization is a kernel of its own:
    it is outside of the blocks."""
    if model.head is None:
        return
    weight = model.embed.weight if model.head.weight is None and model.embed is not None else model.head.weight
    assert weight is not None, "a tied head has the embedding beside it"
    outputs, inputs = weight.shape
    why = why_not(outputs, inputs, found.recipe, together=None)
    if why:
        found.kept["head"] = why
        return
    found.has_head = True
    matmuls = Float8HeadMatmuls(found.recipe, compiled=compiled)
    head = become(model.head, FusedHead, matmuls=matmuls, matmul=float8_linear(found.recipe, compiled=compiled))
    if head.weight is not None and not weight.requires_grad:
        head.matmul = frozen_linear(found.recipe, compiled=compiled)
        found.waiting.append(head)


class Float8Linear(nn.Linear):
    """An nn.Linear whose matmul is in fp8."""

    matmul: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x, weight_of(self))
        return y if self.bias is None else y + self.bias.to(y.dtype)
