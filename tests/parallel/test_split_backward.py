"""A backward in two halves is the whole backward: same gradients, and the first half leaves the matrices alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.parallel.pipeline.split_backward import Todo, deferring, finish
from shardwise.spec.presets import preset

SMALL = {"num_layers": 2, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn": 21, "vocab": 31}
MODELS = {
    "tiny": preset("tiny").with_overrides(SMALL),
    "tied": preset("tiny").with_overrides(SMALL | {"tied": True}),
    "gpt2": preset("gpt2").with_overrides(SMALL | {"num_kv_heads": 4, "max_seq_len": 16}),
    "experts": preset("tiny-moe").with_overrides(SMALL | {"num_experts": 4}),
}


def make(name: str) -> Decoder:
    model = Decoder(MODELS[name]).double()
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():  # no zero bias hides a mistake
            parameter += 0.1 * torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view_as(parameter)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_are_the_whole(name: str) -> None:
    tokens = torch.arange(24).view(2, 12) % MODELS[name].vocab
    whole, halves = make(name), make(name)
    todo: Todo = []
    for micro in range(2):  # gradients add up over micro-batches
        sum(whole(tokens + micro, tokens)).backward()  # type: ignore[arg-type]
    for micro in range(2):
        with deferring(todo):
            losses = halves(tokens + micro, tokens)
        sum(losses).backward()
    early = {name for name, parameter in halves.named_parameters() if parameter.grad is not None}
    late = {name for name, _ in halves.named_parameters()} - early
    assert any(name.endswith("attention.q.weight") for name in late) and len(todo) > 0
    assert all("norm" in n or "embed" in n or "experts" in n or "bias" in n or "router" in n for n in early), early
    finish(todo)
    assert todo == []
    for (name, parameter), other in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None, name
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-12, atol=1e-14), name


def test_the_gradient_of_the_input_is_there_after_the_first_half() -> None:
    linear, todo = nn.Linear(3, 5).double(), []
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    with deferring(todo):
        y = linear(x)
    y.square().sum().backward()
    assert linear.weight.grad is None and len(todo) == 1
    assert x.grad is not None and torch.allclose(x.grad, 2 * y.detach() @ linear.weight)
    assert linear.bias.grad is not None and torch.allclose(linear.bias.grad, 2 * y.detach().sum((0, 1)))


def test_what_is_not_a_parameter_is_left_alone() -> None:
    todo: Todo = []
    weight = torch.randn(2, 3, requires_grad=True)
    frozen = nn.Parameter(torch.randn(2, 3), requires_grad=False)
    with deferring(todo):
        nn.functional.linear(torch.ones(1, 3), weight).sum().backward()
        nn.functional.linear(torch.ones(1, 3, requires_grad=True), frozen).sum().backward()
        with torch.no_grad():
            nn.functional.linear(torch.ones(1, 3), nn.Parameter(torch.ones(2, 3)))
    assert todo == [] and weight.grad is not None and frozen.grad is None


def test_keyword_arguments() -> None:
    todo: Todo = []
    weight = nn.Parameter(torch.randn(2, 3))
    with deferring(todo):
        nn.functional.linear(input=torch.ones(4, 3), bias=None, weight=weight).sum().backward()
    finish(todo)
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((2, 3), 4.0))
