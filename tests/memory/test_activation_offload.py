"""Activation offload: refused where there is nothing to move; on a GPU the same bits and less memory."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise import UserError
from shardwise.memory.activation_offload import apply_activation_offload
from shardwise.memory.recompute import apply_recompute
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides({"num_layers": 8, "hidden": 512, "num_heads": 8, "num_kv_heads": 4, "ffn": 1376})


def test_refused_on_a_cpu() -> None:
    with pytest.raises(UserError) as caught:
        apply_activation_offload([], torch.device("cpu"))
    error = caught.value
    assert error.what == "`memory.activation_offload = true` has nothing to move on a CPU"
    assert error.why == "it takes activations from a GPU's memory to the CPU's, where they are already"
    assert error.fix == "memory.activation_offload=false memory.recompute=full"


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["none", "full", "selective", "sqrt"])
def test_same_bits_and_less_memory(mode: str) -> None:
    device = torch.device("cuda", 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for offload in (False, True):
        model = Decoder(SPEC, "math").bfloat16()  # backward of fused attention is not repeatable to the bit
        initialize(model, 0)
        model.to(device)
        blocks = list(model.layers.values())
        apply_recompute(blocks, mode)
        if offload:
            apply_activation_offload(blocks, device)
        tokens = torch.arange(4 * 1024, device=device).view(4, 1024) % SPEC.vocab
        gradients = []
        for _ in range(3):  # two passes in flight, then backward of both, as pipelines do
            losses = [model(tokens, tokens).cross_entropy for _ in range(2)]
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            for loss in losses:
                loss.backward()
            gradients = [parameter.grad.cpu() for parameter in model.parameters()]
            model.zero_grad()
        found.append((held, gradients))
        del losses, loss, model, blocks
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    # With sqrt a pass keeps two inputs of segments, no more than may still be on their way out.
    most = {"none": 0.75, "selective": 0.75, "full": 1.0, "sqrt": math.inf}[mode]
    assert found[1][0] < most * found[0][0], (found[1][0], found[0][0])
