"""What compiled and fused blocks keep for backward: the count against the graphs that torch cuts in two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.kernels.compiled import MODES, apply_compile
from shardwise.kernels.float8 import apply_float8
from shardwise.kernels.fused_projections import apply_fused_projections
from shardwise.kernels.norm_gradient import apply_norm_gradients
from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.plan.prediction.activations import TokenShare, kept_activations
from shardwise.plan.prediction.work import norms_have_kernel
from shardwise.plan.resolve.speed import our_stack
from shardwise.spec.fp8 import WORTH
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

BATCH, LENGTH = 4, 128
SMALL = {"num_layers": 2, "hidden": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32, "ffn": 640, "vocab": 100}
LATENT = {
    "num_layers": 2,
    "hidden": 256,
    "num_heads": 4,
    "num_kv_heads": 4,
    "vocab": 100,
    "ffn": 512,
    "first_dense_layers": 2,
}
MODELS = {
    "llama": preset("tiny").with_overrides(SMALL),
    "windows": preset("tiny").with_overrides({**SMALL, "sliding_window": 16}),
    "qwen3": preset("qwen3-0.6b").with_overrides(SMALL),
    "gpt2": preset("gpt2").with_overrides({**SMALL, "num_kv_heads": 8}),
    "gemma": preset("gemma2-2b").with_overrides({**SMALL, "query_scale_dim": 32}),
    "moe": preset("tiny-moe").with_overrides(
        {**SMALL, "num_experts": 8, "expert_ffn": 128, "experts_per_token": 2, "moe_every": 1}
    ),
    "latent": preset("deepseek-v3").with_overrides(LATENT),
}
CASES = [
    ("llama", "none", False),
    ("llama", "none", True),
    ("llama", "selective", True),
    ("qwen3", "none", True),
    ("gpt2", "none", True),
    ("windows", "selective", False),
    ("gemma", "none", False),
    ("gemma", "selective", False),
    ("moe", "none", False),
    ("moe", "selective", False),
    ("latent", "none", False),
    ("latent", "selective", True),
]


@pytest.fixture(scope="module", autouse=True)
def graphs_alone():
    """The compiler's operations, cut in two by its rules, and run by plain kernels."""
    MODES["graphs alone"] = {"backend": "aot_eager_decomp_partition"}
    yield
    del MODES["graphs alone"]


def counted(spec: ModelSpec, mode: str, fuse: bool, size: int, recipe: str = "", least: int = 0) -> float:
    """Bytes of the last layer."""
    stack, saved = our_stack(True, fuse, True), replace(spec, norm="layer")  # compiled norms keep their input alone
    if recipe:
        stack = our_stack.__wrapped__(
            True, fuse, True, False, recipe
        )  # with the test's own `least`, which nobody may remember
        assert stack.fp8_least == least
    tokens = BATCH * LENGTH
    keys = LENGTH if spec.attention_softcap else LENGTH // BATCH  # a mask is one for all rows
    return (
        size
        * tokens
        * kept_activations(saved, spec.layers[-1:], mode, TokenShare(keys, size=size, tokens=tokens), stack).between
    )


@pytest.mark.parametrize("name, mode, fuse", CASES, ids=["-".join(map(str, case)) for case in CASES])
@pytest.mark.parametrize("own", [False, True])
def test_graphs_keep_what_is_counted(name: str, mode: str, fuse: bool, own: bool) -> None:
    """In bf16 and without memory: no kernel runs. What is counted as one number per head is fp32 there. `own`: with a
    kernel for norms' backward, where runs have it."""
    torch._dynamo.reset()
    spec = MODELS[name]
    if own and not norms_have_kernel(replace(spec, hidden=512)):
        pytest.skip("runs have none there")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = Decoder(spec)
            apply_fused_projections(model.layers.values() if fuse else ())
            if own:
                apply_norm_gradients(model.layers.values())
            apply_compile(model.layers.values(), "graphs alone", selective=mode == "selective", whole=True)
            two = kept_by(model)
            del model.layers["1"]
            one = kept_by(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert two - one == pytest.approx(counted(spec, mode, fuse, 2), rel=0.02)


@pytest.mark.parametrize(
    "name, least, fuse, recipe",
    [
        ("llama", 1, False, "tensorwise"),
        ("llama", 100, False, "rowwise"),
        ("llama", 100, True, "tensorwise"),
        ("gpt2", 1, False, "rowwise"),
        ("moe", 1, True, "rowwise"),
    ],
)
def test_graphs_in_fp8_keep_what_is_counted(
    name: str, least: int, fuse: bool, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of matmuls are quantized again in backward and not kept, unless one of their matmuls is too small for fp8:
    `least`, keys and values."""
    torch._dynamo.reset()
    spec = MODELS[name].with_overrides({"vocab": 112})
    monkeypatch.setitem(WORTH, recipe, least)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = Decoder(spec)
            apply_float8(model, model.layers.values(), recipe, emulate=False, fused=fuse)
            apply_fused_projections(model.layers.values() if fuse else ())
            apply_compile(model.layers.values(), "graphs alone", selective=False, whole=True)
            two = kept_by(model)
            del model.layers["1"]
            one = kept_by(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert two - one == pytest.approx(counted(spec, "none", fuse, 2, recipe, least), rel=0.02)


def kept_by(model: Decoder) -> int:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    model(tokens, tokens)  # compiled before anybody looks
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(tokens, tokens)
    del outputs
    return sum(storage.nbytes() for storage in seen.values())


def test_compiled_blocks_keep_what_is_counted() -> None:
    """Real kernels, in fp32."""
    torch._dynamo.reset()
    spec = MODELS["llama"]
    model = Decoder(spec)
    initialize(model, 0)
    apply_fused_projections(model.layers.values())
    apply_compile(model.layers.values(), "blocks", selective=False, whole=True)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    model(tokens, tokens)
    two = saved_bytes(model, tokens, tokens)
    del model.layers["1"]
    assert two - saved_bytes(model, tokens, tokens) == pytest.approx(counted(spec, "none", True, 4), rel=0.01)
