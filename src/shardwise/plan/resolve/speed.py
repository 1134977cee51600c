"""Which of the [speed] tricks a plan uses: fills `auto`; and what the planner has to know of them. No torch.

Everything here changes how fast a step is computed, not what. Invariant: a trick that the layout cannot bear is off,
whatever `auto` would like. Read next: parallel/apply.py, which applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from shardwise.errors import UserError
from shardwise.plan.prediction.stack import OURS, Stack
from shardwise.plan.prediction.work import norms_have_kernel
from shardwise.spec.fp8 import WORTH
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schedules import SCHEDULES, splits_backward
from shardwise.spec.schema import SpeedConfig


def with_speed(
    plan: Plan, asked: SpeedConfig, spec: ModelSpec, attention: str = "sdpa", *, skips_steps: bool = False
) -> Plan:
    """Returns the plan with its tricks. Called last: what they may do depends on the layout. `attention`: as a `Job`
    has it. `skips_steps`: a step whose loss is not finite is passed over (run.on_nan = skip)."""
    kernels = kernels_of(asked, plan.device, spec, plan.pp, plan.schedule)
    keeps = keeps_low_precision(asked, plan.device, plan.precision, spec, plan.world, plan.offload, plan.zero)
    keeps, loss = keeps and not plan.rounds_sums, loss_of(asked, plan.pp, plan.schedule)
    if asked.copies is True and not keeps:
        raise _no_low_precision(plan, spec)
    if (asked.compile not in ("auto", "none") and kernels["compile"] == "none") or (
        asked.fuse is True and not kernels["fuse"]
    ):
        raise _no_kernels("compile" if kernels["compile"] != asked.compile else "fuse", plan, asked, spec)
    for key, value in (("products", "measured"), ("kernels", "own")):
        if getattr(asked, key) == value and kernels[key] != value:
            raise UserError(
                f"`speed.{key} = {value}` is for compiled blocks on a GPU",
                why=f"this run has speed.compile = {kernels['compile']} on {plan.device}",
                fix=f"speed.{key}=auto, which takes that where it can",
            )
    kernels["kernels"] = norms_of(kernels["kernels"], spec, plan.precision, plan.tp * plan.cp * plan.ep)
    if asked.kernels == "own" and kernels["kernels"] != "own":
        raise UserError(
            (
                "`speed.kernels = own` is for norms of 512 to 16,384 elements (RMSNorm, none after a part) in 16 "
                "bits, with tp = cp = ep = 1"
            ),
            why=f"this run is {spec.name} with {plan.layout} in {plan.precision}",
            fix="speed.kernels=auto, which takes that where it can",
        )
    if asked.loss == "fused" and loss != "fused":
        raise UserError(
            f"`speed.loss = fused` does not go with `parallel.schedule = {plan.schedule}`",
            why="all micro-batches wait for their backward, each with a gradient of the head's weights in fp32",
            fix="speed.loss=auto or parallel.schedule=1f1b",
        )
    attention = attention_of(attention, spec, plan.precision, plan.cp, plan.cp_kind)
    results = results_of(asked, plan.device, plan.precision, skips_steps or plan.fill_bubbles != "none")
    return replace(plan, **kernels, copies=keeps, loss=loss, attention=attention, results=results)


def results_of(asked: SpeedConfig, device: str, precision: str, at_once: bool = False) -> str:
    """Returns when a step's loss is read: `late`, with the next step queued, on GPUs; `at-once` where results decide
    about the step's own update (a scaled loss) or, by `at_once`, about what follows."""
    can = device == "cuda" and not PRECISIONS[precision].scales_loss and not at_once
    return ("late" if can else "at-once") if asked.results == "auto" else asked.results


def asked_speed(fixed: Mapping[str, Any]) -> SpeedConfig:
    """Returns the section [speed] from `section.key` words."""
    return SpeedConfig(
        **{key.removeprefix("speed."): value for key, value in fixed.items() if key.startswith("speed.")}
    )


def kernels_of(asked: SpeedConfig, device: str, spec: ModelSpec, pp: int, schedule: str) -> dict[str, Any]:
    """Returns the kernels of a layout by key of [speed]. A compiled block has one backward: schedules that make the
    gradients of weights later need it in two."""
    compiled = asked.compile
    if compiled == "auto":  # liger's kernels are for blocks that are not compiled (config/check.py)
        compiled = "blocks" if device == "cuda" and asked.kernels != "liger" else "none"
    if not spec.is_ours or (pp > 1 and splits_backward(schedule)):
        compiled = "none"
    # Fused gradients are put side by side by a kernel that reads its inputs twice (docs/log.md); so not by itself.
    fuse = asked.fuse is True and spec.is_ours
    # By a pass over compiled graphs, with kernels that only CUDA has.
    can = device == "cuda" and compiled in ("blocks", "graphs")
    return {
        "compile": compiled,
        "fuse": fuse,
        "kernels": asked.kernels if asked.kernels in ("torch", "liger") else "own" if can else "torch",
        "products": "measured" if can and asked.products != "library" else "library",
    }


def norms_of(kernels: str, spec: ModelSpec, precision: str, ranks: int) -> str:
    """Returns whose kernels norms have: `own` where that is possible. `ranks`: those that a block talks to. In fp8 a
    compiler looks for a gradient's largest element in the pass that makes it."""
    can = (
        norms_have_kernel(spec)
        and PRECISIONS[precision].is_sixteen_bit
        and not PRECISIONS[precision].is_fp8
        and ranks == 1
    )
    return "torch" if kernels == "own" and not can else kernels


def keeps_low_precision(
    asked: SpeedConfig, device: str, precision: str, spec: ModelSpec, world: int, offload: str, zero: int
) -> bool:
    """Returns whether low-precision weights stay between steps: one rank alone keeps weights in fp32 and uses them in
    16 bits."""
    can = world == 1 and PRECISIONS[precision].is_mixed and zero == 0 and offload == "none" and spec.is_ours
    return can and (device == "cuda" if asked.copies == "auto" else bool(asked.copies))


def bears(asked: SpeedConfig, schedule: str) -> bool:
    """Returns whether a pipeline with this schedule can have what is asked for outright."""
    compiles = asked.compile not in ("auto", "none") or asked.products == "measured" or asked.kernels == "own"
    return not (compiles and splits_backward(schedule)) and not (
        asked.loss == "fused" and SCHEDULES[schedule].holds_all
    )


def _no_kernels(key: str, plan: Plan, asked: SpeedConfig, spec: ModelSpec) -> UserError:
    value = asked.compile if key == "compile" else "true"
    if not spec.is_ours:
        why, instead = f"{spec.name} is transformers' model, whose blocks stay as they are", ""
    else:
        why = f"{plan.schedule} makes gradients of weights later than others, a compiled block all at once"
        instead = " or parallel.schedule=1f1b"
    return UserError(f"`speed.{key} = {value}` is not for this run", why=why, fix=f"speed.{key}=auto{instead}")


def _no_low_precision(plan: Plan, spec: ModelSpec) -> UserError:
    also = f", with gradients summed in {plan.reduce_dtype}" if plan.rounds_sums else ""
    return UserError(
        "speed.copies = true is for one rank alone that computes in 16 bits over fp32 weights",
        why=f"this plan is {plan.layout} in {plan.precision}" + (also if spec.is_ours else ", of transformers' model"),
        fix="speed.copies=auto, which keeps low-precision weights where it can",
    )


def loss_of(asked: SpeedConfig, pp: int, schedule: str) -> str:
    """Returns how the loss is computed: `fused`, or `recompute` where gpipe has all micro-batches wait for their
    backward, because each would keep a gradient of the head's weights in fp32."""
    can = pp == 1 or not SCHEDULES[schedule].holds_all
    return "fused" if can and asked.loss in ("auto", "fused") else "recompute"


WIDEST_FLASH4 = 128
"""Heads of 64 and 128 were measured (kernels.py)."""


def attention_of(asked: str, spec: ModelSpec, precision: str, cp: int, cp_kind: str) -> str:
    """Returns the kernel by which a layout's attention is priced. FlashAttention 4 computes in 16 bits, without soft
    caps. Nobody measures kernels where sequences are cut (parallel/apply.py), and a ring has its own."""
    can = asked != "sdpa" and spec.is_ours and not spec.attention.pads_values and not spec.attention_softcap
    can = can and spec.head_dim <= WIDEST_FLASH4 and PRECISIONS[precision].is_sixteen_bit
    return "flash4" if can and (cp == 1 or (asked == "flash4" and cp_kind == "ulysses")) else "sdpa"


def stack_of(plan: Plan) -> Stack:
    """Returns the `Stack` with which our runtime executes a plan."""
    fp8 = fp8_of(plan.precision, plan.fp8_recipe, plan.fp8_head)
    stack = our_stack(plan.compile != "none", plan.fuse, plan.loss == "fused", plan.products == "measured", *fp8)
    return attending(stack, plan.attention)


def attending(stack: Stack, kernel: str) -> Stack:
    return stack if stack.attention == kernel else _attending(stack, kernel)


@cache
def _attending(stack: Stack, kernel: str) -> Stack:
    """Returns the same object for the same words, because prices are kept by it (step_time.py)."""
    return replace(stack, attention=kernel)


def fp8_of(precision: str, recipe: str, head: bool) -> tuple[str, bool]:
    """Returns the last words of `our_stack`: the recipe, none without fp8, and whether the head has it too."""
    return (recipe, head) if PRECISIONS[precision].is_fp8 else ("", False)


@cache
def our_stack(
    compiled: bool, fuse: bool, fused_loss: bool, chosen: bool = False, recipe: str = "", fp8_head: bool = False
) -> Stack:
    """Returns the `Stack` with which our runtime executes a layout that has these tricks."""
    if not (compiled or fuse or fused_loss or recipe):
        return OURS
    return replace(
        OURS,
        compiled=compiled,
        stops_early=not compiled,
        chosen=chosen,
        fused_matmuls=fuse,
        side_by_side=("qkv", "gate up") if fuse else (),
        logits_again=not fused_loss,
        fused_loss=compiled and fused_loss,
        fp8_least=WORTH.get(recipe, 0),
        fp8_rows=recipe == "rowwise",
        fp8_head=fp8_head,
    )
