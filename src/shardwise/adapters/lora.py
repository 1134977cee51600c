"""Adds LoRA (arXiv 2106.09685) and QLoRA to linear layers: a small trained matmul beside a frozen weight.

    y = x W^T + (alpha / rank) * dropout(x) A^T B^T + bias          A [rank, inputs], B [outputs, rank], zero at first

Owns the layer (`AdaptedLinear`, which an nn.Linear becomes in place), what is trained and what is frozen, and the first
values. Works on any module, with memory or on `meta`. Invariants: names of the base stay, `lora_a` and `lora_b` stand
beside `weight`; a first value depends on (seed, name) only. Read next: `dropout.py`, `nf4.py` (the base in four bits),
`fused.py` (adapters side by side), interop/peft/targets.py (which layers), interop/peft/format.py (files).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.dropout import AdapterDropout, apply_dropout
from shardwise.adapters.nf4 import LEAVES, PAIR, PackedWeight, dequantize, nf4_linear, quantize, tables
from shardwise.errors import UserError
from shardwise.interop.peft.format import read_adapter
from shardwise.interop.peft.targets import Settings, find_targets, find_trained, linears_of, modules_of, their_modules
from shardwise.kernels.quantized_weight import weight_of
from shardwise.model.dtypes import COMPUTED, KEPT
from shardwise.model.experts import moe_layers
from shardwise.model.replacement import become
from shardwise.spec.model import ModelSpec


@dataclass(frozen=True)
class Adapters:
    """Where adapters go in one model, and what they start from."""

    rank: int
    scale: float
    dropout: float
    seed: int
    targets: frozenset[str]  # linear layers with an adapter
    quantized: frozenset[str]  # linear layers whose weight is kept in four bits
    trained: frozenset[str]  # modules whose own parameters are trained
    frozen_dtype: torch.dtype | None = None  # what frozen elements are kept in; None: as they are
    start: Mapping[str, Tensor] = field(default_factory=dict)  # full tensors of an existing adapter, by our names

    def is_trained(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return leaf in ("lora_a", "lora_b") or (module in self.trained and leaf not in LEAVES)


def decoder_adapters(spec: ModelSpec, settings: Settings, seed: int, precision: str) -> Adapters | None:
    """Returns the adapters of our own decoder, whatever part of it a rank has; None where all weights are trained."""
    if settings.kind == "none":
        return None
    theirs = their_modules(spec)
    trained = find_trained(settings, modules_of(spec), theirs, spec.name)
    targets = find_targets(settings, linears_of(spec), theirs, spec.name)
    start = read_adapter(settings.path, spec) if settings.path else {}
    return _adapters(settings, seed, precision, linears_of(spec), targets, trained, start)


def module_adapters(
    module: nn.Module,
    blocks: str,
    settings: Settings,
    seed: int,
    precision: str,
    start: Mapping[str, Tensor] | None = None,
) -> Adapters | None:
    """Returns the adapters of any module, on the linear layers inside its blocks; None where all weights are
    trained."""
    if settings.kind == "none":
        return None
    if settings.dropout:
        raise UserError(
            "adapter.dropout is not possible for a model that is not ours",
            why="what is dropped follows from the row of the batch, which only our own decoder hands to its layers",
            fix="adapter.dropout=0",
        )
    name = type(getattr(module, "inner", module)).__name__
    linears = [path for path, m in module.named_modules() if type(m) is nn.Linear and path.startswith(f"{blocks}.")]
    modules = [path for path, m in module.named_modules() if next(m.parameters(recurse=False), None) is not None]
    targets = find_targets(settings, linears, {}, name)
    trained = find_trained(settings, modules, {}, name)
    touched = linears if settings.kind == "qlora" else targets
    _refuse_readers(module, touched)
    return _adapters(settings, seed, precision, linears, targets, trained, start or {})


def _refuse_readers(module: nn.Module, linears: list[str]) -> None:
    """Refuses layers of torch's own encoder and decoder: they may hand `layer.weight` to one fused kernel, and an
    adapter would be passed over in silence."""
    for path in linears:
        parent = module.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            raise UserError(
                f"{path} cannot have an adapter",
                why=f"{type(parent).__name__} may read its weight and not call it: the adapter would do nothing",
                fix="a block that calls its linear layers, or adapter.targets without this one",
            )


def _adapters(
    settings: Settings,
    seed: int,
    precision: str,
    linears: Iterable[str],
    targets: list[str],
    trained: list[str],
    start: Mapping[str, Tensor],
) -> Adapters:
    quantized = frozenset(linears) - frozenset(trained) if settings.kind == "qlora" else frozenset()
    # Elements that never change need no wider format than the one that is computed in.
    frozen_dtype = COMPUTED[precision] if COMPUTED[precision] != KEPT[precision] else None
    return Adapters(
        settings.rank,
        settings.alpha / settings.rank,
        settings.dropout,
        seed,
        frozenset(targets),
        quantized,
        frozenset(trained),
        frozen_dtype,
        start,
    )


# A module becomes an adapted one
# ----------------------------------------------------------------------------------------


@torch.no_grad()
def adapt(module: nn.Module, adapters: Adapters | None) -> AdapterDropout | None:
    """Adapts a module in place, at full shape: freezes, adds A and B with their first values, puts weights into four
    bits. On `meta` there are only shapes. Returns the dropout that all adapters share, of which blocks must be told
    (`apply_dropout`)."""
    if adapters is None:
        return None
    dropout = AdapterDropout(adapters.seed, adapters.dropout)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and name in adapters.targets | adapters.quantized:
            become(layer, AdaptedLinear, salt=dropout.salt(name), scale=adapters.scale, dropout=dropout)
            if name in adapters.targets:
                _add_matrices(layer, name, adapters)
            if name in adapters.quantized:
                _put_into_four_bits(layer, adapters.frozen_dtype)
    for name, parameter in module.named_parameters():
        trained = adapters.is_trained(name)
        parameter.requires_grad_(trained)
        if trained and name in adapters.start and not parameter.is_meta:
            parameter.copy_(adapters.start[name])
        if not trained and adapters.frozen_dtype is not None and name.rpartition(".")[2] not in LEAVES:
            parameter.data = parameter.data.to(adapters.frozen_dtype)
    for layer in moe_layers(module):
        layer.bias_update_rate = 0.0  # a frozen router keeps its bias
    return dropout


def adapt_whole(model: Any, settings: Settings, seed: int, precision: str) -> None:
    """Adapts a whole model that has its weights, in place: our decoder, or one of transformers."""
    spec = model.spec
    if spec.is_ours:
        apply_dropout(model.layers.values(), adapt(model, decoder_adapters(spec, settings, seed, precision)))
        return
    start = read_adapter(settings.path, spec) if settings.kind != "none" and settings.path else {}
    adapt(model, module_adapters(model, f"inner.{spec.blocks}", settings, seed, precision, start))


def _add_matrices(layer: nn.Linear, name: str, adapters: Adapters) -> None:
    weight = layer.weight
    shapes = {"lora_a": (adapters.rank, layer.in_features), "lora_b": (layer.out_features, adapters.rank)}
    for leaf, shape in shapes.items():
        value = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        if leaf == "lora_a" and not weight.is_meta:
            value.copy_(first_a(f"{name}.{leaf}", shape, adapters.seed))
        layer.register_parameter(leaf, nn.Parameter(value))


def first_a(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Returns the first value of A: uniform within 1 / sqrt(inputs), as PEFT draws it; at full shape, fp32, on the
    CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def _put_into_four_bits(layer: nn.Linear, frozen_dtype: torch.dtype | None) -> None:
    """Replaces a weight by its NF4 codes. The bits are viewed in the 16-bit format that is computed in, so that no
    policy of mixed precision casts them."""
    format_ = frozen_dtype or layer.weight.dtype
    container = format_ if format_.itemsize == 2 else torch.bfloat16
    packed = quantize(layer.weight, container)
    if not layer.weight.is_meta:
        tables(layer.weight.device)
    layer.register_parameter("weight", None)
    for leaf, value in zip(LEAVES, packed, strict=True):
        layer.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


class AdaptedLinear(nn.Linear):
    """An nn.Linear with a LoRA matmul beside it, or a weight in four bits, or both."""

    salt: Tensor  # seeds its dropout; a tensor, so that compiled blocks differ in nothing but tensors
    scale: float
    dropout: AdapterDropout
    first_input: int = 0  # tensor parallelism may keep a slice of the inputs
    matmul: Callable[..., Tensor] = staticmethod(F.linear)  # with the base weight; fp8 has its own
    lora_add: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # y + xa B^T, where that is one kernel
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
        y = adapted_linear(self, x, xa)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the salt with the parameters; it keeps its value where they lose theirs."""
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device.type != "meta":
            self.salt = self.salt.to(device)
            tables(device)
        return self


def adapted_linear(layer: Any, x: Tensor, xa: Tensor | None = None) -> Tensor:
    """Returns what a linear layer computes, without its bias; also for layers without an adapter. `xa` is x A^T,
    scaled, where it is there already."""
    if hasattr(layer, LEAVES[0]):
        y = nf4_linear(x, PackedWeight(*(getattr(layer, leaf) for leaf in LEAVES)), layer.first_input % PAIR)
    else:
        y = layer.matmul(x, weight_of(layer))
    if getattr(layer, "lora_a", None) is None:
        return y
    if xa is None:
        # Scaled where it is narrow: something as wide as y would need its gradient once more, scaled.
        xa = F.linear(layer.dropout.drop(x, layer.salt, layer.first_input), layer.lora_a) * layer.scale
    if (add := getattr(layer, "lora_add", None)) is not None:
        return add(y, xa, layer.lora_b)
    return y + F.linear(xa, layer.lora_b)


# Whole weights
# ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_weight(layer: AdaptedLinear, dtype: torch.dtype) -> Tensor:
    """Returns the base weight as elements of `dtype`."""
    if layer.weight is not None:
        return layer.weight.to(dtype)
    packed = PackedWeight(layer.weight_nf4, layer.weight_absmax, layer.weight_scale)
    return dequantize(packed, layer.in_features, dtype, layer.first_input % PAIR)


@torch.no_grad()
def merge(module: nn.Module, dtype: torch.dtype) -> None:
    """Merges adapters in place: every adapted layer becomes an nn.Linear with W + (alpha / rank) B A, added in at least
    fp32."""
    for layer in module.modules():
        if not isinstance(layer, AdaptedLinear):
            continue
        work = torch.float64 if dtype == torch.float64 else torch.float32
        weight = plain_weight(layer, work)
        if getattr(layer, "lora_a", None) is not None:
            weight += layer.scale * (layer.lora_b.to(work) @ layer.lora_a.to(work))
        for leaf in (*LEAVES, "lora_a", "lora_b"):
            layer._parameters.pop(leaf, None)
        layer.__class__ = nn.Linear  # type: ignore[assignment]
        layer.weight = nn.Parameter(weight.to(dtype))
    module.to(dtype)
