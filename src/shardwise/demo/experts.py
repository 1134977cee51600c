"""Acts expert parallelism out: four ranks, two experts each; tokens travel to the experts they chose and come back.

Small numbers go through the exchange of `parallel/expert/dispatch.py`; the rest is a step of the engine. Read next:
`parallel/expert/dispatch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.demo.observe import SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, on_the_wire, same_as_one_process, table
from shardwise.demo.wire import of_kind, total
from shardwise.model.decoder import Decoder
from shardwise.model.experts import count_experts, moe_layers
from shardwise.parallel.expert.dispatch import exchange, plan_trip
from shardwise.prove.reference import Trial

WORLD = 4
EXPERTS, CHOSEN, WIDTH = 8, 2, 32
MOE = SPEC.with_overrides(
    {
        "num_layers": 2,
        "num_experts": EXPERTS,
        "experts_per_token": CHOSEN,
        "expert_ffn": WIDTH,
        "moe_every": 1,
        "router": "softmax-topk",
        "norm_topk": True,
        "aux_loss_coef": 0.01,
    }
)
ROWS, TOKENS, NUM_MICRO = 2, 64, 2
TRIAL = Trial(global_batch=WORLD * NUM_MICRO * ROWS, micro_batch=ROWS, seq_len=TOKENS, precision="fp32")
EXACT = Trial(global_batch=8, micro_batch=1, seq_len=16, num_steps=2)
CHOICES = ([0, 3, 3], [2, 1, 0], [3, 0, 3], [2, 3, 0])
"""The expert that each of three tokens chose, on each of four ranks; rank r has expert r."""


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    say("three tokens per rank")
    found: dict[str, Any] = _small(rank)
    say("a step of a model with experts")
    loads: list[list[int]] = []

    def watch(engine: Any, _: Any) -> None:
        for layer in moe_layers(engine.models[0]):
            layer.experts.register_forward_pre_hook(lambda module, args: loads.append(args[1].tolist()))

    seen = observe_step(TRIAL, rank, spec=MOE, prepare=watch, dp=world, ep=world)
    exchanges = [m for m in of_kind(seen.transfers, "all-to-all") if m.phase in ("forward", "backward")]
    shards = seen.engine.shards
    found |= {
        "loads": loads,
        "exchanges": len(exchanges),
        "exchange_bytes": total(exchanges),
        "sent": seen.sent,
        "expert_bytes": sum(shard.local.nbytes for shard in shards if ".experts." in shard.name),
        "dense_bytes": sum(shard.local.nbytes for shard in shards if ".experts." not in shard.name),
    }
    say("comparison with one process")
    found["difference"] = difference(EXACT, truth_of(EXACT, rank, MOE), rank, MOE, dp=world, ep=world)
    return found


def _small(rank: int) -> dict[str, Any]:
    """Sends three numbers per rank to experts and back. Token t of rank r is the number 10 r + t; an expert adds 100
    times its own number, plus 100. Returns what was sent, what arrived and what came back."""
    chosen = torch.tensor(CHOICES[rank])
    order = chosen.argsort(stable=True)
    tokens = 10.0 * rank + torch.arange(3.0)
    trip = plan_trip(count_experts(chosen[None], WORLD)[0], dist.group.WORLD)
    arrived = exchange(tokens[order][:, None], trip.received, trip.sent, dist.group.WORLD)
    back = exchange(arrived + 100 * (rank + 1), trip.sent, trip.received, dist.group.WORLD)
    return {
        "tokens": tokens.int().tolist(),
        "chosen": chosen.tolist(),
        "arrived": arrived.flatten().int().tolist(),
        "back": back[order.argsort()].flatten().int().tolist(),
    }


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story(
        "experts",
        f"Expert parallelism: {WORLD} processes, each with its own rows and {EXPERTS // WORLD} experts per layer",
    )
    story.step(
        "Before: three tokens per rank, and the expert that each has chosen (here rank r has expert r)",
        table(
            ["", "tokens", "chose expert"],
            [[f"rank {r}", _list(x["tokens"]), _list(x["chosen"])] for r, x in enumerate(found)],
            (0, 1, 2),
        ),
    )
    story.step(
        "What moves: every rank sorts its tokens by expert, says how many come, and sends them",
        table(
            ["", "arrived for its expert", "results that came back, in the old order"],
            [[f"rank {r}", _list(x["arrived"]) or "nothing", _list(x["back"])] for r, x in enumerate(found)],
            (0, 1, 2),
        ),
        "Tokens arrive in the order of ranks. An expert here adds 100 times its number, plus 100: the hundreds say who "
        "has worked on a token. Expert 1 got one token and expert 3 five: nobody's are dropped, and rank 3 works "
        "longest.",
    )
    loads = [x["loads"][0] for x in found]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    names = [f"e{expert}" for expert in range(EXPERTS)]
    story.step(
        "A real step: rows from each rank to each expert, first layer, first micro-batch",
        table(["", *names], [[f"rank {r}", *row] for r, row in enumerate(loads)] + [["load", *totals]]),
        f"A token chooses {CHOSEN}. Ranks 0 to 3 have experts 0-1, 2-3, 4-5 and 6-7. The mean load is "
        f"{sum(totals) // EXPERTS}; the busiest expert has {max(totals) * EXPERTS / sum(totals):.2f} times that "
        "(`expert_load_max` in a run's metrics).",
    )
    whole = _expert_bytes()
    story.step(
        "After: what a rank holds",
        table(
            ["bytes of parameters", "one process", "each of 4 ranks"],
            [
                ["experts", whole, found[0]["expert_bytes"]],
                ["everything else", found[0]["dense_bytes"], found[0]["dense_bytes"]],
            ],
        ),
        "Gradients and optimizer state fall with the parameters. Gradients of the rest are summed over all ranks; "
        "those of an expert are complete where it is, because all of its tokens came to it.",
    )
    story.checks = _checks(found)
    story.figures = {"ranks": found}
    return story


def _checks(found: list[dict[str, Any]]) -> list[Check]:
    layers, hidden = MOE.num_layers, MOE.hidden
    passes = layers * NUM_MICRO
    routed_rows = CHOSEN * ROWS * TOKENS
    rows = [row for x in found for row in x["loads"]]
    here = EXPERTS // WORLD
    leaving = sum(
        sum(row) - sum(row[here * rank : here * (rank + 1)]) for rank, x in enumerate(found) for row in x["loads"]
    )
    given = WORLD * passes * (4 * routed_rows * 4 * hidden + 8 * EXPERTS)
    dense = found[0]["dense_bytes"]
    wire = (4 * leaving * 4 * hidden) / WORLD + 2 * (WORLD - 1) / WORLD * dense
    return [
        Check(
            "bytes of experts on a rank",
            "4 x 3hf L E/e",
            f"12 x {hidden} x {WIDTH} x {layers} x {EXPERTS}/{WORLD}",
            _expert_bytes() / WORLD,
            found[0]["expert_bytes"],
        ),
        Check(
            "exchanges of a rank: counts, rows there and back, gradients there and back",
            "5LM",
            f"5 x {layers} x {NUM_MICRO}",
            5 * passes,
            found[0]["exchanges"],
        ),
        Check(
            "rows that reached an expert in a forward pass, all ranks",
            "n LM kbs",
            f"{WORLD} x {passes} x {routed_rows}",
            WORLD * passes * routed_rows,
            sum(sum(row) for row in rows),
        ),
        Check(
            "bytes exchanged by all ranks",
            "n LM (4 x 4kbsh + 8E)",
            f"{WORLD} x {passes} x {given // WORLD // passes:,}",
            given,
            sum(x["exchange_bytes"] for x in found),
        ),
        *on_the_wire(
            "rows + 3/2 of the rest",
            f"{4 * leaving * 4 * hidden // WORLD:,} + {2 * (WORLD - 1) * dense // WORLD:,}",
            wire,
            [x["sent"] for x in found],
        ),
        same_as_one_process(max(x["difference"] for x in found), EXACT.num_steps),
    ]


def _expert_bytes() -> int:
    with torch.device("meta"):
        model = Decoder(MOE)
    return sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)


def _list(values: list[int]) -> str:
    return "  ".join(map(str, values))
