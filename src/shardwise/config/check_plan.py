"""Refuses what a finished plan cannot have, each in three lines. No torch.

Whether a plan fits into memory is fit.py's, what the machine lacks is
cluster/describe/capabilities.py's, what [speed] cannot do is speed.py's.
"""

from __future__ import annotations

from shardwise.config.keys import Origins, where_written
from shardwise.config.units import parse_steps
from shardwise.errors import UserError
from shardwise.spec.fp8 import MULTIPLE, check_float8_base
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config


def check_plan(config: Config, plan: Plan, spec: ModelSpec, origins: Origins) -> None:
    """Raises where a plan with every `auto` resolved cannot run."""
    _check_fill(config, plan, origins)
    written = where_written(origins, "memory.precision", "parallel.zero", "memory.offload")
    check_float8_base(plan.precision, config.adapter.kind, plan.zero, plan.offload, written)
    _check_fp8_tokens(plan, origins)
    _check_fp8_head(plan, spec, origins)
    _check_offload(plan, origins)
    _check_profile(config.run.profile, plan.num_steps, origins)


def _check_fill(config: Config, plan: Plan, origins: Origins) -> None:
    """Refuses side work for idle slots where it is not available: it is plain forwards between those of training, over
    gloo."""
    if config.parallel.fill_bubbles == "none":
        return
    if plan.device == "cuda":
        word, why = "on GPUs", "its times and sends were only ever tried on CPUs"
    elif plan.uses_fsdp:
        word = f"with zero={plan.zero}" if plan.zero else f"with memory.precision={plan.precision}"
        why = "parameters are gathered for training's own forwards and must not stay gathered for another one"
    else:
        return
    raise UserError(
        f"`parallel.fill_bubbles = eval` is not available yet {word}",
        why=why,
        fix="parallel.fill_bubbles=none",
        where=where_written(origins, "parallel.fill_bubbles", "parallel.zero", "memory.precision"),
    )


def _check_fp8_tokens(plan: Plan, origins: Origins) -> None:
    """Refuses sequences that fp8 cannot take: the gradient of a weight multiplies over tokens."""
    tokens = plan.seq_len // plan.cp
    if plan.formats.is_fp8 and tokens % MULTIPLE:
        needed = MULTIPLE * plan.cp
        raise UserError(
            f"memory.precision = fp8 needs sequences that divide by {needed}",
            why=f"fp8 matmuls take tokens by {MULTIPLE}, and a rank has {tokens} of each sequence",
            fix=f"train.seq_len={-(-plan.seq_len // needed) * needed} or memory.precision=bf16",
            where=where_written(origins, "memory.precision", "train.seq_len", "parallel.cp"),
        )


def _check_fp8_head(plan: Plan, spec: ModelSpec, origins: Origins) -> None:
    if plan.fp8_head and (not plan.formats.is_fp8 or not spec.is_ours):
        is_mixed = not plan.formats.is_fp8
        raise UserError(
            "memory.fp8_head has nothing to do here",
            why=f"memory.precision is {plan.precision}" if is_mixed else f"the head of {spec.name} is not ours",
            fix="memory.fp8_head=false" + (" or memory.precision=fp8" if is_mixed else ""),
            where=where_written(origins, "memory.fp8_head"),
        )


def _check_offload(plan: Plan, origins: Origins) -> None:
    if plan.device == "cuda" and plan.offload == "all" and plan.offload_to == "nvme":
        raise UserError(
            "parameters on a disk are not available yet on GPUs",
            why="they were only ever tried on CPUs; the optimizer's state may lie on a disk",
            fix="memory.offload=nvme, or memory.offload=all memory.offload_to=cpu",
            where=where_written(origins, "memory.offload", "memory.offload_to"),
        )


def _check_profile(steps: str | None, num_steps: int, origins: Origins) -> None:
    if steps is not None and parse_steps(steps)[-1] > num_steps:
        length = len(parse_steps(steps))
        raise UserError(
            f'`run.profile = "{steps}"` goes beyond the last step',
            why=f"this run has {num_steps} steps",
            fix=f"run.profile={max(1, num_steps - length + 1)}:{num_steps}",
            where=where_written(origins, "run.profile"),
        )
