"""Compiled blocks compute what plain ones do: their graphs, run with plain kernels, in every model and layout; real
kernels once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SMALL = {"num_layers": 3, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 53}
MODELS = {
    "llama": preset("tiny").with_overrides(SMALL),
    "gpt2": preset("gpt2").with_overrides({**SMALL, "num_kv_heads": 4, "max_seq_len": 64}),
    "gemma": preset("gemma2-2b").with_overrides({**SMALL, "sliding_window": 8, "query_scale_dim": 8}),
}
TRIAL = Trial(global_batch=4, micro_batch=2, seq_len=16)


def difference(found: Record, truth: Record) -> float:
    """The largest, of losses and norms over three steps, and of gradients over each tensor's largest. Biases of keys
    have none but noise."""
    pairs = zip([*found.losses, *found.norms], [*truth.losses, *truth.norms], strict=True)
    assert found.gradients.keys() == truth.gradients.keys()
    there = {name: g for name, g in truth.gradients.items() if g.abs().max() > 1e-12}
    apart = (float((found.gradients[name] - g).abs().max() / g.abs().max()) for name, g in there.items())
    return max(*(abs(a - b) / abs(b) for a, b in pairs), *apart)


def alone(spec: ModelSpec, plan: Plan) -> tuple[Record, int]:
    torch._dynamo.reset()
    counters.clear()
    record = train_in_layout(spec, plan, TRIAL, 0, CPU)
    return record, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", MODELS)
def test_graphs_compute_what_blocks_do(name: str) -> None:
    spec = MODELS[name]
    found, num_graphs = alone(spec, trial_plan(TRIAL, compile="trace"))
    assert difference(found, train_plain(spec, TRIAL)) < 1e-12
    kinds = {(layer.window is None or layer.window >= TRIAL.seq_len) for layer in spec.layers}
    assert num_graphs == len(kinds), "one graph for each kind of block, however many there are"


@pytest.mark.parametrize("name", MODELS)
def test_fused_matmuls(name: str) -> None:
    """With biases in gpt2, which has no gate."""
    spec = MODELS[name]
    found = train_in_layout(spec, trial_plan(TRIAL, fuse=True), TRIAL, 0, CPU)
    assert difference(found, train_plain(spec, TRIAL)) < 1e-12


@pytest.mark.parametrize(
    "name, recompute", [("llama", "full"), ("llama", "selective"), ("llama", "sqrt"), ("gemma", "selective")]
)
def test_recomputation(name: str, recompute: str) -> None:
    """gemma's attention is plain: its matmuls of scores are computed again too."""
    found, _ = alone(MODELS[name], trial_plan(TRIAL, compile="trace", recompute=recompute))
    assert difference(found, train_plain(MODELS[name], TRIAL)) < 1e-12


def in_layout(spec: ModelSpec, plan: Plan) -> Record:
    torch._dynamo.reset()
    return train_in_layout(spec, plan, TRIAL, dist.get_rank(), CPU)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"pp": 2, "split": (1, 2)},
        {"tp": 2, "sequence": True},
        {"cp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_layouts(layout: dict[str, Any], ranks: Any) -> None:
    spec, plan = MODELS["llama"], trial_plan(TRIAL, compile="trace", **layout)
    assert difference(ranks.run(in_layout, 2, spec, plan)[0], train_plain(spec, TRIAL)) < 1e-12
