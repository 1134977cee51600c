"""A kind of layer is one record and one module: two kinds that nobody else has heard of are counted, planned, run, cut
and proven."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cluster.describe.read import read_cluster
from shardwise.errors import UserError
from shardwise.interop.huggingface.export import config_from_spec
from shardwise.memory.recompute import apply_recompute
from shardwise.memory.usage import saved_bytes
from shardwise.model import decoder
from shardwise.model.attention import Attention, AttentionInputs
from shardwise.model.attention_kernels import AttentionKernel
from shardwise.model.cache import KeyValueCache
from shardwise.model.initialize import initialize
from shardwise.plan.layouts.search import search
from shardwise.plan.prediction.activations import TokenShare, head_activation_bytes, kept_activations
from shardwise.plan.prediction.operations import layer_work
from shardwise.plan.prediction.predict import outside
from shardwise.plan.prediction.stack import OURS
from shardwise.plan.prediction.work import RankShape
from shardwise.prove import verify
from shardwise.spec import layers
from shardwise.spec.job import Job
from shardwise.spec.layers import AttentionKind, FeedForwardKind, TensorCut, Weight, impossible, linear
from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset, preset_names
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

# The records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputGateKind(AttentionKind):
    """Attention whose result is multiplied, channel by channel, by a gate of the layer's input."""

    name = "output-gate"
    trait = "output gates"
    fused = ()

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        channels = spec.num_heads * spec.head_dim
        gate = linear("g", channels, spec.hidden, TensorCut(0, spec.num_heads, spec.head_dim))
        return (*gate, *super().weights(spec))

    def kept(self, spec: ModelSpec) -> int:
        """The gate, and the product that is projected."""
        return super().kept(spec) + 2 * spec.num_heads * spec.head_dim

    def selected(self, spec: ModelSpec, compiled: bool) -> int:
        return super().selected(spec, compiled) + spec.num_heads * spec.head_dim


@dataclass(frozen=True)
class ReluSquaredKind(FeedForwardKind):
    """Two projections with the square of ReLU between them (Primer, arXiv 2109.08668)."""

    name = "relu-squared"
    fused = ()

    def check(self, spec: ModelSpec) -> None:
        if spec.gated or spec.mlp_bias:
            raise impossible("relu-squared with a gate or biases", "it has two matrices", "gated = false")


# The modules ----------------------------------------------------------------------------------------------------------


class OutputGate(Attention):
    def __init__(self, spec: ModelSpec, layer: LayerSpec, kernel: AttentionKernel):
        super().__init__(spec, layer, kernel)
        self.g = nn.Linear(spec.hidden, spec.num_heads * spec.head_dim, bias=False)

    def forward(self, x_BTD: Tensor, inputs: AttentionInputs) -> Tensor:
        gate_BTHC = self.g(x_BTD).sigmoid().unflatten(-1, (-1, self.head_dim))
        return super().forward(x_BTD, replace(inputs, attend=lambda *args: inputs.attend(*args) * gate_BTHC))


class ReluSquared(nn.Module):
    def __init__(self, spec: ModelSpec, ffn: int):
        super().__init__()
        self.up = nn.Linear(spec.hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, spec.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BTD)).square())


# Registered -----------------------------------------------------------------------------------------------------------


@contextmanager
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layers.ATTENTION, OutputGateKind.name, OutputGateKind())
        patch.setitem(layers.FEEDFORWARD, ReluSquaredKind.name, ReluSquaredKind())
        patch.setitem(decoder.ATTENTION, OutputGateKind.name, OutputGate)
        patch.setitem(decoder.FEEDFORWARD, ReluSquaredKind.name, ReluSquared)
        yield


@pytest.fixture(autouse=True)
def new_kinds() -> Iterator[None]:
    with registered():
        yield


NEW = {"attention_kind": "output-gate", "feedforward_kind": "relu-squared", "gated": False, "name": "new"}
CPU = torch.device("cpu")


def new(model: str = "tiny", **changes: object) -> ModelSpec:
    return preset(model).with_overrides(NEW | changes)


def test_it_is_counted() -> None:
    spec, plain = new("llama3-8b"), preset("llama3-8b")
    gates = spec.num_heads * spec.head_dim * spec.hidden
    assert spec.num_parameters - plain.num_parameters == spec.num_layers * (gates - spec.ffn * spec.hidden)
    more = spec.flops_per_token(1024) - plain.flops_per_token(1024)
    assert more == 6 * spec.num_layers * (gates - spec.ffn * spec.hidden)
    assert spec == ModelSpec.from_dict(spec.to_dict())


@pytest.mark.parametrize("name", ["new", *preset_names()])
def test_a_record_lists_exactly_the_parameters_of_its_module(name: str) -> None:
    spec = new() if name == "new" else preset(name).with_overrides({"num_layers": min(4, preset(name).num_layers)})
    with torch.device("meta"):
        model = decoder.Decoder(spec)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: weight.shape for name, weight in spec.weights.items()
    }
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_its_backward_needs_is_what_torch_saves(mode: str) -> None:
    spec = new()
    model = decoder.Decoder(spec)
    initialize(model, 0)
    apply_recompute(list(model.layers.values()), mode)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    counted = 512 * kept_activations(spec, spec.layers, mode, TokenShare(128)).between + head_activation_bytes(
        spec, 128, 4
    )
    assert counted == pytest.approx(saved_bytes(model, tokens, tokens), rel=0.01)


def test_it_is_planned() -> None:
    """Its matmuls are priced, and a plan for 16 GPUs is found."""
    spec = new("llama3-8b")
    work = layer_work(spec, spec.layers[0], RankShape(1, 512, 512, tp=2), OURS)
    assert (
        sum(p.flops for p in work.forward.matmuls)
        == 2 * 512 * sum(w.size for w in (*spec.attention_weights, *spec.feedforward_weights(spec.layers[0]))) / 2
    )
    job = Job(seq_len=4096, global_batch=256)
    best = search(spec, read_cluster("2x8xh100"), job, top=1)[0]
    assert sum(best.prediction.step.values()) > 0
    assert "output gates: no run with it" in outside(spec, read_cluster("2x8xh100"), best.plan)


def plan_of(**layout: object) -> Plan:
    values = dict(device="cpu", precision="bf16", seq_len=64, num_steps=9, threads_per_rank=1, reason="")
    return Plan(**values | dict(global_batch=8, micro_batch=2) | layout)  # type: ignore[arg-type]


def proof_of(spec: ModelSpec, plan: Plan, adapter: AdapterConfig) -> verify.Proof:
    """Runs on a rank."""
    with registered():
        return verify.prove(spec, plan, OptimizerConfig(), dist.get_rank(), CPU, adapter=adapter)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence": True},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 1, "tp": 2},
        {"pp": 2, "split": (3, 3)},
        {"cp": 2},
    ],
    ids=str,
)
def test_it_is_cut_exactly(ranks, layout: dict[str, object]) -> None:
    plan = plan_of(**layout)
    proofs = ranks.run(proof_of, plan.world, new(), plan, AdapterConfig())
    assert all(proof.holds and proof.largest < 1e-11 for proof in proofs)


def test_its_layers_have_adapters(ranks) -> None:
    adapter = AdapterConfig(kind="lora", rank=4, targets=("g", "up"))
    proofs = ranks.run(proof_of, 2, new(), plan_of(tp=2), adapter)
    assert all(proof.holds for proof in proofs)


def test_it_generates_with_a_cache() -> None:
    model = decoder.Decoder(new()).double()
    initialize(model, 0)
    tokens_BT = torch.arange(12)[None] * 7 % 256
    cache = KeyValueCache(12)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens_BT.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens_BT))


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(UserError, match="attention_kind = 'output-gates'"):
        new(attention_kind="output-gates")
    with pytest.raises(UserError, match="relu-squared with a gate"):
        new(gated=True)
    with pytest.raises(UserError, match="new has no Hugging Face form"):
        config_from_spec(new("llama3-8b"))
