"""Matmuls by the fastest kernel with the same bits: what they compute, and when nothing is measured. Most of it on a
GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.kernels import choose_matmul, cublas
from shardwise.kernels.choose_matmul import (
    MeasuredHeadMatmuls,
    MeasureMatmuls,
    multiply,
    multiply_into,
    operation,
    summary,
)
from shardwise.kernels.fused_loss import HeadMatmuls

SIZES = (4096, 2048, 3072)  # rows, inner, columns: 5e10 FLOPs


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    choose_matmul._found.clear()
    choose_matmul._zeros.clear()
    yield
    choose_matmul._found.clear()


def factors(
    layout: str, dtype: torch.dtype = torch.bfloat16, sizes: tuple[int, int, int] = SIZES
) -> tuple[Tensor, Tensor]:
    """`layout`: whether each factor lies in memory as it is (n) or transposed (t)."""
    rows, inner, columns = sizes
    draw = torch.Generator("cuda").manual_seed(3)
    a, b = (
        torch.randn(shape, device="cuda", dtype=dtype, generator=draw) for shape in ((rows, inner), (inner, columns))
    )
    a, b = (matrix.t().contiguous().t() if how == "t" else matrix for matrix, how in zip((a, b), layout, strict=True))
    return a, b


def test_the_operation_is_a_matmul_wherever_there_is_no_gpu() -> None:
    a, b = torch.randn(5, 7), torch.randn(4, 7).t()
    assert torch.equal(operation()(a, b), a @ b)
    assert torch.equal(multiply(a, b), a @ b)
    torch.library.opcheck(operation(), (a, b), test_utils=("test_schema", "test_faketensor"))


def test_graphs_with_other_passes_are_told_apart_in_torchs_cache() -> None:
    assert MeasureMatmuls(1.0).uuid() != MeasureMatmuls(2.0).uuid()


@pytest.mark.parametrize(
    ("size", "dtype", "is_measured"),
    [(8192, torch.bfloat16, True), (512, torch.bfloat16, False), (8192, torch.float32, False)],
)
def test_large_matmuls_of_a_graph_are_measured_where_there_is_a_choice(
    size: int, dtype: torch.dtype, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass alone: a machine without a GPU has no such library."""
    monkeypatch.setattr(cublas, "library", lambda: "there")
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = b.meta["val"] = torch.empty(size, size, dtype=dtype, device="meta")
    node = graph.call_function(torch.ops.aten.mm.default, (a, b))
    MeasureMatmuls()(graph)
    assert node.target is (operation() if is_measured else torch.ops.aten.mm.default)


def test_the_fastest_with_the_same_bits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice alone, among kernels that stand in for the library's: one refuses, one is wrong, one is slow, one is
    good."""
    calls: list[str] = []

    def kernel(name: str) -> cublas.Launch:
        def launch(a: Tensor, b: Tensor, out: Tensor, beta: float) -> None:
            calls.append(name)
            if name == "refuses":
                raise RuntimeError("cuBLASLt answered 15")
            if name == "slow":
                time.sleep(0.01)
            assert beta == 0.0, "what is there already must not be added again and again"
            out.copy_(a @ b)
            if name == "wrong":
                out[0, 0] += 1

        return launch

    proposals = [kernel(name) for name in ("refuses", "wrong", "slow", "good")]
    monkeypatch.setattr(cublas, "library", lambda: "there")
    monkeypatch.setattr(cublas, "proposals", lambda *asked: proposals)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(choose_matmul, "TURN_S", 1e-3)
    a, b = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    out, plain = torch.empty(256, 256, dtype=torch.bfloat16), choose_matmul._as_torch

    def slowly(*asked: Any) -> None:
        time.sleep(0.005)
        plain(*asked)

    monkeypatch.setattr(choose_matmul, "_as_torch", slowly)
    assert choose_matmul._measure(torch.zeros_like(a), b, out, ("zeros",)) is None
    found = choose_matmul._measure(a, b, out, ("some",))
    assert found is not None and found.launch is proposals[3] and 0 < found.ms < found.torch_ms
    assert calls.count("refuses") == calls.count("wrong") == 1 and calls.count("good") > 4


def test_a_head_on_a_cpu_has_its_plain_matmuls() -> None:
    x, weight, gradient = torch.randn(6, 8), torch.randn(10, 8), torch.randn(6, 10)
    sums, inputs = [torch.ones(10, 8) for _ in range(2)], [torch.empty(6, 8) for _ in range(2)]
    for matmuls, total, dx in zip((HeadMatmuls(), MeasuredHeadMatmuls()), sums, inputs, strict=True):
        matmuls.weight_gradient(gradient, x, total, False)
        matmuls.input_gradient(gradient, weight, dx)
    assert torch.equal(*sums) and torch.equal(*inputs)
    assert torch.equal(MeasuredHeadMatmuls().logits(x, weight), HeadMatmuls().logits(x, weight))


def test_strides_say_how_a_matrix_lies() -> None:
    matrix = torch.empty(6, 8)
    assert cublas.is_transposed(matrix) is False and cublas.is_transposed(matrix.t()) is True
    assert (
        cublas.is_transposed(matrix[:, :4]) is False and cublas.is_transposed(matrix.t()[:4]) is True
    )  # parts of rows
    assert cublas.is_transposed(matrix[:, ::2]) is None and cublas.is_transposed(torch.empty(1, 8).expand(6, 8)) is None


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_that_takes_part_gives_torchs_bits(layout: str, dtype: torch.dtype) -> None:
    a, b = factors(layout, dtype)
    truth = torch.mm(a, b)
    assert torch.equal(multiply(a, b), truth)
    (found,) = choose_matmul._found.values()
    assert 0 < found.ms <= found.torch_ms
    proposals = cublas.proposals(a, b, truth, choose_matmul.MOST_PROPOSALS)
    assert len(proposals) > 1, "there is something to choose from"
    for launch in proposals:  # near at least, or strides were given wrong
        out = torch.full_like(truth, torch.nan)
        launch(a, b, out, 0.0)
        torch.testing.assert_close(out, truth, rtol=2e-2, atol=0.5)
    assert torch.equal(multiply(*factors(layout, dtype)), truth)  # the second time it is only started
    assert len(choose_matmul._found) == 1 and "same bits" in (summary() or "")


@pytest.mark.cuda
def test_sums_in_fp32_go_on_where_they_are() -> None:
    a, b = factors("tn")
    once = torch.ops.aten.mm.dtype(a, b, torch.float32)
    total = torch.full_like(once, torch.nan)
    multiply_into(a, b, total)
    assert torch.equal(total, once)
    multiply_into(a, b, total, 1.0)
    assert torch.equal(total, 2 * once)


@pytest.mark.cuda
def test_parts_of_a_matrix_have_their_own_strides() -> None:
    a, b = factors("nn")
    wide = torch.zeros(a.shape[0], 2 * a.shape[1], device="cuda", dtype=a.dtype)
    wide[:, : a.shape[1]] = a
    assert torch.equal(multiply(wide[:, : a.shape[1]], b), torch.mm(a, b))


@pytest.mark.cuda
def test_what_is_small_or_begins_anywhere_is_torchs() -> None:
    a, b = factors("nn", sizes=(64, 64, 64))
    assert torch.equal(multiply(a, b), a @ b) and not choose_matmul._found
    long = torch.randn(4096 * 2048 + 8, device="cuda").bfloat16()
    a, b = long[8:].view(4096, 2048), factors("nn")[1]
    assert torch.equal(multiply(a, b), a @ b) and not choose_matmul._found


@pytest.mark.cuda
def test_zeros_choose_nobody() -> None:
    a, b = factors("nn")
    multiply(torch.zeros_like(a), b)
    assert not choose_matmul._found
    multiply(a, b)
    assert len(choose_matmul._found) == 1


@pytest.mark.cuda
def test_compiled_graphs_use_it_both_ways_and_nothing_changes() -> None:
    rows, width, out = 4096, 2048, 4096
    draw = torch.Generator("cuda").manual_seed(5)
    x, weight = (
        torch.randn(shape, device="cuda", generator=draw).bfloat16() for shape in ((rows, width), (out, width))
    )
    results = []
    for options in ({}, {"post_grad_custom_post_pass": MeasureMatmuls()}):
        torch._dynamo.reset()
        xs, weights = (tensor.clone().requires_grad_() for tensor in (x, weight))
        run = torch.compile(lambda x, w: torch.nn.functional.silu(x @ w.t()), dynamic=False, options=options)
        y = run(xs, weights)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), xs.grad, weights.grad))
    assert len(choose_matmul._found) == 3  # forward, and both gradients
    for plain, measured in zip(*results, strict=True):
        assert torch.equal(plain, measured)
