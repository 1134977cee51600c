"""From what the user asked for to a `Plan`: fills every `auto` and refuses what cannot work, before torch is imported.

The degrees of the axes come first (degrees.py); then the ZeRO stage and the micro-batch, by predicted memory
(memory.py). Where that does not fit, or on several GPUs could be faster, the search decides (searched.py). What was
chosen and why goes into the config (resolved_config.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from shardwise.cluster.describe.machine import Machine
from shardwise.config.check_layout import degree
from shardwise.config.keys import Origins, where_written
from shardwise.config.units import format_bytes, parse_steps
from shardwise.errors import Exit, UserError
from shardwise.interop.transformers.spec import no_document_mask
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.resolve.adapter_choice import settle_adapter
from shardwise.plan.resolve.degrees import choose_degrees, global_batch_of
from shardwise.plan.resolve.fit import does_not_fit, needed_memory, rank_memory_limit
from shardwise.plan.resolve.hardware import attention_here, check_cuda_only, choose_precision, why_precision
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.resolved_config import fill
from shardwise.plan.resolve.searched import HOST_SHARE, MemorySaving, better_layout, fits_on_host, possible_savings
from shardwise.plan.resolve.speed import with_speed
from shardwise.spec.cluster import HEADROOM, ClusterSpec
from shardwise.spec.fp8 import MULTIPLE, check_float8_base, keeps_base_whole
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import check_activation_offload
from shardwise.spec.schema import Config, ParallelConfig

DEFAULT_STEPS = 340


@dataclass(frozen=True)
class Resolved:
    """A plan, and the config with the same values filled in for people to read."""

    plan: Plan
    config: Config
    chosen: Mapping[str, str]  # the keys that the planner filled -> why


def resolve(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    nproc: int | None,
    num_sequences: int,
    origins: Origins = MappingProxyType({}),
    measured: ClusterSpec | None = None,
) -> Resolved:
    """`num_sequences`: sequences in one pass over the training data, which `epochs` needs. `origins`: for the errors.
    `measured`: this machine as somebody measured it."""
    train = config.train
    if spec.positions == "learned" and train.seq_len > spec.max_seq_len:
        raise UserError(
            f"train.seq_len = {train.seq_len} is longer than {spec.name} can read",
            why=f"its learned positions end at {spec.max_seq_len}",
            fix=f"train.seq_len={spec.max_seq_len}",
            where=where_written(origins, "train.seq_len"),
        )
    if config.data.document_mask and not spec.is_ours:
        raise no_document_mask(spec.name, where_written(origins, "data.document_mask"))
    config = settle_adapter(config, spec, origins)
    asked = Asked(config, spec, machine, nproc, measured)
    if config.memory.activation_offload:
        check_activation_offload(asked.device, where_written(origins, "memory.activation_offload"))
    plan = plan_of(asked, num_sequences, origins)
    limit = rank_memory_limit(config, machine, plan)
    fits = needed_memory(spec, plan, config) <= limit
    found = better_layout(asked, plan, limit, fits, origins, lambda other: plan_of(other, num_sequences, origins))
    if found is not None:
        plan = found.plan
    elif not fits:
        raise does_not_fit(asked, plan, limit, lambda other: plan_of(other, num_sequences))
    if not fits_on_host(asked, plan):
        raise _no_room_on_host(asked, plan, origins)
    return Resolved(plan, *fill(config, plan, found))


def _no_room_on_host(asked: Asked, plan: Plan, origins: Origins) -> UserError:
    config = asked.config
    away = plan.world * predict_elsewhere(asked.spec, plan, config.optimizer.name, config.adapter)["host"]
    return UserError(
        f"memory.activation_offload needs {format_bytes(away)} of CPU memory, this machine has "
        f"{format_bytes(asked.machine.memory_bytes)}",
        why=f"all activations of {plan.world} rank{'s' if plan.world > 1 else ''} with micro-batch "
        f"{plan.micro_batch} wait there, and {HOST_SHARE:.0%} of it may be used",
        fix="memory.activation_offload=false memory.recompute=full"
        + (" or train.micro_batch=1" if plan.micro_batch > 1 else ""),
        where=where_written(origins, "memory.activation_offload"),
        code=Exit.OUT_OF_MEMORY,
    )


def plan_of(asked: Asked, num_sequences: int, origins: Origins = MappingProxyType({})) -> Plan:
    """Returns the plan of a job, whether it fits into memory or not."""
    config, machine = asked.config, asked.machine
    train = config.train
    degrees = choose_degrees(asked, origins)
    global_batch = global_batch_of(train)
    threads = max(1, machine.cores // degrees.world)
    goes_to = "nvme" if config.memory.offload == "nvme" else config.memory.offload_to
    saving = possible_savings(asked)[0]
    plan = Plan.of(
        config,
        device=asked.device,
        precision=choose_precision(config, machine, origins),
        seq_len=train.seq_len,
        global_batch=global_batch,
        micro_batch=1,
        num_steps=_num_steps(config, global_batch, num_sequences),
        threads_per_rank=threads if asked.device == "cpu" else min(4, threads),
        reason=degrees.reason + why_precision(config, machine),
        dp=degrees.dp,
        zero=0,  # until memory has decided
        replicate=1,
        tp=degrees.tp,
        sequence=degrees.sequence,
        cp=degrees.cp,
        pp=degrees.pp,
        virtual_stages=degrees.virtual_stages,
        split=degrees.split,
        ep=degrees.ep,
        recompute=saving.recompute,
        offload=saving.offload,
        offload_to=goes_to,
        offload_dir=(config.memory.offload_dir or config.run.dir) if goes_to == "nvme" else "",
    )
    if train.micro_batch != "auto":
        _check_micro_batch(config, plan, int(train.micro_batch), origins)
    plan = _choose_states(asked, plan, rank_memory_limit(config, machine, plan))
    _check_fill(config, plan, origins)
    written = where_written(origins, "memory.precision", "parallel.zero", "memory.offload")
    check_float8_base(plan.precision, config.adapter.kind, plan.zero, plan.offload, written)
    _check_fp8_tokens(plan, origins)
    _check_fp8_head(plan, asked.spec, origins)
    _check_offload(plan, origins)
    _check_profile(config.run.profile, plan.num_steps, origins)
    check_cuda_only(asked, origins)
    return with_speed(plan, config.speed, asked.spec, attention_here(asked), skips_steps=config.run.on_nan == "skip")


def _check_micro_batch(config: Config, plan: Plan, micro_batch: int, origins: Origins) -> None:
    if micro_batch <= plan.rows_per_rank:
        return
    batch = f"train.global_batch={micro_batch * plan.dp}"
    if config.train.global_batch_tokens:
        batch = f"train.global_batch_tokens={micro_batch * plan.dp * plan.seq_len}"
    raise UserError(
        f"train.micro_batch = {micro_batch} is larger than a rank's share of the batch",
        why=f"a global batch of {plan.global_batch} over dp={plan.dp} leaves {plan.rows_per_rank} sequences per rank",
        fix=f"train.micro_batch={plan.rows_per_rank} or {batch}",
        where=where_written(origins, "train.global_batch", "train.global_batch_tokens", "train.micro_batch"),
    )


def _check_fill(config: Config, plan: Plan, origins: Origins) -> None:
    """Idle slots are filled by plain forwards between those of training, over gloo."""
    if config.parallel.fill_bubbles == "none":
        return
    if plan.device == "cuda":
        word, why = "on GPUs", "its times and messages were only ever tried on CPUs"
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


def _choose_states(asked: Asked, plan: Plan, limit: int) -> Plan:
    """The smallest ZeRO stage that fits, with the largest micro-batch that fits beside it. What costs time comes after
    that: computing again, then states in CPU memory. The run measures the micro-batch again."""
    config, size = asked.config, asked.config.train.micro_batch
    is_whole = keeps_base_whole(plan.precision, config.adapter.kind)
    stages, savings = _possible_stages(config.parallel, plan.dp, plan.cp, is_whole), possible_savings(asked)
    for saving, zero in product(savings, stages):
        replicate = plan.dp if zero == 0 else degree(config.parallel.replicate)
        new = replace(plan, recompute=saving.recompute, offload=saving.offload, zero=zero, replicate=replicate)
        if saving.offload != savings[0].offload and not fits_on_host(asked, new):
            continue
        for micro_batch in micro_batch_sizes(new) if size == "auto" else [int(size)]:
            plan = replace(new, micro_batch=micro_batch)
            if needed_memory(asked.spec, plan, config) <= HEADROOM * limit:
                chosen = f"; zero={zero} is the smallest stage that fits" if zero and len(stages) > 1 else ""
                saved = f"; {saving} because it does not fit without" if saving != savings[0] else ""
                return replace(plan, reason=plan.reason + chosen + saved)
    is_forced = len(stages) == len(savings) == 1
    return (
        plan
        if is_forced
        else replace(plan, reason=f"{plan.reason}; {_said(plan, stages, savings)} needs the least memory")
    )


def _said(plan: Plan, stages: Sequence[int], savings: Sequence[MemorySaving]) -> str:
    saving = str(MemorySaving(plan.recompute, plan.offload))
    words = [f"zero={plan.zero}"] * (len(stages) > 1) + [saving] * (len(savings) > 1)
    return " ".join(words)


def _possible_stages(parallel: ParallelConfig, dp: int, cp: int, is_whole: bool) -> tuple[int, ...]:
    if parallel.zero != "auto":
        return (int(parallel.zero),)
    if cp == 1 and (dp == 1 or parallel.replicate == dp):  # nobody to share with
        return (0,)
    if parallel.replicate == "auto":
        return (0,) if is_whole else (0, 1, 2, 3)
    return (1, 2, 3)


def micro_batch_sizes(plan: Plan) -> list[int]:
    """What `micro_batch = "auto"` chooses from, largest first: even parts of a rank's rows. A pipeline idles for pp - 1
    of every M + pp - 1 slots, so it gets M >= 4 pp micro-batches (GPipe, arXiv 1811.06965, section 2.3) where rows
    allow."""
    rows = plan.rows_per_rank
    most = rows if plan.pp == 1 else max(1, rows // (4 * plan.pp))
    return [size for size in range(most, 0, -1) if rows % size == 0]


def _check_fp8_tokens(plan: Plan, origins: Origins) -> None:
    """Refuses sequences that fp8 cannot take: the gradient of a weight multiplies over tokens."""
    tokens = plan.seq_len // plan.cp
    if plan.formats.is_fp8 and tokens % MULTIPLE:
        needed = MULTIPLE * plan.cp
        raise UserError(
            f"memory.precision = fp8 needs sequences that divide by {needed}",
            why=f"fp8 products take tokens by {MULTIPLE}, and a rank has {tokens} of each sequence",
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


def _num_steps(config: Config, global_batch: int, num_sequences: int) -> int:
    train = config.train
    if train.tokens:
        return math.ceil(train.tokens / (global_batch * train.seq_len))
    if train.epochs:
        return max(1, math.ceil(train.epochs * num_sequences / global_batch))
    return train.steps or DEFAULT_STEPS
