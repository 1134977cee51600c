"""Blocks with liger-kernel's norms and activations compute what they compute with torch's."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.liger import apply_liger
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset

pytestmark = [pytest.mark.cuda, pytest.mark.needs("liger_kernel")]


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_losses_and_gradients_are_torchs(dtype: torch.dtype, limit: float, plus_one: bool) -> None:
    spec = preset("tiny").with_overrides({"num_layers": 2, "norm_plus_one": plus_one})
    tokens_BT = torch.randint(0, spec.vocab, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for with_liger in (False, True):
        model = Decoder(spec, "math")
        initialize(model, 0)
        if with_liger:
            apply_liger(model)
        model.to("cuda", dtype)
        loss = model(tokens_BT, tokens_BT.roll(-1, 1)).cross_entropy
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, gradients), (other, others) = found
    assert other == pytest.approx(loss, rel=limit)
    for name, gradient in gradients.items():
        assert torch.dist(others[name].float(), gradient.float()) <= limit * gradient.float().norm(), name
