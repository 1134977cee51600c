"""Runs that meet batches whose loss is not a number: all ranks skip the same updates, or go back together, and pass
over the same batches, then and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import losses_of
from guarded import prepare_run, run_rank, skip_on_one_rank
from ranks import RankPool

from shardwise.errors import Exit, UserError
from shardwise.run.non_finite import NonFinite
from shardwise.run.passed_over import PassedOver, batches_in
from shardwise.run.rundir import RunDir
from shardwise.run.spikes import Spikes
from shardwise.run.step import StepResult


def journal_of(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.passed_over.read_text().splitlines()]


def trained(ranks: RankPool, name: str, world: int, batches: tuple[int, ...], *words: str) -> tuple[RunDir, str]:
    run = prepare_run(name, world, *words)
    found = ranks.run(run_rank, world, str(run.path.resolve()), batches, timeout=120)
    assert {code for code, _ in found} == {Exit.DONE}, found[0][1]
    return run, found[0][1]


@pytest.fixture
def undisturbed(ranks: RankPool, workdir: Path) -> dict[int, float]:
    """The losses of one process that has passed over batch 5 from its start, as its journal says."""
    run = prepare_run("undisturbed", 1)
    run.passed_over.write_text('{"batches": [5]}\n')
    found = ranks.run(run_rank, 1, str(run.path.resolve()), (5,), timeout=120)
    assert found[0][0] == Exit.DONE, found[0][1]
    return losses_of(run.path)


def test_every_layout_goes_back_and_passes_over_the_batch(ranks: RankPool, undisturbed: dict[int, float]) -> None:
    """The steps that are made again, and all after them, are those of a run that never saw the batch."""
    for layout in ("dp=2", "dp=2 zero=3", "tp=2 sp", "pp=2"):
        words = [f"parallel.layout={layout}", *(["speed.results=late"] if layout == "dp=2" else [])]
        run, said = trained(ranks, layout.replace(" ", "-"), 2, (5,), *words)
        assert losses_of(run.path) == pytest.approx(undisturbed, abs=1e-9), layout
        assert "back     from step 5 to the checkpoint of step 3: the loss is not a number" in said, layout
        (line,) = journal_of(run)
        assert (line["batches"], line["step"], line["back_to"]) == ([5], 5, 3)
    assert run.last_event()["event"] == "finished"  # type: ignore[index]


def test_a_loss_spike_is_gone_back_before_or_told_of(ranks: RankPool, workdir: Path) -> None:
    """With the batches of its three steps and the one before it passed over, as they are by a run that never saw it."""
    words, batches = ["train.steps=42", "checkpoint.keep=3"], (-36, -37, -38)
    run, said = trained(ranks, "spike", 2, batches, *words, "run.on_spike=rollback", "parallel.layout=pp=2")
    assert "back     from step 38 to the checkpoint of step 33: a loss spike, " in said
    assert "resume " not in said  # it is no other process
    assert [line["batches"] for line in journal_of(run)] == [[35, 36, 37, 38]]
    told, said = trained(ranks, "told", 1, batches, *words)
    assert "spike    step 38: a loss spike, " in said and not told.passed_over.exists()
    with_journal = prepare_run("never", 1, *words)
    with_journal.passed_over.write_text(run.passed_over.read_text())
    found = ranks.run(run_rank, 1, str(with_journal.path.resolve()), batches, timeout=120)
    assert found[0][0] == Exit.DONE and "spike " not in found[0][1]
    assert losses_of(run.path) == pytest.approx(losses_of(with_journal.path), abs=1e-9)


def test_skipped_updates_and_three_in_a_row(ranks: RankPool, workdir: Path) -> None:
    """One is left out, and its step counts; the third in a row makes the run go back before the first of them."""
    run, said = trained(ranks, "skips", 2, (2, 5, 6, 7), "parallel.layout=dp=2", "run.on_nan=skip")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("skipped")] == [2, 5, 6, 7]
    assert said.count("no rank made the update") == 4
    assert [(line["batches"], line["step"], line["back_to"]) for line in journal_of(run)] == [([5, 6, 7], 7, 3)]
    assert [line["step"] for line in lines if line.get("event") == "resumed"] == [3]
    assert (run.checkpoints / "abandoned-step-6").is_dir()
    losses = losses_of(run.path)
    assert list(losses) == list(range(1, 10)) and all(losses[step] is not None for step in (4, 5, 6, 7, 8, 9))


def test_all_ranks_skip_what_one_of_them_found(ranks: RankPool) -> None:
    """A gradient that is damaged on one rank alone, behind the sum over ranks: parameters and states keep their bits,
    also those that balance experts."""
    for is_same, skipped, moved in ranks.run(skip_on_one_rank, 2):
        assert skipped == [False, True, False] and is_same and moved


def test_a_step_that_is_never_finite_ends_the_run(ranks: RankPool, workdir: Path) -> None:
    """Before there is a checkpoint at once, and with one after going back to it three times."""
    run = prepare_run("hopeless", 2, "parallel.layout=dp=2")
    found = ranks.run(run_rank, 2, str(run.path.resolve()), (2,), timeout=120)
    assert [code for code, _ in found] == [Exit.DIVERGED] * 2
    assert "not gone back to a checkpoint: there is no good checkpoint of before" in found[0][1]
    assert not run.passed_over.exists() and not any(run.checkpoints.iterdir())
    run = prepare_run("again", 2, "parallel.layout=dp=2")
    found = ranks.run(run_rank, 2, str(run.path.resolve()), (4, 5, 6, 7), timeout=120)
    assert [code for code, _ in found] == [Exit.DIVERGED] * 2
    assert "it happened again after going back to step 3 3 times" in found[0][1]
    assert [line["batches"] for line in journal_of(run)] == [[4], [5], [6]]


def test_a_stream_is_read_anew_from_the_checkpoint(ranks: RankPool, workdir: Path) -> None:
    """Text that is tokenised while training, in its own order: the poisoned batch is read and dropped, now and by a run
    whose journal has it from the start; a resumed run goes on behind it."""
    rows = [f"row {number} of many, each with enough words to fill a sequence" for number in range(120)]
    rows[22] = chr(0x1F600) * 16  # begins with the poison in UTF-8, as nothing else here
    Path("rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    words = ["data.source=rows.jsonl", "data.streaming=true", "data.shuffle_buffer=0", "data.held_out=8"]
    losses = []
    for name, journal in (("stream", False), ("never", True)):
        run = prepare_run(name, 1, *words)
        if journal:
            run.passed_over.write_text(Path("runs/stream/passed-over.jsonl").read_text())
        [(code, said)] = ranks.run(run_rank, 1, str(run.path.resolve()), None, timeout=120)
        assert code == Exit.DONE and ("back     from step" in said) is not journal, said
        losses.append(losses_of(run.path))
    assert losses[0] == losses[1] and len(losses[0]) == 9


# Spikes --------------------------------------------------------------------------------------------------------------


def spikes_in(losses: list[float], norms: list[float] | None = None) -> list[tuple[int, int, tuple[int, ...]]]:
    guard, found = Spikes(), []
    for step, loss in enumerate(losses, 1):
        if trouble := guard.look(step, StepResult(loss, 0.0, 0.0, norms[step - 1] if norms else 1.0)):
            guard.goes_on()
            found.append((trouble.step, trouble.newest, trouble.steps))
    return found


def test_a_spike_is_three_high_steps_in_a_row() -> None:
    calm = [3.0 + 0.02 * (step % 5) for step in range(40)]
    assert spikes_in([*calm, 5.0, 5.0, *calm]) == []
    assert spikes_in([*calm, 5.0, 5.0, 5.0, *calm]) == [(43, 39, (40, 41, 42, 43))]
    assert spikes_in([*calm[:31], 5.0, 5.0, 5.0]) == []  # too early to say
    norms = [1.0] * 40 + [30.0] * 3
    assert spikes_in([*calm, *calm[:3]], norms) == [(43, 39, (40, 41, 42, 43))]
    assert spikes_in([*calm, *[3.2] * 30]) == []  # less than a tenth
    assert spikes_in([*calm, *[5.0] * 200]) == [(43, 39, (40, 41, 42, 43))]  # once: then it is usual


def test_ten_thousand_steps_without_a_spike_have_none() -> None:
    """Heavy tails (Student's t with three degrees of freedom), a loss that falls and wanders, norms that grow."""
    draw = np.random.default_rng(0)
    steps = np.arange(10_000)
    losses = 2.0 + 6.0 * np.exp(-steps / 300) + 0.03 * draw.standard_t(3, 10_000) + 0.1 * np.sin(steps / 150)
    norms = 0.3 + np.minimum(steps / 1000, 2.0) + 0.2 * np.abs(draw.standard_t(3, 10_000))
    assert spikes_in(losses.tolist(), norms.tolist()) == []


# What is passed over -------------------------------------------------------------------------------------------------


def test_steps_train_on_the_batches_that_are_left() -> None:
    passed = PassedOver([2, 3, 7])
    assert [passed.number(step) for step in range(8)] == [0, 1, 4, 5, 6, 8, 9, 10]
    before = [passed.number(step) for step in range(4)]
    passed.batches |= {8, 9}  # behind what those steps were trained on
    assert [passed.number(step) for step in range(7)] == [*before, 6, 10, 11]


def test_a_journal_is_read_to_its_last_whole_line_and_refused_when_damaged(tmp_path: Path) -> None:
    journal = tmp_path / "passed-over.jsonl"
    assert not batches_in(journal)
    PassedOver().add([4, 5], journal, {"step": 5}, writes=True)
    PassedOver().add([9], journal, {"step": 9}, writes=True)
    PassedOver().add([99], journal, {"step": 9}, writes=False)
    assert batches_in(journal) == [4, 5, 9]
    with open(journal, "a") as file:
        file.write('{"step": 12, "batches": [1')  # the process was killed here
    assert batches_in(journal) == [4, 5, 9]
    journal.write_text("nonsense\n" + journal.read_text())
    with pytest.raises(UserError, match="is damaged"):
        batches_in(journal)


@pytest.mark.parametrize(("on_nan", "found"), [("rollback", [4, 6, 7, 8]), ("stop", [4, 6, 7, 8]), ("skip", [8])])
def test_which_steps_are_trouble(on_nan: str, found: list[int]) -> None:
    guard, nan = NonFinite(on_nan), float("nan")
    losses = {1: 2.0, 2: 2.1, 3: 1.0, 4: nan, 5: 2.0, 6: nan, 7: float("inf"), 8: nan, 9: 1.0}
    troubles = [guard.look(step, StepResult(loss, 0.0, 0.0, 1.0)) for step, loss in losses.items()]
    assert [trouble.step for trouble in troubles if trouble] == found
    assert guard.look(10, StepResult(1.0, 0.0, 0.0, nan)) is None or on_nan != "skip"
