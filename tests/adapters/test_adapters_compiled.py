"""Adapted blocks under torch.compile: one graph for all of them, nothing computed or kept for weights that are
frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from shardwise.adapters.dropout import AdapterDropout, apply_dropout
from shardwise.adapters.lora import adapt, decoder_adapters
from shardwise.kernels.compiled import apply_compile
from shardwise.kernels.float8 import apply_float8
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

SIZES = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny").with_overrides(SIZES)


def make(kind: str, rate: float) -> tuple[Decoder, dict[int, Any], AdapterDropout]:
    """`kind`: of adapters, or the recipe of a base in fp8."""
    model = Decoder(SPEC)
    initialize(model, 0)
    in_fp8 = kind in ("rowwise", "tensorwise")
    adapter = AdapterConfig(kind="lora" if in_fp8 else kind, rank=4, targets=("all-linear",), dropout=rate)
    dropout = adapt(model, decoder_adapters(SPEC, adapter, 0, "fp32"))
    assert dropout is not None
    if in_fp8:
        apply_float8(model, model.layers.values(), kind, emulate=True).quantize_frozen()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    rows_B, positions_BT = torch.tensor([5, 9]), torch.arange(16)[None]
    inputs = model.prepare_attention(torch.float32, positions_BT, None, None)
    return model, {n: replace(one, rows_B=rows_B, positions_BT=positions_BT) for n, one in inputs.items()}, dropout


def through(model: Decoder, forwards: list[Any], inputs: dict[int, Any]) -> list[Tensor]:
    model.zero_grad()
    x_BTD = first = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for index, forward in enumerate(forwards):
        x_BTD, _ = forward(x_BTD, inputs[index])
    x_BTD.square().sum().backward()
    assert first.grad is not None
    return [x_BTD.detach(), first.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("kind", "dropout"), [("lora", 0.0), ("qlora", 0.1), ("rowwise", 0.1), ("tensorwise", 0.0)])
def test_all_blocks_are_one_graph_and_compute_what_they_did(kind: str, dropout: float, selective: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    results = []
    for compiled in (False, True):
        model, inputs, shared = make(kind, dropout)
        blocks: list[Any] = list(model.layers.values())
        if compiled:
            apply_compile(blocks, "trace", selective=selective, whole=True)
        apply_dropout(blocks, shared)
        results.append(through(model, [block.forward for block in blocks], inputs))
    expected, found = results
    assert counters["stats"]["unique_graphs"] == 1
    assert len(found) == 2 + 2 * 2 * 7
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_four_bits_stay_four_bits_until_backward() -> None:
    """The compiler chooses what to keep, as it does on a GPU. A weight that was read is not among it, and has no
    gradient."""
    torch.compiler.reset()
    model, inputs, _ = make("qlora", 0.0)
    block: Any = model.layers["0"]
    compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    x_BTD = torch.randn(3, 16, 64, requires_grad=True)  # 48 tokens: no weight has as many rows
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out_BTD, _ = compiled(x_BTD, inputs[0])
    weights = {
        (layer.out_features, layer.in_features) for layer in block.modules() if isinstance(layer, torch.nn.Linear)
    }
    assert ((64, 32), torch.bfloat16) in kept  # the bits of q and o, 64 inputs in pairs of blocks
    assert not {(shape, torch.float32) for shape in weights} & set(kept)
    out_BTD.sum().backward()
    assert x_BTD.grad is not None
