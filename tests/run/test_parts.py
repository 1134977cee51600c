"""The small parts of the loop, each on its own: schedules, optimizers, clock, metrics, memory, sampling."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SMALL

from shardwise.data.sequences import Batch, Sequences
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.optim.build import build_optimizer
from shardwise.optim.schedule import batch_scale, learning_rate
from shardwise.plan.prediction.activations import TokenShare, head_activation_bytes, layer_activations
from shardwise.plan.prediction.lifetimes import ALLOCATOR_SHARE, PROCESS_BYTES
from shardwise.report.terminal import sparkline
from shardwise.run.clock import Clock, verdict
from shardwise.run.evaluate import evaluate
from shardwise.run.generate import Sampling, generate
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig


def small_model() -> Decoder:
    sizes = {"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 64}
    model = Decoder(preset("tiny").with_overrides(sizes))
    initialize(model, 0)
    return model


@pytest.mark.parametrize("shape", ["cosine", "wsd", "linear", "constant"])
def test_every_schedule_warms_up_and_ends_where_it_should(shape):
    rate = learning_rate(OptimizerConfig(lr=1.0, schedule=shape, warmup=10, min_lr=0.1), 100, 8)
    assert rate(1) == pytest.approx(0.1) and rate(10) == pytest.approx(1.0)
    assert rate(100) == pytest.approx(1.0 if shape == "constant" else 0.1)
    if shape == "wsd":
        assert rate(80) == pytest.approx(1.0) and rate(90) < 1.0
    values = [rate(step) for step in range(10, 101)]
    assert values == sorted(values, reverse=True)


def test_learning_rate_scales_with_the_batch():
    assert batch_scale(OptimizerConfig(lr_scaling="linear", reference_batch=8), 32) == 4
    assert batch_scale(OptimizerConfig(lr_scaling="sqrt", reference_batch=8), 32) == 2
    assert batch_scale(OptimizerConfig(), 32) == 1


@pytest.mark.parametrize(
    "name, states", [("adamw", 2), ("adam", 2), ("sgd", 0), ("momentum", 1), ("adagrad", 1), ("rmsprop", 1)]
)
def test_optimizers_keep_the_states_they_promise_and_decay_matrices_only(name, states):
    model = small_model()
    optimizer = build_optimizer(OptimizerConfig(name=name), model.parameters())
    tokens = torch.randint(0, 256, (2, 16))
    sum(model(tokens, tokens)).backward()
    optimizer.step()
    weight = model.layers["0"].attention.q.weight
    full = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.shape == weight.shape]
    assert len(full) == states == OPTIMIZERS[name].num_states
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert all((decay[id(p)] > 0) == (p.ndim >= 2) for p in model.parameters())


def test_parts_of_a_step_add_up_and_count_for_the_innermost_span():
    clock = Clock(torch.device("cpu"))
    with clock.span("compute", "work", microbatch=1, stage=2) as work:
        time.sleep(0.01)
        with clock.span("comm_exposed", "all-reduce", group="tp", num_bytes=8) as wait:
            time.sleep(0.02)
        before = clock.moment()
        time.sleep(0.01)
        clock.add("comm_exposed", "all-reduce", before, clock.moment(), group="dp", num_bytes=4)
    with clock.span("other", "send activations"):
        time.sleep(0.01)
    parts = clock.finish()
    late = clock.spans[1]
    assert [span.name for span in clock.spans] == ["all-reduce", "all-reduce", "work", "send activations"]
    assert (wait.microbatch, wait.stage, late.microbatch, late.group) == (1, 2, 1, "dp")
    assert wait.duration_s >= 0.02 and late.duration_s >= 0.01
    assert parts["comm_exposed_s"] == pytest.approx(wait.duration_s + late.duration_s, abs=1e-12)
    assert parts["compute_s"] == pytest.approx(work.duration_s - wait.duration_s - late.duration_s, abs=1e-12)
    assert parts["other_s"] >= 0.01  # reported, not counted
    assert sum(value for key, value in parts.items() if key != "step_s") == pytest.approx(parts["step_s"], rel=1e-12)


@pytest.mark.parametrize(
    "slow, word",
    [
        ("data_wait", "input-bound: 31 %"),
        ("comm_exposed", "network-bound: 31 %"),
        ("optimizer", "optimizer-bound: 31 %"),
        ("compute", "compute-bound"),
    ],
)
def test_the_verdict_names_what_was_slow(slow, word):
    parts = {f"{kind}_s": 0.0 for kind in ("data_wait", "compute", "comm_exposed", "bubble", "optimizer", "other")}
    parts |= {"compute_s": 0.69, "step_s": 1.0}
    parts[f"{slow}_s"] += 0.31
    assert verdict(parts).startswith(word)


def test_auto_micro_batch_obeys_the_memory_limit(run_here):
    """Room for five of the rank's eight sequences: four is the largest even part."""
    spec = small_model().spec
    one = 512 * layer_activations(spec, spec.layers, TokenShare(512)) * 4 + head_activation_bytes(spec, 512, 4)
    five = 5 * one * (1 + ALLOCATOR_SHARE["cpu"])
    room = PROCESS_BYTES["cpu"] + 16 * spec.num_parameters + five
    words = [*SMALL, "train.seq_len=512", "train.steps=1", f"memory.limit={int(room / 0.9)}", "run.name=fit"]
    assert run_here("train", "--nproc", 1, *words) == 0
    assert json.loads(Path("runs/fit/plan.json").read_text())["micro_batch"] == 4


def test_sampling_is_reproducible_and_greedy_at_zero_temperature():
    model = small_model()
    first = list(generate(model, [1, 2, 3], 12, Sampling(seed=3)))
    assert first == list(generate(model, [1, 2, 3], 12, Sampling(seed=3)))
    assert first != list(generate(model, [1, 2, 3], 12, Sampling(seed=4)))
    greedy = list(generate(model, [1, 2, 3], 5, Sampling(temperature=0)))
    with torch.inference_mode():
        tokens = [1, 2, 3]
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert greedy == tokens[3:]
    assert list(generate(model, [1, 2, 3], 5, Sampling(temperature=0), frozenset({greedy[2]}))) == greedy[:2]


def test_a_sparkline_shows_the_course():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 40


@pytest.mark.parametrize("count, max_rows", [(37, 20), (37, None), (5, 16)])
def test_the_held_out_set_is_the_same_for_any_global_batch(count, max_rows):
    """Every sequence of it once, in whole batches of 8, whether the training batch divides it or is larger than it."""

    class Numbered(Sequences):
        num_sequences = count

        def batch(self, step, rows, global_batch):
            first = (step - 1) * global_batch
            numbers = np.array([(first + row) % count for row in rows], dtype=np.int64)[:, None]
            return Batch(numbers, numbers.copy(), None)

    seen: list[int] = []

    def sums(microbatches):
        rows = torch.cat([micro.targets for micro in microbatches])
        counted = rows[rows >= 0]
        seen.extend(counted.tolist())
        return torch.tensor([float((counted.double() ** 2).sum())])

    wanted = list(range({(37, 20): 16, (37, None): 32, (5, 16): 5}[count, max_rows]))
    for global_batch, ranks in ((4, 1), (6, 2), (16, 2), (64, 4)):
        seen.clear()
        losses = [
            evaluate(sums, Numbered([], seq_len=1, seed=0), global_batch=global_batch,
                     rows=range(rank * global_batch // ranks, (rank + 1) * global_batch // ranks), micro_batch=1,
                     device=torch.device("cpu"), max_rows=max_rows)
            for rank in range(ranks)
        ]  # fmt: skip
        assert sorted(seen) == wanted
        if ranks == 1:
            assert losses == [np.mean(np.array(wanted) ** 2.0)]
