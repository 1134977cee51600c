"""Presets have the published sizes, and the decoder built from them has what the spec counts."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import transformers

from shardwise.errors import UserError
from shardwise.interop.huggingface.load_save import config_from_spec
from shardwise.model.decoder import Decoder, Losses
from shardwise.spec.presets import preset, preset_names

# Parameter counts as published: the safetensors totals on the hub, or the papers' tables.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    # The hub's 671,026,419,200 includes the routers' 58 x 256 correction biases, which no gradient moves.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}
ACTIVE = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9, "deepseek-v3": 37e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert preset(name).num_parameters == PUBLISHED[name]


def test_gpt3_is_175b_within_the_papers_rounding() -> None:
    assert preset("gpt3-175b").num_parameters == pytest.approx(175e9, rel=0.005)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_as_published(name: str) -> None:
    assert preset(name).num_active_parameters == pytest.approx(ACTIVE[name], rel=0.03)


def test_unknown_preset_suggests_names() -> None:
    with pytest.raises(UserError) as error:
        preset("lama3-8b")
    assert "llama3-8b" in error.value.fix


@pytest.mark.parametrize(
    "name", ["llama3.2-1b", "qwen2.5-0.5b", "gemma2-2b", "gemma3-1b", "mixtral-8x7b", "deepseek-v3"]
)
def test_transformers_builds_the_same_number_of_parameters(name: str) -> None:
    config = transformers.AutoConfig.for_model(**config_from_spec(preset(name)))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == preset(name).num_parameters


@pytest.mark.parametrize(
    "name", ["tiny-moe", "gpt2", "llama3-8b", "qwen2.5-7b", "qwen3-1.7b", "gemma3-1b", "mixtral-8x7b"]
)
def test_built_and_run_on_meta(name: str) -> None:
    spec = preset(name)
    with torch.device("meta"):
        model = Decoder(spec)
        tokens_BT = torch.zeros(1, 8, dtype=torch.long)
        logits = model(tokens_BT)
        losses = model(tokens_BT, tokens_BT)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters
    assert logits.shape == (1, 8, spec.vocab) and logits.is_meta
    assert isinstance(losses, Losses) and losses.cross_entropy.is_meta


def test_every_named_preset_is_counted() -> None:
    variants = {"tiny", "tiny-moe", "gpt3-175b", "llama3.1-8b", "llama3.1-70b", "llama3-405b", "llama3.3-70b"}
    assert set(preset_names()) == set(PUBLISHED) | variants
