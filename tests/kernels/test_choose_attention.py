"""Attention kernels are chosen by measuring those that run here."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels import choose_attention as attention_choice
from shardwise.kernels.choose_attention import AttentionShape, candidates, choose, use_kernels
from shardwise.model.attention_kernels import KERNELS, AttentionKernel
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 53}
LLAMA = preset("tiny").with_overrides(SMALL)


def test_candidates_follow_from_what_a_layer_sees():
    gemma = preset("gemma2-2b")
    mistral = preset("mistral-7b")
    assert candidates(LLAMA, LLAMA.layers[0], 4096) == ("cudnn", "flash", "flash4")
    assert candidates(gemma, gemma.layers[0], 4096) == ("flex", "math")
    assert (
        mistral.layers[0].window and candidates(mistral, mistral.layers[0], 2 * mistral.layers[0].window)[0] == "flex"
    )
    assert candidates(mistral, mistral.layers[0], mistral.layers[0].window)[0] == "cudnn"


def test_the_fastest_of_those_that_run_is_taken():
    found = choose(LLAMA, LLAMA.layers, AttentionShape(2, 512), torch.float32, CPU, among=("sdpa", "math", "flex"))
    assert set(found) == {0, 1, 2, 3}
    one = found[0]
    assert set(one.seconds) == {"sdpa", "math"}, "flex has no backward pass on a CPU"
    assert one.kernel == min(one.seconds, key=one.seconds.__getitem__) and one.kernel in str(one)
    assert all(found[index] is one for index in found), "layers that see as much are measured once"


def test_a_kernel_that_does_not_run_here_drops_out():
    found = choose(LLAMA, LLAMA.layers[:1], AttentionShape(1, 32), torch.bfloat16, CPU, among=("flex",))
    assert (found[0].kernel, found[0].seconds) == ("sdpa", {})
    gemma = preset("gemma2-2b").with_overrides({**SMALL, "query_scale_dim": 16})
    assert (
        choose(gemma, gemma.layers[:1], AttentionShape(1, 32), torch.float32, CPU, among=("flex",))[0].kernel == "math"
    )


def test_a_kernel_that_fails_drops_out_aloud(monkeypatch: pytest.MonkeyPatch):
    """Another one's mistake costs nobody a run, but is not hidden either."""

    def fails(*arguments):
        raise KeyError("no such\nengine")

    def is_wrong(*arguments):
        return 1.1 * KERNELS["sdpa"].compute(*arguments)

    faulty = {"cudnn": AttentionKernel("cudnn", fails), "flash": AttentionKernel("flash", is_wrong)}
    monkeypatch.setattr(attention_choice, "_kernel", lambda name: faulty.get(name) or KERNELS[name])
    found = choose(
        LLAMA, LLAMA.layers[:1], AttentionShape(1, 32), torch.float32, CPU, among=("cudnn", "sdpa", "flash")
    )[0]
    assert found.kernel == "sdpa" and set(found.seconds) == {"sdpa"}
    assert "; cudnn dropped out: KeyError: 'no such\\nengine'; flash dropped out: its results are " in str(found)


def test_layers_may_use_different_kernels():
    model = Decoder(LLAMA).double()
    initialize(model, 0)
    tokens = torch.randint(0, 53, (2, 16))
    before = model(tokens)
    names = {0: "math", 1: "sdpa", 2: "math", 3: "sdpa"}
    use_kernels(model, names)
    assert {index: kernel.name for index, kernel in model.kernels.items()} == names
    assert torch.allclose(model(tokens), before, rtol=0, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama3.2-1b", "gemma2-2b", "mistral-7b"])
def test_kernels_on_a_gpu_agree(name):
    spec = preset(name).with_overrides({"num_layers": 2, "vocab": 512})
    if spec.sliding_window:
        spec = spec.with_overrides({"sliding_window": 256})
    device, shape = torch.device("cuda"), AttentionShape(2, 1024)
    chosen = choose(spec, spec.layers, shape, torch.bfloat16, device)
    assert all(choice.seconds for choice in chosen.values()), chosen
    tokens = torch.randint(0, 512, (2, 1024), device=device)
    model = Decoder(spec, "math").to(device)
    initialize(model, 0)
    model.bfloat16()
    with torch.no_grad():
        truth = model(tokens).float()
        use_kernels(model, {index: choice.kernel for index, choice in chosen.items()})
        assert (model(tokens).float() - truth).abs().max() < 0.05 * truth.abs().max()
