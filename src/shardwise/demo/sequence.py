"""Acts sequence parallelism out: tensor parallelism over two ranks without it and with it, collective by collective,
byte by byte.

Small numbers go through the borders of `parallel/tensor/collectives.py`; the rest are steps of the engine. Read next:
`parallel/tensor/collectives.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.demo.observe import CPU, SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, drawing, on_the_wire, same_as_one_process, table
from shardwise.demo.wire import of_kind, total
from shardwise.memory.usage import saved_bytes
from shardwise.parallel.tensor.collectives import TensorParallel, enter, leave
from shardwise.prove.reference import Record, Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock

WORLD = 2
ROWS, TOKENS = 4, 64  # b and s of a micro-batch
NUM_MICRO = 2
TRIAL = Trial(global_batch=NUM_MICRO * ROWS, micro_batch=ROWS, seq_len=TOKENS, precision="fp32")
EXACT = Trial(global_batch=4, micro_batch=2, seq_len=16, num_steps=2)
PASSED = (
    2 * SPEC.num_layers + 1
)  # regions that a pass enters: two per layer and the head; it leaves as many, the embedding included
SHOWN = 4


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    say("a few tokens")
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD, sequence=True)
    tp.active = True
    part_BTD = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]) * (1, 10)[rank]
    stretch_BTD = leave(part_BTD, tp)
    found: dict[str, Any] = {
        "part": part_BTD.flatten().tolist(),
        "left": stretch_BTD.flatten().tolist(),
        "entered": enter(stretch_BTD, tp).flatten().tolist(),
    }
    truth = truth_of(EXACT, rank)
    for name, sequence in (("without", False), ("with", True)):
        say(f"a step {name} sequence parallelism")
        found[name] = _step(rank, world, sequence)
        say(f"comparison with one process, {name} sequence parallelism")
        found[name]["difference"] = difference(EXACT, truth, rank, tp=world, sequence=sequence)
    return {**found, **_norm_gradient(rank, world, truth)}


def _step(rank: int, world: int, sequence: bool) -> dict[str, Any]:
    shapes: list[list[int]] = []

    def watch(engine: Any, _: Any) -> None:
        block = engine.models[0].layers["0"]
        block.attention_norm.register_forward_hook(lambda module, args, result: shapes.append(list(result.shape)))
        block.attention.q.register_forward_hook(lambda module, args, result: shapes.append(list(args[0].shape)))

    seen = observe_step(TRIAL, rank, prepare=watch, tp=world, sequence=sequence)
    batch, _ = trial_batch(SPEC, seen.engine.plan, TRIAL, 1, 0)
    micro = batch.microbatches[0]
    size, transfers = ROWS * TOKENS * SPEC.hidden * 4, seen.transfers
    big = [transfer for transfer in transfers if transfer.num_bytes == size]
    kinds = ("all-reduce", "all-gather", "all-to-all")
    return {
        "between": shapes[0],
        "inside": shapes[1],
        "counts": {kind: len(of_kind(big, kind)) for kind in kinds},
        "tape": [(m.kind, m.phase) for m in big if m.microbatch == 0],
        "buffer_bytes": total(big),
        "wire_bytes": sum(transfer.share(world) for transfer in transfers),
        "norm_bytes": total(of_kind(transfers, "all-reduce", "replicated gradients")),
        "sent": seen.sent,
        "saved": saved_bytes(seen.engine.models[0], micro.tokens, micro.targets),
    }


def _norm_gradient(rank: int, world: int, truth: Record | None) -> dict[str, Any]:
    """Returns the gradient of the last norm before and after the ranks add their parts."""
    plan = trial_plan(EXACT, tp=world, sequence=True)
    engine = build_trial(SPEC, plan, EXACT, rank, CPU)
    shard = next(shard for shard in engine.shards if shard.name == "norm.weight")
    parts: list[list[float]] = []
    add_up = engine.sum_partial

    def note_and_add() -> None:
        assert shard.gradient is not None
        parts.append(shard.gradient[:SHOWN].tolist())
        add_up()

    engine.sum_partial = note_and_add  # type: ignore[method-assign]
    batch, num_targets = trial_batch(SPEC, plan, EXACT, 1, 0)
    engine.gradients(batch.microbatches, num_targets, Clock(CPU))
    assert shard.gradient is not None
    one = truth.gradients["norm.weight"][:SHOWN].tolist() if truth else []
    return {"norm_part": parts[0], "norm_sum": shard.gradient[:SHOWN].tolist(), "norm_one_process": one}


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story(
        "sequence", "Sequence parallelism: 2 tensor-parallel processes that also share the tokens between regions"
    )
    names = [f"rank {rank}" for rank in range(WORLD)]
    without, with_sp = found[0]["without"], found[0]["with"]
    story.step(
        "Before: a region has ended, each rank has a part of the sum for all four tokens",
        table(["", "token 0", "1", "2", "3"], [[name, *rank["part"]] for name, rank in zip(names, found, strict=True)]),
        "Tensor parallelism alone adds them up on every rank: both then hold 11 22 33 44, and norms and residuals are "
        "computed twice.",
    )
    left = [
        [name, *([""] * 2 * index), *rank["left"], *([""] * (2 - 2 * index))]
        for index, (name, rank) in enumerate(zip(names, found, strict=True))
    ]
    story.step(
        "What moves: a reduce-scatter where a region ends, an all-gather where the next one begins",
        table(["after the reduce-scatter", "token 0", "1", "2", "3"], left),
        table(
            ["after the all-gather", "token 0", "1", "2", "3"],
            [[name, *rank["entered"]] for name, rank in zip(names, found, strict=True)],
        ),
        "In between each rank works on its own stretch of the tokens.",
    )
    _real(story, without, with_sp)
    rows = [[f"part of {name}", *_digits(rank["norm_part"])] for name, rank in zip(names, found, strict=True)]
    rows += [["sum, on both ranks", *_digits(found[0]["norm_sum"])]]
    rows += [["one process", *_digits(found[0]["norm_one_process"])]]
    story.step(
        "The price: norms saw a part of the tokens; their gradients are added once per step",
        table(["gradient of the last norm", "[0]", "[1]", "[2]", "[3]"], rows),
    )
    story.checks = _checks(found, without, with_sp)
    story.figures = {"ranks": found}
    return story


def _real(story: Story, without: dict[str, Any], with_sp: dict[str, Any]) -> None:
    signs = {"all-reduce": "A", "all-gather": "g", "all-to-all": "s"}
    tapes = []
    for name, step in (("without", without), ("with", with_sp)):
        for phase in ("forward", "backward"):
            tape = " ".join(signs[kind] for kind, when in step["tape"] if when == phase)
            tapes.append(f"{name:<8} {phase:<9} {tape}")
    story.step(
        "A real step: the collectives of rank 0 with hidden states, first micro-batch",
        drawing("\n".join(tapes)),
        "A all-reduce, g all-gather, s reduce-scatter (on gloo an exchange and a local sum). Each A has become a pair "
        "of s and g, moved apart: everything between s and the next g is done on half of the tokens.",
    )
    rows = [
        [
            name,
            _shape(step["inside"]),
            _shape(step["between"]),
            step["saved"],
            "not counted" if step["sent"] is None else step["sent"],
        ]
        for name, step in (("without", without), ("with", with_sp))
    ]
    story.step(
        "After: what rank 0 holds and sends",
        table(["", "inside regions", "between regions", "kept for backward, bytes", "sent in a step, bytes"], rows),
        f"Rows x tokens x width. The bytes kept for backward fell to {with_sp['saved'] / without['saved']:.0%} of what "
        "they were; the bytes sent did not grow.",
    )


def _checks(found: list[dict[str, Any]], without: dict[str, Any], with_sp: dict[str, Any]) -> list[Check]:
    size, layers, hidden = ROWS * TOKENS * SPEC.hidden * 4, SPEC.num_layers, SPEC.hidden
    pairs = NUM_MICRO * 2 * PASSED
    text = f"2 x {NUM_MICRO} x (2 x {layers} + 1)"
    outside = (
        PASSED * 4 * ROWS * TOKENS * (2 * hidden + 1)
    )  # of every norm: input, normalised values, a scale per token
    norms = 4 * PASSED * hidden
    loss = NUM_MICRO * 12 * ROWS * TOKENS
    wire = pairs * size * 2 * (WORLD - 1) / WORLD
    checks = [
        Check("all-reduces of hidden states without it", "2M(2L + 1)", text, pairs, without["counts"]["all-reduce"]),
        Check("all-reduces of hidden states with it", "0", "", 0, with_sp["counts"]["all-reduce"]),
        Check("all-gathers with it", "2M(2L + 1)", text, pairs, with_sp["counts"]["all-gather"]),
        Check("reduce-scatters with it", "2M(2L + 1)", text, pairs, with_sp["counts"]["all-to-all"]),
        Check(
            "bytes kept for backward: what falls away",
            "(1-1/t) (2L+1) 4bs(2h+1)",
            f"1/2 x {outside:,}",
            outside * (1 - 1 / WORLD),
            without["saved"] - with_sp["saved"],
        ),
        Check(
            "bytes of norms' gradients, once per step",
            "4(2L + 1)h",
            f"4 x {PASSED} x {hidden}",
            norms,
            with_sp["norm_bytes"],
        ),
    ]
    for name, rest in (("without", loss), ("with", loss + norms)):
        expected = wire + rest * 2 * (WORLD - 1) / WORLD
        sent = [rank[name]["sent"] for rank in found]
        numbers = f"{wire:,.0f} + {rest:,}"
        checks += on_the_wire("2(t-1)/t of all", numbers, expected, sent, f"{name} it: ")
    sums = [abs(a - b) for a, b in zip(found[0]["norm_sum"], found[0]["norm_one_process"], strict=True)]
    checks.append(Check("sum of the norm's parts: difference from one process", "0", "", 0, max(sums), 1e-9))
    largest = max(rank[name]["difference"] for rank in found for name in ("without", "with"))
    return [*checks, same_as_one_process(largest, EXACT.num_steps)]


def _shape(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))


def _digits(values: list[float]) -> list[str]:
    return [f"{value:+.6f}" for value in values]
