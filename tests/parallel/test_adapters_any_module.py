"""Adapters on modules that are not ours: through `parallelize` and on models of transformers, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from any_models import LR, STEPS, batch, build, loss_sum
from foreign_models import MODULES, write_model

from shardwise import UserError, parallelize
from shardwise.interop.huggingface.load_save import read_spec
from shardwise.optim.build import build_optimizer
from shardwise.parallel.apply import parallelize_decoder
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.schema import AdapterConfig

CPU = torch.device("cpu")
LAYOUTS = ["dp=2", "dp=2 zero=2", "dp=2 zero=3"]
TRIAL = Trial(global_batch=6, micro_batch=2, seq_len=12)


def train_any(kind: str, layouts: list[str]) -> list[tuple[list[float], int]]:
    """Losses, and the numbers that the optimizer moves."""
    found = []
    for layout in layouts:
        adapter = AdapterConfig(kind=kind, rank=2, targets=("mix",), train_also=("norm",))
        split = parallelize(build("untied", torch.float64), layout, blocks="body.blocks", adapter=adapter)
        trained = [p for p in split.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR)
        losses = []
        for step in range(STEPS):
            rows = batch(step).chunk(split.world, dim=1)[split.rank]
            losses.append(split.gradients(list(rows.split(2, dim=1)), loss_sum, clip=0.7).loss)
            optimizer.step()
        found.append((losses, sum(p.numel() for p in trained)))
    return found


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_parallelize_trains_adapters(kind: str, ranks: Any) -> None:
    [(truth, trained)] = ranks.run(train_any, 1, kind, ["dp=1"])[0]
    assert trained == 3 * (2 * (11 + 11) + 22)
    for losses, _ in ranks.run(train_any, 2, kind, LAYOUTS)[0]:
        assert losses == pytest.approx(truth, abs=1e-9)
    assert truth[0] != truth[-1]


def train_foreign(directory: Path, kind: str, layouts: list[dict[str, int]]) -> list[tuple[list[float], set[str]]]:
    spec, found = read_spec(directory), []
    adapter = AdapterConfig(kind=kind, rank=2, targets=("query_key_value", "dense_4h_to_h"))
    for fields in layouts:
        plan = trial_plan(TRIAL, **fields)
        engine = parallelize_decoder(
            spec, plan, dist.get_rank(), CPU, "auto", lambda m: m.read(directory), adapter=adapter
        )
        optimizer, clock, losses = build_optimizer(TRIAL.optimizer, engine.locals()), Clock(CPU), []
        for step in range(1, 4):
            micro, num_targets = trial_batch(spec, plan, TRIAL, step, engine.mesh.at.dp)
            norm, finish = accumulate(engine, micro, num_targets, clock)
            losses.append(float(finish()[0]) / num_targets)
            update(engine, optimizer, norm, lr=1e-2, clip=0.5, clock=clock)
        found.append((losses, {shard.name for shard in engine.shards if shard.local.requires_grad}))
    return found


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_foreign_model_trains_adapters(kind: str, tmp_path: Path, ranks: Any) -> None:
    ranks.preload(*MODULES)
    directory = write_model("gpt_neox", tmp_path / "neox")
    [(truth, names)] = ranks.run(train_foreign, 1, directory, kind, [{}])[0]
    assert len(names) == 3 * 2 * 2 and all(".lora_" in name for name in names)
    for losses, _ in ranks.run(train_foreign, 2, directory, kind, [{"dp": 2}, {"dp": 2, "zero": 3}])[0]:
        assert losses == pytest.approx(truth, abs=1e-9)


def test_a_target_that_the_module_does_not_have_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        parallelize(build("untied", torch.float32), "dp=1", "body.blocks", adapter=AdapterConfig(kind="lora"))
    what, why, fix = str(caught.value).splitlines()
    assert what == "error: adapter.targets: `q` matches no linear layer of Handmade"
    assert "mix" in why and "`mix`" in fix


def test_dropout_needs_our_own_decoder() -> None:
    adapter = AdapterConfig(kind="lora", targets=("mix",), dropout=0.1)
    with pytest.raises(UserError, match=r"adapter.dropout is not possible"):
        parallelize(build("untied", torch.float32), "dp=1", "body.blocks", adapter=adapter)


def test_a_block_that_reads_weights_itself_is_refused() -> None:
    module = torch.nn.Sequential()
    module.layers = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(8, 2, 16)])
    with pytest.raises(UserError, match=r"layers.0.linear1 cannot have an adapter"):
        parallelize(module, "dp=1", "layers", adapter=AdapterConfig(kind="lora", targets=("linear1",)))
