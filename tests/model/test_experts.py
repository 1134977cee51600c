"""Mixture of experts: no token lost, losses per sequence, balance by bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from decoders import VARIANTS, make, some_tokens

from shardwise.model.decoder import IGNORE, Decoder
from shardwise.model.experts import MixtureOfExperts, moe_layers, update_router_bias
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset


def make_layer(**overrides) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(VARIANTS["moe"].with_overrides(overrides)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("router", ["softmax-topk", "topk-softmax", "sigmoid-bias"])
def test_output_is_the_weighted_sum_of_the_chosen_experts(router: str) -> None:
    layer = make_layer(router=router, routed_scaling=1.5, num_shared_experts=1)
    x_BTD = torch.randn(2, 5, 32, dtype=torch.float64)
    out_BTD, _ = layer(x_BTD, None)
    choice = layer.router(x_BTD.flatten(0, 1))
    for token, x in enumerate(x_BTD.flatten(0, 1)):
        expected = layer.shared(x)
        for expert, weight in zip(choice.experts_NK[token], choice.weights_NK[token], strict=True):
            gate, up, down = (getattr(layer.experts, name)[expert] for name in ("gate", "up", "down"))
            expected = expected + weight * (down @ (F.silu(gate @ x) * (up @ x)))
        torch.testing.assert_close(out_BTD.flatten(0, 1)[token], expected)


def test_normalised_softmax_of_the_best_equals_the_softmax_over_the_best() -> None:
    x_ND = torch.randn(9, 32, dtype=torch.float64)
    one, other = make_layer(router="softmax-topk"), make_layer(router="topk-softmax")
    torch.testing.assert_close(one.router(x_ND).weights_NK, other.router(x_ND).weights_NK)


def test_balanced_routing_has_auxiliary_loss_one_and_collapse_costs_more() -> None:
    layer = make_layer(aux_loss_coef=1.0)
    x_BTD = torch.randn(1, 64, 32, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.zero_()  # uniform probabilities: balanced whatever is chosen
    assert layer(x_BTD, torch.tensor([1]))[1].aux.item() == pytest.approx(1.0)
    with torch.no_grad():
        layer.router.weight[0] = 5 * x_BTD.mean((0, 1))
    assert layer(x_BTD.mean(1, keepdim=True).expand(1, 64, 32), torch.tensor([1]))[1].aux.item() > 1.5


def test_router_losses_do_not_depend_on_how_sequences_are_batched() -> None:
    model, tokens_BT = make("moe"), some_tokens()
    targets_BT = tokens_BT.clone()
    targets_BT[0, :9] = IGNORE
    together = model(tokens_BT, targets_BT)
    apart = [model(tokens_BT[row : row + 1], targets_BT[row : row + 1]) for row in range(2)]
    for name in ("cross_entropy", "aux", "z"):
        parts = getattr(apart[0], name) + getattr(apart[1], name)
        torch.testing.assert_close(getattr(together, name), parts)
        assert parts > 0


def test_a_sequence_without_targets_adds_nothing() -> None:
    tokens_BT = some_tokens()
    targets_BT = tokens_BT.clone()
    targets_BT[1] = IGNORE
    padded, alone = make("moe").train(), make("moe").train()
    for one, other in zip(padded(tokens_BT, targets_BT), alone(tokens_BT[:1], targets_BT[:1]), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(moe_layers(padded), moe_layers(alone), strict=True):
        assert torch.equal(one.tokens_per_expert, other.tokens_per_expert)
        assert one.tokens_per_expert.sum() == 16 * 2


def test_counts_are_for_training_only() -> None:
    model = make("moe").eval()
    model(some_tokens(), some_tokens())
    model.train()(some_tokens())
    assert all(layer.tokens_per_expert.sum() == 0 for layer in moe_layers(model))


def test_bias_moves_against_the_load_and_counts_start_anew() -> None:
    model = make("latent", dtype=torch.float32)
    layer = moe_layers(model)[0]
    layer.tokens_per_expert.copy_(torch.tensor([8, 0, 4, 4, 4, 4, 4, 4]))
    update_router_bias(model)
    rate = model.spec.bias_update_rate
    torch.testing.assert_close(layer.router.bias, rate * torch.tensor([-1.0, 1, 0, 0, 0, 0, 0, 0]))
    assert layer.tokens_per_expert.sum() == 0


def test_bias_balancing_evens_out_the_load() -> None:
    spec = VARIANTS["latent"].with_overrides({"bias_update_rate": 0.01, "num_expert_groups": 1, "topk_groups": 1})
    model = Decoder(spec)
    initialize(model, seed=0)
    layer = moe_layers(model)[0]
    with torch.no_grad():
        layer.router.weight.mul_(20)
    x_BTD = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0)) + 0.5

    def busiest_share() -> float:
        counts = layer(x_BTD, torch.tensor([1] * 4))[1].tokens_per_expert_E
        layer.tokens_per_expert += counts
        return (counts.max() / counts.sum()).item()

    before = busiest_share()
    for _ in range(100):
        update_router_bias(model)
        after = busiest_share()
    assert after < 0.16 < 0.2 < before  # 1/8 is perfect


def test_casting_the_model_keeps_the_bias_exact() -> None:
    model = make("latent", dtype=torch.float32)
    bias = moe_layers(model)[0].router.bias
    bias.fill_(0.1234567)
    model.to(torch.bfloat16)
    assert moe_layers(model)[0].router.bias.dtype == torch.float32
    assert torch.equal(moe_layers(model)[0].router.bias, bias)


def test_tiny_moe_is_tiny_with_experts_in_every_second_layer() -> None:
    tiny, moe = preset("tiny"), preset("tiny-moe")
    assert moe.with_overrides({"num_experts": 0}).flops_per_token(64) == tiny.flops_per_token(64)
    assert sum(layer.is_moe for layer in moe.layers) == 3
