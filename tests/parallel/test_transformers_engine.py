"""The engine over models that transformers builds: every layout against transformers' own model in one process, in
fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign_models import KINDS, MODULES, write_model
from torch import Tensor

from shardwise.data.sequences import IGNORE
from shardwise.interop.huggingface.load_save import read_spec
from shardwise.optim.build import build_optimizer
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.collect import collect
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.generate import Sampling, generate_together
from shardwise.run.step import accumulate, update
from shardwise.spec.plan import Plan

CPU = torch.device("cpu")
TRIAL = Trial(global_batch=7, micro_batch=2, seq_len=12, clip=0.5)  # seven rows: ranks have different shares
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"dp": 2},
    "dp=2 zero=1": {"dp": 2, "zero": 1},
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "dp=4 zero=3 replicate=2": {"dp": 4, "zero": 3, "replicate": 2},
}
Found = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor], list[int]]


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: Any) -> None:
    ranks.preload(*MODULES)


@pytest.fixture(scope="module", params=["gpt_neox", "opt"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def truth(model_dir: Path) -> Found:
    """transformers and torch alone, the whole batch at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    optimizer = build_optimizer(TRIAL.optimizer, model.parameters())
    losses, norms, first = [], [], {}
    for step in range(1, TRIAL.num_steps + 1):
        batch = TRIAL.batch(read_spec(model_dir), step)
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        if step == 1:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), TRIAL.clip)))
        optimizer.step()
        optimizer.zero_grad()
    tokens = [5, 6, 7]
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return losses, norms, first, {name: p.detach() for name, p in model.named_parameters()}, tokens[3:]


def train(directory: Path, plan: Plan) -> Found:
    spec = read_spec(directory)
    engine = parallelize_decoder(spec, plan, dist.get_rank(), CPU, "auto", lambda model: model.read(directory))
    optimizer, clock = build_optimizer(TRIAL.optimizer, engine.locals()), Clock(CPU)
    losses, norms, first = [], [], {}
    for step in range(1, TRIAL.num_steps + 1):
        batch, num_targets = trial_batch(spec, plan, TRIAL, step, engine.mesh.at.dp)
        norm, finish = accumulate(engine, batch, num_targets, clock)
        losses.append(float(finish()[0]) / num_targets)
        norms.append(float(norm))
        if step == 1:
            first = collect(engine, lambda s: {} if s.gradient is None else {s.name: s.gradient.clone()})
        update(engine, optimizer, norm, lr=TRIAL.optimizer.lr, clip=TRIAL.clip, clock=clock)
    weights = collect(engine, lambda shard: {shard.name: shard.local.detach().clone()}, engine.buffers())
    return losses, norms, first, weights, generate_together(engine, [5, 6, 7], 4, Sampling(temperature=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_foreign_model_trains_as_in_one_process(layout: str, model_dir: Path, truth: Found, ranks: Any) -> None:
    plan = trial_plan(TRIAL, **LAYOUTS[layout])
    for losses, norms, _, _, tokens in ranks.run(train, plan.world, model_dir, plan):
        assert losses == pytest.approx(truth[0], abs=1e-9)
        assert norms == pytest.approx(truth[1], rel=1e-9)
        assert tokens == truth[4]
    assert min(truth[1]) > TRIAL.clip, "clipping is at work"


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=3", "dp=4 zero=3 replicate=2"])
def test_its_gradients_and_weights_too(layout: str, model_dir: Path, truth: Found, ranks: Any) -> None:
    plan = trial_plan(TRIAL, **LAYOUTS[layout])
    _, _, gradients, weights, _ = ranks.run(train, plan.world, model_dir, plan)[0]
    for found, right in ((gradients, truth[2]), (weights, truth[3])):
        assert {name.removeprefix("inner.") for name in found} == right.keys(), "tied weights and buffers once"
        for name, value in right.items():
            assert torch.allclose(found[f"inner.{name}"], value, rtol=1e-9, atol=1e-9), name


def test_blocks_and_parameters_are_counted(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for kind in KINDS:
        directory = write_model(kind, tmp_path / kind)
        spec, model = read_spec(directory), AutoModelForCausalLM.from_pretrained(directory)
        assert spec.num_parameters == model.num_parameters() and spec.num_layers == 3 and not spec.is_ours
