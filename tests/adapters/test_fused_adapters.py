"""Adapters of layers that read the same states: x A^T as one matmul computes what matmuls of their own do, and a graph
has fewer of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule, Node

from shardwise.adapters.fused import (
    FusedAdaptersAttention,
    FusedAdaptersFeedForward,
    apply_fused_adapters,
    apply_lora_add,
    project_together,
)
from shardwise.adapters.lora import adapt, decoder_adapters
from shardwise.kernels.compiled import apply_compile
from shardwise.kernels.float8 import apply_float8
from shardwise.kernels.lora_add import lora_add
from shardwise.model.attention import Attention
from shardwise.model.decoder import Decoder
from shardwise.model.feedforward import FeedForward
from shardwise.model.initialize import initialize
from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny").with_overrides(SIZES)
BIASED = preset("gpt2").with_overrides({**SIZES, "num_kv_heads": 4, "max_seq_len": 64})
RANK = 3  # no side of anything else
EVERY = ("all-linear",)


def adapter(kind: str = "lora", targets: tuple[str, ...] = EVERY, dropout: float = 0.0) -> AdapterConfig:
    return AdapterConfig(kind=kind, rank=RANK, alpha=5.0, targets=targets, dropout=dropout)


def make(settings: AdapterConfig, spec: Any = SPEC) -> Decoder:
    """In fp64, with B that is not zero."""
    model = Decoder(spec).double()
    initialize(model, 0)
    adapt(model, decoder_adapters(spec, settings, 0, "fp64"))
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def through(model: Decoder) -> list[Tensor]:
    """What comes out of the blocks, and all gradients."""
    model.zero_grad()
    device = next(model.parameters()).device
    inputs = model.prepare_attention(torch.float64, torch.arange(16, device=device)[None], None, None)
    draw = torch.Generator().manual_seed(2)
    x_BTD = first = torch.randn(2, 16, 64, generator=draw, dtype=torch.float64).to(device).requires_grad_()
    for index, block in model.layers.items():
        x_BTD, _ = block(x_BTD, inputs[int(index)])
    x_BTD.square().sum().backward()
    assert first.grad is not None
    return [x_BTD.detach(), first.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def apart(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest difference, over each tensor's largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True))


def fused(model: Decoder) -> list[tuple[bool, bool]]:
    """Attention and feed-forward part of each block."""
    pairs: Any = [(block.attention, block.feedforward) for block in model.layers.values()]
    return [(is_fused(attention), is_fused(feedforward)) for attention, feedforward in pairs]


def is_fused(module: Any) -> bool:
    return isinstance(module, FusedAdaptersAttention | FusedAdaptersFeedForward)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    "spec, kind, targets, fuses",
    [
        (SPEC, "lora", EVERY, (True, True)),
        (SPEC, "qlora", EVERY, (True, True)),
        (SPEC, "lora", ("q", "v"), (True, False)),
        (SPEC, "lora", ("k", "o", "gate", "up"), (False, True)),
        (SPEC, "qlora", ("q", "v", "down"), (True, False)),
        (BIASED, "lora", EVERY, (True, False)),
    ],
    ids=["all", "qlora", "q v", "gate up", "qlora q v", "biases, no gate"],
)
def test_compiled_blocks_compute_what_they_did(
    spec: Any, kind: str, targets: tuple[str, ...], fuses: tuple[bool, bool], selective: bool
) -> None:
    torch.compiler.reset()
    counters.clear()
    model = make(adapter(kind, targets), spec)
    truth = through(model)
    apply_fused_adapters(model.layers.values())
    assert fused(model) == [fuses] * 2
    apply_compile(model.layers.values(), "trace", selective=selective, whole=True)
    assert apart(through(model), truth) < 1e-12
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_kernels_compute_what_they_did(kind: str) -> None:
    """Kernels both times: unpacking four bits, a kernel multiplies and adds in fp32 in one rounding, which is 6e-9 of
    an eager run's result."""
    results = []
    for fuses in (False, True):
        torch.compiler.reset()
        model = make(adapter(kind)).to("cuda")
        if fuses:
            apply_fused_adapters(model.layers.values())
        apply_compile(model.layers.values(), "blocks", selective=False, whole=True)
        results.append(through(model))
    assert apart(*results) < 1e-12


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_sums_in_one_kernel_are_the_same_sums(kind: str, fuses: bool) -> None:
    """As graphs see them. What the kernel does is for a GPU."""
    torch.compiler.reset()
    model = make(replace(adapter(kind), rank=8))
    truth = through(model)
    if fuses:
        apply_fused_adapters(model.layers.values())
    attention: Any = model.layers["0"].attention
    apply_lora_add(model.layers.values(), torch.float32)
    assert attention.q.lora_add is None, "it is for 16 bits"
    apply_lora_add(model.layers.values(), torch.bfloat16)
    assert attention.q.lora_add is torch.ops.shardwise.lora_add.default
    apply_compile(model.layers.values(), "trace", selective=fuses, whole=True)
    assert apart(through(model), truth) < 1e-12


def test_the_sum_is_an_operation_with_gradients() -> None:
    y, x, b = (torch.randn(size, requires_grad=True, dtype=torch.float64) for size in ((2, 5, 7), (2, 5, 8), (7, 8)))
    torch.library.opcheck(lora_add(), (y, x, b))
    assert torch.autograd.gradcheck(lora_add(), (y, x, b))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "rank, first, width", [(16, 0, 4096), (16, 16, 4096), (64, 0, 1000), (24, 8, 72), (8, 0, 4096)]
)
def test_the_kernel_of_the_sum_rounds_once(rank: int, first: int, width: int) -> None:
    """x is a part of the rows of another matrix, as with fused adapters."""
    draw = torch.Generator("cuda").manual_seed(0)
    y, wide, b = (
        torch.randn(size, device="cuda", generator=draw).bfloat16()
        for size in ((4, 1001, width), (4, 1001, rank + 32), (width, rank))
    )
    x = wide[..., first : first + rank]
    truth = (y.double() + x.double() @ b.double().t()).bfloat16()
    out = lora_add()(y, x, b)
    assert (out != truth).float().mean() < 1e-3  # fp32 sums that lie between two values
    assert torch.equal(lora_add()(y, x, torch.zeros_like(b)), y)


@pytest.mark.parametrize("base", ["rowwise", "tensorwise"])
def test_a_base_in_eight_bits_stays_apart(base: str) -> None:
    """One layer deep: further on, the last bit of fp64 may decide how a number is rounded to eight bits. `k` has no
    adapter."""
    model = make(adapter(targets=("q", "v")))
    apply_float8(model, model.layers.values(), base, emulate=True).quantize_frozen()
    attention: Any = model.layers["0"].attention
    layers, results = [attention.q, attention.k, attention.v], []
    ways: list[Callable[[Tensor], list[Tensor]]] = [
        lambda x: [layer(x) for layer in layers],
        lambda x: project_together(layers, x),
    ]
    for way in ways:
        model.zero_grad()
        draw = torch.Generator().manual_seed(3)
        x_BTD = torch.randn(2, 16, 64, generator=draw, dtype=torch.float64).requires_grad_()
        out = way(x_BTD)
        torch.cat(out, dim=-1).sin().sum().backward()
        results.append(
            [*(y.detach() for y in out), x_BTD.grad, *(p.grad for p in attention.parameters() if p.grad is not None)]
        )
    assert len(results[0]) == 3 + 1 + 2 * 2
    assert apart(results[1], results[0]) < 1e-12


def test_what_drops_is_not_fused() -> None:
    model = make(adapter(dropout=0.1))
    apply_fused_adapters(model.layers.values())
    assert fused(model) == [(False, False)] * 2


def low_rank_matmuls(model: Decoder) -> list[int]:
    """Matmuls with a side of at most three ranks in the forward and the backward graph of a block."""
    torch.compiler.reset()
    counts: list[int] = []

    def is_low_rank(node: Node) -> bool:
        factors = [argument.meta["val"].shape for argument in node.all_input_nodes]
        return any(side in (RANK, 2 * RANK, 3 * RANK) for shape in factors for side in shape)

    def count(graph: GraphModule, _inputs: Any) -> Any:
        matmuls = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default]
        counts.append(sum(is_low_rank(node) for node in matmuls))
        return make_boxed_func(graph.forward)

    model.layers["0"].forward = torch.compile(  # type: ignore[method-assign]
        model.layers["0"].forward, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True
    )
    through(model)
    return counts


def test_graphs_have_fewer_low_rank_matmuls() -> None:
    """Alone, each of 7 layers has x A^T and one with B; then gradients of A, of B, of what is narrow and of x."""
    assert low_rank_matmuls(make(adapter())) == [7 + 7, 4 * 7]
    model = make(adapter())
    apply_fused_adapters(model.layers.values())
    assert low_rank_matmuls(model) == [4 + 7, 2 * 7 + 2 * 4]  # q k v, o, gate up, down


def in_layout(plan: Plan, trial: Trial) -> tuple[Any, list[bool]]:
    torch.compiler.reset()
    rank = dist.get_rank() if dist.is_initialized() else 0
    modules = build_trial(SPEC, plan, trial, rank, CPU).stages[0].model.modules()
    flags = [is_fused(module) for module in modules if isinstance(module, Attention | FeedForward)]
    return train_in_layout(SPEC, plan, trial, rank, CPU), flags


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training(recompute: str) -> None:
    """Losses, norms, gradients and what is trained, beside plain blocks in one process, which join nothing."""
    trial = Trial(global_batch=4, adapter=adapter())
    record, flags = in_layout(trial_plan(trial, compile="trace", recompute=recompute), trial)
    assert flags == [True] * 4
    assert max(compare(record, train_plain(SPEC, trial))[0]) < 1e-12
    assert not any(in_layout(trial_plan(trial, recompute=recompute), trial)[1])


@pytest.mark.parametrize(
    "layout, fuses",
    [({"dp": 2, "zero": 3}, True), ({"pp": 2, "split": (1, 1)}, True), ({"cp": 2}, True), ({"tp": 2}, False)],
    ids=str,
)
def test_layouts(layout: dict[str, Any], fuses: bool, ranks: Any) -> None:
    trial = Trial(global_batch=4, adapter=adapter())
    record, flags = ranks.run(in_layout, 2, trial_plan(trial, compile="trace", **layout), trial)[0]
    assert set(flags) == {fuses}
    assert max(compare(record, train_plain(SPEC, trial))[0]) < 1e-12
