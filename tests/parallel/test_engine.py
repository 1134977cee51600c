"""The engine beside training losses: gradient norms and clipping, evaluation, generation, padding, expert counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.loader import TensorBatch, cut_microbatches
from shardwise.data.sequences import IGNORE
from shardwise.model.decoder import Decoder
from shardwise.model.experts import MixtureOfExperts
from shardwise.model.initialize import initialize
from shardwise.parallel.collect import collect
from shardwise.prove.reference import Trial, plain_gradients
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.evaluate import plain_sums
from shardwise.run.generate import Sampling, generate, generate_together
from shardwise.run.step import accumulate
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
SPECS = {
    "untied": preset("tiny").with_overrides(SMALL),
    "tied": preset("tiny").with_overrides(SMALL | {"tied": True}),
    "experts": preset("tiny-moe").with_overrides(SMALL | {"num_experts": 4, "aux_loss_coef": 0.1}),
}
TRIAL = Trial(global_batch=5, micro_batch=1, seq_len=12, documents=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"dp": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "dp=4 zero=1 replicate=2": {"dp": 4, "zero": 1, "replicate": 2},
    "tp=4": {"tp": 4},
    "tp=2 sp": {"tp": 2, "sequence": True},
    "dp=2 ep=2": {"dp": 2, "ep": 2},
    "dp=2 zero=3 tp=2 sp ep=4": {"dp": 2, "zero": 3, "tp": 2, "sequence": True, "ep": 4},
    "cp=2 ring": {"cp": 2},
    "zero=2 cp=2 ulysses": {"cp": 2, "cp_kind": "ulysses", "zero": 2},
    "tp=2 sp cp=2 ring": {"tp": 2, "sequence": True, "cp": 2},
    "cp=2 ring pp=2": {"cp": 2, "pp": 2},
    "pp=3": {"pp": 3},
    "pp=2 zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "dp=2 zero=2 pp=2 interleaved": {"dp": 2, "zero": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "tp=2 sp pp=2 zero-bubble": {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero-bubble"},
}


def make_plan(layout: str, trial: Trial = TRIAL) -> Plan:
    fields = dict(LAYOUTS[layout])
    if fields.get("pp", 1) > 1:
        fields["split"] = even_split(SMALL["num_layers"], fields["pp"] * fields.get("virtual_stages", 1))
    return trial_plan(trial, **fields)


def plain_model(spec: ModelSpec) -> Decoder:
    model = Decoder(spec).double()
    initialize(model, TRIAL.seed)
    return model


# One engine for each layout and model, which all tests look at -------------------------------------------------------

PROMPT, SAMPLING = [5, 17, 3, 40, 41], Sampling(temperature=1.5, top_p=0.9, seed=3)


@dataclass(frozen=True)
class Looked:
    """What one rank saw."""

    evaluated: list[float]  # of all ranks
    tokens: list[int]
    is_training: bool  # after a generation
    norm: float
    gradients: dict[str, Tensor]
    counts: dict[str, Tensor]


def look(spec: ModelSpec, plan: Plan, largest_norm: float, num_tokens: int = 0) -> Looked:
    """Evaluates, generates, and then does a step; the first two leave nothing behind that the step would show."""
    engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
    engine.train(False)
    sums = engine.evaluate(trial_batch(spec, plan, TRIAL, 7, engine.mesh.at.dp)[0].microbatches)
    dist.all_reduce(sums)
    engine.train(True)
    tokens = generate_together(engine, PROMPT, num_tokens, SAMPLING, frozenset()) if num_tokens else []
    is_training = all(model.training for model in engine.models)
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    norm, *_ = accumulate(engine, batch, num_targets, Clock(CPU))
    counts = {
        name: module.tokens_per_expert.clone()
        for model in engine.models
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    factor = engine.factor(norm, largest_norm)
    if factor is not None:
        engine.multiply(factor)
    gradients = collect(engine, lambda s: {} if s.gradient is None else {s.name: s.gradient.clone()})
    return Looked(sums.tolist(), tokens, is_training, float(norm), gradients, counts)


def generating_model(plan: Plan) -> str:
    """One for each layout is enough: a token is a pass."""
    return "experts" if plan.ep > 1 else "tied"


@pytest.fixture(scope="module")
def looked(ranks: Any) -> Any:
    @cache
    def run(layout: str, model: str) -> list[Looked]:
        plan = make_plan(layout)
        num_tokens = 12 * (model == generating_model(plan))
        return ranks.run(look, plan.world, SPECS[model], plan, true_norm(model) / 3, num_tokens)

    return run


# Norm and clipping ---------------------------------------------------------------------------------------------------


def true_norm(name: str) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in true_gradients(name).values()))


@cache
def true_gradients(name: str) -> dict[str, Tensor]:
    model, batch = plain_model(SPECS[name]), TRIAL.batch(SPECS[name], 1)
    plain_gradients(model, cut_microbatches(batch, 5), int((batch.targets != IGNORE).sum()), "fp64")
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model", ["untied", "tied", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_and_clipping_are_global(layout: str, model: str, looked: Any) -> None:
    """A tied weight on two stages, a replicated vector, a key-value head on two ranks: all count once."""
    truth, norm = true_gradients(model), true_norm(model)
    found = looked(layout, model)
    assert [rank.norm for rank in found] == pytest.approx([norm] * len(found), rel=1e-12)
    gradients = found[0].gradients
    assert gradients.keys() == truth.keys()
    for name, gradient in truth.items():
        assert torch.allclose(gradients[name], gradient / 3, rtol=1e-5, atol=0), name  # clipping adds 1e-6 to the norm
        assert torch.allclose(gradients[name], gradient * (norm / 3) / (norm + 1e-6), rtol=1e-9, atol=1e-15), name


def test_a_small_norm_is_not_clipped(ranks: Any) -> None:
    truth, plan = true_gradients("untied"), make_plan("dp=2 zero=3")
    gradients = ranks.run(look, 2, SPECS["untied"], plan, 1e6)[0].gradients
    for name, gradient in truth.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-15), name


# Evaluation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_equals_plain_evaluation(layout: str, model: str, looked: Any) -> None:
    spec = SPECS[model]
    with torch.no_grad():
        truth = plain_sums(plain_model(spec).eval())([TRIAL.batch(spec, 7)]).tolist()
    for rank in looked(layout, model):
        assert rank.evaluated == pytest.approx(truth, rel=1e-11)


# Generation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_gives_the_same_tokens(layout: str, looked: Any) -> None:
    model = generating_model(make_plan(layout))
    truth = list(generate(plain_model(SPECS[model]), PROMPT, 12, SAMPLING))
    assert len(truth) == 12 and len(set(truth)) > 3
    assert all(rank.tokens == truth and rank.is_training for rank in looked(layout, model))


def generated(spec: ModelSpec, plan: Plan, sampling: Sampling, stop: frozenset[int]) -> tuple[list[int], bool]:
    engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
    tokens = generate_together(engine, PROMPT, 12, sampling, stop)
    return tokens, all(model.training for model in engine.models)


def test_generation_stops_on_all_ranks_together(ranks: Any) -> None:
    spec, plan, sampling = SPECS["untied"], make_plan("pp=3"), Sampling(temperature=1.5, seed=1)
    truth = list(generate(plain_model(spec), PROMPT, 12, sampling))
    stop = frozenset(truth[4:5])
    wanted = truth[: truth.index(truth[4])]
    assert ranks.run(generated, plan.world, spec, plan, sampling, stop) == [(wanted, True)] * plan.world


# Padding and experts -------------------------------------------------------------------------------------------------


def test_ranks_have_equally_many_microbatches() -> None:
    """Five rows over two ranks: three and two micro-batches, so one without targets keeps step."""
    spec, plan = SPECS["untied"], make_plan("dp=2")
    (first, total), (second, same) = (trial_batch(spec, plan, TRIAL, 1, index) for index in range(2))
    assert [len(batch.microbatches) for batch in (first, second)] == [3, 3]
    assert total == same == first.num_targets + second.num_targets
    padding = second.microbatches[-1]
    assert padding.tokens.shape == (1, TRIAL.seq_len) and bool((padding.targets == IGNORE).all())
    assert padding.documents is not None and padding.documents.shape == padding.tokens.shape


def test_rows_that_fill_a_pipelines_shape_have_no_targets() -> None:
    rows = TensorBatch(torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64), None)
    parts = cut_microbatches(rows, 2, at_least=3, same_shape=True)
    assert [tuple(part.tokens.shape) for part in parts] == [(2, 4)] * 3
    assert [int((part.targets != IGNORE).sum()) for part in parts] == [8, 4, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_not_counted_by_routers(layout: str, looked: Any) -> None:
    spec = SPECS["experts"]
    model, batch = plain_model(spec), TRIAL.batch(spec, 1)
    model(batch.tokens, batch.targets, documents_BT=batch.documents)
    truth = {f"layers.{index}.feedforward": model.layers[str(index)].feedforward.tokens_per_expert for index in (1, 3)}
    found = [rank.counts for rank in looked(layout, "experts")]
    assert {name for counts in found for name in counts} == truth.keys()
    assert all(torch.equal(value, truth[name]) for counts in found for name, value in counts.items())
