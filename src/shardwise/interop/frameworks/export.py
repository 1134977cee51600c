"""Writes a plan in the words of other frameworks: Megatron-LM's flags, torchtitan's TOML, DeepSpeed's JSON,
accelerate's YAML. No torch.

Each writer says the layout and the batch, and has a line for each thing that its framework cannot do or does otherwise.
Invariant: nothing of the plan is left out silently. Names are those of Megatron-LM core 0.13, torchtitan 0.2, DeepSpeed
0.17, accelerate 1.10.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import UserError
from shardwise.interop.frameworks.megatron import megatron_flags
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.split import even_split


@dataclass(frozen=True)
class Exported:
    """A plan as another framework reads it."""

    text: str  # what that framework reads
    kind: str  # flags | toml | json | yaml
    missing: tuple[str, ...]  # what it cannot do, and what it does instead

    def to_print(self, title: str) -> str:
        """Returns one text that the framework reads, with the rest as comments; JSON has none, so they go under a key
        that nobody reads."""
        if self.kind == "json":
            return json.dumps({"_shardwise": [title, *self.missing], **json.loads(self.text)}, indent=2)
        return "\n".join([f"# {title}", *(f"# {line}" for line in self.missing), self.text])


def export_as(framework: str, spec: ModelSpec, job: Job, plan: Plan, per_node: int) -> Exported:
    check_framework(framework)
    return FRAMEWORKS[framework](spec, job, plan, per_node)


def check_framework(name: str) -> None:
    if name in FRAMEWORKS:
        return
    close = difflib.get_close_matches(name.lower(), FRAMEWORKS, n=1, cutoff=0.4)
    raise UserError(
        f"unknown framework `--as {name}`",
        why=f"a row can be printed for: {', '.join(FRAMEWORKS)}",
        fix=f"--as {close[0]}" if close else f"--as {next(iter(FRAMEWORKS))}",
    )


def _megatron(spec: ModelSpec, job: Job, plan: Plan, per_node: int) -> Exported:
    flags, missing = megatron_flags(spec, job, plan)
    return Exported(_wrapped(flags), "flags", (*missing, *_everywhere(job)))


# torchtitan ----------------------------------------------------------------------------------------------------------


def _torchtitan(spec: ModelSpec, job: Job, plan: Plan, per_node: int) -> Exported:
    missing: list[str] = []
    replicate, shard = (plan.dp, 1) if plan.zero == 0 else (plan.replicate, plan.shard)
    if plan.zero == 1:
        missing.append("zero=1: FSDP2 without resharding reduces gradients at every micro-batch, which is zero=2")
    if plan.zero == 0 and plan.dp > 1 and plan.tp * plan.pp * plan.cp > 1:
        missing.append("zero=0: replicas without shards work alone, not together with tp, pp or cp")
    pipeline = SCHEDULES[plan.schedule].torchtitan
    if plan.pp > 1 and pipeline is None:
        missing.append(f"schedule={plan.schedule}: it does not have it")
    if plan.pp > 1 and plan.schedule == "zero-bubble" and plan.virtual_stages == 1:
        missing.append("schedule=zero-bubble with one stage per rank: its zero-bubble schedules want two or more")
    if plan.cp > 1 and plan.cp_kind == "ulysses":
        missing.append("cp_kind=ulysses: it shares sequences by rings or gathers")
    if plan.tp > 1 and not plan.sequence:
        missing.append("tp without sp: it always runs sequence parallelism with tp")
    split = plan.split and plan.split != even_split(spec.num_layers, plan.num_stages)
    if split:
        missing.append(
            f"split={','.join(map(str, plan.split))}: "
            "name the first module of every stage in module_fqns_per_model_part"
        )
    if plan.recompute in ("sqrt",):
        missing.append("recompute=sqrt: blocks are recomputed one by one")
    if plan.offload == "optimizer":
        missing.append("offload=optimizer: it offloads parameters, gradients and states together")
    mode = "none" if plan.recompute == "none" else "selective" if plan.recompute != "full" else "full"
    every = plan.recompute.partition("-")[2] if plan.recompute.startswith("every-") else "op"
    number = plan.formats.torchtitan
    family, _, size = spec.name.partition("-")
    lines = [
        "[model]",
        f'name = "{family}"',
        f'flavor = "{size.upper()}"',
        "",
        "[training]",
        f"local_batch_size = {plan.micro_batch if plan.pp == 1 else plan.rows_per_rank}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {job.seq_len}",
        *([f"steps = {-(-job.tokens // job.tokens_per_step)}"] if job.tokens else []),
        f'mixed_precision_param = "{number}"',
        f'mixed_precision_reduce = "{ {"bf16": "bfloat16"}.get(plan.reduce_dtype, "float32") }"',
        f"enable_cpu_offload = {str(plan.offload != 'none').lower()}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
        f'fsdp_reshard_after_forward = "{"always" if plan.stage.drops_parameters else "never"}"',
        f"tensor_parallel_degree = {plan.tp}",
        f"context_parallel_degree = {plan.cp}",
        f"pipeline_parallel_degree = {plan.pp}",
    ]
    if plan.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{pipeline}"',
            f"pipeline_parallel_microbatch_size = {plan.micro_batch}",
            f"pipeline_parallel_layers_per_stage = {-(-spec.num_layers // plan.num_stages)}",
        ]
    if spec.is_moe:
        lines.append(f"expert_parallel_degree = {plan.ep}")
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    lines += [f'selective_ac_option = "{every}"'] if mode == "selective" else []
    if plan.formats.is_fp8:
        lines += ["", "[quantize.linear.float8]", f'recipe_name = "{plan.fp8_recipe}"']
    missing.append("the model: name and flavor must be one of its own")
    return Exported("\n".join(lines), "toml", (*missing, *_everywhere(job)))


# DeepSpeed -----------------------------------------------------------------------------------------------------------


def _deepspeed(spec: ModelSpec, job: Job, plan: Plan, per_node: int) -> Exported:
    missing: list[str] = []
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True, "contiguous_gradients": True}
    if plan.replicate > 1 and plan.zero:
        zero["mics_shard_size"] = plan.shard
        if not plan.stage.drops_parameters:
            missing.append(f"replicate={plan.replicate}: groups of shards (MiCS) exist for stage 3 only")
    if plan.secondary_shard:
        zero["zero_hpz_partition_size"] = plan.secondary_shard
    zero |= {"zero_quantized_weights": True} if plan.quantize_weights != "none" else {}
    zero |= {"zero_quantized_gradients": True} if plan.quantize_gradients != "none" else {}
    device = "nvme" if plan.offload_to == "nvme" else "cpu"
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": device, "pin_memory": True}
    if plan.offload == "all":
        zero["offload_param"] = {"device": device, "pin_memory": True}
        if not plan.stage.drops_parameters:
            missing.append("offload=all: parameters leave the device with stage 3 only")
    config: dict[str, object] = {
        "train_batch_size": plan.micro_batch * plan.num_microbatches * plan.dp,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if plan.micro_batch * plan.num_microbatches * plan.dp != plan.global_batch:
        missing.append(
            f"a batch of {plan.global_batch} does not divide evenly; we fill up with empty sequences, it cannot"
        )
    if plan.formats.deepspeed:
        config[plan.formats.deepspeed] = {"enabled": True}
    if plan.formats.is_fp8:
        missing.append(f"fp8: it has no fp8 matmuls of its own; {plan.formats.deepspeed} is written")
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
        if plan.stage.drops_parameters:
            missing.append(f"tp={plan.tp} with zero=3: its tensor parallelism goes with stages 0 to 2")
        if plan.sequence:
            missing.append("sp: its tensor parallelism keeps every token on every rank, so activations grow")
    if plan.pp > 1:
        missing.append(
            f"pp={plan.pp}: pipelines are code there (PipelineModule with num_stages={plan.pp}), without zero above 1"
        )
        if plan.schedule != "1f1b":
            missing.append(f"schedule={plan.schedule}: its pipelines run 1F1B")
    if plan.cp > 1:
        kind = (
            "UlyssesSPAttentionHF in code" if plan.cp_kind == "ulysses" else "rings are not there; Ulysses is, in code"
        )
        missing.append(f"cp={plan.cp}: {kind}")
    if plan.ep > 1:
        missing.append(f"ep={plan.ep}: ep_size of deepspeed.moe.layer.MoE, in code")
    if plan.recompute != "none":
        config["activation_checkpointing"] = {"partition_activations": False}
        missing.append(f"recompute={plan.recompute}: the model calls deepspeed.checkpointing itself, a block at a time")
    return Exported(json.dumps(config, indent=2), "json", (*missing, *_everywhere(job)))


# accelerate ----------------------------------------------------------------------------------------------------------


def _accelerate(spec: ModelSpec, job: Job, plan: Plan, per_node: int) -> Exported:
    missing: list[str] = []
    sharded = plan.zero > 0 and plan.dp * plan.cp > 1
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU' if plan.world > 1 else 'NO'}",
        f"mixed_precision: {'no' if plan.precision == 'fp32' else plan.precision.removesuffix('-true')}",
        f"num_machines: {max(1, -(-plan.world // per_node))}",
        f"num_processes: {plan.world}",
    ]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(plan.stage.drops_parameters).lower()}",
            f"  fsdp_activation_checkpointing: {str(plan.recompute != 'none').lower()}",
            f"  fsdp_offload_params: {str(plan.offload != 'none').lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if plan.tp * plan.cp > 1 or (sharded and plan.replicate > 1):
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {plan.replicate}",
            f"  parallelism_config_dp_shard_size: {plan.shard if sharded else 1}",
            f"  parallelism_config_tp_size: {plan.tp}",
            f"  parallelism_config_cp_size: {plan.cp}",
        ]
    lines += [
        "# in the script:",
        f"#   Accelerator(gradient_accumulation_steps={plan.num_microbatches}), "
        f"DataLoader(batch_size={plan.micro_batch})",
    ]
    if plan.zero == 1:
        missing.append("zero=1: FSDP without resharding reduces gradients at every micro-batch, which is zero=2")
    if plan.pp > 1:
        missing.append(f"pp={plan.pp}: it trains without pipelines (its pippy support is for inference)")
    if plan.ep > 1:
        missing.append(f"ep={plan.ep}: not there")
    if plan.sequence:
        missing.append("sp: follows from the model's own tp_plan, if it has one")
    if plan.cp > 1 and plan.cp_kind == "ulysses":
        missing.append("cp_kind=ulysses: context parallelism there is torch's ring")
    if plan.recompute not in ("none", "full"):
        missing.append(f"recompute={plan.recompute}: whole blocks or nothing")
    if plan.recompute != "none" and not sharded:
        missing.append("recompute: model.gradient_checkpointing_enable() in the script")
    if plan.offload == "optimizer":
        missing.append("offload=optimizer: FSDP offloads parameters too; DeepSpeed under accelerate can do this")
    return Exported("\n".join(lines), "yaml", (*missing, *_everywhere(job)))


def _everywhere(job: Job) -> list[str]:
    found = ["predicted times and memory are of our runtime, not of this framework"]
    if job.adapter.kind != "none":
        found.insert(0, f"adapter.kind={job.adapter.kind}: peft adds adapters in the script")
    if not OPTIMIZERS[job.optimizer].is_adam:
        found.insert(0, f"optimizer.name={job.optimizer}: choose it there; adamw is its default")
    return found


def _wrapped(words: list[str], width: int = 100) -> str:
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return " \\\n  ".join([*lines, line])


FRAMEWORKS: dict[str, Callable[[ModelSpec, Job, Plan, int], Exported]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}
