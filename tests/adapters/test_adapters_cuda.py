"""Adapters on one GPU: the same four and eight bits as on a CPU, and the engine against the plain model on the same
device."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.adapters.nf4 import PackedWeight, dequantize, quantize
from shardwise.kernels.float8_matmul import frozen_linear, quantize_weight
from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("repeatable_on_gpu"),
]

SIZES = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5}


def test_four_bits_are_read_as_on_a_cpu() -> None:
    """What is rounded may differ where a mean is summed in another order; what is read from the same bits may not."""
    packed = quantize(torch.randn(70, 300, generator=torch.Generator().manual_seed(0)), torch.bfloat16)
    there = PackedWeight(*(part.cuda() for part in packed))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(there, 300, dtype).cpu(), dequantize(packed, 300, dtype))


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_engine_on_one_gpu_trains_the_same_adapters(kind: str, precision: str) -> None:
    device, spec = torch.device("cuda", 0), preset("tiny").with_overrides(SIZES)
    adapter = AdapterConfig(kind=kind, rank=4, targets=("all-linear",), train_also=("*norm",), dropout=0.1)
    attention = "math" if precision == "fp64" else "sdpa"  # `auto` would choose by time, anew in each run
    trial = Trial(num_steps=4, precision=precision, attention=attention, seq_len=32, adapter=adapter)
    record = train_in_layout(spec, trial_plan(trial), trial, 0, device)
    (losses, *_), worst = compare(record, train_plain(spec, trial, device))
    assert losses <= LIMITS[precision], (losses, worst)


# fp8 ----------------------------------------------------------------------------------------------------------------

WIDE = SIZES | {"num_layers": 2, "hidden": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn": 4096}
ON_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU that multiplies in fp8",
)


@ON_FP8
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_matmuls_of_frozen_weights_are_those_that_a_cpu_emulates(recipe: str, compiled: bool) -> None:
    """The same 8 bits; sums in another order, and in forward with fewer digits inside."""
    draw = torch.Generator().manual_seed(0)
    weight_OI, x, g = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((48, 1040), (2, 32, 1040), (2, 32, 48))
    )
    here, there = quantize_weight(weight_OI, recipe), quantize_weight(weight_OI.cuda(), recipe)
    for one, other in ((here.rows_OI, there.rows_OI), (here.columns_IO, there.columns_IO)):
        assert torch.equal(one.float(), other.cpu().float())
    torch.testing.assert_close(there.columns_scale.cpu(), here.columns_scale)
    matmul = frozen_linear(recipe)
    run = torch.compile(matmul, fullgraph=True, dynamic=False) if compiled else matmul
    results: list[Any] = []
    for multiply, factor, device in ((matmul, here, "cpu"), (run, there, "cuda")):
        leaf = x.clone().to(device).requires_grad_()
        y = multiply(leaf, factor)
        y.backward(g.to(device))
        assert leaf.grad is not None
        results.append((y.detach().cpu().float(), leaf.grad.cpu().float()))
    for expected, found in zip(*results, strict=True):
        assert float((found - expected).abs().max()) < 2**-7 * float(expected.abs().max())


@ON_FP8
@pytest.mark.parametrize("layout", [{}, {"copies": True}, {"copies": True, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_engine_trains_the_same_adapters_beside_a_base_in_fp8(recipe: str, layout: dict[str, Any]) -> None:
    device, spec = torch.device("cuda", 0), preset("tiny").with_overrides(WIDE)
    adapter = AdapterConfig(kind="lora", rank=4, targets=("all-linear",), dropout=0.1)
    trial = Trial(3, precision="fp8", clip=0.0, seq_len=32, adapter=adapter, fp8_recipe=recipe, attention="sdpa")
    record = train_in_layout(spec, replace(trial_plan(trial, **layout), device="cuda"), trial, 0, device)
    (losses, _, gradients, _), worst = compare(record, train_plain(spec, trial, device))
    assert losses <= 1e-4 and gradients <= 1e-3, worst
    # What 8 bits leave out moves the loss, by less than 0.5 %: the bound that runs have for bf16.
    bf16 = train_plain(spec, replace(trial, precision="bf16"), device)
    assert (
        0 < max(abs(one - other) for one, other in zip(record.losses, bf16.losses, strict=True)) < 5e-3 * bf16.losses[0]
    )


@ON_FP8
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_compute_the_same_beside_a_base_in_fp8(recompute: str) -> None:
    device, spec = torch.device("cuda", 0), preset("tiny").with_overrides(WIDE)
    adapter = AdapterConfig(kind="lora", rank=4, targets=("all-linear",))
    trial = Trial(num_steps=2, precision="fp8", clip=0.0, seq_len=64, adapter=adapter, attention="sdpa")
    plan = replace(trial_plan(trial, copies=True), device="cuda")
    plain = train_in_layout(spec, plan, trial, 0, device)
    torch.compiler.reset()
    fast = train_in_layout(spec, replace(plan, compile="blocks", recompute=recompute), trial, 0, device)
    for one, other in zip(plain.losses, fast.losses, strict=True):
        assert abs(one - other) < 5e-3 * one  # roundings of bf16 and of 8 bits that fall elsewhere


@ON_FP8
def test_a_base_in_fp8_takes_no_more_memory_than_in_bf16() -> None:
    device, spec = torch.device("cuda", 0), preset("tiny").with_overrides(WIDE)
    adapter, held = AdapterConfig(kind="lora", rank=4, targets=("all-linear",)), {}
    for precision in ("bf16", "fp8"):
        trial = Trial(precision=precision, adapter=adapter)
        before = torch.cuda.memory_allocated(device)
        engine = build_trial(spec, replace(trial_plan(trial, copies=True), device="cuda"), trial, 0, device)
        held[precision] = torch.cuda.memory_allocated(device) - before
        del engine
        gc.collect()
    assert held["fp8"] < 1.01 * held["bf16"]
