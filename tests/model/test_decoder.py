"""The decoder's promises: masks, caches, losses and first weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from decoders import VARIANTS, make, some_tokens

from shardwise.errors import UserError
from shardwise.model import loss as loss_module
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import IGNORE, Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset


@pytest.mark.parametrize("variant", VARIANTS)
def test_sdpa_equals_the_plain_softmax(variant: str) -> None:
    tokens_BT = some_tokens()
    torch.testing.assert_close(make(variant)(tokens_BT), make(variant, "math")(tokens_BT), rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["auto", "math"])
def test_documents_packed_together_are_as_if_alone(variant: str, attention: str) -> None:
    model, tokens_BT = make(variant, attention), some_tokens()
    documents_BT = torch.tensor([[0] * 6 + [1] * 10, [5] * 11 + [2] * 5])
    positions_BT = torch.arange(16).expand(2, 16)
    packed = model(tokens_BT, documents_BT=documents_BT)
    for row, start, end in [(0, 0, 6), (0, 6, 16), (1, 0, 11), (1, 11, 16)]:
        alone = model(tokens_BT[row : row + 1, start:end], positions_BT=positions_BT[:1, start:end])
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=0, atol=1e-10)


def test_a_window_hides_what_is_older() -> None:
    spec = VARIANTS["window"].with_overrides({"num_layers": 1})
    model = Decoder(spec).double()
    initialize(model, seed=0)
    tokens_BT = some_tokens()
    changed = tokens_BT.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 64
    moved = (model(tokens_BT) - model(changed)).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]  # the token itself and the three that still see it


def test_a_window_as_long_as_the_sequence_takes_the_fast_path() -> None:
    model = make("window")
    inputs = model.prepare_attention(torch.float64, torch.arange(4)[None], None, None)
    assert all(layer.mask.is_causal and layer.mask.allowed_1TS is None for layer in inputs.values())


def test_layers_share_masks_and_rotations() -> None:
    inputs = make("gemma3").prepare_attention(torch.float64, torch.arange(8)[None], None, None)
    assert inputs[0].mask is inputs[1].mask and inputs[0].rotation is inputs[1].rotation
    assert inputs[2].mask is not inputs[1].mask and inputs[2].rotation is not inputs[1].rotation


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_generation_sees_what_the_full_pass_sees(variant: str) -> None:
    model, tokens_BT = make(variant).eval(), some_tokens()
    full = model(tokens_BT)
    cache = KeyValueCache(16)
    pieces = [tokens_BT[:, :7], tokens_BT[:, 7:10], *tokens_BT[:, 10:].split(1, dim=1)]
    stepwise = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
    assert cache.length == 16
    torch.testing.assert_close(stepwise, full, rtol=0, atol=1e-10)


def test_a_full_cache_refuses_more() -> None:
    model = make("llama")
    with pytest.raises(UserError, match="cache holds 4 tokens"):
        model(some_tokens(5), cache=KeyValueCache(4))


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma2"])
def test_cross_entropy_is_the_sum_over_targets(variant: str) -> None:
    model, tokens_BT = make(variant, dtype=torch.float32), some_tokens()
    targets_BT = tokens_BT.roll(-1, dims=1)
    targets_BT[0, :5] = IGNORE
    losses = model(tokens_BT, targets_BT)
    expected = F.cross_entropy(
        model(tokens_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    torch.testing.assert_close(losses.cross_entropy, expected)
    assert losses.aux == 0 and losses.z == 0


def test_a_batch_too_large_for_its_logits_gives_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_BT = some_tokens()
    model = make("llama")
    model(tokens_BT, tokens_BT).cross_entropy.backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    monkeypatch.setattr(loss_module, "MAX_LOGITS_BYTES", 4 * 64 * 5)  # five rows of logits at a time
    model.zero_grad()
    model(tokens_BT, tokens_BT).cross_entropy.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bf16_loss_is_computed_in_fp32() -> None:
    # Without oneDNN: on virtual machines that announce AMX but forbid it, its bf16 matmul kills the process.
    with torch.backends.mkldnn.flags(enabled=False):
        losses = make("moe", dtype=torch.bfloat16)(some_tokens(), some_tokens())
    assert losses.cross_entropy.dtype == torch.float32 and losses.cross_entropy.isfinite()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    model, tokens_BT = make(variant), some_tokens()
    losses = model(tokens_BT, tokens_BT.roll(-1, dims=1))
    (losses.cross_entropy + losses.aux + losses.z).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_first_weights_depend_on_seed_and_name_only() -> None:
    spec = VARIANTS["moe"]
    model, other, part = Decoder(spec), Decoder(spec).to(torch.bfloat16), Decoder(spec)
    del part.layers["0"], part.layers["2"]
    with torch.device("meta"):
        late = Decoder(spec)
    late.to_empty(device="cpu")
    torch.manual_seed(1234)
    for each in (late, part, other, model):
        initialize(each, seed=7)
    weights = model.state_dict()
    for name, tensor in part.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    for name, tensor in late.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name
    initialize(other, seed=8)
    assert not torch.equal(other.embed.weight, weights["embed.weight"].bfloat16())


def test_first_weights_have_the_stated_spread() -> None:
    model = Decoder(preset("tiny"))
    initialize(model, seed=0)
    block = model.layers["0"]
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feedforward.down.weight.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.05)
    assert block.attention.o.weight.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.05)
    assert (block.attention_norm.weight == 1).all()
    assert (make("gemma2").norm.weight == 0).all()


def test_a_stage_with_some_layers_keeps_the_names_of_the_whole() -> None:
    model = make("llama")
    names = set(dict(model.named_parameters()))
    del model.layers["0"]
    assert {name for name, _ in model.named_parameters()} < names
    assert model(some_tokens()).shape == (2, 16, 64)


def test_flex_is_refused_off_cuda_and_unknown_kernels_always() -> None:
    with pytest.raises(UserError, match="flex does not run on cpu"):
        make("llama", "flex")(some_tokens())
    with pytest.raises(UserError, match="unknown attention"):
        Decoder(VARIANTS["llama"], "turbo")


def test_soft_capped_attention_says_why_it_is_not_sdpa() -> None:
    assert "sdpa" in make("gemma2").kernel_reason and not make("llama").kernel_reason
    with pytest.raises(UserError, match="sdpa does not fit"):
        make("gemma2", "sdpa")


def test_learned_positions_end_somewhere() -> None:
    with pytest.raises(UserError, match="too long"):
        make("gpt2")(some_tokens(65))


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_one_after_another_compute_what_the_whole_computes(variant: str) -> None:
    model, tokens_BT = make(variant), some_tokens()
    spec, state, targets_BT = model.spec, model.state_dict(), some_tokens().roll(-1, 1)
    parts = [Decoder(spec, model.kernel, range(0, 1)), Decoder(spec, model.kernel, range(1, spec.num_layers))]
    for part in parts:
        part.to(torch.float64).load_state_dict({name: state[name] for name in part.state_dict()})
    first, last = parts
    hidden = first(tokens_BT)
    assert torch.equal(last(tokens_BT, x_BTD=hidden.x_BTD), model(tokens_BT))
    hidden, whole = first(tokens_BT, targets_BT), model(tokens_BT, targets_BT)
    losses = last(tokens_BT, targets_BT, x_BTD=hidden.x_BTD)
    assert torch.equal(losses.cross_entropy, whole.cross_entropy)
    torch.testing.assert_close(hidden.aux + losses.aux, whole.aux)
    torch.testing.assert_close(hidden.z + losses.z, whole.z)
