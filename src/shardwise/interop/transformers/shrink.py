"""Makes a small model of the same architecture as one that only transformers knows: what a proof of a layout trains.

Only sizes go down. Invariant: every kind of block stays (by its number of parameters, and by what the config lists per
layer), and what comes out has been trained for a moment: a guess that transformers cannot build or run is never handed
on. Loads torch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.transformers.spec import TransformersSpec, spec_from_transformers

MAX_PARAMETERS = 10_000_000  # 320 MB in fp64 with gradients and Adam
HEAD_DIM, WIDTH = 16, 48  # the width of a head, and of feed-forward parts
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@cache
def shrink_transformers(spec: TransformersSpec, vocab: int) -> TransformersSpec:
    """Returns a small spec: narrow if the architecture lets us, else only with fewer layers and tokens."""
    problem = ""
    for narrow in (True, False):
        try:
            small = spec_from_transformers(_smaller(spec, vocab, narrow))
            if small.num_parameters > MAX_PARAMETERS:
                problem = (
                    f"only its layers and tokens can be cut, which leaves {small.num_parameters / 1e6:.0f} M parameters"
                )
                continue
            _try(small)
            return replace(small, name=spec.name)
        except Exception as error:  # whatever an architecture says to sizes it cannot have
            problem = (str(error) or type(error).__name__).splitlines()[0]
    raise UserError(
        f"{spec.name} cannot be made smaller for a proof",
        why=f"transformers builds this model: {problem}",
        fix="`shardwise train` repeats its first steps in one process when it ends; --nproc 2 train.steps=3 is enough",
    )


def _smaller(spec: TransformersSpec, vocab: int, narrow: bool) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    config = json.loads(spec.config_json)
    whole = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    about = whole.get_text_config()
    per_layer = {name: value for name, value in vars(about).items() if _is_per_layer(value, spec.num_layers)}
    kinds = list(zip(spec.block_parameters, *map(_words, per_layer.values()), strict=True))
    num_layers = max(min(2, spec.num_layers), *(kinds.index(kind) + 1 for kind in kinds))
    about.num_hidden_layers, about.vocab_size = num_layers, min(spec.vocab, vocab)
    for name, value in per_layer.items():
        setattr(about, name, value[:num_layers])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(token := getattr(about, name, None), int):
            setattr(about, name, min(token, about.vocab_size - 1))
    if narrow:
        kv_heads = min(spec.num_kv_heads, 4)
        heads = kv_heads * min(spec.num_heads // spec.num_kv_heads, 2)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * HEAD_DIM}
        sizes |= {"head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM, **dict.fromkeys(WIDTHS, WIDTH)}
        sizes |= dict.fromkeys(EXPERTS, 16)
        for name, size in sizes.items():
            if isinstance(found := getattr(about, name, None), int):
                with suppress(AttributeError):  # some follow from others
                    setattr(about, name, min(found, size))
    return {**json.loads(whole.to_json_string(use_diff=False)), "_name_or_path": ""}


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _words(values: list[Any]) -> list[str]:
    return [str(value) for value in values]


def _try(spec: TransformersSpec) -> None:
    import torch

    from shardwise.interop.transformers.model import TransformersModel

    model = TransformersModel(spec, dtype=torch.float64)
    model.draw_from(0)
    tokens_BT = torch.arange(16)[None] % spec.vocab
    model(tokens_BT, tokens_BT).cross_entropy.backward()
    if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
        raise ValueError("its gradients are not finite")
