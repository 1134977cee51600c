"""Lists how our parameters are called, cut and laid out in a Hugging Face checkpoint. No torch.

Owns the table of names. Invariant: the table covers every parameter (and router bias) of the spec exactly once.
Read next: `weights.py`, which moves the data along it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.interop.huggingface.architectures import ARCHITECTURES, choose_architecture
from shardwise.spec.layers import Weight
from shardwise.spec.model import LayerSpec, ModelSpec


@dataclass(frozen=True)
class Part:
    """One of our tensors, or one expert's slice of it."""

    ours: str
    expert: int | None = None


@dataclass(frozen=True)
class TheirTensor:
    """A tensor on disk: our parts concatenated along `cat_dim`, then transposed where they store (in, out)."""

    name: str
    parts: tuple[Part, ...]
    cat_dim: int = 0
    transposed: bool = False


# Harmless leftovers in published checkpoints: buffers that are recomputed, never learned.
IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)$")


def tensor_table(spec: ModelSpec, fused_experts: bool = False) -> list[TheirTensor]:
    """Returns every tensor of the checkpoint. Published ones have a tensor per expert; `fused_experts` is transformers'
    memory layout."""
    kind = choose_architecture(spec)
    if kind == "gpt2":
        return list(_gpt2(spec))
    return list(_llama_like(spec, kind, fused_experts))


def is_ignorable(name: str, spec: ModelSpec) -> bool:
    if IGNORED.search(name):
        return True
    # DeepSeek appends its multi-token-prediction module as one more layer; it is no part of the main model.
    match = re.match(r"model\.layers\.(\d+)\.", name)
    appends = ARCHITECTURES[choose_architecture(spec)].appends_layers
    return appends and match is not None and int(match[1]) >= spec.num_layers


def whole(theirs: str, ours: str) -> TheirTensor:
    return TheirTensor(theirs, (Part(ours),))


def _llama_like(spec: ModelSpec, kind: str, fused_experts: bool) -> Iterator[TheirTensor]:
    yield whole("model.embed_tokens.weight", "embed.weight")
    for layer in spec.layers:
        ours, theirs = f"layers.{layer.index}", f"model.layers.{layer.index}"
        attention = ARCHITECTURES[kind].attention(spec)
        names = _norms(spec) | {f"attention.{one}": f"self_attn.{other}" for one, other in attention.items()}
        for our_name, their_name in names.items():
            yield whole(f"{theirs}.{their_name}.weight", f"{ours}.{our_name}.weight")
        yield from _biases(spec, ours, theirs)
        if layer.is_moe:
            yield from _experts(spec, layer, kind, ours, theirs, fused_experts)
        else:
            yield from _feedforward(spec.feedforward_weights(layer), f"{ours}.feedforward", f"{theirs}.mlp")
    yield whole("model.norm.weight", "norm.weight")
    if not spec.tied:
        yield whole("lm_head.weight", "head.weight")


def _norms(spec: ModelSpec) -> dict[str, str]:
    if spec.post_norms:
        return {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "feedforward_norm": "pre_feedforward_layernorm",
            "feedforward_post_norm": "post_feedforward_layernorm",
        }
    return {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}


def _biases(spec: ModelSpec, ours: str, theirs: str) -> Iterator[TheirTensor]:
    letters = ("qkv" if spec.qkv_bias else "") + ("o" if spec.out_bias else "")
    for letter in letters:
        yield whole(f"{theirs}.self_attn.{letter}_proj.bias", f"{ours}.attention.{letter}.bias")


def _feedforward(weights: Iterable[Weight], ours: str, theirs: str) -> Iterator[TheirTensor]:
    for weight in weights:
        module, leaf = weight.name.rsplit(".", 1)
        yield whole(f"{theirs}.{module}_proj.{leaf}", f"{ours}.{weight.name}")


def _experts(
    spec: ModelSpec, layer: LayerSpec, kind: str, ours: str, theirs: str, fused: bool
) -> Iterator[TheirTensor]:
    ours = f"{ours}.feedforward"
    theirs = f"{theirs}.block_sparse_moe" if kind == "mixtral" and not fused else f"{theirs}.mlp"
    yield whole(f"{theirs}.gate.weight", f"{ours}.router.weight")
    if spec.router == "sigmoid-bias":
        yield whole(f"{theirs}.gate.e_score_correction_bias", f"{ours}.router.bias")
    for tensor in _feedforward((one for one in spec.feedforward_weights(layer) if one.is_linear), ours, theirs):
        yield replace(tensor, name=tensor.name.replace(".shared.", ".shared_experts."))
    if fused:
        gate_up = (Part(f"{ours}.experts.gate"), Part(f"{ours}.experts.up"))
        yield TheirTensor(f"{theirs}.experts.gate_up_proj", gate_up, cat_dim=1)
        yield whole(f"{theirs}.experts.down_proj", f"{ours}.experts.down")
        return
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if kind == "mixtral":
        names = {"gate": "w1", "up": "w3", "down": "w2"}
    for expert in range(spec.num_experts):
        for our_name, their_name in names.items():
            part = Part(f"{ours}.experts.{our_name}", expert)
            yield TheirTensor(f"{theirs}.experts.{expert}.{their_name}.weight", (part,))


def _gpt2(spec: ModelSpec) -> Iterator[TheirTensor]:
    yield whole("transformer.wte.weight", "embed.weight")
    yield whole("transformer.wpe.weight", "position_embed.weight")
    for layer in spec.layers:
        yield from _gpt2_layer(layer)
    yield whole("transformer.ln_f.weight", "norm.weight")
    yield whole("transformer.ln_f.bias", "norm.bias")
    if not spec.tied:
        yield whole("lm_head.weight", "head.weight")


def _gpt2_layer(layer: LayerSpec) -> Iterator[TheirTensor]:
    """Yields the tensors of a layer. GPT-2 stores linear weights as (in, out), and query, key and value side by
    side."""
    ours, theirs = f"layers.{layer.index}", f"transformer.h.{layer.index}"
    for our_name, their_name in (("attention_norm", "ln_1"), ("feedforward_norm", "ln_2")):
        for kind in ("weight", "bias"):
            yield whole(f"{theirs}.{their_name}.{kind}", f"{ours}.{our_name}.{kind}")
    linears = {
        "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
        "attn.c_proj": ("attention.o",),
        "mlp.c_fc": ("feedforward.up",),
        "mlp.c_proj": ("feedforward.down",),
    }
    for their_name, our_names in linears.items():
        weights = tuple(Part(f"{ours}.{name}.weight") for name in our_names)
        biases = tuple(Part(f"{ours}.{name}.bias") for name in our_names)
        yield TheirTensor(f"{theirs}.{their_name}.weight", weights, transposed=True)
        yield TheirTensor(f"{theirs}.{their_name}.bias", biases)
