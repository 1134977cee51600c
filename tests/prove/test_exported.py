"""`export` reads back what it wrote in another process, and finds what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint import store
from shardwise.interop.huggingface.load_save import save_model
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.prove.exported import prove_export
from shardwise.run.weights import find_weights
from shardwise.spec.presets import preset

SPEC = preset("mixtral-8x7b").with_overrides(
    {"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 48, "expert_ffn": 24,
     "num_experts": 4, "vocab": 67, "max_seq_len": 64}
)  # fmt: skip


def test_experts_that_were_dropped_are_found(tmp_path: Path) -> None:
    model = Decoder(SPEC, "sdpa")
    initialize(model, 0)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    store.write(tmp_path / "ours", 0, {"weights": tensors}, {"model": SPEC.to_dict()})
    save_model(model, tmp_path / "hf", dtype=torch.float32)
    weights = find_weights(str(tmp_path / "ours"))
    proof = prove_export(weights, tmp_path / "hf", torch.float32)
    assert proof.holds and proof.difference <= 1e-5 * proof.largest and "transformers" in proof.reader
    file = tmp_path / "hf" / "model.safetensors"
    stored = load_file(file)
    expert = next(name for name in stored if ".experts." in name)
    stored[expert].zero_()
    save_file(stored, file, {"format": "pt"})
    wrong = prove_export(weights, tmp_path / "hf", torch.float32)
    assert not wrong.holds and wrong.difference > 1e-3 * wrong.largest


def test_what_cannot_be_read_back_is_said(tmp_path: Path) -> None:
    model = Decoder(SPEC, "sdpa")
    initialize(model, 0)
    store.write(tmp_path / "ours", 0, {"weights": dict(model.state_dict())}, {"model": SPEC.to_dict()})
    (tmp_path / "hf").mkdir()
    with pytest.raises(Exception, match="could not be read back"):
        prove_export(find_weights(str(tmp_path / "ours")), tmp_path / "hf", torch.float32)
