"""The model a row is about. What its columns leave open (gated or not, tied, learned positions, biases) is decided by
which choice counts `params` best, and by the name; experts and latent attention come from the note or from our preset
of that name."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

from accuracy.run import Run, Skip
from shardwise.errors import UserError
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset, preset_names

GATED = ("llama", "qwen", "mistral", "mixtral", "internlm", "deepseek", "gemma", "kimi", "oss", "yi-", "olmo", "smol")
UNGATED = ("gpt", "mpt", "megatron", "turing", "opt", "bloom", "nemotron", "falcon", "pythia")
PRIOR = 0.01
"""By how much of `params` a choice that a name speaks against must count better."""

USUAL_VOCAB = 51200
"""GPT-2's, filled up as Megatron does for eight slices, where a source says nothing."""

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@cache
def _presets() -> dict[str, ModelSpec]:
    return {_letters(name): preset(name) for name in preset_names()}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def known_preset(name: str) -> ModelSpec | None:
    plain = re.sub(r"\(.*?\)|-?\d+-?layers?", "", name.lower())
    return _presets().get(_letters(plain))


COLUMNS = ("model", "params", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "note")


def shape_of(run: Run) -> ModelSpec:
    note = re.sub(r"MFU as shown.*|case \S+", "", run.note)  # differs from row to row, and says nothing of the model
    return _known_shape(tuple((name, run.text(name)) for name in COLUMNS[:-1]), note)


@cache
def _known_shape(cells: tuple[tuple[str, str], ...], note: str) -> ModelSpec:
    run = Run("", 0, dict(cells) | {"note": note})
    try:
        return _shape_of(run)
    except UserError as error:
        raise Skip(f"not a model we can build: {error.what}") from None


def _shape_of(run: Run) -> ModelSpec:
    seq = run.count("seq", 1024)
    known = known_preset(run.text("model"))
    if known is None and not (run.number("layers") and run.number("hidden")):
        raise Skip("no layers and widths, and no preset of that name")
    columns = {"layers": "num_layers", "hidden": "hidden", "heads": "num_heads", "kv_heads": "num_kv_heads",
               "ffn": "ffn", "vocab": "vocab"}  # fmt: skip
    given: dict[str, Any] = {ours: run.count(theirs) for theirs, ours in columns.items() if run.number(theirs)}
    if known is not None and all(
        given.get(name, getattr(known, name)) == getattr(known, name) for name in ("hidden", "num_heads")
    ):
        given.pop("ffn", None)  # of experts in some rows, of dense layers in others
        return known.with_overrides(given | _experts(run, given, known) | {"max_seq_len": max(seq, known.max_seq_len)})
    given.setdefault("num_heads", max(1, given["hidden"] // 128))
    given.setdefault("vocab", USUAL_VOCAB)
    given["name"], given["max_seq_len"] = run.text("model"), seq
    experts = _experts(run, given, None)
    if given.get("num_kv_heads") and experts.get("kv_lora_rank"):
        given.pop("num_kv_heads")
    choices = [
        _style(run, given, *choice) for choice in product((True, False), repeat=3) if not (experts and choice[2])
    ]
    params = run.number("params") or (run.number("params_b") or 0) * 1e9
    specs = [(penalty, ModelSpec.from_dict(fields | experts)) for penalty, fields in choices]
    return min(specs, key=lambda one: one[0] + (abs(one[1].num_parameters / params - 1) if params else 0))[1]


def _style(run: Run, given: dict[str, Any], gated: bool, tied: bool, gpt: bool) -> tuple[float, dict[str, Any]]:
    """How odd a choice is, and its fields. `gpt`: learned positions, biases, LayerNorm."""
    name, note, hidden = run.text("model").lower(), run.note, given["hidden"]
    likely_gated = any(word in name for word in GATED)
    if not likely_gated and not any(word in name for word in UNGATED):
        likely_gated = given.get("ffn") != 4 * hidden
    odd = PRIOR * (gated != likely_gated)
    if "untied emb" in note:
        odd += tied
    elif "tied emb" in note:
        odd += not tied
    else:
        odd += PRIOR / 10 * (tied == likely_gated)
    odd += PRIOR * (gpt == likely_gated)
    fields = given | {"gated": gated, "tied": tied}
    fields.setdefault("ffn", int(8 * hidden / 3) if gated else 4 * hidden)
    if gpt:
        fields |= {"positions": "learned", "norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    if not gated:
        fields |= {"activation": "gelu", "norm": "layer"}
    return odd, fields


def _experts(run: Run, given: dict[str, Any], known: ModelSpec | None) -> dict[str, Any]:
    """What the note says of experts and latent attention."""
    found: dict[str, Any] = {}
    layers = given.get("num_layers") or (known.num_layers if known else 0)
    if known is not None and known.first_dense_layers >= layers > 1:
        found["first_dense_layers"] = 1  # a model of which only a few layers are left
    for field, pattern in {
        "first_dense_layers": r"first (\d+) layers dense|(\d+) dense layer",
        "head_dim": r"head_dim (\d+)",
        "sliding_window": r"sliding window (\d+)",
    }.items():
        match = re.search(pattern, run.note)
        if match and (field != "first_dense_layers" or layers > 1):
            found[field] = int(next(group for group in match.groups() if group))
    if "first layer dense" in run.note:
        found["first_dense_layers"] = 1
    if "alternating sliding" in run.note:
        found["global_every"] = 2
    experts = run.found(r"MoE (\d+) (?:routed|experts)")
    if experts is None or known is not None:
        return {name: value for name, value in found.items() if name != "head_dim" or known is None}
    found |= {"num_experts": experts, "experts_per_token": run.found(r"top-?(\d+)") or 1}
    found["num_shared_experts"] = run.found(r"(\d+) shared") or 0
    found["expert_ffn"] = run.found(r"moe_ffn=(\d+)") or 0
    if "MLA" in run.note:
        usual = preset("deepseek-v3")
        found |= {name: getattr(usual, name) for name in LATENT}
        found["kv_lora_rank"] = run.found(r"kv_lora (\d+)") or usual.kv_lora_rank
        found["q_lora_rank"] = run.found(r"q_lora (\d+)") or usual.q_lora_rank
    return found
