"""What only a GPU can show: FlexAttention and grouped matmuls compute what the plain paths compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import VARIANTS, make, some_tokens

from shardwise.interop.huggingface.load_save import load_weights, save_model
from shardwise.kernels.fused_experts import fuse_experts
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.model.experts import MixtureOfExperts, can_group
from shardwise.model.initialize import initialize

pytestmark = pytest.mark.cuda
DOCUMENTS_BT = torch.tensor([[0] * 60 + [1] * 68, [0] * 128])


def gradients(variant: str, attention: str, documents_BT: torch.Tensor | None) -> dict[str, torch.Tensor]:
    spec = VARIANTS[variant].with_overrides({"head_dim": 16, "max_seq_len": 128}) if variant != "latent" else None
    spec = spec or VARIANTS[variant].with_overrides({"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16})
    model = Decoder(spec, attention).cuda()
    initialize(model, seed=0)
    tokens_BT = some_tokens(128).cuda()
    losses = model(tokens_BT, tokens_BT.roll(-1, 1), documents_BT=documents_BT)
    losses.cross_entropy.backward()
    return {"loss": losses.cross_entropy.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("variant", ["llama", "window", "gemma2", "latent"])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_and_sdpa_equal_the_plain_softmax_forward_and_backward(variant: str, packed: bool) -> None:
    documents_BT = DOCUMENTS_BT.cuda() if packed else None
    expected = gradients(variant, "math", documents_BT)
    for attention in ("auto", "flex"):
        for name, value in gradients(variant, attention, documents_BT).items():
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(value, expected[name], rtol=0, atol=5e-3 * scale, msg=f"{attention} {name}")


def test_grouped_matmul_equals_the_loop_over_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(VARIANTS["moe"].with_overrides({"hidden": 64, "ffn": 96})).cuda().bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_BTD = torch.randn(2, 33, 64, device="cuda", dtype=torch.bfloat16)
    assert can_group(x_BTD)
    results = []
    for grouped in (True, False):
        monkeypatch.setattr("shardwise.model.experts.can_group", lambda x, grouped=grouped: grouped)
        layer.zero_grad()
        out_BTD, _ = layer(x_BTD, None)
        out_BTD.square().sum().backward()
        results.append([out_BTD.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * other.abs().max().item())


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_experts_never_make_the_host_wait(fused: bool) -> None:
    """Other tokens, other counts: the same kernels, and nothing that asks the GPU for a number."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(VARIANTS["moe"].with_overrides({"hidden": 64, "ffn": 96})).cuda().bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    inputs = [torch.randn(2, 33, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    counts_B = torch.ones(2, dtype=torch.int64, device="cuda")
    expected = [layer(x_BTD, counts_B)[0].detach() for x_BTD in inputs]
    if fused:
        fuse_experts(layer.experts)
    compiled = torch.compile(layer.forward, fullgraph=True)
    for number, (x_BTD, out_BTD) in enumerate(zip(inputs, expected, strict=True)):
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first time it compiles
        found_BTD, routing = compiled(x_BTD, counts_B)
        (found_BTD.float().sum() + routing.aux).backward()
        torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found_BTD, out_BTD, rtol=0, atol=0.02 * out_BTD.abs().max().item())


def test_first_weights_are_those_of_the_cpu() -> None:
    model = make("moe", dtype=torch.float32)
    with torch.device("meta"):
        other = Decoder(VARIANTS["moe"])
    other.to_empty(device="cuda")
    initialize(model, seed=5)
    initialize(other, seed=5)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor.cpu(), model.state_dict()[name]), name


@pytest.mark.parametrize("variant", ["window", "gemma2", "latent"])
def test_a_flex_model_generates_with_a_cache_what_it_computes_at_once(variant: str) -> None:
    model, tokens_BT = make(variant, "flex", torch.float32).cuda().eval(), some_tokens().cuda()
    reference = make(variant, "math", torch.float32).cuda().eval()
    cache = KeyValueCache(16)
    with torch.no_grad():
        pieces = [tokens_BT[:, :9], *tokens_BT[:, 9:].split(1, dim=1)]
        stepwise = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
        torch.testing.assert_close(stepwise, reference(tokens_BT), rtol=0, atol=2e-2)


def test_weights_load_straight_onto_the_device(tmp_path: Path) -> None:
    spec = VARIANTS["llama"]
    model = make("llama", dtype=torch.float32)
    save_model(model, tmp_path / "model", dtype=torch.bfloat16)
    other = Decoder(spec).to("cuda", torch.bfloat16)
    load_weights(other, tmp_path / "model")
    save_model(other, tmp_path / "again")
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor.cpu(), model.state_dict()[name].bfloat16()), name
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again"))
    assert one == two


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_never_build_the_score_matrix(dtype: torch.dtype) -> None:
    """torch silently falls back to it when a kernel does not know grouped heads: 2 GiB here instead of a few MiB."""
    from shardwise.model.attention_kernels import KERNELS, attend
    from shardwise.model.masking import Mask

    q = torch.randn(1, 8192, 8, 32, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, 8192, 2, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # also what libraries and earlier tests hold
    attend(q, k, v, Mask(is_causal=True), KERNELS["sdpa"], 32**-0.5, 0.0).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * 8192 * 8192 * dtype.itemsize / 4
