"""Acts tensor parallelism out: a feed-forward part cut by hand-made numbers, then a step of the engine with tp = 2.

The small matrices go through the borders of `parallel/tensor/collectives.py`, where the engine's collectives are called
too. Read next: `parallel/tensor/slices.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.demo.observe import SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, drawing, number, on_the_wire, same_as_one_process, table
from shardwise.demo.wire import WireOperation, of_kind, total
from shardwise.parallel.tensor.collectives import TensorParallel, enter, share
from shardwise.parallel.tensor.slices import RowLinear
from shardwise.prove.reference import Trial

WORLD = 2
ROWS, TOKENS = 4, 64  # b and s of a micro-batch
NUM_MICRO = 2
TRIAL = Trial(global_batch=NUM_MICRO * ROWS, micro_batch=ROWS, seq_len=TOKENS, precision="fp32")
EXACT = Trial(global_batch=4, micro_batch=2, seq_len=16, num_steps=2)
BORDERS = 2 * SPEC.num_layers  # regions that are cut: attention and feed-forward part of every layer

X = [[1.0, 2.0]]
UP = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]  # four channels, each a row of two weights
DOWN = [[1.0, 1.0, 1.0, 5.0], [10.0, 20.0, 30.0, 40.0]]  # two outputs, each a row of four weights


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    say("a small feed-forward part")
    small = _small_region(rank, world)
    say("a step of the engine")
    shapes: dict[str, list[int]] = {}
    seen = observe_step(
        TRIAL,
        rank,
        tp=world,
        look=lambda engine, _: shapes.update({s.name: list(s.local.shape) for s in engine.shards}),
    )
    say("comparison with one process")
    return {
        **small,
        "shapes": {name: shape for name, shape in shapes.items() if "layers." not in name or "layers.0." in name},
        "held": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "transfers": [transfer._asdict() for transfer in seen.transfers],
        "sent": seen.sent,
        "difference": difference(EXACT, truth_of(EXACT, rank), rank, tp=world),
    }


def _small_region(rank: int, world: int) -> dict[str, Any]:
    """Computes x -> down(relu(up(x))), cut as `parallel/tensor/slices.py` cuts it, and the backward pass of the sum of
    the outputs; returns the numbers on the way."""
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD)
    start, stop = share(len(UP), world, rank)
    down = nn.Linear(stop - start, len(DOWN), bias=False)
    down.weight = nn.Parameter(torch.tensor(DOWN)[:, start:stop].clone())
    x = torch.tensor(X, requires_grad=True)
    hidden = F.relu(F.linear(enter(x, tp), torch.tensor(UP)[start:stop]))
    out = RowLinear(down, tp)(hidden)
    out.sum().backward()
    assert x.grad is not None
    return {
        "channels": [start, stop],
        "hidden": hidden[0].tolist(),
        "part": F.linear(hidden, down.weight)[0].tolist(),
        "out": out[0].tolist(),
        "x_gradient": x.grad[0].tolist(),
    }


def _one_process() -> tuple[list[float], list[float]]:
    """Returns the output and the gradient of the input that one process computes."""
    x = torch.tensor(X, requires_grad=True)
    out = F.linear(F.relu(F.linear(x, torch.tensor(UP))), torch.tensor(DOWN))
    out.sum().backward()
    assert x.grad is not None
    return out[0].tolist(), x.grad[0].tolist()


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story("tensor", "Tensor parallelism: 2 processes, each with half of every matrix")
    names = [f"rank {rank}" for rank in range(WORLD)]
    one, one_gradient = _one_process()
    story.step(
        "Before: a feed-forward part with four channels, cut in two",
        drawing(
            "   x = [1 2]         up: one row per channel       down: one column per channel\n"
            "                     1  0   rank 0                     rank 0 | rank 1\n"
            "                     0  1   rank 0                      1   1 |  1   5\n"
            "                     1  1   rank 1                     10  20 | 30  40\n"
            "                     1 -1   rank 1"
        ),
        "The first matrix is cut by its outputs, the second by its inputs. A channel begins and ends on the same rank, "
        "so nothing is sent between the two; relu needs no other rank either.",
    )
    story.step(
        "What moves: one sum at the end",
        table(
            ["", "its channels of relu(up x)", "its part of the result", "after the all-reduce"],
            [
                [name, _vector(rank["hidden"]), _vector(rank["part"]), _vector(rank["out"])]
                for name, rank in zip(names, found, strict=True)
            ]
            + [["one process", "[1 2 3 0]", "", _vector(one)]],
        ),
        f"Backward the same happens at the entrance: each rank has a part of the gradient of x, their sum is "
        f"{_vector(found[0]['x_gradient'])} on both; one process says {_vector(one_gradient)}.",
    )
    transfers = [WireOperation(**transfer) for transfer in found[0]["transfers"]]
    big = [transfer for transfer in transfers if transfer.num_bytes == ROWS * TOKENS * SPEC.hidden * 4]
    _shapes(story, found)
    _tape(story, transfers, big)
    story.checks = _checks(found, transfers, big, one, one_gradient)
    story.figures = {"one_process": one, "one_process_gradient": one_gradient, "ranks": found}
    return story


def _shapes(story: Story, found: list[dict[str, Any]]) -> None:
    whole = {
        "layers.0.attention.q.weight": [SPEC.num_heads * SPEC.head_dim, SPEC.hidden],
        "layers.0.attention.o.weight": [SPEC.hidden, SPEC.num_heads * SPEC.head_dim],
        "layers.0.feedforward.up.weight": [SPEC.ffn, SPEC.hidden],
        "layers.0.feedforward.down.weight": [SPEC.hidden, SPEC.ffn],
        "layers.0.feedforward_norm.weight": [SPEC.hidden],
        "embed.weight": [SPEC.vocab, SPEC.hidden],
    }
    cut = (
        "by outputs: whole heads",
        "by inputs",
        "by outputs: channels",
        "by inputs",
        "whole on every rank",
        "by rows",
    )
    rows = [
        [name, _shape(shape), *(_shape(rank["shapes"][name]) for rank in found), how]
        for (name, shape), how in zip(whole.items(), cut, strict=True)
    ]
    story.step(
        "The same in a real model: what each rank holds",
        table(["", "whole", "rank 0", "rank 1", "cut"], rows, words=(0, 4)),
        f"Of {SPEC.num_parameters:,} parameters {', '.join(number(rank['held']) for rank in found)} are on rank 0 and "
        "rank 1.",
    )


def _tape(story: Story, transfers: list[WireOperation], big: list[WireOperation]) -> None:
    """Shows the order in which rank 0 called its collectives, for the first micro-batch."""
    first = [m for m in transfers if m.microbatch == 0]
    lines = []
    for phase in ("forward", "backward"):
        signs = "".join("A" if transfer in big else "l" for transfer in first if transfer.phase == phase)
        lines.append(f"{phase:<10}{' '.join(signs)}")
    size = ROWS * TOKENS * SPEC.hidden * 4
    story.step(
        f"What moves in a step: the all-reduces of rank 0, first micro-batch ({ROWS} rows of {TOKENS} tokens)",
        drawing("\n".join(lines)),
        f"A: the hidden states of all tokens, b s h = {ROWS} x {TOKENS} x {SPEC.hidden} elements, {size:,} bytes. "
        "Forward: one for the embedding, then two per layer, where attention and feed-forward part end. l: for the "
        "loss, numbers per token (largest logit; sum of exponentials and the target's logit). Backward: one where the "
        "head began, two per layer where its regions began.",
    )


def _checks(
    found: list[dict[str, Any]],
    transfers: list[WireOperation],
    big: list[WireOperation],
    one: list[float],
    gradient: list[float],
) -> list[Check]:
    size, layers = ROWS * TOKENS * SPEC.hidden * 4, SPEC.num_layers
    forward, backward = (len(of_kind(big, "all-reduce", phase)) for phase in ("forward", "backward"))
    small = total(transfers) - total(big)
    per_micro = 2 * (BORDERS + 1) * size + 3 * ROWS * TOKENS * 4
    everything = NUM_MICRO * per_micro
    norms = (2 * layers + 1) * SPEC.hidden
    differences = [
        abs(a - b)
        for rank in found
        for key, truth in (("out", one), ("x_gradient", gradient))
        for a, b in zip(rank[key], truth, strict=True)
    ]
    return [
        Check("small region: difference of result and gradient from one process", "0", "", 0, max(differences)),
        Check(
            "parameters on rank 0; n of them are in norms, which are whole everywhere",
            "(P-n)/t + n",
            f"({SPEC.num_parameters:,} - {norms})/2 + {norms}",
            (SPEC.num_parameters - norms) / WORLD + norms,
            found[0]["held"],
        ),
        Check(
            "all-reduces of hidden states forward, in a step",
            "M(2L + 1)",
            f"{NUM_MICRO} x (2 x {layers} + 1)",
            NUM_MICRO * (BORDERS + 1),
            forward,
        ),
        Check(
            "all-reduces of hidden states backward, in a step",
            "M(2L + 1)",
            f"{NUM_MICRO} x (2 x {layers} + 1)",
            NUM_MICRO * (BORDERS + 1),
            backward,
        ),
        Check(
            "bytes of one of them",
            "4 b s h",
            f"4 x {ROWS} x {TOKENS} x {SPEC.hidden}",
            size,
            total(big) / max(1, len(big)),
        ),
        Check(
            "bytes for the loss, in a step",
            "M x 3 x 4 b s",
            f"{NUM_MICRO} x 3 x 4 x {ROWS} x {TOKENS}",
            NUM_MICRO * 12 * ROWS * TOKENS,
            small,
        ),
        *on_the_wire("2(t-1)/t of all", f"2 x 1/2 x {everything:,}", everything, [rank["sent"] for rank in found]),
        same_as_one_process(max(rank["difference"] for rank in found), EXACT.num_steps),
    ]


def _vector(values: list[float]) -> str:
    return "[" + " ".join(f"{value:g}" for value in values) + "]"


def _shape(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))
