"""LoRA (arXiv 2106.09685) and QLoRA: linear layers with a small trained product beside a frozen weight.

    y = x W^T + (alpha / rank) * dropout(x) A^T B^T + bias          A [rank, inputs], B [outputs, rank], zero at first

Owns the layer (`AdaptedLinear`, made of an nn.Linear in place), what is trained and what is frozen, the first values and the dropout.
Works on any module, with memory or on `meta`. Invariants: names of the base stay, `lora_a` and `lora_b` stand beside `weight`; a first value
depends on (seed, name) only; dropout on (seed, step, row, position, channel, layer) only, so every layout drops the same numbers.
Read next: adapter_names.py (which layers), nf4.py (the base in four bits), peft_format.py (files).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.nf4 import LEAVES, PAIR, Packed, dequantize, nf4_product, quantize, tables
from shardwise.errors import UserError
from shardwise.interop.peft.format import read_adapter
from shardwise.interop.peft.targets import Settings, find_targets, find_trained, linears_of, modules_of, their_modules
from shardwise.kernels.quantized_weight import factor
from shardwise.model.decoder import Block
from shardwise.model.dtypes import COMPUTED, KEPT
from shardwise.model.experts import moe_layers
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
    frozen_dtype: torch.dtype | None = None  # what frozen numbers are kept in; None: as they are
    start: Mapping[str, Tensor] = field(default_factory=dict)  # full tensors of an existing adapter, by our names

    def is_trained(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return leaf in ("lora_a", "lora_b") or (module in self.trained and leaf not in LEAVES)


def decoder_adapters(spec: ModelSpec, settings: Settings, seed: int, precision: str) -> Adapters | None:
    """Of our own decoder, whatever part of it a rank has. None: all weights are trained."""
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
    """Of any module: the linear layers inside its blocks."""
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
    """torch's own encoder and decoder layers may hand `layer.weight` to one fused kernel: an adapter would be passed over in silence."""
    for path in linears:
        parent = module.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            raise UserError(
                f"{path} cannot have an adapter",
                why=f"{type(parent).__name__} may read its weight without calling the layer, so the adapter would do nothing",
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
    # Numbers that never change need no wider format than the one that is computed in.
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


# A module becomes an adapted one ----------------------------------------------------------------------------------------


@torch.no_grad()
def adapt(module: nn.Module, adapters: Adapters | None) -> None:
    """In place, at full shape: freeze, add A and B with their first values, put weights into four bits. On `meta`: only shapes."""
    if adapters is None:
        return
    chance = Chance(adapters.seed, adapters.dropout)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and name in adapters.targets | adapters.quantized:
            layer.__class__ = AdaptedLinear
            layer.salt, layer.scale, layer.chance = chance.salt(name), adapters.scale, chance  # type: ignore[assignment]
            if name in adapters.targets:
                _add_product(layer, name, adapters)
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
    for block in module.modules():
        if isinstance(block, Block) and adapters.dropout:
            block.chance = chance


def adapt_whole(model: Any, settings: Settings, seed: int, precision: str) -> None:
    """A whole model that has its weights: our decoder, or one of transformers."""
    spec = model.spec
    if spec.is_ours:
        adapt(model, decoder_adapters(spec, settings, seed, precision))
        return
    start = read_adapter(settings.path, spec) if settings.kind != "none" and settings.path else {}
    adapt(model, module_adapters(model, f"inner.{spec.blocks}", settings, seed, precision, start))


def _add_product(layer: nn.Linear, name: str, adapters: Adapters) -> None:
    weight = layer.weight
    shapes = {"lora_a": (adapters.rank, layer.in_features), "lora_b": (layer.out_features, adapters.rank)}
    for leaf, shape in shapes.items():
        value = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        if leaf == "lora_a" and not weight.is_meta:
            value.copy_(first_a(f"{name}.{leaf}", shape, adapters.seed))
        layer.register_parameter(leaf, nn.Parameter(value))


def first_a(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Uniform within 1 / sqrt(inputs), as PEFT draws it; at full shape, fp32, on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def _put_into_four_bits(layer: nn.Linear, frozen_dtype: torch.dtype | None) -> None:
    """The bits are viewed in the 16-bit format that is computed in, so that no policy of mixed precision casts them."""
    format_ = frozen_dtype or layer.weight.dtype
    container = format_ if format_.itemsize == 2 else torch.bfloat16
    packed = quantize(layer.weight, container)
    if not layer.weight.is_meta:
        tables(layer.weight.device)
    layer.register_parameter("weight", None)
    for leaf, value in zip(LEAVES, packed, strict=True):
        layer.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


class AdaptedLinear(nn.Linear):
    """An nn.Linear with a product beside it, or a weight in four bits, or both."""

    salt: Tensor  # of its dropout; a tensor, so that compiled blocks differ in nothing but tensors
    scale: float
    chance: Chance
    first_input: int = 0  # tensor parallelism may keep a slice of the inputs
    product: Callable[..., Tensor] = staticmethod(F.linear)  # of the base; fp8 has its own
    add_narrow: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # y + narrow B^T, where that is one kernel
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, x: Tensor, narrow: Tensor | None = None) -> Tensor:
        y = product(self, x, narrow)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The salt goes with the parameters, and keeps its value where they lose theirs."""
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device.type != "meta":
            self.salt = self.salt.to(device)
            tables(device)
        return self


def product(layer: Any, x: Tensor, narrow: Tensor | None = None) -> Tensor:
    """What a linear layer adds up, without its bias. Also for layers without an adapter. `narrow`: x A^T, scaled, where it is there already."""
    if not hasattr(layer, "chance"):
        return F.linear(x, layer.weight)
    if hasattr(layer, "weight_nf4"):
        bits = (layer.weight_nf4, layer.weight_absmax, layer.weight_scale)
        y = nf4_product(x, Packed(*bits), layer.first_input % PAIR)
    else:
        y = layer.product(x, factor(layer))
    if getattr(layer, "lora_a", None) is None:
        return y
    if narrow is None:
        # Scaled where it is narrow: a product of y's width would need its gradient once more, scaled.
        narrow = F.linear(layer.chance.drop(x, layer.salt, layer.first_input), layer.lora_a) * layer.scale
    if (add := getattr(layer, "add_narrow", None)) is not None:
        return add(y, narrow, layer.lora_b)
    return y + F.linear(narrow, layer.lora_b)


# Whole weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_weight(layer: AdaptedLinear, dtype: torch.dtype) -> Tensor:
    """The base weight as numbers."""
    if layer.weight is not None:
        return layer.weight.to(dtype)
    packed = Packed(layer.weight_nf4, layer.weight_absmax, layer.weight_scale)
    return dequantize(packed, layer.in_features, dtype, layer.first_input % PAIR)


@torch.no_grad()
def merge(module: nn.Module, dtype: torch.dtype) -> None:
    """In place: every adapted layer becomes an nn.Linear with W + (alpha / rank) B A, added in at least fp32."""
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


# Dropout ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Chance:
    """What adapters drop. A block says before it begins which rows and positions its tokens have (`Block.forward`), so that a block
    that is computed again drops the same numbers."""

    seed: int
    rate: float
    rows_B: Tensor | None = None  # a number for every row of every step; None: nothing is dropped
    positions_BT: Tensor | None = None

    def begin(self, rows_B: Tensor | None, positions_BT: Tensor | None) -> None:
        self.rows_B, self.positions_BT = rows_B, positions_BT

    def salt(self, layer: str) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{layer}".encode()).digest()
        return torch.tensor(int.from_bytes(digest[:8], "little", signed=True), device="cpu")

    def drop(self, x_BTI: Tensor, salt: Tensor, first_input: int) -> Tensor:
        if not self.rate or self.rows_B is None:
            return x_BTI
        assert self.positions_BT is not None
        tokens_BT = _mixed(_mixed(self.rows_B[:, None] ^ salt) + self.positions_BT)
        inputs_I = torch.arange(first_input, first_input + x_BTI.shape[-1], device=x_BTI.device)
        # tokens + inputs * ODD, written so that the product is of numbers in memory: those of an arange are 32 bits wide in compiled kernels.
        draw_BTI = _mixed(((tokens_BT * INVERSE)[..., None] + inputs_I) * ODD)
        is_kept_BTI = ((draw_BTI >> 40) & 0xFFFFFF) >= int(self.rate * 2**24)
        return x_BTI * is_kept_BTI.to(x_BTI.dtype) / (1 - self.rate)


ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
INVERSE = -1018231460777725123  # INVERSE * ODD = 1, modulo 2^64


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: every bit of the input moves every bit of the output. Products wrap, shifts fill with zeros."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
