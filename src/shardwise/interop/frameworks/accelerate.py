"""Writes a plan as the YAML of `accelerate launch`, and says which layouts it runs. No torch.

The model is the script's there. Sizes of its parallelism config multiply up to the number of processes, and it has one
only together with FSDP 2.
"""

from __future__ import annotations

from shardwise.interop.frameworks.framework import WHOLE_BATCHES, Exported, Framework, Rule, UpdateRule
from shardwise.interop.frameworks.script_model import model_lines
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import recompute_of

RULES = (
    WHOLE_BATCHES,
    Rule(("grid",), "no pipelines for training", lambda spec, at: at.pp > 1),
    Rule(("grid",), "no expert parallelism", lambda spec, at: at.ep > 1),
    Rule(
        ("grid",),
        "no Ulysses but through DeepSpeed: with FSDP it shares sequences by rings",
        lambda s, at: at.cp > 1 and at.cp_kind != "ring",
    ),
    Rule(
        ("grid",),
        "no sequence parallelism: transformers' tensor parallelism keeps every token on every rank",
        lambda s, at: at.sequence,
    ),
    Rule(
        ("grid",), "no tensor parallelism finer than key-value heads", lambda spec, at: spec.num_kv_heads % at.tp != 0
    ),
    Rule(
        ("grid",), "no sequences that 2 x cp does not divide", lambda s, at: at.cp > 1 and at.seq_len % (2 * at.cp) != 0
    ),
    Rule(
        ("grid",),
        "no tensor parallelism of experts, of latent attention or of models with learned positions",
        lambda spec, at: at.tp > 1 and (spec.is_moe or spec.kv_lora_rank > 0 or spec.positions == "learned"),
    ),
    Rule(("grid",), "no rings over sliding windows", lambda spec, at: at.cp > 1 and spec.sliding_window > 0),
    Rule(
        ("grid", "states"),
        "no tensor or context parallelism without shards (FSDP)",
        lambda spec, at: at.tp * at.cp > 1 and (at.zero == 0 or at.shard * at.cp == 1),
    ),
    Rule(
        ("grid", "states"),
        "no replicas of tensor- or context-parallel ranks whose states are not sharded too",
        lambda spec, at: at.tp * at.cp > 1 and at.replicate > 1 and at.shard == 1,
    ),
    Rule(
        ("states",),
        "no zero=1: without resharding FSDP2 still reduces gradients at every micro-batch, which is zero=2",
        lambda spec, at: at.zero == 1,
    ),
    Rule(
        ("saving",),
        "no recomputation but of whole blocks",
        lambda spec, at: not (recompute_of(at.recompute).is_none or recompute_of(at.recompute).every == 1),
    ),
    Rule(
        ("saving",),
        "no optimizer states alone in CPU memory but through DeepSpeed: FSDP offloads parameters too",
        lambda spec, at: at.offload == "optimizer",
    ),
    Rule(
        ("states", "saving"),
        "no parameters in CPU memory without FSDP",
        lambda s, at: at.offload == "all" and not at.zero,
    ),
    Rule(
        ("states", "saving"),
        "no activations in CPU memory but the inputs of recomputed blocks, with FSDP",
        lambda spec, at: at.activation_offload and (recompute_of(at.recompute).every != 1 or at.zero == 0),
    ),
)


def _refuses(spec: ModelSpec, job: Job) -> list[str]:
    return []


def _write(spec: ModelSpec, job: Job, plan: Plan, per_node: int, rule: UpdateRule) -> Exported:
    missing = model_lines(spec, job)
    sharded = plan.zero > 0
    machines = max(1, -(-plan.world // per_node))
    # A model whose weights are bf16 is trained as it is; `bf16` would keep fp32 beside it.
    mixed = plan.formats.is_mixed
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU' if plan.world > 1 else 'NO'}",
        f"mixed_precision: '{plan.precision if mixed else 'no'}'",
        f"num_machines: {machines}",
        f"num_processes: {plan.world}",
        "machine_rank: 0",
        "main_training_function: main",
    ]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {_word(plan.stage.drops_parameters)}",
            f"  fsdp_activation_checkpointing: {_word(plan.recomputes.every == 1)}",
            f"  fsdp_activation_checkpointing_offload: {_word(plan.activation_offload)}",
            f"  fsdp_offload_params: {_word(plan.offload == 'all')}",
            "  fsdp_cpu_ram_efficient_loading: " + _word(not plan.formats.is_fp8),
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {plan.replicate}",
            f"  parallelism_config_dp_shard_size: {plan.shard}",
            f"  parallelism_config_tp_size: {plan.tp}",
            f"  parallelism_config_cp_size: {plan.cp}",
            "  parallelism_config_cp_backend: torch",
            "  parallelism_config_cp_comm_strategy: allgather",
            "  parallelism_config_sp_size: 1",
            "  parallelism_config_sp_backend: deepspeed",
        ]
    if plan.formats.is_fp8:
        lines += ["fp8_config:", "  fp8_backend: AO"]
        missing.append("needs torchao for mixed_precision fp8")
        missing.append(
            f"cannot scale fp8 {plan.fp8_recipe}, nor choose the matmuls, by configuration: it scales whole tensors "
            "and leaves the first and the last linear layer in bf16; AORecipeKwargs(config=...) in the script"
        )
    lines += [
        "# in the script:",
        f"#   Accelerator(gradient_accumulation_steps={plan.num_microbatches}), "
        f"DataLoader(batch_size={plan.micro_batch}) of sequences of {plan.seq_len} tokens",
        f"#   {rule.in_words}, {f'clip_grad_norm_({rule.clip:g})' if rule.clip else 'no clipping'}",
    ]
    if not mixed and plan.formats.computed != "fp32":
        missing.append(f"{plan.precision}: load the model with dtype={plan.formats.computed} in the script")
    if plan.tp > 1:
        missing.append(f"tp={plan.tp}: load the model with tp_plan='auto' and the device mesh in the script")
    if plan.recomputes.every == 1 and not sharded:
        missing.append("recompute=full: model.gradient_checkpointing_enable() in the script")
    reduced = plan.formats.kept if plan.reduce_dtype == "auto" else plan.reduce_dtype
    if reduced != (plan.formats.computed if sharded else plan.formats.kept):
        way = "FullyShardedDataParallelPlugin(mixed_precision_policy=...)" if sharded else "a communication hook"
        missing.append(f"cannot reduce gradients in {reduced} by configuration: {way} in the script")
    if "none" not in (plan.quantize_weights, plan.quantize_gradients) or plan.secondary_shard:
        missing.append("cannot quantize or regroup what FSDP gathers (ZeRO++)")
    if machines > 1:
        missing.append(
            "on every machine: accelerate launch --machine_rank N --main_process_ip HOST --main_process_port PORT"
        )
    return Exported("\n".join(lines), "yaml", tuple(missing))


def _word(value: bool) -> str:
    return str(value).lower()


ACCELERATE = Framework("accelerate", "accelerate 1.15.0", RULES, _refuses, _write)
