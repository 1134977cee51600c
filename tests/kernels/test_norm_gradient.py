"""The backward pass of norms with the sums around it: results, and what the pass over graphs takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.adapters.fused import apply_fused_adapters
from shardwise.adapters.lora import adapt, decoder_adapters
from shardwise.kernels.compiled import apply_compile
from shardwise.kernels.graph_passes import GraphPasses
from shardwise.kernels.norm_gradient import (
    MOST_TERMS,
    GatherSums,
    KernelNorm,
    apply_norm_gradients,
    kernel_norm,
    operation,
)
from shardwise.model.decoder import Decoder
from shardwise.model.norm import RMSNorm
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

EPS, WIDTH = 1e-5, 24


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def scale_of(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True).add(EPS).rsqrt()


def test_forward_and_backward_are_those_of_the_norm() -> None:
    operation()
    x, weight = (one.requires_grad_() for one in draw((2, 3, WIDTH), (WIDTH,)))
    assert torch.allclose(kernel_norm(x, weight, EPS), F.rms_norm(x, (WIDTH,), weight, EPS), rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x, weight: kernel_norm(x, weight, EPS), (x, weight))


def test_a_frozen_weight_has_no_gradient() -> None:
    operation()
    x, weight = draw((2, WIDTH), (WIDTH,))
    kernel_norm(x.requires_grad_(), weight, EPS).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_torch_knows_the_operation() -> None:
    x, weight, *grads = draw((2, 3, WIDTH), (WIDTH,), *[(2, 3, WIDTH)] * 3)
    for arguments in ((grads[:1], None, True), (grads[:2], grads[2], True), (grads, grads[0], False)):
        some, around, learns = arguments
        torch.library.opcheck(operation(), (some, around, x, scale_of(x), weight, learns))


# What the pass takes
# ---------------------------------------------------------------------------------------------------

Backward = Callable[..., tuple[Tensor, ...]]


def gathered(backward: Backward, *inputs: Tensor) -> tuple[int, bool]:
    """How many gradients the norm's backward adds after the pass, and whether it adds what goes around. The graph
    computes the same."""
    operation()
    module: GraphModule = make_fx(backward, tracing_mode="fake")(*inputs)
    truth = module(*inputs)
    GatherSums()(module.graph)
    module.graph.lint()
    module.recompile()
    for found, one in zip(module(*inputs), truth, strict=True):
        assert torch.allclose(found, one, rtol=1e-12)
    (node,) = module.graph.find_nodes(op="call_function", target=operation())
    return len(node.args[0]), node.args[1] is not None


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.shardwise.norm_gradient([grad], None, x, scale_of(x), weight, True)


def inputs(num_grads: int) -> list[Tensor]:
    return draw((2, 3, WIDTH), (WIDTH,), *[(6, WIDTH)] * num_grads)


def test_sums_before_and_after_are_taken_through_views() -> None:
    def backward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        total = (a.view(x.shape) + b.view(x.shape)) + c.view(x.shape)
        grad_x, grad_weight = norm_backward(total, x, weight)
        return d.view(x.shape) + grad_x, grad_weight

    assert gathered(backward, *inputs(4)) == (3, True)


def test_a_sum_that_others_read_is_left_where_it_is() -> None:
    def backward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        total = a.view(x.shape) + b.view(x.shape)
        grad_x, grad_weight = norm_backward(total, x, weight)
        return grad_x, grad_weight, total

    assert gathered(backward, *inputs(2)) == (1, False)


def test_a_result_that_others_read_is_left_as_it_is() -> None:
    def backward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        grad_x, grad_weight = norm_backward(a.view(x.shape), x, weight)
        return grad_x + b.view(x.shape), grad_x, grad_weight

    assert gathered(backward, *inputs(2)) == (1, False)


def test_what_comes_later_cannot_go_around() -> None:
    def backward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        grad_x, grad_weight = norm_backward(a.view(x.shape), x, weight)
        return grad_x + (b.view(x.shape) * grad_weight), grad_weight

    assert gathered(backward, *inputs(2)) == (1, False)


def test_more_terms_than_the_kernel_has_are_added_before() -> None:
    def backward(x: Tensor, weight: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        total = grads[0].view(x.shape)
        for grad in grads[1:]:
            total = total + grad.view(x.shape)
        return norm_backward(total, x, weight)

    assert gathered(backward, *inputs(MOST_TERMS)) == (MOST_TERMS, False)
    assert gathered(backward, *inputs(MOST_TERMS + 1)) == (1, False)


def test_a_second_pass_takes_nothing_more() -> None:
    def backward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        around = c.view(x.shape)
        grad_x, grad_weight = norm_backward(a.view(x.shape) + b.view(x.shape), x, weight)
        return grad_x + around, grad_weight

    operation()
    module = make_fx(backward, tracing_mode="fake")(*inputs(3))
    truth = module(*inputs(3))
    for _ in range(2):
        GatherSums()(module.graph)
    module.recompile()
    assert all(torch.allclose(found, one, rtol=1e-12) for found, one in zip(module(*inputs(3)), truth, strict=True))


def test_only_plain_sums_are_taken() -> None:
    def with_factor(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return norm_backward(torch.add(a.view(x.shape), b.view(x.shape), alpha=2), x, weight)

    def spread(x: Tensor, weight: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return norm_backward(a.view(x.shape) + weight, x, weight)

    def doubled(x: Tensor, weight: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        grad_x, grad_weight = norm_backward(a.view(x.shape), x, weight)
        return grad_x + grad_x, grad_weight

    assert gathered(with_factor, *inputs(2)) == (1, False)
    assert gathered(spread, *inputs(1)) == (1, False)
    assert gathered(doubled, *inputs(1)) == (1, False)


# In blocks
# ---------------------------------------------------------------------------------------------------------------

SMALL = {"hidden": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "num_layers": 1, "ffn": 256}


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("tiny", {}),
    "experts": ("tiny-moe", {"moe_every": 1}),
    "gemma": ("tiny", {"norm_plus_one": True}),
    "adapters": ("tiny", {}),
}
TAKEN = {
    "llama": [(2, True), (3, True)],  # gate and up; q, k and v
    "experts": [(1, True), (3, True)],  # experts and router do not meet in a plain sum
    "gemma": [(2, True), (3, True)],
    "adapters": [(2, True), (4, True)],  # one more for those of q, k and v
}
"""For each norm of a backward pass, from its beginning: how many gradients, and whether one goes around."""


def make(dtype: torch.dtype, device: str = "cpu", kind: str = "llama") -> Decoder:
    torch.manual_seed(0)
    base, changes = MODELS[kind]
    model = Decoder(preset(base).with_overrides({**SMALL, **changes}), "sdpa")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 and kind != "gemma" else 0.0, 0.05)
    if kind == "adapters":
        adapt(
            model,
            decoder_adapters(
                model.spec,
                AdapterConfig(kind="lora", rank=4, targets=("q", "k", "v"), train_also=("embed",)),
                0,
                "fp32",
            ),
        )
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                nn.init.normal_(parameter, 0.0, 0.05)
        apply_fused_adapters(model.layers.values())
    return model.to(device, dtype)


def gradients(model: Decoder, device: str = "cpu", batch: int = 1) -> dict[str, Tensor]:
    """Of the batch with that number."""
    model.zero_grad()
    tokens_BT = torch.randint(0, model.spec.vocab, (2, 64), generator=torch.Generator().manual_seed(batch)).to(device)
    losses = model(tokens_BT, tokens_BT.roll(1, 1))
    (losses.cross_entropy + losses.aux + losses.z).backward()
    named = model.named_parameters()
    return {name: parameter.grad.double() for name, parameter in named if parameter.grad is not None}


@contextmanager
def graphs_from_here(has_kernels: bool = False) -> Iterator[None]:
    """No graph comes from disk, where no pass would see it. Without kernels, inductor lowers the graph to torch's own
    operations where it can (torch 2.13), because compiling C++ is the larger part of the time. That way does not cut
    a list of inputs: lists of two and four gradients, which adapters have, need kernels."""
    settings: dict[str, bool] = {"fx_graph_cache": False}
    if not has_kernels and hasattr(torch._inductor.config, "fallback_by_default"):
        settings["fallback_by_default"] = True
    with torch._inductor.config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def distances(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What the pass left in the graphs that it saw."""
    seen: list[tuple[int, bool]] = []
    plain = GatherSums.__call__

    def call(self: GatherSums, graph: torch.fx.Graph) -> None:
        plain(self, graph)
        nodes = graph.find_nodes(op="call_function", target=operation())
        seen.extend((len(node.args[0]), node.args[1] is not None) for node in nodes)

    monkeypatch.setattr(GatherSums, "__call__", call)
    return seen


def test_norms_of_blocks_and_the_last_one_get_it() -> None:
    model = Decoder(preset("tiny").with_overrides({**SMALL, "qk_norm": True, "num_layers": 2}))
    apply_norm_gradients([*model.layers.values(), model])
    have = [name for name, module in model.named_modules() if isinstance(module, KernelNorm)]
    blocks = [f"layers.{index}.{name}_norm" for index in range(2) for name in ("attention", "feedforward")]
    assert have == [*blocks, "norm"], "norms of heads have short rows"


def test_an_engine_has_it_where_its_plan_says_so(watched: list[tuple[int, bool]]) -> None:
    """In bf16 on a CPU, where the operation is plain: the same training as with plain blocks, to rounding."""
    spec, records = preset("tiny").with_overrides(SMALL), {}
    trial = Trial(num_steps=2, precision="bf16", micro_batch=8, seq_len=16, attention="math")
    for kernels, compiled in (("torch", "none"), ("own", "blocks")):
        plan = trial_plan(trial, compile=compiled, kernels=kernels)
        engine = build_trial(spec, plan, trial, 0, torch.device("cpu"))
        norms = [module for module in engine.models[0].modules() if isinstance(module, RMSNorm)]
        assert {isinstance(norm, KernelNorm) for norm in norms} == {kernels == "own"}
        with graphs_from_here():
            records[kernels] = train_in_layout(spec, plan, trial, 0, torch.device("cpu"))
        assert watched == (TAKEN["llama"] if kernels == "own" else [])
    (losses, norms_apart, *_), _ = compare(records["own"], records["torch"])
    assert losses <= 1e-3 and norms_apart <= 1e-2, (losses, norms_apart)


@pytest.mark.parametrize(
    ("kind", "selective"),
    [("llama", False), ("gemma", True), ("experts", False), ("adapters", False)],
)
def test_compiled_blocks_add_all_gradients_in_it(kind: str, selective: bool, watched: list[tuple[int, bool]]) -> None:
    """Inductor cuts a list of inputs to the length it had when it was traced, unless the operation asks for contiguous
    ones (torch 2.11, 2.13): gradients of all but the first input would be lost."""
    truth = gradients(make(torch.float64, kind=kind))
    model = make(torch.float32, kind=kind)
    apply_norm_gradients([*model.layers.values(), model])
    apply_compile(model.layers.values(), "blocks", selective=selective, whole=True, gathers_sums=True)
    with graphs_from_here(has_kernels=kind == "adapters"):
        found = distances(gradients(model), truth)
    assert watched == TAKEN[kind]
    assert found and max(found.values()) < 1e-5, found


def test_graphs_on_disk_are_told_apart_by_the_passes() -> None:
    kinds = [GraphPasses(measures_matmuls=m, gathers_sums=g).uuid() for m in (False, True) for g in (False, True)]
    assert len(set(kinds)) == 4


@pytest.mark.cuda
@pytest.mark.parametrize("width", [512, 576, 2048, 4096, 5120, 8192, 9216, 16384])
@pytest.mark.parametrize("learns", [False, True])
def test_kernel_and_definition_agree_on_a_gpu(width: int, learns: bool) -> None:
    rows = 1000
    x, weight, *grads = draw((rows, width), (width,), *[(rows, width)] * 5, dtype=torch.bfloat16)
    for num_terms, around in ((1, None), (2, grads[4]), (3, grads[4]), (4, grads[4])):
        wide = [one.double() for one in grads[:num_terms]]
        given = None if around is None else around.double()
        truth, truth_weight = operation()(wide, given, x.double(), scale_of(x.double()), weight.double(), learns)
        on_gpu = [one.cuda() for one in grads[:num_terms]]
        arguments = (None if around is None else around.cuda(), x.cuda(), scale_of(x).cuda(), weight.cuda(), learns)
        found, found_weight = operation()(on_gpu, *arguments)
        again, again_weight = operation()(on_gpu, *arguments)
        assert torch.equal(found, again) and torch.equal(found_weight, again_weight), "the same bits every time"
        assert (found.cpu() != truth.bfloat16()).double().mean() < 2e-3, "but for fp32's last bit"
        assert torch.allclose(found_weight.cpu().double(), truth_weight, rtol=2**-7, atol=1e-2)


@pytest.mark.cuda
def test_compiled_blocks_on_a_gpu_are_as_near_to_the_truth_as_without() -> None:
    """Both round the same gradients, and in one batch the one or the other is lucky: the mean over batches tells. The
    truth has the same weights in bf16, so that nothing but the rounding of computing is compared."""
    exact, batches, found = make(torch.bfloat16).double(), range(1, 9), {}
    truths = [{name: one.cuda() for name, one in gradients(exact, batch=batch).items()} for batch in batches]
    for own in (False, True):
        model = make(torch.bfloat16, "cuda")
        if own:
            apply_norm_gradients([*model.layers.values(), model])
        apply_compile(model.layers.values(), "blocks", selective=False, whole=True, gathers_sums=own)
        far = [distances(gradients(model, "cuda", batch), truth) for batch, truth in zip(batches, truths, strict=True)]
        found[own] = {name: sum(each[name] for each in far) / len(far) for name in truths[0]}
    over = {name: (own, found[False][name]) for name, own in found[True].items() if own > 1.1 * found[False][name]}
    assert not over, over
