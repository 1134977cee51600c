"""Recomputation under what gathers parameters, and in modules that are not ours: collectives, losses, kept bytes."""

from __future__ import annotations

from typing import Any

import any_models
import torch
from observe import observe
from test_any_module import train

from shardwise import parallelize
from shardwise.memory.usage import saved_bytes
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.spec.presets import preset

MODES = ("full", "selective", "sqrt", "every-2")
SPEC = preset("tiny").with_overrides(
    {"num_layers": 9, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 64}
)


def test_no_mode_gathers_more_than_zero_3_does_anyway(ranks: Any) -> None:
    """A block that is computed again was gathered for its backward already. A group of blocks stays gathered from its
    second forward to its backward."""
    trial = Trial(global_batch=2, micro_batch=1, seq_len=8, precision="fp32")
    gathers = {}
    for mode in ("none", *MODES):
        plan = trial_plan(trial, dp=2, zero=3, recompute=mode)
        found = ranks.run(observe, 2, SPEC, plan, trial, timeout=120)[0]
        gathers[mode] = found.gathers
        names = [[name for name in look.gathered if name.startswith("layers.")] for look in found.looks]
        assert max(map(len, names)) == (3 if mode == "sqrt" else 2), mode
    assert set(gathers.values()) == {2 * 11 - 3}


# Modules that are not ours -------------------------------------------------------------------------------------------


def train_any(layouts: list[str]) -> dict[str, list[float]]:
    found = {}
    for layout in layouts:
        for name in ("untied", "neox"):
            done = train(name, layout, torch.float64, 1)
            found[f"{name} {layout}"] = [*done["losses"], *done["norms"], done["eval"]]
    return found


def test_modules_that_are_not_ours(ranks: Any) -> None:
    layouts = [f"dp=2{zero}{mode}" for zero in ("", " zero=3") for mode in ("", *(f" recompute={m}" for m in MODES))]
    found = ranks.run(train_any, 2, layouts, timeout=120)[0]
    for case, numbers in found.items():
        assert numbers == found[case.split(" recompute")[0]], case


def test_a_foreign_block_keeps_less() -> None:
    sizes = {}
    for mode in ("", *(f" recompute={mode}" for mode in MODES)):
        split = parallelize(any_models.neox(), f"dp=1{mode}", blocks="gpt_neox.layers")
        sizes[mode] = saved_bytes(split.module, torch.zeros(1, any_models.LENGTH, dtype=torch.long))
    assert sizes[" recompute=sqrt"] < sizes[" recompute=full"] < sizes[" recompute=selective"] < sizes[""]
