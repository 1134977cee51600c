"""Writes a plan as flags of Megatron-LM (core 0.13). No torch. Part of export.py."""

from __future__ import annotations

from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.split import even_split


def megatron_flags(spec: ModelSpec, job: Job, plan: Plan) -> tuple[list[str], list[str]]:
    """Returns the flags, and what they cannot say."""
    flags: list[tuple[str, object]] = [
        ("num-layers", spec.num_layers),
        ("hidden-size", spec.hidden),
        ("num-attention-heads", spec.num_heads),
        ("ffn-hidden-size", spec.ffn),
        ("seq-length", job.seq_len),
        ("max-position-embeddings", max(job.seq_len, spec.max_seq_len)),
        ("micro-batch-size", plan.micro_batch),
        ("global-batch-size", plan.global_batch),
        ("tensor-model-parallel-size", plan.tp),
        ("pipeline-model-parallel-size", plan.pp),
    ]
    missing: list[str] = []
    if spec.num_kv_heads != spec.num_heads:
        flags += [("group-query-attention", True), ("num-query-groups", spec.num_kv_heads)]
    if spec.head_dim * spec.num_heads != spec.hidden:
        flags.append(("kv-channels", spec.head_dim))
    flags += [("normalization", "RMSNorm" if spec.norm == "rms" else "LayerNorm")]
    flags += [("swiglu", spec.gated), ("disable-bias-linear", not (spec.qkv_bias or spec.mlp_bias))]
    flags += [("position-embedding-type", "rope" if spec.positions == "rope" else "learned_absolute")]
    flags += [("untie-embeddings-and-output-weights", not spec.tied), ("sequence-parallel", plan.sequence)]
    if plan.cp > 1:
        kind = "p2p" if plan.cp_kind == "ring" else "a2a"
        flags += [("context-parallel-size", plan.cp), ("cp-comm-type", kind)]
    if spec.is_moe:
        flags += [("num-experts", spec.num_experts), ("moe-router-topk", spec.experts_per_token)]
        flags += [("moe-ffn-hidden-size", spec.expert_ffn), ("expert-model-parallel-size", plan.ep)]
    flags += spec.attention.megatron(spec)
    _megatron_states(flags, missing, plan)
    _megatron_pipeline(flags, missing, spec, plan)
    if plan.recomputes.is_selective:
        flags.append(("recompute-activations", True))
        missing.append("recompute=selective: Megatron recomputes attention's core, we recompute norms and activations")
    elif not plan.recomputes.is_none:
        group = plan.recomputes.every or 1
        flags += [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", group)]
        if plan.recomputes.every != 1:
            missing.append(f"recompute={plan.recompute}: the nearest is full recomputation in groups of {group}")
    precision = plan.precision.removesuffix("-true")
    if precision == "fp8":
        flags += [("bf16", True), ("fp8-format", "hybrid")]
    elif precision in ("bf16", "fp16"):
        flags.append((precision, True))
    if plan.precision.endswith("-true"):
        missing.append(
            f"{plan.precision}: Megatron keeps fp32 master weights, 12 more bytes per parameter over the shards"
        )
    if plan.offload != "none":
        flags += [("optimizer-cpu-offload", True), ("use-precision-aware-optimizer", True)]
        if plan.offload == "all" or plan.offload_to == "nvme":
            missing.append("offload: only the optimizer, and only to CPU memory")
    if job.tokens:
        flags.append(("train-samples", -(-job.tokens // job.seq_len)))
    text = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags if value is not False]
    return text, missing


def _megatron_states(flags: list[tuple[str, object]], missing: list[str], plan: Plan) -> None:
    if plan.zero == 0:
        flags.append(("overlap-grad-reduce", plan.dp > 1))
        return
    flags += [("use-distributed-optimizer", True), ("overlap-grad-reduce", True), ("overlap-param-gather", True)]
    if plan.zero >= 2:
        kind = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        flags += [("use-megatron-fsdp", True), ("data-parallel-sharding-strategy", kind)]
        if plan.pp > 1:
            missing.append(f"zero={plan.zero} with pp={plan.pp}: its FSDP takes no pipelines; use zero=1 there")
    if plan.replicate > 1:
        flags.append(("num-distributed-optimizer-instances", plan.replicate))


def _megatron_pipeline(flags: list[tuple[str, object]], missing: list[str], spec: ModelSpec, plan: Plan) -> None:
    if plan.pp == 1:
        return
    if plan.virtual_stages > 1:
        flags.append(("num-virtual-stages-per-pipeline-rank", plan.virtual_stages))
    if not SCHEDULES[plan.schedule].megatron:
        instead = "interleaved 1F1B" if plan.virtual_stages > 1 else "1F1B"
        missing.append(f"schedule={plan.schedule}: it runs {instead}")
    if plan.split != even_split(spec.num_layers, plan.num_stages):
        layout = "|".join(["t" * layers for layers in plan.split])
        flags.append(("pipeline-model-parallel-layout", f"'E{layout}L'"))
