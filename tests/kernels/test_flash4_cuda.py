"""FlashAttention 4 computes what the plain softmax computes, also in compiled blocks, and only where it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from shardwise.cluster.describe import capabilities
from shardwise.kernels import flash4
from shardwise.kernels.choose_attention import AttentionShape, choose
from shardwise.kernels.compiled import apply_compile
from shardwise.kernels.flash4 import FLASH4, kernel_named
from shardwise.model.attention_kernels import KERNELS, AttentionKernel
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.model.masking import Mask
from shardwise.spec.presets import preset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_it = pytest.mark.skipif(not flash4.can_run(DEVICE), reason="needs flash-attn-4 and a Hopper GPU")
CAUSAL = Mask(is_causal=True)
SPEC = preset("llama3.2-1b").with_overrides({"num_layers": 2, "vocab": 512})


def results(kernel: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, tokens: int) -> list[Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, tokens, num, width, device=DEVICE, generator=draw).bfloat16().to(dtype)
        for num in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(q, k, v, kernel, width**-0.5)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]


def attend(q: Tensor, k: Tensor, v: Tensor, name: str, scale: float) -> Tensor:
    kernel = kernel_named(name)
    assert isinstance(kernel, AttentionKernel)
    return kernel.compute(q, k, v, CAUSAL, scale, 0.0)


def apart(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


@pytest.mark.cuda
@needs_it
@pytest.mark.parametrize("heads, kv_heads, width, tokens", [(8, 2, 64, 1024), (8, 8, 128, 512), (8, 1, 128, 1000)])
def test_it_is_as_close_to_the_plain_softmax_as_cudnn(heads: int, kv_heads: int, width: int, tokens: int) -> None:
    shape = (heads, kv_heads, width, tokens)
    truth = results("math", torch.float32, *shape)
    found = apart(results("flash4", torch.bfloat16, *shape), truth)
    assert found < 5e-3 and found < 1.2 * apart(results("cudnn", torch.bfloat16, *shape), truth)


@pytest.mark.cuda
@needs_it
def test_a_repeated_backward_repeats_its_bits_where_that_is_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results("flash4", torch.bfloat16, 8, 2, 64, 2048) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradients(kernel: str, compiled: bool, selective: bool) -> list[Tensor]:
    torch.compiler.reset()
    model = Decoder(SPEC, kernel_named(kernel)).to(DEVICE)
    initialize(model, 0)
    model.bfloat16()
    if compiled:
        apply_compile(model.layers.values(), "blocks", selective=selective, whole=True)
    tokens = torch.randint(0, 512, (2, 1024), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    loss = model(tokens, tokens.roll(-1, 1)).cross_entropy
    loss.backward()
    return [loss.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]


@pytest.mark.cuda
@needs_it
@pytest.mark.parametrize("compiled, selective", [(False, False), (True, False), (True, True)])
def test_a_model_computes_what_it_does_with_cudnn(compiled: bool, selective: bool) -> None:
    truth = gradients("cudnn", compiled, selective)
    assert apart(gradients("flash4", compiled, selective), truth) < 0.02


@pytest.mark.cuda
@needs_it
def test_it_takes_part_in_the_choice() -> None:
    choice = choose(SPEC, SPEC.layers, AttentionShape(2, 4096), torch.bfloat16, DEVICE)[0]
    assert {"cudnn", "flash", "flash4"} == set(choice.seconds)


def test_one_rule_says_which_kernels_and_cards_these_are() -> None:
    """The planner, which has no torch, has its own words for both."""
    assert flash4.LEAST_CAPABILITY == capabilities.FLASH4_CAPABILITY
    kernels = [*KERNELS.values(), FLASH4]
    assert tuple(kernel.name for kernel in kernels if kernel.needs_cuda) == capabilities.CUDA_ATTENTION


def test_without_it_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "can_run", lambda device: False)
    choice = choose(SPEC, SPEC.layers, AttentionShape(1, 64), torch.float32, DEVICE, among=("sdpa", "flash4"))[0]
    assert set(choice.seconds) == {"sdpa"}


class OnCpu:
    """The two functions of the package, by torch's kernel for CPUs."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, **_: bool) -> tuple[Tensor | None, ...]:
        OnCpu.calls.append("forward")
        ready = (x.detach().transpose(1, 2) for x in (q, *repeated(q, k, v)))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*ready, 0.0, True, scale=softmax_scale)
        return out.transpose(1, 2).contiguous(), lse.contiguous(), None

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        softmax_scale: float, **_: bool,
    ) -> None:  # fmt: skip
        OnCpu.calls.append("backward")
        ready = (x.transpose(1, 2) for x in (grad, q, *repeated(q, k, v), out))
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = [x.transpose(1, 2) for x in backward(*ready, lse, 0.0, True, scale=softmax_scale)]
        for mine, theirs in zip((dq, dk, dv), found, strict=True):
            mine.copy_(theirs.unflatten(2, (mine.shape[2], -1)).sum(3))


def repeated(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in tensors]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flash4, "_interface", lambda: OnCpu)
    monkeypatch.setattr("shardwise.model.decoder.check_kernel_device", lambda *_: None)
    with torch.library._scoped_library("shardwise", "FRAGMENT") as library:
        library.impl("flash", flash4._forward, "CPU")
        library.impl("flash_backward", flash4._backward, "CPU")
        yield


def test_its_operations_have_gradients(on_cpu: None) -> None:
    """As torch sees them, whoever computes: schema, shapes, autograd, and a graph of both."""
    q, k, v = (torch.randn(2, 32, num, 16, requires_grad=True) for num in (4, 2, 2))
    torch.library.opcheck(torch.ops.shardwise.flash.default, (q, k, v, 0.25))
    half, OnCpu.calls = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)], []
    truth, out = attend(q, k, v, "math", 0.25), attend(*half, "flash4", 0.25)
    pairs = zip(torch.autograd.grad(out, half, out), torch.autograd.grad(truth, (q, k, v), truth), strict=True)
    assert max(float((a.float() - b).norm() / b.norm()) for a, b in pairs) < 0.02
    assert OnCpu.calls == ["forward", "backward"]
    attend(q, k, v, "flash4", 0.25)
    assert len(OnCpu.calls) == 2, "it is not for fp32"


@pytest.mark.parametrize("selective", [False, True])
def test_compiled_blocks_hold_it_as_one_operation(on_cpu: None, selective: bool) -> None:
    def gradients_of(kernel: str) -> list[Tensor]:
        torch.compiler.reset()
        model = Decoder(preset("tiny").with_overrides({"num_layers": 1, "vocab": 64}), kernel_named(kernel))
        initialize(model, 0)
        model.bfloat16()
        apply_compile(model.layers.values(), "trace", selective=selective, whole=True)
        tokens = torch.arange(128).view(2, 64) % 61
        model(tokens, tokens.roll(-1, 1)).cross_entropy.backward()
        return [p.grad.float() for p in model.parameters() if p.grad is not None]

    assert apart(gradients_of("flash4"), gradients_of("sdpa")) < 0.02


def test_shapes_are_known_before_anything_runs() -> None:
    """What a compiler asks for. Heads of values may be narrower."""
    q, k, v = (torch.empty(2, 16, num, width, device="meta") for num, width in ((4, 8), (2, 8), (2, 6)))
    out, lse = torch.ops.shardwise.flash.default(q, k, v, 1.0)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 16, 4, 6), (2, 4, 16), torch.float32)
    found = torch.ops.shardwise.flash_backward.default(out, q, k, v, out, lse, 1.0)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
