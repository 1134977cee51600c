"""A program's own loss, data, optimizer, evaluation and callbacks: the same numbers in every layout, and errors in its
words."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise.api.functions import own_evaluate, own_loss, own_optimizer
from shardwise.data.own_rows import batch_of, own_rows
from shardwise.errors import UserError
from shardwise.optim.build import set_learning_rate
from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.build import use_losses
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate
from shardwise.spec.presets import preset
from shardwise.terminal import type_of

CPU = torch.device("cpu")
SHAPE = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 96}
SPEC = preset("tiny").with_overrides(SHAPE)
SMALL = {"model": SHAPE, "train": {"steps": 4, "global_batch": 4, "seq_len": 16, "sample_tokens": 0}, "parallel.dp": 1}
ROWS = [[(3 * row + place * place) % 96 for place in range(17)] for row in range(24)]
LAYOUTS = ({"tp": 2, "sequence": True}, {"pp": 2, "split": (1, 1)}, {"dp": 2, "zero": 3}, {"cp": 2})


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none", label_smoothing=0.2)


def first_step(layouts: tuple[dict, ...]) -> list[tuple[float, float]]:
    """Runs on every rank: loss and gradient norm of one step by an own loss, in each layout."""
    found, rank = [], dist.get_rank() if dist.is_initialized() else 0
    for layout in layouts:
        trial = Trial(seq_len=16)
        plan = trial_plan(trial, loss="recompute", **layout)
        engine = build_trial(SPEC, plan, trial, rank, CPU)
        use_losses(engine.models, smoothed)
        batch, num_targets = trial_batch(SPEC, plan, trial, 1, engine.mesh.at.dp)
        norm, finish = accumulate(engine, batch, num_targets, Clock(CPU))
        found.append((float(finish()[0]) / num_targets, float(norm)))
    return found


def test_an_own_loss_is_the_same_in_every_layout(ranks):
    (alone,) = first_step(({},))
    plain = train_plain(SPEC, Trial(seq_len=16, num_steps=1))
    assert abs(alone[0] - plain.losses[0]) > 1e-3, "or it is cross-entropy"
    for by_layout in ranks.run(first_step, 2, LAYOUTS):
        for layout, found in zip(LAYOUTS, by_layout, strict=True):
            assert found == pytest.approx(alone, abs=1e-12), layout


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_become_batches():
    batch = batch_of([[1, 2, 3, 4], (np.array([5, 6]), [-100, 7])], seq_len=4, vocab=10, padding=0)
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [5, 6, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, -100], [-100, 7, -100, -100]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (list(range(7)), "has 7 token ids"),
        ([1], "has 1 token ids"),
        ([1, 2, 99], "has the token id 99"),
        ([-5, 2, 3], "has the token id -5"),
        ("text", "text belongs into files"),
        ({"input_ids": [1, 2]}, "for row in data"),
        (3, "cuts one long array into rows"),
        (([1] * 7, [1] * 7), "takes 1 to 5 beside their targets"),
        ([0.5, 1.5], "holds no token ids"),
        (([1, 2], [3]), "each id has one target"),
    ],
)
def test_odd_rows_are_refused(row, said):
    with pytest.raises(UserError, match=said):
        batch_of([row], seq_len=5, vocab=10, padding=0)


def test_rows_by_index_are_dealt_once_in_an_epoch_for_any_split():
    rows = own_rows(ROWS, seq_len=16, vocab=96, padding=0, seed=3)
    whole = [rows.batch(step, range(6), 6).tokens for step in range(1, 5)]
    parts = [rows.batch(step, part, 6).tokens for step in range(1, 5) for part in (range(2), range(2, 6))]
    assert np.array_equal(np.concatenate(whole), np.concatenate(parts))
    assert sorted(map(tuple, np.concatenate(whole).tolist())) == sorted(tuple(row[:16]) for row in ROWS)


@pytest.mark.parametrize("data", [3, "text", {"a": 1}])
def test_what_is_no_data_is_refused(data):
    with pytest.raises(UserError, match=f"data is {type_of(data)}"):
        own_rows(data, seq_len=16, vocab=96, padding=0, seed=0)


class Stream:
    """Endless rows with a state, as torchdata's loaders have."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield ROWS[(7 * self.place) % len(ROWS)]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Plain:
    """The same rows, without a state."""

    def __iter__(self):
        return (ROWS[(7 * place) % len(ROWS)] for place in count(1))


# Runs ----------------------------------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_a_run_with_all_parts_stops_resumes_and_tells(tmp_path):
    settings = SMALL | {"run.dir": str(tmp_path), "train.eval_every": 2}
    heard = []

    class Watch(shardwise.Callback):
        def on_eval(self, step, values):
            heard.append((step, *values))

        def on_save(self, step, path):
            assert path.is_dir()
            heard.append((step, "saved"))

        def on_stop(self, step, why):
            heard.append((step, why))

    def stop_at_2(step):
        if step.step == 2:
            raise shardwise.StopTraining("enough")

    def evaluate(score):
        return {"first": sum(score(ROWS[:2])) / 2}

    own = {"loss": smoothed, "optimizer": sgd, "evaluate": evaluate, "eval_data": ROWS[:4]}
    for data in (ROWS, Stream, Plain):
        make = data if isinstance(data, type) else lambda data=data: data
        whole = shardwise.train(settings, data=make(), **own)
        heard.clear()
        run = shardwise.train(settings, data=make(), callbacks=[stop_at_2, Watch()], **own)
        # The stop is agreed on a step later, as every stop is.
        assert run.state == "stopped" and heard[0][1:] == ("first",) and heard[1][1:] == ("eval_loss",)
        assert heard[-2:] == [(len(run.losses), "saved"), (len(run.losses), "a callback: enough")]
        assert json.loads(run.directory.own_parts.read_text())["parts"] == ["loss", "optimizer", "evaluate", "data"]
        with pytest.raises(UserError, match="its own optimizer and evaluate and data"):
            run.resume(loss=smoothed)
        run = run.resume(data=make(), **own)
        assert run.losses == whole.losses and run.eval_losses == whole.eval_losses
    assert len(set(whole.losses)) == 4


def test_an_error_in_a_callback_ends_the_run_and_comes_back(tmp_path):
    def fails(step):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        shardwise.train(SMALL | {"run.dir": str(tmp_path)}, data=ROWS, callbacks=fails)
    assert shardwise.load("last", str(tmp_path)).state == "stopped"


def test_a_run_leaves_no_tensors_in_its_program(tmp_path):
    """Runs of a sweep would fill a GPU one after the other: what they held is in cycles."""

    def held():
        with warnings.catch_warnings(action="ignore"):  # torch's old names warn when they are looked at
            return sum(isinstance(one, torch.nn.Parameter) for one in gc.get_objects())

    gc.collect()
    before = held()
    shardwise.train(SMALL | {"run.dir": str(tmp_path)}, data=ROWS, optimizer=sgd)
    assert held() == before


BAD_PARTS = [
    (own_loss(lambda logits, targets: logits.missing), "loss raised AttributeError"),
    (own_loss(lambda logits: logits), "loss raised TypeError"),
    (own_loss(F.cross_entropy), "loss returned a tensor of shape ()"),
    (own_loss(lambda logits, targets: None), "loss returned nothing"),
    (own_loss(lambda logits, targets: smoothed(logits, targets).detach()), "without a gradient"),
    (own_optimizer(lambda parameters: parameters[7]), "optimizer raised IndexError"),
    (own_optimizer(lambda parameters: None), "optimizer returned nothing"),
    (own_optimizer(torch.optim.LBFGS), "LBFGS"),
    (own_evaluate(lambda score: 1 / 0), "evaluate raised ZeroDivisionError"),
    (own_evaluate(lambda score: 0.5), "evaluate returned a float"),
    (own_evaluate(lambda score: {"a": "b"}), "evaluate returned a str for 'a'"),
    (own_evaluate(lambda score: {"eval_loss": 1.0}), "calls a number 'eval_loss'"),
]


@pytest.mark.parametrize(("part", "said"), BAD_PARTS)
def test_what_a_function_of_a_program_does_wrong_is_said_of_it(part, said):
    logits, targets = torch.zeros(4, 8, requires_grad=True), torch.ones(4, dtype=torch.long)
    given = {"_loss": (logits, targets), "_optimizer": ([torch.nn.Parameter(logits)],), "_evaluate": (len,)}
    with pytest.raises(UserError) as problem:
        part(*given[part.func.__name__])
    assert said in str(problem.value)
    if "raised" in said and "TypeError" not in said:
        assert Path(problem.value.where.rpartition(":")[0]) == Path(__file__)


def test_groups_of_an_own_optimizer_keep_their_share_of_the_learning_rate(tmp_path, capsys):
    def two_groups(parameters):
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.1)

    seen = own_optimizer(two_groups)([torch.nn.Parameter(torch.zeros(2)) for _ in range(4)])
    set_learning_rate(seen, 3.0)
    assert [group["lr"] for group in seen.param_groups] == pytest.approx([3.0, 0.6])
    settings = SMALL | {"run.dir": str(tmp_path), "train.steps": 3}
    grouped = shardwise.train(settings, {"optimizer.lr": 0.1}, data=ROWS, optimizer=two_groups)
    assert "not its own" not in capsys.readouterr().out
    single = shardwise.train(settings, data=ROWS, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert "goes for the program's optimizer, not its own 0.1" in capsys.readouterr().out
    assert grouped.losses[0] == single.losses[0] and grouped.losses[2] != single.losses[2]


def test_numbers_of_an_evaluation_may_be_of_torch_or_numpy():
    found = own_evaluate(lambda score: {"a": torch.tensor(1.5), "b": np.float32(2.5), "c": 3})(len)
    assert found == {"a": 1.5, "b": 2.5, "c": 3.0} and all(type(value) is float for value in found.values())


def test_an_error_of_ours_below_a_function_of_the_program_stays_ours():
    def broken_score(rows):
        return len(rows) / 0

    broken_score.__code__ = broken_score.__code__.replace(co_filename=shardwise.api.__file__)
    with pytest.raises(ZeroDivisionError):
        own_evaluate(lambda score: {"a": score([])})(broken_score)


def test_an_error_in_a_loss_ends_a_run_in_three_lines_and_keeps_its_traceback(tmp_path, capsys):
    with pytest.raises(shardwise.RunFailed, match=r"loss raised KeyError: 'weights'.*exit 2") as failed:
        shardwise.train(SMALL | {"run.dir": str(tmp_path)}, data=ROWS, loss=lambda logits, targets: {}["weights"])
    assert "a bug of shardwise" not in capsys.readouterr().err
    assert f'File "{__file__}"' in (failed.value.run.directory.crash / "rank0.txt").read_text()


def test_ranks_print_where_the_program_prints(tmp_path):
    """As in the cell of a notebook, whose output no other process can write to."""
    settings, heard = SMALL | {"run.dir": str(tmp_path), "parallel.dp": 2}, []
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        run = shardwise.train(settings, data=ROWS, callbacks=heard.append, verify=False)
        with pytest.raises(shardwise.RunFailed):
            shardwise.train(settings, data=ROWS, loss=lambda logits, targets: 1 / 0, verify=False)
    assert [step.step for step in heard] == [1, 2, 3, 4] and len(run.losses) == 4
    for line in ("starting 2 processes", "step 4/4", "nothing is held out", f"run      {run.path}"):
        assert out.getvalue().count(line) == 1 + (line[:8] == "starting"), out.getvalue()
    assert "error: loss raised ZeroDivisionError" in err.getvalue()


def test_ranks_end_with_the_program_that_leaves_a_callback(tmp_path):
    def leave(step):
        raise SystemExit(3)

    settings = SMALL | {"run.dir": str(tmp_path), "parallel.dp": 2, "train.steps": 100_000}
    with pytest.raises(SystemExit):
        shardwise.train(settings, data=ROWS, callbacks=leave, verify=False)
    run = shardwise.load("last", str(tmp_path))
    assert run.state == "stopped" and list(run.directory.checkpoints.iterdir())
    assert not run.directory.is_locked(), "its ranks have ended"


def test_how_a_run_of_a_program_goes_on_is_python(tmp_path):
    run = shardwise.train(SMALL | {"run.dir": str(tmp_path), "train.steps": 1}, data=ROWS)
    said = run.directory.how_to_resume("train.steps=2", "memory.precision=bf16", allow=["train.steps"])
    call = (
        said.removesuffix(" in that program")
        .replace("data=...", "data=ROWS")
        .replace(', "memory.precision": "bf16"', "")
    )
    assert '"memory.precision": "bf16"' in said
    with pytest.raises(UserError) as problem:
        run.resume({"train.steps": 2}, data=ROWS)
    assert problem.value.fix.startswith('add allow=["train.steps"] ')
    assert len(eval(call).losses) == 2
    assert len(run.resume({"train.steps": 3}, data=ROWS, allow="train.steps").losses) == 3


def test_what_came_out_is_asked_in_words_of_a_program(tmp_path):
    run = shardwise.train(SMALL | {"run.dir": str(tmp_path), "train.steps": 1}, data=ROWS, eval_data=ROWS[:6])
    assert run.evaluate(ROWS[:6]) == pytest.approx(run.eval_losses[1], abs=1e-6)
    (tmp_path / "text.txt").write_text("no row")
    for ask, said in (
        (lambda: run.evaluate(tmp_path / "no.txt"), "no such data"),
        (lambda: run.evaluate([tmp_path / "text.txt"]), "beyond the model's vocabulary"),
        (lambda: run.generate(3), "prompt is an int"),
        (lambda: run.generate("x", 0), "max_tokens = 0"),
        (lambda: run.evaluate(3), "eval_data is an int"),
        (lambda: shardwise.load("mine", str(tmp_path)), f"{tmp_path} has {run.name}"),
        (lambda: run.generate("a"), "prompt has the token id 97"),
        (lambda: run.generate("A", temperature=-1), "temperature=0.8"),
        (lambda: run.generate("A", top_p=3), "top_p=0.95"),
        (lambda: run.export(tmp_path / "out", dtype="fp3"), "dtype = 'fp3' is not written"),
        (lambda: run.resume(data=ROWS, from_step=7), "no checkpoint of step 7"),
    ):
        with pytest.raises(UserError) as problem:
            ask()
        assert said in str(problem.value)
    assert run.state == "finished", "asking for what is not there leaves it what it is"


def test_a_notebook_shows_a_mistake_in_three_lines(tmp_path):
    with pytest.raises(UserError) as problem:
        shardwise.load(tmp_path / "nothing")
    assert len(problem.value._render_traceback_()) == 3


def test_a_generator_that_ends_is_said(tmp_path):
    with pytest.raises(shardwise.RunFailed, match="exit 2"):
        shardwise.train(SMALL | {"run.dir": str(tmp_path)}, data=iter(ROWS[:6]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"data": ROWS, "config": {"data.source": "x.txt"}}, "data and data.source are both given"),
        ({"eval_data": ROWS}, "eval_data has no data beside it"),
        ({"data": [*ROWS, [1, 2, 96]]}, "data[24] has the token id 96"),
        ({"data": ROWS, "eval_data": [[1]]}, "eval_data[0] has 1 token ids"),
        ({"data": {0: ROWS}.values()}, "a row of data is a list, which holds no token ids"),
        ({"loss": 3}, "loss is an int"),
        ({"loss": smoothed, "config": {"speed.loss": "fused"}}, "goes with cross-entropy alone"),
        ({"optimizer": sgd, "config": {"memory.offload": "optimizer"}}, "goes with the optimizers of optimizer.name"),
        ({"callbacks": ["print"]}, "a callback is a str"),
        ({"callbacks": "print"}, "a callback is a str"),
        ({"changes": ["train.steps=3"]}, "settings are a list"),
        ({"nproc": 0}, "nproc = 0 is no number"),
        ({"nproc": "2"}, "nproc = '2' is no number"),
        ({"config": {"train.steps": 2, "train.tokens": 64}}, "`train.steps` (this program)"),
        ({"config": {"train.stpes": 3}}, "did you mean"),
        ({"config": {"train.steps": "many"}}, "this program"),
        ({"config": {"train.steps": sgd}}, "a setting is a function"),
        ({"config": 3}, "config is an int"),
        ({"model": torch.nn.Linear(2, 2)}, "shardwise.parallelize"),
        ({"model": "lama3-8b"}, "llama3-8b"),
    ],
)
def test_mistakes_are_answered_in_words_of_a_program(keys, said, tmp_path):
    open_before = len(os.listdir("/dev/fd"))
    settings = keys.pop("config", {})
    settings = SMALL | {"run.dir": str(tmp_path)} | settings if isinstance(settings, dict) else settings
    with pytest.raises(UserError) as problem:
        shardwise.train(settings, **keys)
    assert said in str(problem.value) and "command line" not in str(problem.value)
    assert not any(path.name != ".data" for path in tmp_path.iterdir()), "nothing is left behind"
    assert len(os.listdir("/dev/fd")) <= open_before, "no pipe either"
