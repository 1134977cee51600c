"""Acts ZeRO out: the same model on four ranks in stages 0 to 3, side by side; bytes come from the tensors themselves.

Each stage is a step of the engine with two micro-batches. Hooks on the blocks look at what FSDP2 has gathered at that
moment. Read next: `parallel/zero/sharding.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shardwise.demo.observe import SPEC, difference, observe_step, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, drawing, on_the_wire, same_as_one_process, table
from shardwise.demo.wire import of_kind, total
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp2 import ParameterGroup, parameter_groups
from shardwise.prove.reference import Trial
from shardwise.run.memory_owners import kept_bytes

WORLD = 4
STAGES = (0, 1, 2, 3)
NUM_MICRO = 2
TRIAL = Trial(global_batch=WORLD * NUM_MICRO, micro_batch=1, seq_len=8, precision="fp32")
EXACT = Trial(global_batch=WORLD * NUM_MICRO, micro_batch=1, seq_len=8, num_steps=1)
GROUPS = SPEC.num_layers + 2  # groups of FSDP2: one per block, one for each end
BLOCK = 4 * (SPEC.num_parameters - (2 * SPEC.vocab + 1) * SPEC.hidden) // SPEC.num_layers  # bytes of a block
ONCE = 4 * SPEC.num_parameters - (SPEC.num_layers - 1) * BLOCK
"""Bytes that stage 3 gathers once per micro-batch: last block and head, where backward begins, and the embedding, which
it does not read."""


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    truth = truth_of(EXACT, rank)
    stages = []
    for zero in STAGES:
        say(f"a step of stage {zero}")
        stages.append(_stage(rank, world, zero))
        say(f"comparison of stage {zero} with one process")
        stages[-1]["difference"] = difference(EXACT, truth, rank, dp=world, zero=zero)
    return {"stages": stages}


def _stage(rank: int, world: int, zero: int) -> dict[str, Any]:
    moments: list[GroupsHere] = []
    kept: dict[str, int] = {}
    seen = observe_step(
        TRIAL,
        rank,
        prepare=lambda engine, _: _watch(engine, moments),
        look=lambda engine, optimizer: kept.update(kept_bytes(engine, optimizer)),
        dp=world,
        zero=zero,
    )
    gathers, exchanges, sums = (of_kind(seen.transfers, kind) for kind in ("all-gather", "all-to-all", "all-reduce"))
    return {
        "stage": zero,
        "kept": kept,
        "gathers": len(gathers),
        "gathered_bytes": total(gathers),
        "reductions": len(exchanges),
        "reduced_bytes": total(exchanges),
        "all_reduces": len(sums),
        "all_reduced_bytes": total(sums),
        "sent": seen.sent,
        "most_full_weights": max((moment.weights for moment in moments), default=0),
        "most_full_gradients": max((moment.gradients for moment in moments), default=0),
        "moments": [(moment.when, moment.groups) for moment in moments if moment.when],
    }


class GroupsHere(NamedTuple):
    """What a rank has whole at one moment: one sign per group (# in full, + arriving, . sharded), and bytes."""

    when: str
    groups: str
    weights: int
    gradients: int


def _watch(engine: Engine, moments: list[GroupsHere]) -> None:
    """Notes what is there before each block's forward, as its backward begins, and shortly before that ends."""
    model = engine.stages[0].model
    groups = parameter_groups(model)
    groups.sort(key=lambda group: (_is_head(group, model), not _is_embed(group, model)))

    def note(when: str) -> None:
        here, weights, gradients = "", 0, 0
        for group in groups:
            storages = [out.untyped_storage() for parameter in group.parameters for out in parameter.gathered]
            size, arriving = sum(storage.size() for storage in storages), group.gather_buffer
            here += "#" if size else "+" if arriving is not None else "."
            weights += size + (arriving.nbytes if arriving is not None and not size else 0)
            for parameter in group.parameters:
                gradients += sum(gradient.nbytes for gradient in parameter.unreduced_gradients())
        moments.append(GroupsHere(when, here, weights, gradients))

    def after(output: Tensor, when: str) -> None:
        output.register_hook(lambda gradient: note(when))

    for index, block in model.layers.items():
        block.register_forward_pre_hook(lambda module, args, index=index: note(f"F{index}"))
        block.register_forward_hook(lambda module, args, result, index=index: after(result[0], f"B{index}"))
        # At the output of its first norm a block's backward has nearly ended: its own gradients are there, in full.
        norm = block.get_submodule("attention_norm")
        norm.register_forward_hook(lambda module, args, result: after(result, ""))


def _is_embed(group: ParameterGroup, model: Any) -> bool:
    return group.parameters[0].module is model.embed


def _is_head(group: ParameterGroup, model: Any) -> bool:
    return group.parameters[-1].module is model.head


def make_story(found: list[dict[str, Any]]) -> Story:
    parameters = SPEC.num_parameters
    story = Story("zero", "ZeRO: one model, 4 processes, what each keeps and what it sends in stages 0, 1, 2 and 3")
    stages = found[0]["stages"]
    story.step(
        "Before: without ZeRO every rank keeps everything",
        f"{SPEC.num_layers} layers, P = {parameters:,} parameters in fp32, trained with Adam by N = {WORLD} ranks. "
        "Each rank keeps the weights (4P bytes), their gradients (4P) and Adam's two averages (8P): 16P, four times "
        "the same.",
    )
    rows = [
        [f"stage {stage['stage']}", *stage["kept"].values(), sum(stage["kept"].values()), _bar(stage["kept"])]
        for stage in stages
    ]
    story.step(
        "After a step: what rank 0 keeps, in bytes, measured from its tensors",
        table(
            ["", "weights", "gradients", "optimizer", "together", "w weights, g gradients, o optimizer"],
            rows,
            words=(0, 5),
        ),
        "Every rank keeps a quarter of the rows of each tensor. Between steps stages 1, 2 and 3 are alike; they differ "
        "in what is whole for a while during a step:",
        table(
            ["", "full weights at most", "full gradients at most", "why"],
            [
                [f"stage {s['stage']}", s["most_full_weights"], s["most_full_gradients"], why]
                for s, why in zip(stages[1:], WHY, strict=True)
            ],
            words=(0, 3),
        ),
    )
    story.step(
        "What moves and when: which weights rank 0 has in full, at each block of a step",
        drawing(_picture(stages[1]["moments"], "stages 1, 2") + "\n\n" + _picture(stages[3]["moments"], "stage 3")),
        "# there in full, + arriving, . only this rank's quarter. F0 is the forward of block 0, B0 its backward. Stage "
        "3 walks through the model with a window of blocks: the one that computes and the next, on its way.",
    )
    story.step(
        "What was sent in one step of two micro-batches (M = 2), G = 6 groups: embedding, 4 blocks, head",
        table(
            ["", "all-reduces", "gathers", "bytes", "reductions", "bytes", "sent per rank"],
            [
                [
                    f"stage {s['stage']}",
                    s["all_reduces"],
                    s["gathers"],
                    s["gathered_bytes"],
                    s["reductions"],
                    s["reduced_bytes"] + s["all_reduced_bytes"],
                    "not counted" if s["sent"] is None else s["sent"],
                ]
                for s in stages
            ],
        ),
        "A gather brings a group's weights to every rank. A reduction adds its gradients and leaves each rank its own "
        "quarter (on gloo an exchange and a local sum). Stage 3 gathers for forward and again for backward, but once "
        f"({ONCE:,} bytes) what ends the model, where backward begins, and the embedding, which backward does not "
        "read.",
    )
    for stage in STAGES:
        story.checks += _checks(stage, [rank["stages"][stage] for rank in found])
    largest = max(stage["difference"] for stage in stages)
    story.checks.append(same_as_one_process(largest, EXACT.num_steps))
    story.figures = {"parameters": parameters, "groups": GROUPS, "microbatches": NUM_MICRO, "ranks": found}
    return story


WHY = (
    "gradients wait for the last micro-batch",
    "a block's gradients leave at once",
    "and weights come block by block",
)


def _checks(stage: int, ranks: list[dict[str, Any]]) -> list[Check]:
    parameters, size = SPEC.num_parameters, 4 * SPEC.num_parameters
    kept = max(sum(rank["kept"].values()) for rank in ranks)
    share, text = (1, "16P") if stage == 0 else (WORLD, "16P/N")
    numbers = f"16 x {parameters:,}" + (f" / {WORLD}" if stage else "")
    checks = [Check(f"stage {stage}: bytes a rank keeps", text, numbers, 16 * parameters / share, kept)]
    if stage == 0:
        checks.append(Check("stage 0: bytes summed", "4P", f"4 x {parameters:,}", size, ranks[0]["all_reduced_bytes"]))
        return checks + on_the_wire("8P(N-1)/N", f"2 x {size:,} x 3/4", 1.5 * size, _sent(ranks), "stage 0: ")
    gathers, formula = (NUM_MICRO * (2 * GROUPS - 3), "M(2G-3)") if stage == 3 else (GROUPS, "G")
    reductions, reduced = (GROUPS, "G") if stage == 1 else (NUM_MICRO * GROUPS, "MG")
    gathered_bytes = NUM_MICRO * (2 * size - ONCE) if stage == 3 else size
    reduced_bytes = size * reductions // GROUPS
    put_in = f"{NUM_MICRO} x {2 * GROUPS - 3}" if stage == 3 else ""
    sent = (gathered_bytes + reduced_bytes) * (WORLD - 1) / WORLD
    checks += [
        Check(f"stage {stage}: gathers", formula, put_in, gathers, ranks[0]["gathers"]),
        Check(
            f"stage {stage}: reductions",
            reduced,
            f"{NUM_MICRO} x {GROUPS}" if stage > 1 else "",
            reductions,
            ranks[0]["reductions"],
        ),
        Check(
            f"stage {stage}: bytes gathered",
            "M(8P - once)" if stage == 3 else "4P",
            f"{NUM_MICRO} x (8 x {parameters:,} - {ONCE:,})" if stage == 3 else f"4 x {parameters:,}",
            gathered_bytes,
            ranks[0]["gathered_bytes"],
        ),
        *on_the_wire(
            "(N-1)/N of both", f"3/4 x {gathered_bytes + reduced_bytes:,}", sent, _sent(ranks), f"stage {stage}: "
        ),
    ]
    whole = ("4P", f"4 x {parameters:,}", size) if stage < 3 else ("two blocks", f"2 x {BLOCK:,}", 2 * BLOCK)
    checks.append(Check(f"stage {stage}: full weights at most", *whole, ranks[0]["most_full_weights"]))
    if stage == 1:
        most = ranks[0]["most_full_gradients"]
        checks.append(Check("stage 1: full gradients at most", "4P", f"4 x {parameters:,}", size, most))
    return checks


def _sent(ranks: list[dict[str, Any]]) -> list[int | None]:
    """Returns the bytes that each rank has sent; None where the system does not count."""
    return [rank["sent"] for rank in ranks]


def _bar(kept: dict[str, int]) -> str:
    """Returns a bar in which a letter is P/2 bytes: 16P are 32 letters."""
    unit = 16 * SPEC.num_parameters / 32
    return "".join(letter * round(size / unit) for letter, size in zip("wgo", kept.values(), strict=True))


def _picture(moments: list[tuple[str, str]], title: str) -> str:
    names = ["embedding", *(f"block {index}" for index in range(SPEC.num_layers)), "head"]
    lines = [f"{title:<12}" + " ".join(when for when, _ in moments)]
    lines += [f"{name:<12}" + " ".join(f"{here[row]:^2}" for _, here in moments) for row, name in enumerate(names)]
    return "\n".join(line.rstrip() for line in lines)
