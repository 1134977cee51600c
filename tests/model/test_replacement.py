"""A module becomes an instance of a subclass of its class, and is otherwise what it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.model.replacement import become


class Doubled(nn.Linear):
    factor: float

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_parameters_names_and_hooks_stay() -> None:
    layer, seen = nn.Linear(3, 2), []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    weight, x = layer.weight, torch.ones(1, 3)
    before = layer(x)
    assert become(layer, Doubled, factor=2.0) is layer
    assert torch.equal(layer(x), 2 * before) and layer.weight is weight and seen == ["hook", "hook"]
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert "factor" not in vars(nn.Linear)


def test_what_it_is_already_only_gets_the_fields() -> None:
    layer = become(nn.Linear(3, 2), Doubled, factor=2.0)
    assert become(layer, nn.Linear, factor=3.0) is layer
    assert type(layer) is Doubled and layer.factor == 3.0


def test_another_kind_of_module_cannot_become_it() -> None:
    with pytest.raises(AssertionError, match="a LayerNorm cannot become a Doubled"):
        become(nn.LayerNorm(3), Doubled)
