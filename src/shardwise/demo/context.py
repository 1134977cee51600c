"""Acts context parallelism out: two ranks share every sequence, by a ring and by Ulysses; four show the zigzag.

A few token numbers are dealt out by the layout's own `Zigzag`; the rest are steps of the engine. Read next:
`parallel/context/ring.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.demo.observe import SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, on_the_wire, percent, same_as_one_process, table
from shardwise.demo.wire import of_kind, total
from shardwise.memory.usage import saved_bytes
from shardwise.parallel.context.zigzag import Zigzag
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_batch

WORLD = 2
ROWS, TOKENS, NUM_MICRO = 4, 64, 2
TRIAL = Trial(global_batch=NUM_MICRO * ROWS, micro_batch=ROWS, seq_len=TOKENS, precision="fp32")
EXACT = Trial(global_batch=4, micro_batch=2, seq_len=16, num_steps=2, documents=True)
KINDS = ("ring", "ulysses")
DRAWN, DRAWN_TOKENS = 4, 16  # ranks and tokens that the picture shows


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    found: dict[str, Any] = {"work": _work(rank, world)}
    truth = truth_of(EXACT, rank)
    for kind in KINDS:
        say(f"a step by {kind}")
        found[kind] = _step(rank, world, kind)
        say(f"comparison with one process, {kind}")
        found[kind]["difference"] = difference(EXACT, truth, rank, cp=world, cp_kind=kind)
    say("a step without context parallelism")
    found["whole_saved"] = _saved(observe_step(TRIAL, rank, dp=world).engine)
    return found


def _work(rank: int, world: int) -> dict[str, float]:
    """Returns how many pairs of query and key this rank computes in a pass over one row: with its zigzag pieces, and
    with a plain stretch of the row."""
    place, stretch = Zigzag(world, rank, TOKENS), TOKENS // world
    zigzag = sum(block.work for source in range(world) for block in place.blocks(source))
    return {"zigzag": zigzag, "stretch": rank * stretch * stretch + stretch * stretch / 2}


def _step(rank: int, world: int, kind: str) -> dict[str, Any]:
    seen = observe_step(TRIAL, rank, cp=world, cp_kind=kind)
    sends, swaps = of_kind(seen.transfers, "send"), of_kind(seen.transfers, "all-to-all")
    return {
        "sends": {phase: total(of_kind(sends, "send", phase)) for phase in ("forward", "backward")},
        "swaps": {phase: total(of_kind(swaps, "all-to-all", phase)) for phase in ("forward", "backward")},
        "num_sends": len(sends),
        "num_swaps": len(swaps),
        "wire_bytes": sum(transfer.share(world) for transfer in seen.transfers),
        "sent": seen.sent,
        "saved": _saved(seen.engine),
    }


def _saved(engine: Any) -> int:
    """Returns the bytes that autograd keeps for the backward pass of one micro-batch."""
    batch, _ = trial_batch(SPEC, engine.plan, TRIAL, 1, 0)
    micro = batch.microbatches[0]
    return saved_bytes(engine.models[0], micro.tokens, micro.targets)


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story("context", "Context parallelism: 2 processes that share every sequence")
    row = torch.arange(DRAWN_TOKENS)[None]
    places = [Zigzag(DRAWN, rank, DRAWN_TOKENS) for rank in range(DRAWN)]
    dealt = [
        [f"rank {place.index}", " ".join(map(str, place.take(row)[0].tolist())), _causal(place), _stretch(place)]
        for place in places
    ]
    story.step(
        f"Before: who gets which of {DRAWN_TOKENS} tokens, were there {DRAWN} ranks",
        table(["", "tokens, zigzag", "work, in pairs", "with a plain stretch"], dealt, words=(0, 1)),
        "A token looks at itself and at all before it. One piece from the front and one from the back make everybody's "
        "work equal; with plain stretches the last rank would have several times the work of the first, and all would "
        "wait for it.",
    )
    rows = []
    for kind in KINDS:
        step = found[0][kind]
        moved = step["sends"] if kind == "ring" else step["swaps"]
        how = f"{step['num_sends']} sends" if kind == "ring" else f"{step['num_swaps']} all-to-alls"
        rows.append([kind, how, moved["forward"], moved["backward"]])
    story.step(
        "What moves in a step: keys and values round the ring, or heads for tokens",
        table(["rank 0", "how", "bytes in forward", "bytes in backward"], rows, words=(0, 1)),
        "Ring: K and V of the other rank arrive while our own block is computed; in backward their gradients travel "
        "with them and go home. Ulysses: an all-to-all gives each rank all tokens of some heads, another takes the "
        "output back (bytes of whole buffers).",
    )
    whole = found[0]["whole_saved"]
    story.step(
        "After: what rank 0 keeps for backward, of one micro-batch",
        table(
            ["", "bytes", "of whole sequences"],
            [["whole sequences", whole, "100 %"]]
            + [[kind, found[0][kind]["saved"], percent(found[0][kind]["saved"] / whole)] for kind in KINDS],
        ),
        "Ulysses keeps attention's output twice, by heads and by tokens.",
    )
    story.checks = _checks(found)
    story.figures = {"ranks": found}
    return story


def _causal(place: Zigzag) -> float:
    """Returns how many pairs of query and key a rank of the picture computes with its zigzag pieces."""
    return sum(block.work for source in range(place.size) for block in place.blocks(source))


def _stretch(place: Zigzag) -> float:
    """Returns how many pairs of query and key a rank of the picture computes with a plain stretch of the row."""
    length = DRAWN_TOKENS // DRAWN
    return place.index * length * length + length * length / 2


def _checks(found: list[dict[str, Any]]) -> list[Check]:
    layers, hidden, passes = SPEC.num_layers, SPEC.hidden, NUM_MICRO * SPEC.num_layers
    kv = 2 * ROWS * TOKENS // WORLD * hidden * 4  # K and V of a rank's tokens
    ring, ulysses = found[0]["ring"], found[0]["ulysses"]
    # q, k, v in one exchange and the output in the other, both ways.
    swapped = passes * 4 * ROWS * TOKENS // WORLD * hidden * 4
    parameters = SPEC.num_parameters * 4
    checks = [
        Check(
            "work of the slower rank over that of the faster, zigzag",
            "1",
            "",
            1,
            max(r["work"]["zigzag"] for r in found) / min(r["work"]["zigzag"] for r in found),
        ),
        Check(
            "the same with plain stretches",
            "2c - 1",
            "2 x 2 - 1",
            3,
            max(r["work"]["stretch"] for r in found) / min(r["work"]["stretch"] for r in found),
        ),
        Check(
            "ring: bytes of K and V in forward",
            "M L (c-1) 2bsh/c 4",
            f"{NUM_MICRO} x {layers} x 1 x {kv:,}",
            passes * kv,
            ring["sends"]["forward"],
        ),
        Check(
            "ring: bytes in backward, with dK and dV",
            "twice that",
            f"2 x {passes * kv:,}",
            2 * passes * kv,
            ring["sends"]["backward"],
        ),
        Check(
            "Ulysses: bytes exchanged in forward",
            "M L 4bsh/c 4",
            f"{NUM_MICRO} x {layers} x {swapped // passes:,}",
            swapped,
            ulysses["swaps"]["forward"],
        ),
        Check("Ulysses: bytes exchanged in backward", "the same", "", swapped, ulysses["swaps"]["backward"]),
    ]
    gradients = parameters * 2 * (WORLD - 1) / WORLD
    for kind, moved in (("ring", 3 * passes * kv), ("ulysses", 2 * swapped * (WORLD - 1) / WORLD)):
        sent = [rank[kind]["sent"] for rank in found]
        numbers = f"{moved:,.0f} + {gradients:,.0f}"
        checks += on_the_wire("these and the gradients", numbers, moved + gradients, sent, f"{kind}: ")
    largest = max(rank[kind]["difference"] for rank in found for kind in KINDS)
    return [*checks, same_as_one_process(largest, EXACT.num_steps)]
