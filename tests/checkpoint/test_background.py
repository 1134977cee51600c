"""Saves in the background: what is saved is the state of that step, a second save does not pile up, and what goes wrong
is said at the next step and loses nothing."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint import store
from shardwise.errors import UserError
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_plan
from shardwise.run.saving import Saver
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides({"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2,
                                      "head_dim": 8, "ffn": 48, "vocab": 67})  # fmt: skip
TRIAL = Trial()


def build(**layout: Any) -> tuple[Any, torch.optim.Optimizer]:
    engine = build_trial(SPEC, trial_plan(TRIAL, **layout), TRIAL, dist.get_rank(), torch.device("cpu"))
    optimizer = engine.optimizer(TRIAL.optimizer)
    for shard in engine.shards:
        optimizer.state[shard.local] = {"step": torch.tensor(1.0), "exp_avg": shard.local.detach() * 2}
    return engine, optimizer


def spoil(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """What the next steps do to the state, and more."""
    for shard in engine.shards:
        shard.local.detach().fill_(torch.nan)
        optimizer.state[shard.local]["exp_avg"].fill_(torch.nan)


def save_both_ways(folder: str) -> list[Any]:
    engine, optimizer = build(dp=2, zero=3)
    Saver(Path(folder) / "now", engine, optimizer).save(4, dict)
    said: list[str] = []
    with Saver(Path(folder) / "behind", engine, optimizer, background=True, say=said.append) as saver:
        going_on = Event()
        assert saver._thread is not None
        saver._thread.submit(going_on.wait)  # a disk that is slow
        started = [saver.save(4, dict)]
        spoil(engine, optimizer)
        started += [saver.save(5, dict), bool(saver.committed()), (Path(folder) / "behind/step-4").exists()]
        dist.barrier()
        going_on.set()
        saver.finish()
        return [*started, saver.committed(), said]


def test_a_save_in_the_background_is_of_its_own_step_and_a_second_one_is_left_out(ranks: Any, tmp_path: Path) -> None:
    line = "save     left out at step 5: the checkpoint before is still being written"
    assert ranks.run(save_both_ways, 2, str(tmp_path)) == [[True, False, False, False, [4], [line]]] * 2
    now, behind = (store.Checkpoint(tmp_path / way / "step-4", 4) for way in ("now", "behind"))
    behind.verify()
    for group in ("weights", "optimizer"):
        first, second = now.load(group), behind.load(group)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert [path.name for path in (tmp_path / "behind").iterdir()] == ["step-4"]


def save_onto_a_full_disk(folder: str, background: bool) -> tuple[str, list[str], list[str]]:
    """No file of this process may have more than a few kB, as of a user whose quota is used up."""
    engine, optimizer = build()
    parent = Path(folder)
    said = ""
    with Saver(parent, engine, optimizer, background=background) as saver:
        saver.save(1, dict)
        saver.finish()
        saver.committed()
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            saver.save(2, dict)
            saver.finish()
        except UserError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        left = [file.name for file in parent.glob(".step-*")]
        left += [] if [one.step for one in store.committed(parent)] == [1] else ["the good one is gone"]
        saver.save(3, dict, wait=True)  # there is room again
        saver.finish()
    return said, left, sorted(path.name for path in parent.iterdir())


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_full_disk_is_said_with_its_directory_and_loses_nothing(ranks: Any, tmp_path: Path, background: bool) -> None:
    [(said, left, there)] = ranks.run(save_onto_a_full_disk, 1, str(tmp_path), background)
    assert said.startswith(f"error: no room to write {tmp_path / 'step-2'}") and "File too large" in said
    assert not left, "what was written in part takes no room"
    assert there == ["step-3"]
    store.Checkpoint(tmp_path / "step-3", 3).verify()
