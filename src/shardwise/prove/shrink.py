"""Finds the smallest model and job that still show every mistake a layout could make: what `verify` trains.

Owns the shrinking. Invariant: everything that changes *how* the model computes stays (kind of attention, heads against
ranks, tied ends, windows, router, biases, norms); only sizes go down, to what the layout still divides. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwise.interop.peft.targets import same_kinds
from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig

MAX_RANKS = 8
"""`verify` starts at most this many processes; a larger layout is proven with its largest axes made smaller."""

SEQ_LEN = 16  # divides by every tp up to 16
VOCAB = 67  # a prime: no degree of tensor parallelism divides it
MAX_MICROBATCHES = 5
OFFLOAD_BUFFER = 2**16  # bytes, so that small models too go through a disk in several groups


def shrink_plan(plan: Plan, max_ranks: int = MAX_RANKS) -> Plan:
    """Returns a plan with the same axes, schedule and ZeRO stage, on at most `max_ranks` ranks; each stage keeps one or
    two layers."""
    ep = plan.ep
    split = tuple(1 + (layers > min(plan.split)) for layers in plan.split)
    while plan.world > max_ranks:
        axes = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "cp": plan.cp}
        plan = _smaller(replace(plan, ep=1), max(axes, key=lambda name: axes[name]))
        plan = replace(plan, ep=math.gcd(ep, plan.stage_world))
        split = split[: plan.num_stages] if plan.pp > 1 else ()
    is_even = plan.global_batch % plan.dp == 0
    num_microbatches = min(plan.num_microbatches, MAX_MICROBATCHES)
    micro_batch = min(plan.micro_batch, 2)
    global_batch = plan.dp * micro_batch * num_microbatches
    if not is_even and plan.dp > 1 and micro_batch * num_microbatches > 1:
        global_batch -= 1  # somebody has fewer rows, as in the real job
    seq_len = math.lcm(SEQ_LEN, 2 * plan.cp * (plan.tp if plan.sequence else 1))
    return replace(
        plan,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        split=split,
        offload_buffer=min(plan.offload_buffer, OFFLOAD_BUFFER),
    )


def left_out(plan: Plan, small: Plan) -> list[str]:
    """Returns the axes of a plan, as a layout string has them, that are no axes of the smaller one any more: what a
    proof of the smaller one says nothing about."""
    axes = [name for name in ("tp", "cp", "pp", "ep", "dp") if getattr(plan, name) > 1 == getattr(small, name)]
    found = [f"{name}={getattr(plan, name)}" for name in axes]
    if plan.sequence and not small.sequence:
        found.append("sp")
    if plan.zero and 1 < plan.replicate < plan.dp and not 1 < small.replicate < small.dp:
        found.append(f"replicate={plan.replicate}")
    return found


def _smaller(plan: Plan, axis: str) -> Plan:
    """Returns the plan with the next smaller degree of one axis."""
    if axis == "cp":
        return replace(plan, cp=_divisor(plan.cp))
    if axis == "tp":
        tp = _divisor(plan.tp)
        return replace(plan, tp=tp, sequence=plan.sequence and tp > 1)
    if axis == "pp":
        pp = plan.pp - 1
        if pp == 1:
            return replace(plan, pp=1, virtual_stages=1, schedule="1f1b", split=())
        return replace(plan, pp=pp, split=plan.split[: pp * plan.virtual_stages])
    replicate, shard = plan.replicate, plan.shard
    if replicate >= shard:
        replicate = _divisor(replicate)
    else:
        shard = _divisor(shard)
    dp = replicate * shard
    batch = max(dp, plan.global_batch * dp // plan.dp)
    return replace(plan, dp=dp, replicate=replicate, global_batch=batch)


def _divisor(degree: int) -> int:
    """Returns the largest divisor of a degree that is smaller than it."""
    return max(n for n in range(1, degree) if degree % n == 0)


def shrink_spec(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """Returns a small model for `plan`, which is already small, with as many layers as it has. What transformers builds
    is tried out, with torch."""
    if isinstance(spec, TransformersSpec):
        from shardwise.interop.transformers.shrink import shrink_transformers

        return shrink_transformers(spec, VOCAB)
    num_heads, num_kv_heads = _heads(spec, plan.tp, plan.cp if plan.cp_kind == "ulysses" else 1)
    sizes: dict[str, object] = {
        "num_layers": sum(plan.split) or min(spec.num_layers, _period(spec) + 1),
        "hidden": 32,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn": max(44, 2 * plan.tp + 1),
        "vocab": VOCAB,
        "max_seq_len": max(plan.seq_len, min(spec.max_seq_len, 4 * SEQ_LEN)),
    }
    sizes |= spec.attention.small_sizes(spec)
    if spec.sliding_window:
        sizes["sliding_window"] = SEQ_LEN // 2
    if spec.num_experts:
        groups = spec.num_expert_groups
        experts = math.lcm(2 * groups if groups > 1 else min(spec.num_experts, 8), plan.ep)
        sizes |= {"num_experts": experts, "expert_ffn": max(20, 2 * plan.tp + 1)}
        sizes |= {"experts_per_token": min(spec.experts_per_token, experts // 2 or 1)}
        sizes |= {"first_dense_layers": min(spec.first_dense_layers, 1)}
    return spec.with_overrides(sizes)


def shrink_adapter(adapter: AdapterConfig, spec: ModelSpec) -> AdapterConfig:
    """Returns adapters of a small rank on the same kinds of layers, whichever layers of the model they are on."""
    if adapter.kind == "none":
        return adapter
    targets, train_also = same_kinds(spec, adapter) if spec.is_ours else (adapter.targets, adapter.train_also)
    return replace(adapter, rank=min(adapter.rank, 3), targets=targets, train_also=train_also, path=None)


def _period(spec: ModelSpec) -> int:
    """Returns the number of layers until every kind of layer has come up."""
    return max(2, min(spec.global_every, 6), spec.moe_every if spec.num_experts else 1)


def _heads(spec: ModelSpec, tp: int, cp: int = 1) -> tuple[int, int]:
    """Returns a few query and key/value heads that stand to tp as the model's own do: grouped if grouped, shared
    between ranks if shared. `cp` are the ranks that share the heads of a slice, the way of Ulysses."""
    ranks = tp * cp
    shares = spec.num_kv_heads < tp
    for kv in range(1, spec.num_kv_heads + 1):
        for group in range(1, spec.num_heads // spec.num_kv_heads + 1):
            fits = (kv * group) % ranks == 0 and (tp % kv == 0 if shares else kv % tp == 0)
            same_kind = (group > 1) == (spec.num_heads > spec.num_kv_heads) and (kv > 1) == (spec.num_kv_heads > 1)
            if fits and same_kind:
                return kv * group, kv
    return spec.num_heads, spec.num_kv_heads
