"""fp8 layers: which of them, what they compute, and where fp8 is refused. Losses and layouts: test_precision.py."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.kernels.float8 import apply_float8, apply_float8_head, why_not
from shardwise.kernels.float8_matmul import (
    GRADIENTS,
    Float8HeadMatmuls,
    float8_linear,
    float8_mm,
    quantize_rows,
)
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.optim.low_bit import load_torchao
from shardwise.plan.resolve.resolve import resolve
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

SHAPE = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8, "ffn": 96, "vocab": 67}


def machine(capability: tuple[int, int] | None, name: str = "H200") -> Machine:
    gpus = () if capability is None else (Gpu(name, 140 * 2**30, capability),)
    return Machine(8, 64 * 2**30, gpus, "linux")


def plan_on(here: Machine, *words: str) -> Plan:
    loaded = load_config(None, words)
    return resolve(loaded.config, preset("tiny"), here, 1, 1000, loaded.origins).plan


def test_layers_that_lose_stay_in_bf16_and_are_named() -> None:
    with torch.device("meta"):
        model = Decoder(preset("tiny").with_overrides(SHAPE))
    names = [name for name, _ in model.named_parameters()]
    found = apply_float8(model, model.layers.values(), "rowwise", emulate=True)
    assert found.kept == dict.fromkeys(("layers.*.attention.k", "layers.*.attention.v"), "8 x 64 does not divide by 16")
    assert found.num_converted == 2 * 5  # q, o, gate, up, down
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.head) is type(Decoder(preset("tiny").with_overrides(SHAPE)).head)
    text = str(found)
    assert text.startswith("10 matrices in fp8, rowwise scales; in bf16: head, embeddings")
    assert "layers.*.attention.k, layers.*.attention.v (8 x 64 does not divide by 16)" in text


@pytest.mark.parametrize(
    ("shape", "recipe", "why"),
    [
        ((4096, 4096), "rowwise", None),
        ((2048, 2048), "rowwise", None),
        ((1024, 4096), "rowwise", "1024 x 4096 is too small to gain"),
        ((1024, 4096), "tensorwise", None),
        ((512, 2048), "tensorwise", "512 x 2048 is too small to gain"),
        ((14336, 4096), "tensorwise", None),
        ((4100, 4096), "rowwise", "4100 x 4096 does not divide by 16"),
    ],
)
def test_small_matrices_are_not_worth_it(shape: tuple[int, int], recipe: str, why: str | None) -> None:
    assert why_not(*shape, recipe, together=shape[0]) == why


def test_what_is_one_matmul_is_judged_as_one() -> None:
    sizes = SHAPE | {"hidden": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "ffn": 2048}
    found = []
    for fused in (False, True):
        with torch.device("meta"):
            model = Decoder(preset("tiny").with_overrides(sizes))
        found.append(apply_float8(model, model.layers.values(), "rowwise", emulate=False, fused=fused))
    too_small = "512 x 2048 is too small to gain"
    assert found[0].kept == dict.fromkeys(("layers.*.attention.k", "layers.*.attention.v"), too_small)
    assert found[0].num_converted == 2 * 5 and found[1].num_converted == 2 * 7 and not found[1].kept


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_matmuls_are_quantized_to_fp8_and_no_more(recipe: str) -> None:
    torch.manual_seed(0)
    block: Any = nn.ModuleDict({"up": nn.Linear(32, 48, bias=True)})
    plain = nn.Linear(32, 48)
    plain.load_state_dict(block["up"].state_dict())
    apply_float8(block, [block], recipe, emulate=True)
    x = torch.randn(16, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    fast, true = block["up"](x), plain(y)
    (fast**2).sum().backward()
    (true**2).sum().backward()
    for found, truth in ((fast, true), (x.grad, y.grad), (block["up"].weight.grad, plain.weight.grad)):
        error = float((found - truth).detach().norm() / truth.detach().norm())
        assert 1e-4 < error < 0.1, error  # three bits per element, many elements per sum


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_every_bit_is_that_of_torchao(recipe: str) -> None:
    load_torchao()
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = Float8Linear.from_float(nn.Linear(64, 48), config)
    results = []
    for matmul in (theirs, lambda x: float8_linear(recipe)(x, theirs.weight) + theirs.bias):
        x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).mul_(3).requires_grad_()
        theirs.zero_grad()
        y = matmul(x)
        (y**3).sum().backward()
        results.append((y.detach(), x.grad, theirs.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_rounding_uses_the_whole_range_and_survives_zeros(recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 64) * 10.0 ** torch.arange(-20, 20, 5)[:, None]
    x[3] = 0
    bits, scale = quantize_rows(x, dtype, recipe)
    largest = bits.float().abs().amax(-1) if recipe == "rowwise" else bits.float().abs().max()
    used = largest[[0, 1, 2, 4, 5, 6, 7]] if recipe == "rowwise" else largest
    most = torch.finfo(dtype).max
    assert bool((used >= most / 2).all() and (used <= most).all()) and not bits[3].float().any()
    if recipe == "rowwise":
        assert torch.equal(scale.log2(), scale.log2().round())  # nothing is lost by scaling back
    sides = quantize_rows(x.t(), dtype, recipe)
    assert sides[0].is_contiguous() and sides[0].shape == (64, 8)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_block_in_fp8_is_one_graph_and_computes_the_same(recipe: str) -> None:
    torch.compiler.reset()
    model = Decoder(preset("tiny").with_overrides(SHAPE | {"head_dim": 16}))
    initialize(model, 0)
    apply_float8(model, model.layers.values(), recipe, emulate=True)
    block: Any = model.layers["0"]
    inputs = model.prepare_attention(torch.float32, torch.arange(32)[None], None, None)[0]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block.forward, backend=counter, fullgraph=True)
    results = []
    for forward in (block.forward, compiled, compiled):
        x_BTD = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        block.zero_grad()
        forward(x_BTD, inputs)[0].square().sum().backward()
        results.append([x_BTD.grad, *(p.grad for p in block.parameters())])
    assert counter.frame_count == 1
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, results[0], strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_head_in_fp8_has_the_same_gradients_at_once_and_in_backward(
    recipe: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matmul per chunk or one for all tokens: what is rounded is the same but for scales of chunks."""
    torch.manual_seed(0)
    tokens_BT = torch.randint(0, 80, (3, 8))
    results = []
    for fused in (False, True, None):
        model = Decoder(preset("tiny").with_overrides(SHAPE | {"vocab": 80, "tied": tied}))
        initialize(model, 0)
        if fused is not None:
            found = apply_float8(model, [], recipe, emulate=True)
            apply_float8_head(model, found, compiled=False)
            assert str(found).startswith(f"0 matrices and the head in fp8, {recipe} scales; in bf16: embeddings")
        monkeypatch.setattr("shardwise.model.loss.MAX_LOGITS_BYTES", 4 * 80 * 10 if fused else 2**20)  # 8 rows of 24
        loss = model(tokens_BT, tokens_BT.roll(-1, 1)).cross_entropy
        loss.backward()
        weight = model.embed.weight if tied else model.head.weight
        results.append([loss.detach(), weight.grad, model.norm.weight.grad])
    for plain, fused, truth in zip(*results, strict=True):
        size = float(truth.norm())
        assert float((plain - fused).norm()) < (0.02 if recipe == "rowwise" else 0.1) * size
        assert 0 < float((fused - truth).norm()) < 0.1 * size


def test_a_head_that_no_kernel_takes_is_named() -> None:
    with torch.device("meta"):
        model = Decoder(preset("tiny").with_overrides(SHAPE))
    found = apply_float8(model, [], "rowwise", emulate=True)
    apply_float8_head(model, found, compiled=False)
    assert found.kept == {"head": "67 x 64 does not divide by 16"} and not found.has_head
    assert str(found).endswith("routers and experts (always); head (67 x 64 does not divide by 16)")


def test_a_head_in_fp8_is_for_runs_in_fp8() -> None:
    assert plan_on(machine((9, 0)), "memory.precision=fp8", "memory.fp8_head=true").fp8_head
    with pytest.raises(UserError) as caught:
        plan_on(machine((9, 0)), "memory.fp8_head=true")
    assert caught.value.why == "memory.precision is bf16"
    assert caught.value.fix == "memory.fp8_head=false or memory.precision=fp8"


@pytest.mark.parametrize(
    ("here", "said", "fix"),
    [
        (machine(None), "there is no GPU here", "memory.precision=bf16"),
        (machine((8, 0), "A100"), "A100 has 8.0", "memory.precision=bf16"),
        (machine((7, 0), "V100"), "V100 has 7.0", "memory.precision=fp32"),
    ],
)
def test_hardware_without_fp8_is_refused_in_three_lines(here: Machine, said: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_on(here, "memory.precision=fp8")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[0].startswith("error: memory.precision = fp8 needs a GPU that multiplies in fp8")
    assert said in lines[1] and "compute capability 8.9" in lines[1] and lines[2] == f"  fix  {fix}"
    assert plan_on(here, fix).precision == fix.split("=")[1]


def test_fp8_needs_sequences_that_its_matmuls_take() -> None:
    assert plan_on(machine((9, 0)), "memory.precision=fp8").precision == "fp8"
    with pytest.raises(UserError) as caught:
        plan_on(machine((9, 0)), "memory.precision=fp8", "train.seq_len=100")
    assert len(str(caught.value).splitlines()) == 3 and "train.seq_len=112" in caught.value.fix
    assert plan_on(machine((9, 0)), "memory.precision=fp8", "train.seq_len=112").seq_len == 112


def test_without_torchao_the_install_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(UserError) as caught:
        plan_on(machine((9, 0)), "optimizer.name=adamw8bit")
    assert plan_on(machine((9, 0)), "memory.precision=fp8").precision == "fp8"  # which is torch's own
    what, why, fix = str(caught.value).splitlines()
    assert "needs torchao, which is not installed" in what and "torchao's" in why
    assert "pip install 'shardwise[lowbit]'" in fix


def test_auto_is_bf16_on_gpus_that_have_it_and_says_so() -> None:
    new, old, none = (plan_on(machine(capability)) for capability in ((9, 0), (7, 5), None))
    assert [plan.precision for plan in (new, old, none)] == ["bf16", "fp32", "fp32"]
    assert "bf16 over fp32 weights" in new.reason and "bf16" not in none.reason
    assert "7.5, bf16 needs 8.0" in old.reason


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("vocab", [64, 53])
def test_a_head_rounds_its_weights_once_to_what_each_matmul_would(recipe: str, vocab: int) -> None:
    """53 is no multiple of what the hardware's matmul takes: padded."""
    draw = torch.Generator().manual_seed(0)
    weight_VD, x_ND, grad_NV = (torch.randn(size, generator=draw) for size in ((vocab, 32), (48, 32), (48, vocab)))
    matmuls = Float8HeadMatmuls(recipe, compiled=False)
    weight, dx_ND = matmuls.prepared(weight_VD), torch.empty(48, 32)
    matmuls.input_gradient(grad_NV, weight, dx_ND)
    assert torch.equal(matmuls.logits(x_ND, weight), float8_mm(x_ND, weight_VD, recipe))
    assert torch.equal(dx_ND, float8_mm(grad_NV, weight_VD.t(), recipe, GRADIENTS[recipe]))
    assert weight.rows is weight.rows and weight.columns is weight.columns
