"""Adapters by themselves: which layers, what is trained, four bits, dropout, and the same logits as peft in both
directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.adapters.dropout import INVERSE, ODD, AdapterDropout
from shardwise.adapters.lora import AdaptedLinear, adapt, decoder_adapters, merge
from shardwise.adapters.nf4 import CODE, dequantize, packed_bytes, quantize, table
from shardwise.errors import UserError
from shardwise.interop.huggingface.load_save import read_spec, save_model
from shardwise.interop.peft.format import open_adapter, read_adapter, write_adapter
from shardwise.interop.peft.targets import find_targets, linears_of, modules_of, their_modules
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 44, "vocab": 53}
SPEC = preset("tiny").with_overrides(SMALL)
TOKENS_BT = torch.randint(0, 53, (2, 9), generator=torch.Generator().manual_seed(1))


def adapted(settings: AdapterConfig, spec: ModelSpec = SPEC, seed: int = 0) -> Decoder:
    model = Decoder(spec)
    initialize(model, seed)
    adapt(model, decoder_adapters(spec, settings, seed, "fp32"))
    return model


def draw_b(model: nn.Module) -> None:
    """As if some training had been done."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


# Which layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-moe", "gpt2", "llama3-8b", "gemma2-2b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"]
)
def test_the_list_of_linear_layers_is_the_decoders_own(name: str) -> None:
    spec = preset(name)
    spec = spec.with_overrides({"num_layers": min(spec.num_layers, 5)})
    with torch.device("meta"):
        model = Decoder(spec)
    found = {path: tuple(m.weight.shape) for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linears_of(spec) == found
    assert set(modules_of(spec)) >= {path.rsplit(".", 1)[0] for path, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "pattern, count",
    [("q", 2), ("q_proj", 2), ("attention.*", 8), ("layers.1.*", 7), ("layers.1.attention.q", 1), ("all-linear", 14),
     ("model.layers.0.mlp.up_proj", 1), ("*_proj", 14), ("[qv]", 4)],
)  # fmt: skip
def test_targets_by_short_full_and_hugging_face_names(pattern: str, count: int) -> None:
    settings = AdapterConfig(kind="lora", targets=(pattern,))
    assert len(find_targets(settings, linears_of(SPEC), their_modules(SPEC), "tiny")) == count


@pytest.mark.parametrize("key", ["targets", "train_also"])
def test_a_pattern_that_matches_nothing_names_what_is_near(key: str) -> None:
    wrong = {"targets": ("qproj",)} if key == "targets" else {"train_also": ("embedd",)}
    with pytest.raises(UserError) as caught:
        decoder_adapters(SPEC, AdapterConfig(kind="lora", **wrong), 0, "fp32")
    what, why, fix = str(caught.value).splitlines()
    kind = "linear layer" if key == "targets" else "parameter"
    assert what == f"error: adapter.{key}: `{wrong[key][0]}` matches no {kind} of tiny"
    assert "attention.q" in why
    assert ("`q" if key == "targets" else "`embed`") in fix


def test_adapters_on_experts_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError) as caught:
        decoder_adapters(preset("tiny-moe"), AdapterConfig(kind="lora", targets=("experts.up",)), 0, "fp32")
    assert "stacked weights" in str(caught.value).splitlines()[1]


# What is trained ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_only_adapters_and_what_was_named_get_gradients(kind: str) -> None:
    model = adapted(AdapterConfig(kind=kind, targets=("q", "down"), train_also=("norm", "embed")))
    model(TOKENS_BT, TOKENS_BT).cross_entropy.backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None}
    ours = {f"layers.{i}.{m}.lora_{x}" for i in (0, 1) for m in ("attention.q", "feedforward.down") for x in "ab"}
    assert got == ours | {"norm.weight", "embed.weight"}


def test_a_new_lora_changes_nothing_until_it_is_trained() -> None:
    plain = Decoder(SPEC)
    initialize(plain, 0)
    assert torch.equal(adapted(AdapterConfig(kind="lora"))(TOKENS_BT), plain(TOKENS_BT))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_merged_weights_compute_the_same(kind: str) -> None:
    model = adapted(AdapterConfig(kind=kind, targets=("all-linear",), rank=4))
    draw_b(model)
    before = model(TOKENS_BT)
    merge(model, torch.float32)
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in Decoder(SPEC).named_parameters()}
    torch.testing.assert_close(model(TOKENS_BT), before, rtol=1e-4, atol=1e-5)


# Four bits ------------------------------------------------------------------------------------------------------------


def test_four_bits_are_those_of_bitsandbytes() -> None:
    codec = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(table(), codec.create_dynamic_map())
    assert torch.equal(torch.tensor(CODE), codec.get_4bit_type("nf4", "cpu", 64))
    weight_OI = 0.02 * torch.randn(96, 512, generator=torch.Generator().manual_seed(0))
    packed = quantize(weight_OI, torch.bfloat16)
    theirs, state = codec.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    assert torch.equal(packed.codes.view(torch.uint8).flatten(), theirs.flatten())
    # With our magnitudes, whose second rounding is per row and not per 256 blocks, bitsandbytes reads our values to
    # the last bit.
    scale_O2 = packed.scale.view(torch.float32)
    state.absmax = (table()[packed.absmax.view(torch.uint8).int()] * scale_O2[:, :1] + scale_O2[:, 1:]).flatten()
    assert torch.equal(codec.dequantize_4bit(theirs, state), dequantize(packed, 512, torch.float32))
    # And the error is that of its own double quantisation.
    nested, nested_state = codec.quantize_4bit(weight_OI, blocksize=64, quant_type="nf4", compress_statistics=True)
    own = (dequantize(packed, 512, torch.float32) - weight_OI).square().mean().sqrt()
    other = (codec.dequantize_4bit(nested, nested_state) - weight_OI).square().mean().sqrt()
    assert own == pytest.approx(float(other), rel=0.01)


@pytest.mark.parametrize("outputs, inputs", [(5, 64), (7, 100), (3, 128), (4, 300)])
def test_rows_and_columns_of_four_bits_can_be_cut(outputs: int, inputs: int) -> None:
    weight_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    packed = quantize(weight_OI, torch.float16)
    assert sum(part.nbytes for part in packed) == packed_bytes(outputs, inputs)
    whole_OI = dequantize(packed, inputs, torch.float64)
    assert float((whole_OI - weight_OI).abs().max() / weight_OI.abs().max()) < 0.2
    rows = type(packed)(*(part[1:3] for part in packed))
    assert torch.equal(dequantize(rows, inputs, torch.float64), whole_OI[1:3])
    assert torch.equal(dequantize(packed, 20, torch.float64, first=30), whole_OI[:, 30:50])


def test_a_row_of_zeros_stays_zero() -> None:
    assert not dequantize(quantize(torch.zeros(2, 128), torch.bfloat16), 128, torch.float32).any()


# Dropout --------------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_row_position_channel_and_layer_only() -> None:
    dropout, x_BTI = AdapterDropout(seed=0, rate=0.25), torch.ones(64, 16, 32)
    rows_B, positions_BT = torch.arange(64) + 3 * 2**32, torch.arange(16)[None]
    dropout.begin(rows_B, positions_BT)
    kept_BTI = dropout.drop(x_BTI, dropout.salt("q"), 0)
    assert float((kept_BTI == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(kept_BTI.max()) == pytest.approx(1 / 0.75)
    for dim in range(3):  # no row, position or channel is favoured
        others = [d for d in range(3) if d != dim]
        assert float((kept_BTI == 0).float().mean(others).sub(0.25).abs().max()) < 0.08
    dropout.begin(rows_B[5:9], positions_BT[:, 4:7])
    assert torch.equal(dropout.drop(x_BTI[5:9, 4:7, 10:20], dropout.salt("q"), 10), kept_BTI[5:9, 4:7, 10:20])
    dropout.begin(rows_B, positions_BT)
    assert not torch.equal(dropout.drop(x_BTI, dropout.salt("k"), 0), kept_BTI)
    dropout.begin(rows_B + 2**32, positions_BT)
    assert not torch.equal(dropout.drop(x_BTI, dropout.salt("q"), 0), kept_BTI)
    dropout.begin(None, positions_BT)
    assert torch.equal(dropout.drop(x_BTI, dropout.salt("q"), 0), x_BTI)
    assert INVERSE * ODD % 2**64 == 1


# PEFT -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "model"
    model = Decoder(SPEC)
    initialize(model, 5)
    save_model(model, directory)
    return directory


def their_logits(base: Path, adapter: Path) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        return model(TOKENS_BT).logits


def our_logits(base: Path, settings: AdapterConfig, trained: dict[str, Tensor] | None = None) -> Tensor:
    from shardwise.interop.huggingface.load_save import load_weights

    spec = read_spec(base)
    model = Decoder(spec)
    load_weights(model, base)
    adapt(model, decoder_adapters(spec, settings, 0, "fp32"))
    with torch.no_grad():
        for name, value in (trained or {}).items():
            model.get_parameter(name).copy_(value)
        return model(TOKENS_BT)


def test_peft_loads_what_is_written_here(base: Path, tmp_path: Path) -> None:
    settings = AdapterConfig(
        kind="lora", rank=3, alpha=5.0, targets=("q", "layers.1.feedforward.*"), train_also=("norm", "head")
    )
    model = adapted(settings, seed=5)
    draw_b(model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    write_adapter(tmp_path / "out", read_spec(base), settings, trained, str(base))
    ours = our_logits(base, settings, trained)
    torch.testing.assert_close(their_logits(base, tmp_path / "out"), ours, rtol=1e-5, atol=1e-5)
    again = AdapterConfig(kind="lora", **settled(tmp_path / "out", read_spec(base)))
    torch.testing.assert_close(our_logits(base, again), ours, rtol=0, atol=0)


def settled(path: Path, spec: ModelSpec) -> dict[str, Any]:
    found = open_adapter(path, spec)
    return {key: getattr(found, key) for key in ("rank", "alpha", "targets", "train_also")} | {"path": str(path)}


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_made_by_peft_load_here(base: Path, tmp_path: Path, rslora: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=10, target_modules=["v_proj", "o_proj", "gate_proj"], use_rslora=rslora,
        modules_to_save=["lm_head"], init_lora_weights=False,
    )  # fmt: skip
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path)
    settings = AdapterConfig(kind="lora", **settled(tmp_path, read_spec(base)))
    assert settings.train_also == ("head",) and settings.rank == 4
    torch.testing.assert_close(our_logits(base, settings), their_logits(base, tmp_path), rtol=1e-5, atol=1e-5)


def written(directory: Path, spec: ModelSpec, **changes: object) -> Path:
    settings = AdapterConfig(kind="lora", rank=2, targets=("q",))
    model = adapted(settings, spec)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    write_adapter(directory, spec, settings, trained, "somebody/else")
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


@pytest.mark.parametrize("sizes", [{"hidden": 48}, {"head_dim": 16}, {"num_layers": 3}])
def test_an_adapter_for_another_model_is_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    directory = written(tmp_path / "a", SPEC.with_overrides(sizes))
    with pytest.raises(UserError) as caught:
        read_adapter(directory, SPEC)
    what, why, fix = str(caught.value).splitlines()
    assert what == f"error: the adapter in {directory} is for another model than tiny"
    assert "self_attn.q_proj.lora_" in why
    assert "somebody/else" in fix


@pytest.mark.parametrize(
    "option",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 8}},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_its_name(tmp_path: Path, option: dict[str, object]) -> None:
    directory = written(tmp_path / "a", SPEC, **option)
    with pytest.raises(UserError) as caught:
        open_adapter(directory, SPEC)
    what, why, fix = str(caught.value).splitlines()
    assert f"has {next(iter(option))} = " in what
    assert "rsLoRA" in why and "merge_and_unload" in fix


def test_a_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_adapter(tmp_path, SPEC)
    assert "adapter_config.json" in str(caught.value).splitlines()[1]
