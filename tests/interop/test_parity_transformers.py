"""For every family: their weights in our decoder give their logits, and ours in theirs give ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, make_theirs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.data.loader import TensorBatch, cut_microbatches
from shardwise.interop.huggingface.load_save import (
    load_weights,
    read_config,
    read_spec,
    save_model,
    spec_from_config,
)
from shardwise.model.decoder import Decoder
from shardwise.model.experts import update_router_bias
from shardwise.model.initialize import initialize
from shardwise.prove.reference import plain_gradients
from shardwise.report.header import builder_lines

TOLERANCE = 1e-4


@torch.no_grad()
def their_logits(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    return model(tokens_BT, use_cache=False).logits


@torch.no_grad()
def our_logits(model: Decoder, tokens_BT: torch.Tensor) -> torch.Tensor:
    return model.eval()(tokens_BT)


def some_tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(1))


def load_ours(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec_from_config(read_config(directory)))
    model = model.to_empty(device="cpu").to(dtype)
    load_weights(model, directory)
    return model


def load_theirs(directory: Path, **options) -> torch.nn.Module:
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_their_checkpoint_gives_their_logits_and_goes_back(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    tokens_BT = some_tokens()
    expected = their_logits(theirs, tokens_BT)
    theirs.save_pretrained(tmp_path / "theirs")

    ours = load_ours(tmp_path / "theirs")
    assert ours.spec.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert (our_logits(ours, tokens_BT) - expected).abs().max() <= TOLERANCE

    save_model(ours, tmp_path / "ours")
    assert (their_logits(load_theirs(tmp_path / "ours"), tokens_BT) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_our_fresh_model_gives_the_same_logits_in_transformers(family: str, tmp_path: Path) -> None:
    config_class, arguments = FAMILIES[family]
    ours = Decoder(spec_from_config(config_class(**arguments).to_dict()))
    initialize(ours, seed=3)
    tokens_BT = some_tokens()
    save_model(ours, tmp_path / "ours", max_shard_bytes=20_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    theirs = load_theirs(tmp_path / "ours")
    assert (their_logits(theirs, tokens_BT) - our_logits(ours, tokens_BT)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["smollm2-tied", "gpt2", "mixtral", "deepseek-v3"])
def test_their_sharded_checkpoint_loads(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens_BT = some_tokens()
    assert (our_logits(load_ours(tmp_path), tokens_BT) - their_logits(theirs, tokens_BT)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "smollm2-tied", "gpt2", "mixtral", "qwen3-moe"])
def test_bf16_weights_survive_the_round_trip_bit_for_bit(family: str, tmp_path: Path) -> None:
    make_theirs(family).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours = load_ours(tmp_path / "theirs", torch.bfloat16)
    save_model(ours, tmp_path / "ours")
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "ours/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert read_config(tmp_path / "ours")["dtype"] == "bfloat16"
    load_theirs(tmp_path / "ours", dtype="auto")


def test_an_fp32_model_can_be_saved_as_bf16(tmp_path: Path) -> None:
    theirs = make_theirs("deepseek-v3")
    theirs.save_pretrained(tmp_path / "theirs")
    save_model(load_ours(tmp_path / "theirs"), tmp_path / "ours", dtype=torch.bfloat16)
    with safe_open(tmp_path / "ours/model.safetensors", "pt") as file:
        assert file.get_slice("lm_head.weight").get_dtype() == "BF16"
        assert file.get_slice("model.layers.1.mlp.gate.e_score_correction_bias").get_dtype() == "F32"


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_fused_on_disk_load_like_separate_ones(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    theirs.save_pretrained(tmp_path)
    fused = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens_BT = some_tokens()
    assert (our_logits(load_ours(tmp_path), tokens_BT) - their_logits(theirs, tokens_BT)).abs().max() <= TOLERANCE


def test_gpt2_as_published_without_prefix_and_with_its_mask_buffers(tmp_path: Path) -> None:
    theirs = make_theirs("gpt2")
    theirs.save_pretrained(tmp_path)
    bare = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens_BT = some_tokens()
    assert (our_logits(load_ours(tmp_path), tokens_BT) - their_logits(theirs, tokens_BT)).abs().max() <= TOLERANCE


def test_old_spelling_of_rotary_scaling_means_the_same(tmp_path: Path) -> None:
    config_class, arguments = FAMILIES["llama3.1"]
    new = config_class(**arguments).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": arguments["rope_theta"], "rope_scaling": dict(arguments["rope_scaling"])}
    assert spec_from_config(json.loads(json.dumps(old))) == spec_from_config(new)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_train_as_in_transformers_with_its_router_loss(family: str, tmp_path: Path) -> None:
    """One forward of transformers over a whole batch, its router loss added; ours in two unequal micro-batches."""
    make_theirs(family).save_pretrained(tmp_path)
    theirs = load_theirs(tmp_path)
    theirs.router_aux_loss_coef = 0.5
    model = Decoder(read_spec(tmp_path).with_overrides({"aux_loss_rule": "transformers", "aux_loss_coef": 0.5}))
    load_weights(model, tmp_path)
    tokens_BT = torch.cat([some_tokens(), some_tokens().flip(1)])[:3]
    targets_BT = tokens_BT[:, 1:].contiguous()
    batch = TensorBatch(tokens_BT[:, :-1], targets_BT, None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (theirs, model)]
    truth, found = [], []
    for _ in range(4):
        output = theirs(batch.tokens, use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets_BT.flatten())
        (
            loss
            + 0.5 * load_balancing_loss_func(output.router_logits, theirs.num_experts, model.spec.experts_per_token)
        ).backward()
        truth.append(loss.item())
        found.append(plain_gradients(model, cut_microbatches(batch, 2), targets_BT.numel(), "fp32"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert found == pytest.approx(truth, rel=2e-6)
    assert "counted by expert in a forward pass before" in builder_lines(model.spec)[0]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_train_as_in_transformers_when_their_balancing_is_switched_off(family: str, tmp_path: Path) -> None:
    """transformers adds no router loss unless a config asks for `output_router_logits`, and never moves DeepSeek's
    bias. Ours balances by default, which is seen from the second step on."""
    make_theirs(family).save_pretrained(tmp_path)

    def losses(model: torch.nn.Module, loss_of, after_step=lambda: None) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(4):
            loss, objective = loss_of()
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            after_step()
            found.append(loss.item())
        return found

    def ours(**overrides: float) -> list[float]:
        spec = read_spec(tmp_path).with_overrides(overrides)
        model = Decoder(spec)
        load_weights(model, tmp_path)

        def loss_of():
            found = model(tokens_BT[:, :-1], targets_BT)
            return found.cross_entropy / targets_BT.numel(), sum(found) / targets_BT.numel()

        return losses(model, loss_of, lambda: update_router_bias(model))

    tokens_BT = some_tokens()
    targets_BT = tokens_BT[:, 1:].contiguous()
    theirs = load_theirs(tmp_path)

    def their_loss():
        logits = theirs(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        return loss, loss

    truth = losses(theirs, their_loss)
    assert ours(aux_loss_coef=0.0, bias_update_rate=0.0) == pytest.approx(truth, rel=2e-6)
    balanced = ours(bias_update_rate=0.05) if family == "deepseek-v3" else ours(aux_loss_coef=0.02)
    assert balanced[0] == pytest.approx(truth[0], rel=2e-6)
    assert balanced[-1] != pytest.approx(truth[-1], rel=1e-5)
