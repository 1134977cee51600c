"""Acts data parallelism out: four replicas, their gradients before and after the sum, and why the sum is not an
average.

The small gradients are summed by `parallel/shards.py`, as pipelines do it; the rest are steps of the engine. Read next:
`parallel/data/replicas.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.loader import cut_microbatches
from shardwise.data.sequences import IGNORE
from shardwise.demo.observe import CPU, SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, drawing, number, on_the_wire, same_as_one_process, table
from shardwise.demo.wire import of_kind, total
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.parallel.shards import sum_tensors
from shardwise.prove.reference import Trial, plain_gradients
from shardwise.prove.trial import build_trial, trial_plan
from shardwise.run.clock import Clock
from shardwise.spec.plan import Plan

WORLD = 4
TRIAL = Trial(global_batch=16, micro_batch=2, seq_len=16, precision="fp32")
EXACT = Trial(global_batch=16, micro_batch=2, seq_len=16, num_steps=2)
BUCKET = 160 * 1024  # bytes: small, so that this model has several buckets
SHOWN = 4  # elements of a gradient that are printed


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    say("sum of four small gradients")
    before = [float((rank + 1) * value) for value in (1, 10, 100, 1000)]
    after = torch.tensor(before)
    sum_tensors([after], dist.group.WORLD, 2**20)
    say("averaging against summing")
    ways = _ways(rank, trial_plan(EXACT, dp=world))
    say("a step of the engine")
    seen = observe_step(TRIAL, rank, bucket=BUCKET, dp=world)
    backward = [span for span in seen.spans if span.name in ("forward", "backward")]
    sums = of_kind(seen.transfers, "all-reduce")
    truth = truth_of(EXACT, rank)
    say("comparison with one process")
    return {
        "before": before,
        "after": after.tolist(),
        **ways,
        "transfers": [(m.kind, m.num_bytes, m.phase, m.microbatch, m.at_s - seen.began_s) for m in sums],
        "spans": [(span.name, span.microbatch, span.start_s, span.duration_s) for span in backward],
        "all_reduces": len(sums),
        "buffer_bytes": total(sums),
        "sent": seen.sent,
        "difference": difference(EXACT, truth, rank, dp=world),
    }


def _ways(rank: int, plan: Plan) -> dict[str, Any]:
    """Returns the gradient of the last norm, computed in three ways: averages of averages, this engine, one process."""
    whole, rows = EXACT.batch(SPEC, 1), plan.rows(rank)
    whole.targets[: len(plan.rows(0)), 3:] = IGNORE  # rank 0 has little to learn from
    part = whole.rows(rows.start, rows.stop)
    num_targets, own_targets = (int((batch.targets != IGNORE).sum()) for batch in (whole, part))
    micro = cut_microbatches(part, plan.micro_batch)

    own, own_loss = _plain(micro, own_targets)
    averaged = torch.cat([own, own.new_tensor([own_loss])]) / plan.world
    dist.all_reduce(averaged)

    engine = build_trial(SPEC, plan, EXACT, rank, CPU)
    _, finish = engine.norm_and_sums(engine.gradients(micro, num_targets, Clock(CPU)))
    sums = finish()
    summed = next(shard.gradient for shard in engine.shards if shard.name == "norm.weight")
    assert summed is not None

    one, one_loss = _plain(cut_microbatches(whole, plan.micro_batch), num_targets)
    ways = {
        "average": averaged.tolist(),
        "sum": [*summed.tolist(), float(sums[0]) / num_targets],
        "one": [*one.tolist(), one_loss],
    }
    return {"targets": own_targets, "own_loss": own_loss, "ways": ways}


def _plain(micro: Any, num_targets: int) -> tuple[torch.Tensor, float]:
    """Returns the gradient of the last norm and the mean loss in nats, computed by the plain model in this process."""
    model = Decoder(SPEC).double()
    initialize(model, EXACT.seed)
    loss = plain_gradients(model, micro, num_targets, EXACT.precision)
    return model.get_parameter("norm.weight").grad, loss  # type: ignore[return-value]


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story(
        "data-parallel", "Data parallelism: 4 processes, each with the whole model and a quarter of the batch"
    )
    names = [f"rank {rank}" for rank in range(WORLD)]
    one_grad = [[name, *(number(value) for value in rank["before"])] for name, rank in zip(names, found)]
    story.step(
        "Before: every rank has the gradient of its own rows",
        "Four numbers stand for the gradient, so that you can add them in your head.",
        table(["", "g[0]", "g[1]", "g[2]", "g[3]"], one_grad),
    )
    summed = [[name, *(number(value) for value in rank["after"])] for name, rank in zip(names, found)]
    story.step(
        "What moves: an all-reduce, in a ring. After: the sum, on every rank",
        drawing(
            "rank 0 --> rank 1 --> rank 2 --> rank 3 --+    N-1 rounds: a quarter of the gradient goes on,\n"
            "   ^                                      |    summed on its way\n"
            "   +--------------------------------------+    N-1 rounds: the finished quarters go round"
        ),
        table(["", "g[0]", "g[1]", "g[2]", "g[3]"], summed),
    )
    _uneven(story, names, found)
    _timeline(story, found[0])
    size = 4 * SPEC.num_parameters
    ways = found[0]["ways"]
    story.checks = [
        Check(
            "sum of the small gradients, added up over all ranks",
            "N (1+2+3+4) 1,111",
            "4 x 10 x 1,111",
            44440,
            sum(sum(rank["after"]) for rank in found),
        ),
        Check(
            "bytes of gradient given to all-reduces, per rank and step",
            "S = 4P",
            f"4 x {SPEC.num_parameters:,}",
            size,
            max(rank["buffer_bytes"] for rank in found),
        ),
        *on_the_wire("2S(N-1)/N", f"2 x {size:,} x 3/4", 2 * size * (WORLD - 1) / WORLD, [r["sent"] for r in found]),
        Check(
            "all-reduces that leave before the last micro-batch",
            "0",
            "",
            0,
            sum(transfer[3] != 1 for rank in found for transfer in rank["transfers"]),
        ),
        Check(
            "uneven token counts: difference of the summed gradient from one process",
            "0",
            "",
            0,
            _far(ways["sum"], ways["one"]),
            1e-9,
        ),
        same_as_one_process(max(rank["difference"] for rank in found), EXACT.num_steps),
    ]
    story.figures = {"parameters": SPEC.num_parameters, "ranks": found}
    return story


def _far(a: list[float], b: list[float]) -> float:
    """Returns the largest difference between two lists."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _uneven(story: Story, names: list[str], found: list[dict[str, Any]]) -> None:
    ways, targets = found[0]["ways"], [rank["targets"] for rank in found]
    rows = [[name, rank["targets"], f"{rank['own_loss']:.6f}"] for name, rank in zip(names, found)]
    labels = {"average": "WRONG  average of averages", "sum": "RIGHT  sums", "one": "one process, all rows"}
    compared = [
        [text, *(f"{value:+.6f}" for value in ways[key][:SHOWN]), f"{ways[key][-1]:.6f}"]
        for key, text in labels.items()
    ]
    story.step(
        "Sum or average? Ranks have different numbers of target tokens",
        f"Here {', '.join(map(str, targets))}. Where a rank divides by its own count, the few tokens of rank 0 weigh "
        "as much as the many of another. So every loss is divided by the count over all ranks, known before the step, "
        "and gradients are only ever added.",
        table(["", "target tokens", "own mean loss"], rows),
        "",
        table(["gradient of the last norm", "[0]", "[1]", "[2]", "[3]", "mean loss"], compared),
        f"The average is off by {_far(ways['average'], ways['one']):.0e}, the sum by "
        f"{_far(ways['sum'], ways['one']):.0e}.",
    )


def _timeline(story: Story, seen: dict[str, Any]) -> None:
    """Draws two micro-batches on a line, and under it when buckets left."""
    width, spans = 72, seen["spans"]
    start, end = spans[0][2], max(begin + took for _, _, begin, took in spans)
    compute, leaves = ["."] * width, [" "] * width
    for column in range(width):
        moment = start + (column + 0.5) * (end - start) / width
        for name, _, begin, took in spans:
            if begin <= moment < begin + took:
                compute[column] = "F" if name == "forward" else "B"
    for *_, at in seen["transfers"]:
        leaves[min(width - 1, max(0, int((at - start) / (end - start) * width)))] = "^"
    story.step(
        "When it moves: a real step of rank 0, two micro-batches",
        drawing(f"computes |{''.join(compute)}|\nsends    |{''.join(leaves)}|"),
        f"F forward, B backward, ^ a bucket of gradients leaves ({seen['all_reduces']} of them). The first micro-batch "
        "only adds to the gradients; in the last one a bucket leaves as soon as it is complete, while backward goes "
        "on.",
    )
