"""What only a GPU can show: fp8's own kernels, the update of 8-bit states, fp16 with a scaled loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.kernels.float8_matmul import GRADIENTS, float8_mm, quantize_rows
from shardwise.optim.build import build_optimizer
from shardwise.optim.low_bit import dequantized
from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

pytestmark = pytest.mark.cuda
SPEC = preset("tiny").with_overrides(
    {"num_layers": 2, "hidden": 2304, "num_heads": 36, "num_kv_heads": 36, "head_dim": 64, "ffn": 4608, "vocab": 128}
)


STATES_IN_8_BITS = pytest.param("adamw8bit", marks=pytest.mark.needs("torchao"))


@pytest.mark.parametrize("name", ["fp16", "fp16-true", "fp8 rowwise", "fp8 tensorwise", STATES_IN_8_BITS])
def test_one_gpu_computes_what_the_plain_model_computes(name: str) -> None:
    precision, _, recipe = name.partition(" ")
    optimizer = OptimizerConfig(lr=1e-3, name=name if name == "adamw8bit" else "adamw")
    precision = "fp32" if name == "adamw8bit" else precision
    recipe = recipe or "rowwise"
    trial = Trial(precision=precision, clip=0.0, optimizer=optimizer, fp8_recipe=recipe, attention="sdpa")
    device = torch.device("cuda")
    plan = trial_plan(trial)
    record = train_in_layout(SPEC, plan, trial, 0, device)
    (losses, _, gradients, _), worst = compare(record, train_plain(SPEC, trial, device))
    # The same kernels on the same numbers (`auto` would choose attention by its time, anew in each run); only the
    # order of fp32 sums of micro-batches may differ.
    assert losses <= 1e-4 and gradients <= 1e-3, worst


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_gpus_products_are_those_that_a_cpu_emulates(recipe: str, compiled: bool) -> None:
    """The same 8 bits; sums in another order, and in forward with fewer digits inside."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw).bfloat16() for shape in ((64, 1040), (48, 1040)))
    for kind, fast in ((torch.float8_e4m3fn, True), (GRADIENTS[recipe], False)):
        assert torch.equal(
            quantize_rows(a.cuda(), kind, recipe)[0].cpu().float(), quantize_rows(a, kind, recipe)[0].float()
        )
        expected = float8_mm(a, b, recipe, kind).float()
        for turn in (False, True):
            x, y = (tensor.t().contiguous().t().cuda() if turn else tensor.cuda() for tensor in (a, b))
            found = float8_mm(x, y, recipe, kind, fast=fast, compiled=compiled).cpu().float()
            assert float((found - expected).abs().max()) < 2**-7 * float(expected.abs().max())


@pytest.mark.needs("torchao")
@pytest.mark.parametrize("has_copies", [False, True])
def test_8_bit_states_are_updated_in_one_pass_that_waits_for_nothing(has_copies: bool) -> None:
    shapes, config = [(64, 256), (128, 48), (37, 111), (256,)], OptimizerConfig(name="adamw8bit", lr=1e-2)
    there, here = (
        [
            nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device))
            for n, shape in enumerate(shapes)
        ]
        for device in ("cuda", "cpu")
    )  # fmt: skip
    low_precision_of = {p: nn.Parameter(p.detach().bfloat16()) for p in there} if has_copies else {}
    optimizer: Any = build_optimizer(config, there, low_precision_of)
    twin: Any = build_optimizer(config, here)
    for number in (1, 2, 3):
        draw = torch.Generator().manual_seed(10 + number)
        for p, q in zip(there, here, strict=True):
            q.grad = torch.randn(q.shape, generator=draw).bfloat16().float() * 2**-6
            low_precision_of.get(p, p).grad = q.grad.to("cuda", low_precision_of.get(p, p).dtype)
        optimizer.grad_factor, twin.grad_factor = torch.tensor(0.37, device="cuda"), torch.tensor(0.37)
        torch.cuda.set_sync_debug_mode("error" if number == 3 else "default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        twin.step()
        for p, q in zip(there, here, strict=True):
            assert torch.allclose(p.cpu(), q, rtol=1e-5, atol=1e-6), (number, p.shape)
            assert not has_copies or torch.equal(low_precision_of[p], p.bfloat16())
            for name, there_now, here_now in states_of(optimizer.state[p], twin.state[q]):
                one, other = dequantized(there_now).cpu(), dequantized(here_now)
                assert float((one - other).abs().mean()) < 1e-4 * float(other.abs().max()), (number, name)
            take_over(p, q, optimizer.state[p], twin.state[q])


def states_of(there: dict[str, Any], here: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in ("exp_avg", "exp_avg_sq"):
        yield name, there[name], here[name]


@torch.no_grad()
def take_over(p: nn.Parameter, q: nn.Parameter, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Each step begins with the CPU's numbers: gradients have few digits, so some quotients lie halfway between two
    codes, and a GPU's division, which is a unit off, takes the other one. That is as right, and would be another
    update."""
    p.copy_(q)
    for _, there_now, here_now in states_of(there, here):
        if not hasattr(here_now, "codes"):
            there_now.copy_(here_now)
            continue
        there_now.codes.copy_(here_now.codes)
        there_now.scale.copy_(here_now.scale)
