"""A model that cannot be read, or that we would compute differently, is refused by name and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import UserError
from shardwise.interop.huggingface.load_save import (
    config_from_spec,
    find_model_dir,
    load_weights,
    save_model,
    spec_from_config,
)
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.presets import preset, preset_names

SPEC = preset("tiny").with_overrides({"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "ffn": 48})


def make() -> Decoder:
    model = Decoder(SPEC)
    initialize(model, seed=0)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(make(), tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refuse_loading(directory: Path, *words: str) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_weights(model, directory)
    for word in words:
        assert word in str(error.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_missing_tensor(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refuse_loading(saved, "1 missing tensor", "model.layers.1.mlp.up_proj.weight")


def test_extra_tensor(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}))
    refuse_loading(saved, "unexpected", "model.layers.2.mlp.up_proj.weight")


def test_wrongly_shaped_tensor(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(33)}))
    refuse_loading(saved, "wrongly shaped", "model.norm.weight [33] instead of [32]")


def test_truncated_file(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse_loading(saved, "damaged")


def test_a_file_that_is_no_safetensors(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"hello")
    refuse_loading(saved, "damaged")


def test_missing_shard(tmp_path: Path) -> None:
    save_model(make(), tmp_path / "model", max_shard_bytes=20_000)
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    shard.unlink()
    refuse_loading(tmp_path / "model", shard.name)


def test_damaged_index(tmp_path: Path) -> None:
    save_model(make(), tmp_path / "model", max_shard_bytes=20_000)
    (tmp_path / "model/model.safetensors.index.json").write_text("{")
    refuse_loading(tmp_path / "model", "damaged")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refuse_loading(tmp_path, "no weights")


def test_a_second_different_head_in_a_tied_checkpoint(tmp_path: Path) -> None:
    spec = SPEC.with_overrides({"tied": True})
    model = Decoder(spec)
    initialize(model, seed=0)
    save_model(model, tmp_path / "model")
    rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_weights(model, tmp_path / "model")  # the same table stored twice is fine
    rewrite(tmp_path / "model", lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match="not the embedding"):
        load_weights(model, tmp_path / "model")


def test_a_part_of_the_model_takes_its_own_tensors(saved: Path) -> None:
    part = Decoder(SPEC)
    initialize(part, seed=1)
    del part.layers["0"]
    load_weights(part, saved)
    assert torch.equal(part.layers["1"].feedforward.up.weight, make().layers["1"].feedforward.up.weight)


def test_existing_directory_is_never_overwritten(saved: Path) -> None:
    before = (saved / "config.json").read_bytes()
    with pytest.raises(UserError, match="already exists"):
        save_model(make(), saved)
    assert (saved / "config.json").read_bytes() == before


def test_an_empty_directory_is_filled_and_extra_files_come_along(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    save_model(make(), tmp_path / "model", extra_files=[tmp_path / "tokenizer.json"])
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        save_model(make(), tmp_path / "model", extra_files=[tmp_path / "absent.json"])
    assert list(tmp_path.iterdir()) == []


LLAMA = config_from_spec(SPEC)
MIXTRAL = config_from_spec(preset("mixtral-8x7b"))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({}, "model_type None"),
        (LLAMA | {"hidden_act": "quick_gelu"}, "hidden_act"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
        (LLAMA | {"hidden_size": "big"}, "config.json"),
        (LLAMA | {"num_key_value_heads": 3}, "key-value heads"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (config_from_spec(preset("gemma2-2b")) | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (config_from_spec(preset("qwen3-8b")) | {"layer_types": ["linear_attention"] * 36}, "layer_types"),
        (config_from_spec(preset("qwen3-30b-a3b")) | {"mlp_only_layers": [5]}, "mlp_only_layers"),
        (config_from_spec(preset("deepseek-v3")) | {"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_unsupported_configs_name_the_field(config: dict, word: str) -> None:
    with pytest.raises(UserError) as error:
        spec_from_config(config)
    assert word in str(error.value)


def test_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UserError) as error:
        spec_from_config({"model_type": "mamba"})
    assert "llama" in error.value.why and "deepseek_v3" in error.value.why


def test_every_preset_but_the_mixed_tiny_one_has_a_hugging_face_form() -> None:
    for name in preset_names():
        if name == "tiny-moe":
            continue
        spec = preset(name)
        config = json.loads(json.dumps(config_from_spec(spec)))
        assert spec_from_config(config).num_parameters == spec.num_parameters, name


def test_a_model_no_architecture_can_hold_is_not_exported() -> None:
    with pytest.raises(UserError) as error:
        config_from_spec(preset("tiny-moe"))
    assert "moe_every = 2" in error.value.why


def test_hub_id_is_found_in_the_cache_or_answered_with_the_download_command(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError) as error:
        find_model_dir("org/some-model")
    assert error.value.fix == "hf download org/some-model"
    folder = tmp_path / "hub/models--org--some-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots").mkdir()
    saved.rename(folder / "snapshots/abc")
    assert find_model_dir("org/some-model") == folder / "snapshots/abc"
    assert find_model_dir(str(folder / "snapshots/abc")) == folder / "snapshots/abc"


def test_a_path_without_a_model(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "deeper"):
        with pytest.raises(UserError):
            find_model_dir(str(path))
