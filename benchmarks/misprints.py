"""Formulas that are often printed wrongly, with the planner's own figures: benchmarks/results/misprints.md.

    python benchmarks/misprints.py            writes the page anew

A test fails when the page is not what the planner says today, or when a command that it names does not exist.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from stacks.foreign import ForeignStack

from shardwise.plan.prediction.activations import TokenShare, layer_activations
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.prediction.stack import OURS
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.timeline import peak_in_flight, simulate

PAGE = Path(__file__).resolve().parent / "results" / "misprints.md"
PAPER = ForeignStack(name="paper", half_weights=True, gradient_bytes=2)
"""bf16 weights and gradients, fp32 masters and moments, as the ZeRO paper counts."""


@dataclass(frozen=True)
class Misprint:
    printed: str
    right: str
    why: str
    command: str


def seven_billion() -> ModelSpec:
    """A model of 7.00B parameters: Llama 2's 7B with a larger vocabulary."""
    base = preset("llama2-7b")
    return base.with_overrides({"vocab": base.vocab + round((7e9 - base.num_parameters) / (2 * base.hidden))})


def states_gb(gpus: int, zero: int) -> float:
    plan = Plan(
        device="cuda",
        precision="bf16",
        seq_len=1,
        global_batch=gpus,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="a misprint",
        dp=gpus,
        zero=zero,
    )
    parts = predict_memory(seven_billion(), plan, "adamw", stack=PAPER)
    return sum(parts[name] for name in ("weights", "gradients", "optimizer")) / 1e9


def scores() -> Misprint:
    spec, seq = preset("gpt3-175b"), 2048
    kept = [
        layer_activations(spec, spec.layers[:1], TokenShare(seq), stack)
        for stack in (ForeignStack(attention="math"), OURS)
    ]
    right, printed = (kept[0] - kept[1]) * seq * 2, 5 * seq**2 * spec.hidden
    return Misprint(
        "Attention keeps `5bs²h` bytes per layer",
        "`5abs²`: heads, not hidden width",
        "Softmax, the mask of its dropout and what that leaves: 2 + 1 + 2 bytes for each head and pair of tokens. A "
        f"layer of GPT-3 with one sequence of {seq:,}"
        f" tokens keeps {right / 1e9:.1f} GB; the misprint says {printed / 1e9:.0f} GB, {printed / right:.0f} times as "
        "much. A fused kernel keeps none of it.",
        "shardwise explain memory",
    )


def bubbles() -> Misprint:
    found = {}
    for name in ("gpipe", "1f1b"):
        actions, owners = schedule_actions(name, 4, 1, 8), stage_owners(name, 4, 1)
        idle = simulate(actions, owners, lambda action: {"F": 1.0, "B": 2.0}[action.kind]).bubble_fraction
        found[name] = (idle, max(peak_in_flight(actions)))
    (gpipe, all_kept), (one, kept) = found["gpipe"], found["1f1b"]
    return Misprint(
        '"1F1B has a smaller bubble than GPipe"',
        "the same bubble, less memory",
        f"With 4 stages and 8 micro-batches ranks idle {gpipe * 100:.1f} % in GPipe and {one * 100:.1f} % in 1F1B: "
        "both fill and drain the pipeline once,"
        f" (p-1)/(m+p-1). What differs is what the first rank holds: {all_kept} micro-batches against {kept}.",
        "shardwise explain pipeline --demo",
    )


def first_stage() -> Misprint:
    right, second = states_gb(8, 1), states_gb(8, 2)
    return Misprint(
        "ZeRO-1 takes `2Ψ + 14Ψ/N` bytes",
        "`4Ψ + 12Ψ/N`",
        "Stage 1 shares out the optimizer alone: masters and two moments, 12 bytes. Weights and gradients stay whole, "
        "2 + 2. For 7B parameters on 8 GPUs that is"
        f" {right:.1f} GB; the misprint, {second:.2f} GB, is stage 2, whose gradients are shared out as well.",
        "shardwise explain zero --demo",
    )


def all_reduces() -> Misprint:
    return Misprint(
        "Tensor parallelism: one all-reduce per block",
        "two forward and two backward",
        "Attention ends in one sum over the ranks and the feed-forward part in another; backward has one at each "
        "entrance. Full recomputation repeats the forward ones but the"
        " last. The command counts them on real processes, M(2L+1) each way: two per layer, and one where embedding or "
        "head is cut.",
        "shardwise explain tensor --demo",
    )


def bytes_per_parameter() -> Misprint:
    right = states_gb(1, 0)
    return Misprint(
        "Training a 7B model takes 84 GB",
        f"{right:.0f} GB before one activation",
        "84 GB are 12 bytes per parameter: optimizer states alone, or weights and two moments in fp32 without "
        "gradients. Mixed precision with Adam keeps"
        " weights (2), gradients (2), fp32 masters (4) and two moments (8): 16. Ours counts 4 + 4 + 8, the same sum.",
        "shardwise explain memory",
    )


def page() -> str:
    found = [scores(), bubbles(), first_stage(), all_reduces(), bytes_per_parameter()]
    lines = [
        "# Formulas that are often printed wrongly",
        "",
        "<!-- Made by `python benchmarks/misprints.py`; a test fails when it is out of date. -->",
        "",
        "Each with the right value and the command that shows it. Figures are the planner's own (`plan/`), held to the "
        "textbooks by",
        "`tests/plan/test_textbook_numbers.py`.",
        "",
        "| printed | right | shown by |",
        "|---|---|---|",
        *(f"| {one.printed} | {one.right} | `{one.command}` |" for one in found),
    ]
    for one in found:
        lines += ["", f"## {one.printed}", "", f"**Right:** {one.right}. {one.why}", "", f"    {one.command}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
