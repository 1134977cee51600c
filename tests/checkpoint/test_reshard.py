"""Every layout's checkpoint goes on in every layout: each of twelve loads what each of the twelve has written.

One process trains two steps in fp64. Every layout loads that, writes its own checkpoint, and loads those of all others:
each element of weights, optimizer states and buffers must be the same bit by bit, so the losses of the next steps,
which every layout is asked for once, are those of every pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import store
from shardwise.parallel.collect import one_state, state_shapes
from shardwise.parallel.engine import Engine
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.saving import Saver
from shardwise.run.state import held_slices, restore_state
from shardwise.run.step import run_step
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SPEC = preset("tiny-moe").with_overrides(
    {"num_layers": 4, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 48, "expert_ffn": 16,
     "num_experts": 4, "vocab": 67, "router": "sigmoid-bias", "bias_update_rate": 0.01}
)  # fmt: skip
TRIAL = replace(Trial(), num_steps=4, global_batch=8, micro_batch=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "pp=2": {"pp": 2, "split": (1, 3)},
    "tp=2 sp": {"tp": 2, "sequence": True},
    "dp=4": {"dp": 4},
    "dp=4 zero=1": {"dp": 4, "zero": 1},
    "dp=4 zero=3 replicate=2": {"dp": 4, "zero": 3, "replicate": 2},
    "tp=4": {"tp": 4},
    "dp=2 cp=2 zero=2": {"dp": 2, "cp": 2, "zero": 2},
    "dp=2 zero=2 pp=2": {"dp": 2, "zero": 2, "pp": 2, "split": (3, 1)},
    "tp=2 pp=2": {"tp": 2, "pp": 2, "split": (2, 2)},
    "dp=4 zero=3 ep=2": {"dp": 4, "zero": 3, "ep": 2},
}


def build(name: str) -> tuple[Engine, torch.optim.Optimizer]:
    plan = trial_plan(TRIAL, **LAYOUTS[name])
    engine = build_trial(SPEC, plan, TRIAL, dist.get_rank(), CPU)
    return engine, engine.optimizer(TRIAL.optimizer)


def train(engine: Engine, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    found = []
    for step in steps:
        batch, targets = trial_batch(SPEC, engine.mesh.plan, TRIAL, step, engine.mesh.at.dp)
        words = {"num_targets": targets, "lr": 1e-3, "clip": TRIAL.clip, "clock": Clock(CPU)}
        found.append(run_step(engine, optimizer, batch, **words).loss)
    return found


def begin(folder: str) -> list[float]:
    engine, optimizer = build("one process")
    train(engine, optimizer, 1, 2)
    Saver(Path(folder) / "begun", engine, optimizer).save(2, dict)
    return train(engine, optimizer, 3, 4)


def write_each(folder: str, names: list[str]) -> None:
    for name in names:
        engine, optimizer = build(name)
        restore_state(engine, optimizer, store.Checkpoint(Path(folder) / "begun" / "step-2", 2))
        Saver(Path(folder) / name, engine, optimizer).save(2, dict)
        dist.barrier()


def held(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Name, elements and offsets of all that a rank holds, read from the engine and the optimizer anew."""
    for shard in engine.shards:
        yield shard.name, shard.value, shard.offsets
        for key, (shape, _) in state_shapes(optimizer, shard).items():
            at = shard.offsets if shape == shard.local.shape else ()
            yield f"{key}/{shard.name}", one_state(optimizer, shard, key), at
    for name, value in engine.buffers().items():
        yield name, value, (0,) * value.ndim


def load_each(folder: str, names: list[str], losses: list[float]) -> list[str]:
    """What differs from the checkpoint of one process: nothing, after any load into any of these layouts."""
    begun = store.Checkpoint(Path(folder) / "begun" / "step-2", 2)
    truth = begun.load("weights") | begun.load("optimizer")
    wrong = []
    for name in names:
        engine, optimizer = build(name)
        for source in LAYOUTS:
            for shard in engine.shards:
                shard.local.detach().fill_(torch.nan)
            for state in optimizer.state.values():
                for value in state.values():
                    value.fill_(torch.nan)
            read = restore_state(engine, optimizer, store.Checkpoint(Path(folder) / source / "step-2", 2))
            num_held, needed = 0, 0
            for key, value, offsets in held(engine, optimizer):
                box = truth[key]
                for dim, (start, extent) in enumerate(zip(offsets, value.shape, strict=True)):
                    box = box.narrow(dim, start, extent)
                num_held, needed = num_held + 1, needed + value.nbytes
                if not torch.equal(value, box):
                    wrong.append(f"{key} in {name} from {source}")
            # Columns that are cut from short rows are read with what lies between them.
            most = needed * (4 if "tp" in name or "ep" in name else 1) + 10_000
            if num_held < 30 or read > most:
                wrong.append(f"{name} from {source}: {num_held} tensors, {read} bytes read for {needed}")
        found = train(engine, optimizer, 3, 4)
        if found != pytest.approx(losses, abs=1e-9):
            wrong.append(f"losses in {name}: {found} instead of {losses}")
    return wrong


def test_each_of_twelve_layouts_goes_on_from_each(ranks: Any, tmp_path: Path) -> None:
    by_world: dict[int, list[str]] = {}
    for name, layout in LAYOUTS.items():
        by_world.setdefault(trial_plan(TRIAL, **layout).world, []).append(name)
    [losses] = ranks.run(begin, 1, str(tmp_path))
    for world, names in by_world.items():
        ranks.run(write_each, world, str(tmp_path), names)
    begun = store.Checkpoint(tmp_path / "begun" / "step-2", 2).manifest()
    for name in LAYOUTS:
        manifest = store.Checkpoint(tmp_path / name / "step-2", 2).manifest()
        for group in ("weights", "optimizer"):  # whole, and nothing twice
            sizes = {key: (one.shape, one.dtype) for key, one in begun.tensors(group).items()}
            assert {key: (one.shape, one.dtype) for key, one in manifest.tensors(group).items()} == sizes
        stored = sum(about.bytes for file, about in manifest.files.items() if file.startswith("optimizer"))
        whole = begun.files["optimizer.safetensors"].bytes
        assert stored <= whole + 40_000 * len(manifest.files), f"{name} writes {stored} bytes of {whole}"
    for world, names in by_world.items():
        for wrong in ranks.run(load_each, world, str(tmp_path), names, losses, timeout=120):
            assert not wrong, "\n".join(wrong[:5])


def shares(folder: str) -> list[int]:
    """Bytes that this rank writes of a model that all hold whole."""
    engine, optimizer = build("dp=4")
    saver = Saver(Path(folder), engine, optimizer)
    shared, _ = saver._share_out()
    assert len(held_slices(engine, optimizer)) > 20
    return [sum(task.slice.nbytes for task in shared.tasks if task.writer == rank) for rank in range(4)]


def test_replicas_share_the_writing_evenly(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(shares, 4, str(tmp_path))
    assert all(one == found[0] for one in found), "every rank comes to the same answer"
    assert max(found[0]) <= 1.05 * sum(found[0]) / 4


def write_from_two_nodes(folder: str) -> tuple[list[bool], int]:
    """Ranks 2 and 3 do not see the run's directory; they hold the second half of the layers."""
    at_head = dist.get_rank() < 2
    run = Path(folder) / ("run" if at_head else "mirror")
    engine, optimizer = build("dp=2 zero=2 pp=2")
    restore_state(engine, optimizer, store.Checkpoint(Path(folder) / "begun" / "step-2", 2))
    saver = Saver(run / "checkpoints", engine, optimizer)
    saver.save(2, dict)
    dist.barrier()
    return saver.sees, len(list((run / "checkpoints").iterdir()))


def test_ranks_that_do_not_see_the_directory_send_their_slices_to_those_that_do(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "mirror" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mirror" / ".mirror").write_text("run")
    ranks.run(begin, 1, str(tmp_path))
    found = ranks.run(write_from_two_nodes, 4, str(tmp_path))
    assert found == [([True, True, False, False], number) for number in (1, 1, 0, 0)]
    begun, sent = (store.Checkpoint(tmp_path / place / "step-2", 2) for place in ("begun", "run/checkpoints"))
    sent.verify()
    assert len(sent.manifest().files) > 4
    for group in ("weights", "optimizer"):
        truth, loaded = begun.load(group), sent.load(group)
        assert loaded.keys() == truth.keys() and all(torch.equal(loaded[name], truth[name]) for name in truth)
