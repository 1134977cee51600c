"""fp8 layers: which of them, what they compute, and where fp8 is refused. Losses and layouts: test_precision.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.cluster.machine import Gpu, Machine
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.memory.float8 import apply_float8, why_not
from shardwise.model.decoder import Decoder
from shardwise.model.presets import preset
from shardwise.plan.plan import Plan
from shardwise.plan.resolve import resolve

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
        ((1024, 4096), "rowwise", "1024 x 4096 is too small to gain"),
        ((1024, 4096), "tensorwise", "1024 x 4096 is too small to gain"),
        ((14336, 4096), "tensorwise", None),
        ((4100, 4096), "rowwise", "4100 x 4096 does not divide by 16"),
    ],
)
def test_small_matrices_are_not_worth_it(shape: tuple[int, int], recipe: str, why: str | None) -> None:
    assert why_not(*shape, recipe) == why


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_products_are_rounded_to_fp8_and_no_more(recipe: str) -> None:
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
        assert 1e-4 < error < 0.1, error  # three bits per number, many numbers per sum


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


def test_fp8_needs_sequences_that_its_products_take() -> None:
    assert plan_on(machine((9, 0)), "memory.precision=fp8").precision == "fp8"
    with pytest.raises(UserError) as caught:
        plan_on(machine((9, 0)), "memory.precision=fp8", "train.seq_len=100")
    assert len(str(caught.value).splitlines()) == 3 and "train.seq_len=112" in caught.value.fix
    assert plan_on(machine((9, 0)), "memory.precision=fp8", "train.seq_len=112").seq_len == 112


@pytest.mark.parametrize("word", ["memory.precision=fp8", "optimizer.name=adamw8bit"])
def test_without_torchao_the_install_line_is_printed(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(UserError) as caught:
        plan_on(machine((9, 0)), word)
    what, why, fix = str(caught.value).splitlines()
    assert "needs torchao, which is not installed" in what and "torchao's" in why
    assert "pip install 'shardwise[lowbit]'" in fix


def test_auto_is_bf16_on_gpus_that_have_it_and_says_so() -> None:
    new, old, none = (plan_on(machine(capability)) for capability in ((9, 0), (7, 5), None))
    assert [plan.precision for plan in (new, old, none)] == ["bf16", "fp32", "fp32"]
    assert "bf16 over fp32 weights" in new.reason and "bf16" not in old.reason + none.reason
