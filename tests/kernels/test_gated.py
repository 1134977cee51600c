"""Gate and up side by side: one operation, whose value and gradient are those of the two halves multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from shardwise.kernels.gated import gated
from shardwise.model.feedforward import ACTIVATIONS


def value_and_gradient(y_N2F: Tensor, activation: Any, one: bool, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    y_N2F = y_N2F.detach().clone().requires_grad_()
    gate_NF, up_NF = y_N2F.chunk(2, dim=-1)
    h_NF = gated(y_N2F, activation) if one else activation(gate_NF) * up_NF
    h_NF.backward(grad_NF)
    assert y_N2F.grad is not None
    return h_NF.detach(), y_N2F.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_a_cpu_every_bit_is_that_of_two_halves(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    y, grad = (3 * torch.randn(2, 5, width, generator=draw).to(dtype) for width in (14, 7))
    found, truth = (value_and_gradient(y, ACTIVATIONS[name], one, grad) for one in (True, False))
    assert torch.equal(found[0], truth[0]) and torch.equal(found[1], truth[1])


def test_a_compiler_keeps_it_whole_and_does_not_compute_it_twice() -> None:
    graphs: list[list[str]] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    x_ND, weight, down = (torch.randn(shape, requires_grad=True) for shape in ((6, 8), (12, 8), (8, 6)))
    layer = torch.compile(lambda x: F.linear(gated(F.linear(x, weight), F.silu), down), backend=backend, fullgraph=True)
    layer(x_ND).sum().backward()
    forward, backward = graphs
    assert [name for name in forward if "gated" in name] == ["shardwise.gated_silu.default"]
    assert [name for name in backward if "gated" in name] == ["shardwise.gated_silu_backward.default"]
    assert not any(name.startswith(("aten.cat", "aten.silu")) for name in backward)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(3, 1, 14), (64, 2 * 1024), (2, 17, 2 * 2731), (0, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_round_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator(device="cuda").manual_seed(0)
    y = (3 * torch.randn(*shape, device="cuda", generator=draw)).to(dtype)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", generator=draw).to(dtype)
    assert_rounded_once(value_and_gradient(y, F.silu, True, grad), y, grad)


def assert_rounded_once(found: tuple[Tensor, Tensor], y_N2F: Tensor, grad_NF: Tensor) -> None:
    """Compared with fp64: at most half a unit in the last place, and what fp32 loses in between. That is of the size of
    the terms, which may cancel. A GPU's exponential and quotient are two units off each, so the sigmoid is five; `gate`
    times that in 1 + gate (1 - s), as in the exponent's rounding."""
    gate, up = y_N2F.double().chunk(2, dim=-1)
    s, grad = gate.sigmoid(), grad_NF.double()
    sizes = gate * s * up, torch.cat([grad * up * s * (1 + gate.abs() * (1 - s)), grad * gate * s], -1)
    lost = 4 * (1 + gate.abs()) * torch.finfo(torch.float32).eps
    truth = value_and_gradient(y_N2F.double(), F.silu, False, grad)
    about = torch.finfo(y_N2F.dtype)
    for ours, exact, size, share in zip(found, truth, sizes, (lost, torch.cat([lost, lost], -1)), strict=True):
        limit = about.eps / 2 * exact.abs() + share * size.abs() + about.smallest_normal * about.eps
        assert bool(((ours.double() - exact).abs() <= limit).all())
