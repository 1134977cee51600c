"""Experts under torch.compile: one graph, whatever the router chooses, and the results of the loop over experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoders import VARIANTS
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise.kernels.fused_experts import fuse_experts
from shardwise.model.experts import MixtureOfExperts, sorting

SPEC = VARIANTS["moe"].with_overrides({"hidden": 64, "ffn": 96, "num_shared_experts": 1})


pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def plain_bf16() -> Iterator[None]:
    """Without oneDNN: on virtual machines that announce AMX but forbid it, its bf16 matmul kills the process."""
    torch.compiler.reset()
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def make_layer(**overrides: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(SPEC.with_overrides(overrides)).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return layer


def results(layer: MixtureOfExperts, forward: Any, x_BTD: Tensor) -> list[Tensor]:
    x_BTD = x_BTD.clone().requires_grad_()
    layer.zero_grad()
    out_BTD, routing = forward(x_BTD, torch.tensor([3, 0]))
    (out_BTD.float().square().sum() + routing.aux + routing.z).backward()
    found = [out_BTD, *routing, x_BTD.grad, *(p.grad for p in layer.parameters())]
    return [value.detach().clone() for value in found if value is not None]


@pytest.mark.parametrize("router", ["softmax-topk", "sigmoid-bias"])
def test_a_layer_is_one_graph_for_every_routing_and_computes_what_the_loop_does(router: str) -> None:
    layer = make_layer(router=router)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer.forward, backend=counter, fullgraph=True)
    for seed in (1, 2, 3):
        x_BTD = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for one, other in zip(results(layer, compiled, x_BTD), results(layer, layer.forward, x_BTD), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1


def test_a_compiled_block_asks_no_tensor_for_its_value() -> None:
    """What would make the host wait for a GPU: reading a number, or a shape that depends on one."""
    layer = make_layer()
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)
    results(layer, torch.compile(layer.forward, backend=backend, fullgraph=True), torch.randn(2, 16, 64).bfloat16())
    assert seen.count("aten._grouped_mm.default") == 9  # three matmuls, and two for the gradients of each
    assert not [name for name in seen if "local_scalar" in name or "nonzero" in name or "_assert" in name]
    assert seen.count("aten.scatter_add.default") == 1  # experts are counted once


def test_gate_and_up_in_one_piece_are_one_matmul() -> None:
    x_BTD = torch.randn(2, 16, 64).bfloat16()
    layer, apart = make_layer(), make_layer()
    fuse_experts(layer.experts)
    assert torch.equal(layer.experts.gate, apart.experts.gate) and torch.equal(layer.experts.up, apart.experts.up)
    found = results(layer, torch.compile(layer.forward, backend="aot_eager", fullgraph=True), x_BTD)
    expected = results(apart, apart.forward, x_BTD)
    for one, other in zip(found, expected, strict=True):
        # The input's gradient is rounded once and not three times.
        torch.testing.assert_close(one, other, rtol=0, atol=2**-7 * float(other.abs().max()))
    exact = {name for name, _ in layer.named_parameters()} - {"router.weight"}
    for name in exact:
        assert torch.equal(layer.get_parameter(name).grad, apart.get_parameter(name).grad), name
    assert layer.experts.gate.grad.is_contiguous()  # or it would be copied once more
    with torch.no_grad():
        layer.experts.gate.zero_()
    assert not layer.experts.gate_up_E2FD[:, :96].any() and layer.experts.gate_up_E2FD[:, 96:].any()


def test_fused_experts_without_a_compiler_take_the_loop() -> None:
    x_MD, counts_E = torch.randn(8, 64).bfloat16(), torch.tensor([3, 0, 4, 1])
    experts = make_layer().experts
    expected = experts(x_MD, counts_E)
    fuse_experts(experts)
    assert torch.equal(experts(x_MD, counts_E), expected)


@pytest.mark.parametrize("num_experts", [64, 256, 300])
def test_one_byte_sorts_as_eight_do(num_experts: int) -> None:
    experts_M = torch.randint(0, num_experts, (4096,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sorting(experts_M, num_experts), experts_M.argsort(stable=True))
