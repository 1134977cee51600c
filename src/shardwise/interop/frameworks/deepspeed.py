"""Writes a plan as DeepSpeed's JSON, and says which layouts its configuration alone runs. No torch.

The model is the script's there. What needs code of its own (pipelines, sequences shared by Ulysses, experts) is not
written: the search looks for the best layout without it.
"""

from __future__ import annotations

import json

from shardwise.interop.frameworks.framework import WHOLE_BATCHES, Exported, Framework, Rule, UpdateRule
from shardwise.interop.frameworks.script_model import model_lines
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import recompute_of

RULES = (
    WHOLE_BATCHES,
    Rule(("grid",), "no pipelines by configuration: they are code (PipelineModule)", lambda spec, at: at.pp > 1),
    Rule(
        ("grid",),
        "no context parallelism by configuration: Ulysses is code, rings are not there",
        lambda s, at: at.cp > 1,
    ),
    Rule(
        ("grid",),
        "no expert parallelism by configuration: it is code (deepspeed.moe.layer.MoE)",
        lambda s, at: at.ep > 1,
    ),
    Rule(
        ("grid",),
        "no sequence parallelism: its tensor parallelism keeps every token on every rank",
        lambda s, at: at.sequence,
    ),
    Rule(
        ("grid",),
        "no tensor parallelism of experts or of latent attention",
        lambda spec, at: at.tp > 1 and _is_special(spec),
    ),
    Rule(
        ("grid",), "no tensor parallelism finer than key-value heads", lambda spec, at: spec.num_kv_heads % at.tp != 0
    ),
    Rule(("grid", "states"), "no tensor parallelism with zero=3", lambda spec, at: at.tp > 1 and at.zero == 3),
    Rule(
        ("states",),
        "no replicas of shards by configuration: MiCS wants the model built in its own context",
        lambda spec, at: at.zero > 0 and at.replicate > 1,
    ),
    Rule(
        ("saving",),
        "no recomputation but of whole blocks",
        lambda spec, at: not (recompute_of(at.recompute).is_none or recompute_of(at.recompute).every == 1),
    ),
    Rule(
        ("states", "saving"),
        "no optimizer in CPU memory without ZeRO",
        lambda s, at: at.offload != "none" and not at.zero,
    ),
    Rule(
        ("states", "saving"),
        "no parameters in CPU memory without zero=3",
        lambda s, at: at.offload == "all" and at.zero != 3,
    ),
    Rule(
        ("saving",),
        "no activations in CPU memory of a model that is not written for it",
        lambda s, at: at.activation_offload,
    ),
)


def _is_special(spec: ModelSpec) -> bool:
    return spec.is_moe or spec.kv_lora_rank > 0


def _refuses(spec: ModelSpec, job: Job) -> list[str]:
    return []


def _write(spec: ModelSpec, job: Job, plan: Plan, per_node: int, rule: UpdateRule) -> Exported:
    missing = model_lines(spec, job)
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True, "contiguous_gradients": True}
    if plan.secondary_shard and plan.stage.drops_parameters:
        zero["zero_hpz_partition_size"] = plan.secondary_shard
    elif plan.secondary_shard:
        missing.append(f"cannot regroup gathered parameters (secondary_shard) with zero={plan.zero}")
    zero |= {"zero_quantized_weights": True} if plan.quantize_weights != "none" else {}
    zero |= {"zero_quantized_gradients": True} if plan.quantize_gradients != "none" else {}
    device: dict[str, object] = {"device": "cpu", "pin_memory": True}
    if plan.offload_to == "nvme":
        device = {"device": "nvme", "nvme_path": plan.offload_dir, "pin_memory": True}
    if plan.offload != "none":
        zero["offload_optimizer"] = device
    if plan.offload == "all":
        zero["offload_param"] = device
    config: dict[str, object] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": rule.clip or 0.0,
        "zero_optimization": zero,
    }
    if plan.formats.deepspeed:
        config[plan.formats.deepspeed] = {"enabled": True}
    if plan.formats.is_fp8:
        missing.append(f"cannot multiply in fp8: {plan.formats.deepspeed} is written")
    if not plan.formats.is_mixed and plan.formats.computed != "fp32":
        missing.append(
            f"cannot train in {plan.precision}: it keeps fp32 master weights, 12 more bytes per parameter and shard"
        )
    _sums(config, missing, plan)
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.recomputes.every == 1:
        missing.append("recompute=full: model.gradient_checkpointing_enable() in the script")
    missing.append(
        f"you add: the script, with {rule.in_words}, your learning rate and its schedule; its optimizer goes to "
        "deepspeed.initialize"
    )
    missing.append(
        f"for {plan.world} ranks, {min(per_node, plan.world)} per node: "
        "deepspeed --hostfile HOSTS SCRIPT --deepspeed_config FILE"
    )
    return Exported(json.dumps(config, indent=2), "json", tuple(missing))


def _sums(config: dict[str, object], missing: list[str], plan: Plan) -> None:
    """Adds the format in which gradients are summed, over ranks and over micro-batches: there it would be the model's
    own."""
    if plan.formats.is_mixed and plan.reduce_dtype in ("auto", "fp32"):
        config["communication_data_type"] = "fp32"
        if plan.zero:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        else:
            missing.append(f"cannot add up micro-batches in fp32 without ZeRO: it does in {plan.formats.computed}")
    elif plan.reduce_dtype not in ("auto", plan.formats.computed):
        config["communication_data_type"] = plan.reduce_dtype


DEEPSPEED = Framework("deepspeed", "DeepSpeed 0.19.8", RULES, _refuses, _write)
