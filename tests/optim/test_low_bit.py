"""8-bit and fp32-over-fp16 optimizer states: bytes, rounding, what comes back from a checkpoint, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.kernels.low_bit_codes import bounds_of, nearest
from shardwise.optim.build import build_optimizer
from shardwise.optim.low_bit import dequantized, is_quantized, kept_in_fp32
from shardwise.optim.low_bit_update import plain_update
from shardwise.plan.prediction.states import WEIGHT_BYTES, state_bytes
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.schema import OptimizerConfig

SHAPES = [(64, 256), (128, 48), (37, 111), (256,)]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(1000 + seed)
    for p in weights:
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype) * 1e-2
    optimizer.step()


def bytes_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    total = 0
    for value in optimizer.state[parameter].values():
        if hasattr(value, "codes"):
            total += value.codes.nbytes + value.scale.nbytes
        elif isinstance(value, Tensor) and value.shape == parameter.shape:
            total += value.nbytes
    return total


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16-true", torch.bfloat16), ("fp16-true", torch.float16)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_the_bytes_it_promises(name: str, precision: str, dtype: torch.dtype) -> None:
    weights = parameters(dtype)
    optimizer = build_optimizer(OptimizerConfig(name=name), weights)
    step(optimizer, weights, 1)
    assert bytes_of(optimizer, weights[0]) == state_bytes(name, precision) * weights[0].numel()
    assert all(p.dtype == dtype and bool(torch.isfinite(p).all()) for p in weights)
    assert weights[0].nbytes == WEIGHT_BYTES[precision] * weights[0].numel()


def test_small_and_odd_tensors_keep_fp32_states() -> None:
    weights = parameters(torch.bfloat16)
    assert [is_quantized(p) for p in weights] == [True, True, False, False]
    assert kept_in_fp32(weights) == (2, 37 * 111 + 256)
    optimizer = build_optimizer(OptimizerConfig(name="adamw8bit"), weights)
    step(optimizer, weights, 1)
    assert [hasattr(optimizer.state[p]["exp_avg"], "codes") for p in weights] == [True, True, False, False]
    assert optimizer.state[weights[2]]["exp_avg"].dtype == torch.float32


def test_eight_bits_follow_adamw() -> None:
    """The first update is computed before anything is rounded; later ones from states with 2 to 3 digits."""
    config = OptimizerConfig(lr=1e-2)
    pairs = [(name, parameters()) for name in ("adamw", "adamw8bit")]
    optimizers = [build_optimizer(OptimizerConfig(name=name, lr=config.lr), weights) for name, weights in pairs]
    start = parameters()
    for number in range(1, 11):
        for optimizer, (_, weights) in zip(optimizers, pairs, strict=True):
            step(optimizer, weights, number)
        for p, q, first in zip(pairs[0][1], pairs[1][1], start, strict=True):
            moved = float((p - first).detach().norm())
            assert float((p - q).detach().norm()) <= (1e-5 if number == 1 else 0.05) * moved, (number, p.shape)


def test_on_a_cpu_chunks_compute_what_torchao_computes() -> None:
    """Its own step compiles; told not to, it runs the same arithmetic on whole tensors."""
    from torchao.optim import AdamW8bit

    ours, theirs = parameters(), parameters()
    big = nn.Parameter(torch.randn(600, 512, generator=torch.Generator().manual_seed(5)))  # more than one chunk
    ours.append(big)
    theirs.append(nn.Parameter(big.detach().clone()))
    groups = [[p for p in theirs if p.ndim >= 2], [p for p in theirs if p.ndim < 2]]
    config = OptimizerConfig(name="adamw8bit")
    optimizer = build_optimizer(config, ours)
    peer = AdamW8bit(
        [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        lr=config.peak_lr, betas=config.betas, eps=config.eps,
    )  # fmt: skip
    for number in (1, 2, 3):
        step(optimizer, ours, number)
        with torch.compiler.set_stance("force_eager"):
            step(peer, theirs, number)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_what_the_kernel_is_compared_with_computes_the_same() -> None:
    """With a gradient in 16 bits, its factor, and a copy that is written on the way."""
    ours, twins = parameters(), parameters()
    low_precision_of = {p: nn.Parameter(p.detach().bfloat16()) for p in ours}
    low_precision_of[ours[0]].data = torch.cat([low_precision_of[ours[0]].data] * 2, 1)[
        :, :256
    ]  # as if something lay beside it
    optimizer: Any = build_optimizer(OptimizerConfig(name="adamw8bit", lr=1e-2), ours)
    twin: Any = build_optimizer(OptimizerConfig(name="adamw8bit", lr=1e-2), twins)
    optimizer.low_precision_of = low_precision_of
    factor = torch.tensor(0.37)
    for number in (1, 2, 3):
        draw = torch.Generator().manual_seed(number)
        for p, q in zip(ours, twins, strict=True):
            low_precision_of[p].grad = torch.randn(p.shape, generator=draw).bfloat16() * 1e-2
            q.grad = low_precision_of[p].grad.float()
        with torch.no_grad():
            for group in optimizer.param_groups:
                optimizer._step_at_once(group, factor, plain_update)
        twin.grad_factor = factor
        twin.step()
        for p, q in zip(ours, twins, strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7), (number, p.shape)  # fp32, summed in another order
            assert torch.equal(low_precision_of[p], p.bfloat16()) and low_precision_of[p].grad is None
            for key in ("exp_avg", "exp_avg_sq"):
                one, other = (dequantized(o.state[x][key]) for o, x in ((optimizer, p), (twin, q)))
                differs = ~torch.isclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
                # A number in the middle between two codes may fall either way.
                assert float(differs.float().mean()) < 1e-3, (number, key)
    assert twin.grad_factor is None


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos_and_bounds_know_them(signed: bool) -> None:
    from torchao.optim.quant_utils import quantize_8bit_with_qmap
    from torchao.optim.subclass_8bit import OptimState8bit

    values = OptimState8bit.zeros((4096,), signed, 256).qmap
    bounds, codes = bounds_of(values), torch.arange(256)
    below = bounds.nextafter(torch.tensor(-torch.inf))
    assert torch.equal(nearest(bounds, values), codes.byte())
    assert torch.equal(nearest(below[1:], values), codes[:-1].byte())
    x = torch.cat([torch.rand(10**5, generator=torch.Generator().manual_seed(0)) ** 4, bounds[1:], below[1:], values])
    x = torch.cat([x, -x]) if signed else x
    assert torch.equal(nearest(x, values), quantize_8bit_with_qmap(x, values))
    assert torch.equal(nearest(x, values).int(), torch.bucketize(x, bounds, right=True, out_int32=True) - 1)


def saved(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> dict[int, dict[str, Tensor]]:
    """As a checkpoint has it: by number in the order of the groups, everything wide."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    return {n: {k: dequantized(v).clone() for k, v in optimizer.state[p].items()} for n, p in enumerate(ordered)}


@pytest.mark.parametrize(
    ("before", "after"), [("adamw8bit", "adamw8bit"), ("adamw8bit", "adamw"), ("adamw", "adamw8bit")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_come_back_from_a_checkpoint(before: str, after: str, dtype: torch.dtype) -> None:
    weights = parameters(dtype)
    optimizer = build_optimizer(OptimizerConfig(name=before), weights)
    for number in (1, 2, 3):
        step(optimizer, weights, number)
    kept = saved(optimizer, weights)
    copies = [nn.Parameter(p.detach().clone()) for p in weights]
    other: Any = build_optimizer(OptimizerConfig(name=after), copies)
    other.load_state_dict({"state": kept, "param_groups": other.state_dict()["param_groups"]})
    assert all(state["exp_avg"].dtype != torch.float16 for state in kept.values())
    for number, values in saved(other, copies).items():
        assert float(values["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            largest = float(kept[number][key].abs().max())
            # Codes come back as the same codes. New codes are within half a step of the map: 1 % of a block's largest.
            limit = 2e-2 if (before, after) == ("adamw", "adamw8bit") else 1e-6
            assert float((values[key] - kept[number][key]).abs().max()) <= limit * largest, (number, key)
    step(optimizer, weights, 4)
    step(other, copies, 4)
    if before == after:
        assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-8) for p, q in zip(weights, copies, strict=True))


def test_a_block_whose_largest_number_is_negative_does_not_shrink() -> None:
    """The lowest code stands for -0.993: a scale taken from it again and again would fall each time."""
    weights = [nn.Parameter(torch.zeros(16, 256))]
    optimizer: Any = build_optimizer(OptimizerConfig(name="adamw8bit"), weights)
    weights[0].grad = -torch.linspace(0.1, 1, 4096).view(16, 256)
    optimizer.step()
    first = saved(optimizer, weights)
    for _ in range(20):
        optimizer.load_state_dict(
            {"state": saved(optimizer, weights), "param_groups": optimizer.state_dict()["param_groups"]}
        )
    assert torch.allclose(saved(optimizer, weights)[0]["exp_avg"], first[0]["exp_avg"], rtol=1e-5, atol=0)


def test_gradients_too_small_for_fp16_still_move_the_states() -> None:
    """Multiplied in fp16 they would be zero: the factor is applied in fp32."""
    weights = parameters(torch.float16)
    optimizer: Any = build_optimizer(OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.0), weights)
    start = [p.detach().clone() for p in weights]
    for p in weights:
        p.grad = torch.full_like(p, 1e-3)
    optimizer.grad_factor = torch.tensor(2.0**-16)
    optimizer.step()
    assert optimizer.grad_factor is None
    for p, before in zip(weights, start, strict=True):
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == torch.float32 and float(state["exp_avg_sq"].min()) > 0
        gradient = 1e-3 * 2.0**-16  # Adam's first step is lr, but for its epsilon
        assert float((before - p).detach().float().mean()) == pytest.approx(
            1e-2 * gradient / (gradient + 1e-8), rel=0.05
        )


def test_unsupported_parameters_are_refused_in_three_lines() -> None:
    with pytest.raises(UserError) as caught:
        build_optimizer(OptimizerConfig(name="adamw8bit"), parameters(torch.float64))
    what, why, fix = str(caught.value).splitlines()
    assert what == "error: optimizer.name = adamw8bit cannot train float64 parameters"
    assert "computed in fp32" in why and "optimizer.name=adamw or memory.precision=fp32" in fix
    with pytest.raises(UserError, match="cannot train fp64 parameters") as caught:
        load_config(None, ["optimizer.name=adamw8bit", "memory.precision=fp64"])
    assert (
        "computed in fp32" in caught.value.why and caught.value.fix == "optimizer.name=adamw or memory.precision=fp32"
    )
