"""Writes a plan as flags of Megatron-LM, and says which layouts it runs. No torch.

The model's flags are in megatron_model.py. The rules are those that its argument checks and its schedules enforce;
what it does otherwise, but runs, is a line.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks.framework import (
    WHOLE_BATCHES,
    Exported,
    Framework,
    Rule,
    UpdateRule,
    adamw_is_left,
    micro_batches,
)
from shardwise.interop.frameworks.megatron_model import Flags, model_flags, refused_model
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import recompute_of
from shardwise.spec.schedules import SCHEDULES

FSDP = {2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO stages that its FSDP runs; stage 1 is its distributed optimizer."""


def _fsdp(at: Any) -> bool:
    return at.zero in FSDP


RULES = (
    WHOLE_BATCHES,
    Rule(
        ("pace", "grid"),
        "no zero-bubble and no V-shaped schedules: its pipelines run 1F1B and interleaved 1F1B",
        lambda spec, at: at.pp > 1 and not SCHEDULES[at.schedule].megatron,
    ),
    Rule(
        ("pace", "grid"),
        "no interleaved 1F1B over a number of micro-batches that the pipeline's ranks do not divide",
        lambda spec, at: at.pp > 1 and at.virtual_stages > 1 and micro_batches(at) % at.pp != 0,
    ),
    Rule(
        ("grid",),
        "no experts under tensor parallelism without sequence parallelism",
        lambda spec, at: spec.is_moe and at.tp > 1 and not at.sequence,
    ),
    Rule(
        ("grid",),
        "no context parallelism over sequences that 2 x its degree does not divide",
        lambda spec, at: at.cp > 1 and at.seq_len % (2 * at.cp) != 0,
    ),
    Rule(
        ("grid",),
        "no rings over sliding windows",
        lambda spec, at: at.cp > 1 and at.cp_kind == "ring" and spec.sliding_window > 0,
    ),
    Rule(
        ("grid",),
        "no Ulysses over more ranks than key-value heads divide among",
        lambda spec, at: at.cp > 1 and at.cp_kind == "ulysses" and spec.num_kv_heads % (at.tp * at.cp) != 0,
    ),
    Rule(
        ("grid", "states"),
        "no replicas of shards that do not divide the ranks with the same experts",
        lambda spec, at: at.zero == 1 and spec.is_moe and (at.dp * at.cp * at.tp // at.ep) % at.replicate != 0,
    ),
    Rule(
        ("grid",),
        "no Ulysses for latent attention",
        lambda spec, at: at.cp > 1 and at.cp_kind == "ulysses" and spec.kv_lora_rank > 0,
    ),
    Rule(
        ("grid", "states"),
        "no pipelines together with its FSDP (zero=2, zero=3)",
        lambda s, at: _fsdp(at) and at.pp > 1,
    ),
    Rule(
        ("states",),
        "no replicas of shards with its FSDP (zero=2, zero=3) by these flags",
        lambda spec, at: _fsdp(at) and at.replicate > 1,
    ),
    Rule(
        ("grid", "saving"),
        "no recomputation of every k-th layer where its stages have different numbers of layers",
        lambda spec, at: bool(_every(at)) and spec.num_layers % (at.pp * (_every(at) or 1)) != 0,
    ),
    Rule(
        ("pace", "grid", "saving"),
        "no recomputation of every k-th layer where its stages have different numbers of layers",
        lambda spec, at: bool(_every(at)) and spec.num_layers % (at.pp * at.virtual_stages * (_every(at) or 1)) != 0,
    ),
    Rule(
        ("saving",),
        "no selective recomputation of everything between matmuls: it leaves out norms, or whole modules",
        lambda spec, at: recompute_of(at.recompute).is_selective,
    ),
    Rule(
        ("grid", "pace", "saving"),
        "no groups of recomputed layers that the layers of a stage do not fill",
        lambda spec, at: recompute_of(at.recompute).in_groups and spec.num_layers % (at.pp * at.virtual_stages) != 0,
    ),
    Rule(
        ("states", "saving"),
        "no optimizer in CPU memory without its distributed optimizer (zero=1)",
        lambda spec, at: at.offload == "optimizer" and at.zero != 1,
    ),
    Rule(("saving",), "no parameters in CPU memory", lambda spec, at: at.offload == "all"),
    Rule(
        ("saving",),
        "no activations in CPU memory by its own flags alone (it needs Transformer Engine's switches)",
        lambda spec, at: at.activation_offload,
    ),
)


def _every(at: Any) -> int | None:
    """Returns k where every k-th layer is recomputed and k is more than 1."""
    every = recompute_of(at.recompute).every
    return every if every != 1 else None


def _refuses(spec: ModelSpec, job: Job) -> list[str]:
    found = refused_model(spec)
    if job.adapter.kind != "none":
        found.append(f"no adapters (adapter.kind={job.adapter.kind})")
    return found


def _write(spec: ModelSpec, job: Job, plan: Plan, per_node: int, rule: UpdateRule) -> Exported:
    flags, missing = model_flags(spec, plan.tp)
    flags += [
        ("seq-length", job.seq_len),
        (
            "max-position-embeddings",
            spec.max_seq_len if spec.positions == "learned" else max(job.seq_len, spec.max_seq_len),
        ),
        ("micro-batch-size", plan.micro_batch),
        ("global-batch-size", plan.global_batch),
        ("tensor-model-parallel-size", plan.tp),
        ("sequence-parallel", plan.sequence),
        ("pipeline-model-parallel-size", plan.pp),
    ]
    if plan.cp > 1:
        kind = "p2p" if plan.cp_kind == "ring" else "a2a"
        flags += [("context-parallel-size", plan.cp), ("cp-comm-type", kind)]
    if spec.is_moe:
        flags.append(("expert-model-parallel-size", plan.ep))
        if plan.ep > 1:  # ours: ranks of tensor parallelism have whole experts too
            flags.append(("expert-tensor-parallel-size", 1))
    _states(flags, plan)
    _pipeline(flags, plan)
    _recompute(flags, missing, spec, plan)
    _formats(flags, missing, spec, plan)
    if plan.offload == "optimizer":
        flags += [("optimizer-cpu-offload", True), ("use-precision-aware-optimizer", True)]
        if plan.offload_to == "nvme":
            missing.append("cannot keep optimizer states on a disk: they go to CPU memory")
    if job.tokens:
        flags.append(("train-samples", -(-job.tokens // job.seq_len)))
    _update(flags, missing, rule)
    missing.append(_environment(plan))
    missing.append(
        "you add: data and tokenizer (--data-path --tokenizer-type --tokenizer-model), --lr and its schedule, "
        + ("--save --load" if job.tokens else "--train-iters, --save --load")
    )
    missing.append(
        f"for torchrun --nproc-per-node {min(per_node, plan.world)} pretrain_gpt.py, {plan.world} ranks in all"
    )
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags if value is not False]
    return Exported(_wrapped(words), "flags", tuple(missing))


def _states(flags: Flags, plan: Plan) -> None:
    if plan.zero in FSDP:
        flags += [
            ("use-megatron-fsdp", True),
            ("data-parallel-sharding-strategy", FSDP[plan.zero]),
            ("use-distributed-optimizer", True),
            ("overlap-grad-reduce", True),
            ("overlap-param-gather", True),
            ("ckpt-format", "fsdp_dtensor"),
            ("no-gradient-accumulation-fusion", True),
        ]
    elif plan.zero == 1:
        flags += [("use-distributed-optimizer", True), ("overlap-grad-reduce", True), ("overlap-param-gather", True)]
        if plan.replicate > 1:
            flags.append(("num-distributed-optimizer-instances", plan.replicate))
    elif plan.dp * plan.cp > 1:
        flags.append(("overlap-grad-reduce", True))


def _pipeline(flags: Flags, plan: Plan) -> None:
    """Adds how the layers are split. Even stages have a flag of their own; others are drawn layer by layer. It takes
    one or the other."""
    if plan.pp == 1:
        return
    if len(set(plan.split)) > 1:
        stages = ["t" * layers for layers in plan.split]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        flags.append(("pipeline-model-parallel-layout", f"'{'|'.join(stages)}'"))
    elif plan.virtual_stages > 1:
        flags.append(("num-virtual-stages-per-pipeline-rank", plan.virtual_stages))


def _recompute(flags: Flags, missing: list[str], spec: ModelSpec, plan: Plan) -> None:
    kind = plan.recomputes
    if kind.is_none:
        return
    layers = spec.num_layers // plan.num_stages
    flags.append(("recompute-granularity", "full"))
    if kind.in_groups:
        group = next(size for size in range(round(layers**0.5), 0, -1) if layers % size == 0)
        flags += [("recompute-method", "uniform"), ("recompute-num-layers", group)]
        missing.append(f"recompute=sqrt: in groups of {group} of the {layers} layers of a stage")
    elif kind.every == 1:
        flags += [("recompute-method", "uniform"), ("recompute-num-layers", 1)]
    else:
        assert kind.every is not None, plan.recompute
        number = layers // kind.every
        flags += [("recompute-method", "block"), ("recompute-num-layers", number)]
        missing.append(
            f"recompute={plan.recompute}: it recomputes the first {number} of {layers} layers of a stage instead"
        )


def _formats(flags: Flags, missing: list[str], spec: ModelSpec, plan: Plan) -> None:
    matmul = plan.formats.computed
    if matmul in ("bf16", "fp16"):
        flags.append((matmul, True))
    if plan.formats.is_fp8:
        flags += [("fp8-format", "hybrid"), ("fp8-recipe", "tensorwise")]
        if plan.fp8_recipe != "tensorwise":
            missing.append(f"cannot scale fp8 {plan.fp8_recipe}: it scales whole tensors by their current maximum")
        if spec.is_moe:
            missing.append("cannot keep experts in bf16: it multiplies them in fp8 too")
        if plan.fp8_head:
            missing.append("cannot multiply the head in fp8 (fp8_head): it stays in bf16")
    if matmul != "fp32" and not plan.formats.is_mixed:
        missing.append(
            f"cannot train in {plan.precision}: it keeps fp32 master weights, 12 more bytes per parameter and shard"
        )
    if matmul == "bf16" and plan.reduce_dtype == "bf16":
        flags.append(("grad-reduce-in-bf16", True))
    elif matmul == "fp16" and plan.reduce_dtype in ("auto", "fp32"):  # which bf16 has by itself
        flags.append(("accumulate-allreduce-grads-in-fp32", True))
    elif plan.reduce_dtype not in ("auto", "fp32", matmul):
        missing.append(f"cannot reduce gradients in {plan.reduce_dtype}: it reduces in {matmul}")
    if "none" not in (plan.quantize_weights, plan.quantize_gradients) or plan.secondary_shard:
        missing.append("cannot quantize or regroup what ZeRO gathers (ZeRO++): it gathers in the weights' format")


def _update(flags: Flags, missing: list[str], rule: UpdateRule) -> None:
    """Adds the optimizer, which is AdamW there under the name of Adam; like ours it decays matrices only."""
    optimizer = rule.optimizer
    flags += [
        *(("adam-beta1", f"{optimizer.betas[0]:g}"), ("adam-beta2", f"{optimizer.betas[1]:g}")),
        *(("adam-eps", f"{optimizer.eps:g}"), ("weight-decay", f"{optimizer.weight_decay:g}")),
        ("clip-grad", f"{rule.clip or 0:g}"),
    ]
    if optimizer.name == "adam" and optimizer.weight_decay:
        missing.append("cannot add weight decay to the gradient (optimizer.name=adam): it decays as AdamW does")
    elif not OPTIMIZERS[optimizer.name].is_adam:
        missing.append(adamw_is_left(optimizer.name))


def _environment(plan: Plan) -> str:
    """Returns what the environment must say before it starts, which its argument check insists on."""
    if plan.zero in FSDP:
        return "environment: CUDA_DEVICE_MAX_CONNECTIONS must not be 1 with its FSDP"
    if plan.tp * plan.cp > 1:
        return "environment: CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell"
    return "environment: nothing to set"


def _wrapped(words: list[str], width: int = 100) -> str:
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return " \\\n  ".join([*lines, line])


MEGATRON = Framework("megatron", "Megatron-LM (core 0.16.1)", RULES, _refuses, _write)
