"""Small models of every family, the same in every process, and how ranks' gradients are held against those of one
process."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.decoder import IGNORE, Decoder
from shardwise.model.experts import moe_layers
from shardwise.parallel.tensor.slices import TensorParallel, apply_tensor_parallel, placement
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

# 67 and 47 are prime: no number of ranks divides vocabulary or feed-forward.
SMALL = {"num_layers": 2, "hidden": 24, "num_heads": 4, "num_kv_heads": 2, "ffn": 47, "vocab": 67, "max_seq_len": 32}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 19, "aux_loss_coef": 0.5, "z_loss_coef": 0.3}
LATENT = {
    "num_kv_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_dense_layers": 1,
    "num_expert_groups": 2,
    "topk_groups": 1,
}
FAMILIES: dict[str, ModelSpec] = {
    "llama": preset("llama3-8b").with_overrides(SMALL),
    "gpt2": preset("gpt2").with_overrides(SMALL | {"num_kv_heads": 4}),
    "gemma2": preset("gemma2-2b").with_overrides(SMALL | {"head_dim": 8, "sliding_window": 5}),
    "gemma3": preset("gemma3-1b").with_overrides(
        SMALL | {"num_kv_heads": 1, "head_dim": 8, "sliding_window": 5, "global_every": 2}
    ),
    "qwen2": preset("qwen2.5-0.5b").with_overrides(SMALL),
    "qwen3": preset("qwen3-8b").with_overrides(SMALL | {"head_dim": 8}),
    "mixtral": preset("mixtral-8x7b").with_overrides(SMALL | EXPERTS),
    "qwen3-moe": preset("qwen3-30b-a3b").with_overrides(SMALL | EXPERTS | {"num_kv_heads": 1, "head_dim": 8}),
    "deepseek": preset("deepseek-v3").with_overrides(SMALL | EXPERTS | LATENT),
    "six-heads": preset("llama3-8b").with_overrides(
        SMALL | {"num_heads": 6, "num_kv_heads": 3, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    ),
}
TOLERANCE = 1e-9
BATCH, TOKENS = 2, 12


# The same model and batch in every process ---------------------------------------------------------------------------


def make(spec: ModelSpec, layers: range | None = None) -> Decoder:
    """All parameters and buffers random, from their names: no zero bias and no unit norm hides a mistake."""
    model = Decoder(spec, layers=layers).double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (name.endswith("norm.weight")))
    return model


def make_parallel(spec: ModelSpec, sequence: bool, layers: range | None = None) -> Decoder:
    model = make(spec, layers)
    apply_tensor_parallel(model, TensorParallel(dist.group.WORLD, sequence))
    return model


def batch(vocab: int = 67, tokens: int = TOKENS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(0, vocab, (BATCH, tokens), generator=generator)
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[:, -1] = IGNORE
    targets_BT[0, :4] = IGNORE
    return {"tokens_BT": tokens_BT, "targets_BT": targets_BT}


def packed() -> dict[str, Tensor]:
    """Two documents in each row, positions of their own."""
    documents_BT = torch.tensor([[0] * 5 + [1] * 7, [3] * 8 + [2] * 4])
    positions_BT = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
    return batch() | {"documents_BT": documents_BT, "positions_BT": positions_BT}


def learn(model: Decoder, inputs: dict[str, Tensor]) -> dict[str, Any]:
    losses = model(**inputs)
    # Unequal weights, so that a gradient that belongs to another loss cannot stand in for it.
    (losses.cross_entropy + 2 * losses.aux + 3 * losses.z).backward()
    return report(model, [loss.detach() for loss in losses])


def report(model: Decoder, losses: list[Tensor]) -> dict[str, Any]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    counts = [layer.tokens_per_expert for layer in moe_layers(model)]
    return {"losses": losses, "grads": grads, "counts": counts}


@cache
def alone(family: str) -> dict[str, Any]:
    return learn(make(FAMILIES[family]), batch())


# Comparing what ranks have with what one process has -----------------------------------------------------------------


def whole(spec: ModelSpec, name: str, parts: list[Tensor], sequence: bool) -> Tensor:
    """The full gradient from the ranks' own, by `placement` alone: copies summed or equal, slices side by side."""
    world = len(parts)
    places = [placement(spec, name, world, index, sequence) for index in range(world)]
    (replicas,) = {place.replicas for place in places}
    held = []
    for first in range(0, world, replicas):
        group = parts[first : first + replicas]
        assert len({place.slice for place in places[first : first + replicas]}) == 1, name
        if places[first].partial:
            held.append(torch.stack(group).sum(0))
        else:  # replicas must stay equal for ever, so to the last bit
            assert all(torch.equal(part, group[0]) for part in group), name
            held.append(group[0])
    slices = [place.slice for place in places[::replicas]]
    if slices[0] is None:
        assert len(held) == 1, name
        return held[0]
    ends = [0, *(each.stop for each in slices)]
    assert [each.start for each in slices] == ends[:-1], f"{name}: {slices}"
    return torch.cat(held, dim=slices[0].dim)


def check_same(spec: ModelSpec, results: list[dict[str, Any]], expected: dict[str, Any], sequence: bool) -> None:
    for result in results:
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=TOLERANCE, atol=0)
        assert all(map(torch.equal, result["counts"], expected["counts"]))
    assert all(set(result["grads"]) == set(expected["grads"]) for result in results)
    # GPT-2's key biases have no true gradient, only rounding: those are held against the other tensors'.
    floor = 1e-4 * max(float(grad.abs().max()) for grad in expected["grads"].values())
    for name, grad in expected["grads"].items():
        mine = whole(spec, name, [result["grads"][name] for result in results], sequence)
        scale = max(float(grad.abs().max()), floor)
        torch.testing.assert_close(mine, grad, rtol=0, atol=TOLERANCE * scale, msg=lambda text, n=name: f"{n}: {text}")
