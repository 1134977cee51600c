"""Writes a plan as torchtitan's TOML, and says which models and layouts it runs. No torch. Its models: torchtitan.toml.

0.2.2 is the last version that reads files; from 0.3 on a config is Python. A model there is a name and a flavor, so one
whose sizes it has not is refused, and what a flavor computes otherwise has a line.
"""

from __future__ import annotations

import json
from typing import Any

from shardwise.interop.frameworks.framework import (
    NOT_OURS,
    WHOLE_BATCHES,
    Exported,
    Framework,
    Rule,
    UpdateRule,
    adamw_is_left,
    micro_batches,
)
from shardwise.interop.frameworks.torchtitan_models import differences, flavor_of, flavors
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import recompute_of
from shardwise.spec.schedules import SCHEDULES


def _has(name: str, spec: ModelSpec) -> bool:
    flavor = flavor_of(spec)
    return flavor is None or bool(getattr(flavor, name))


def _rounds(at: Any) -> bool:
    """Returns whether micro-batches fill rounds of its interleaved schedules."""
    return micro_batches(at) % max(1, micro_batches(at) // at.pp) == 0


NEVER_CLIPS = 1e30
"""A gradient norm for its max_norm, of which 0 would make every gradient 0."""

RULES = (
    WHOLE_BATCHES,
    Rule(("grid",), "no pipelines for this model", lambda spec, at: at.pp > 1 and not _has("pipelines", spec)),
    Rule(
        ("grid",),
        "no context parallelism for this model, whose flavor masks documents with FlexAttention",
        lambda spec, at: at.cp > 1 and not _has("context", spec),
    ),
    Rule(
        ("grid", "pace"),
        "no schedule of this name",
        lambda spec, at: at.pp > 1 and SCHEDULES[at.schedule].torchtitan is None,
    ),
    Rule(
        ("grid", "pace"),
        "no interleaved or zero-bubble schedules of one stage per rank",
        lambda spec, at: at.pp > 1 and not SCHEDULES[at.schedule].is_simple and at.virtual_stages < 2,
    ),
    Rule(
        ("grid", "pace"),
        "no interleaved schedules over micro-batches that do not fill whole rounds",
        lambda spec, at: at.pp > 1 and at.virtual_stages > 1 and not SCHEDULES[at.schedule].is_v and not _rounds(at),
    ),
    Rule(
        ("grid", "pace"),
        "no 1F1B and no V-shaped schedules over fewer micro-batches than stages",
        lambda spec, at: (
            at.pp > 1
            and (SCHEDULES[at.schedule].is_v or not SCHEDULES[at.schedule].holds_all)
            and micro_batches(at) < at.pp * (2 if SCHEDULES[at.schedule].is_v else 1)
        ),
    ),
    Rule(("grid",), "no Ulysses: it shares sequences by rings", lambda s, at: at.cp > 1 and at.cp_kind != "ring"),
    Rule(("grid",), "no tensor parallelism without sequence parallelism", lambda s, at: at.tp > 1 and not at.sequence),
    Rule(
        ("grid",),
        "no tensor parallelism finer than key-value heads",
        lambda spec, at: spec.num_kv_heads % at.tp != 0,
    ),
    Rule(
        ("grid",),
        "no sequences that tp x 2 cp does not divide",
        lambda spec, at: at.tp * at.cp > 1 and at.seq_len % (at.tp * (2 * at.cp if at.cp > 1 else 1)) != 0,
    ),
    Rule(
        ("grid", "states"),
        "no replicas without shards (zero=0) beside tensor, context, expert or pipeline parallelism",
        lambda spec, at: at.zero == 0 and max(at.tp, at.cp, at.pp, at.ep) > 1,
    ),
    Rule(
        ("states",),
        "no zero=1: without resharding FSDP2 still reduces gradients at every micro-batch, which is zero=2",
        lambda spec, at: at.zero == 1,
    ),
    Rule(
        ("grid", "states"),
        "no experts that are shared over replicas",
        lambda spec, at: at.ep > 1 and (at.shard * at.cp * at.tp) % at.ep != 0,
    ),
    Rule(
        ("saving",),
        "no recomputation in groups of layers",
        lambda spec, at: recompute_of(at.recompute).in_groups,
    ),
    Rule(
        ("saving",),
        "no optimizer states alone in CPU memory: it offloads parameters, gradients and states together",
        lambda spec, at: at.offload == "optimizer",
    ),
    Rule(
        ("states", "saving"),
        "no parameters in CPU memory without FSDP",
        lambda s, at: at.offload == "all" and not at.zero,
    ),
    Rule(("saving",), "no activations in CPU memory", lambda spec, at: at.activation_offload),
)


def _refuses(spec: ModelSpec, job: Job) -> list[str]:
    found = []
    if not spec.is_ours:
        return [NOT_OURS]
    if flavor_of(spec) is None:
        have = ", ".join(f"{one.name} {one.flavor}" for one in flavors())
        found.append(f"no flavor with these sizes and layers; it has {have}")
    if job.precision.startswith("fp16"):
        found.append("no fp16: it computes in bfloat16 or float32")
    if job.adapter.kind != "none":
        found.append(f"no adapters (adapter.kind={job.adapter.kind})")
    return found


def _write(spec: ModelSpec, job: Job, plan: Plan, per_node: int, rule: UpdateRule) -> Exported:
    flavor = flavor_of(spec)
    assert flavor is not None, spec.name
    missing = differences(flavor, spec, job.seq_len)
    if not flavor.context:
        missing.append("cannot attend over the ends of documents: its flavor masks them with FlexAttention")
    alone = plan.zero == 0
    replicate, shard = (plan.dp, 1) if alone else (plan.replicate, plan.shard)
    lines = ["[model]", f'name = "{flavor.name}"', f'flavor = "{flavor.flavor}"']
    if plan.formats.is_fp8:
        lines.append('converters = ["quantize.linear.float8"]')
    lines += [
        "",
        "[training]",
        f"local_batch_size = {plan.micro_batch if plan.pp == 1 else plan.rows_per_rank}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {job.seq_len}",
        *([f"steps = {-(-job.tokens // job.tokens_per_step)}"] if job.tokens else []),
        f'dtype = "{_dtype(plan.formats.kept)}"',
        f'mixed_precision_param = "{_dtype(plan.formats.computed)}"',
        'mixed_precision_reduce = "float32"',
        f"max_norm = {rule.clip or NEVER_CLIPS}",
        f"enable_cpu_offload = {_word(plan.offload == 'all')}",
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
            f'pipeline_parallel_schedule = "{SCHEDULES[plan.schedule].torchtitan}"',
            f"pipeline_parallel_microbatch_size = {plan.micro_batch}",
            "module_fqns_per_model_part = [",
            *(f"  {json.dumps(stage)}," for stage in _stages(plan)),
            "]",
        ]
    if spec.is_moe:
        lines += [f"expert_parallel_degree = {plan.ep}", "expert_tensor_parallel_degree = 1"]
    lines += ["", "[activation_checkpoint]", *_recompute(plan, missing)]
    lines += ["", "[compile]", f"enable = {_word(plan.compile != 'none')}"]
    if plan.formats.is_fp8:
        recipe = plan.fp8_recipe if plan.fp8_recipe in ("rowwise", "tensorwise") else "rowwise"
        kept = [*([] if plan.fp8_head else ["output"]), *(["router.gate"] if spec.is_moe else [])]
        lines += ["", "[quantize.linear.float8]", f'recipe_name = "{recipe}"', f"filter_fqns = {json.dumps(kept)}"]
        if recipe != plan.fp8_recipe:
            missing.append(f"cannot scale fp8 {plan.fp8_recipe}: it scales by rows")
    if plan.reduce_dtype not in ("auto", "fp32"):
        missing.append(f"cannot reduce gradients in {plan.reduce_dtype}: it reduces in float32")
    lines += _update(missing, rule)
    if "none" not in (plan.quantize_weights, plan.quantize_gradients) or plan.secondary_shard:
        missing.append("cannot quantize or regroup what FSDP gathers (ZeRO++): it gathers in mixed_precision_param")
    missing.append(
        "you add: [training] dataset, [model] hf_assets_path (tokenizer), [optimizer] lr, [lr_scheduler], [checkpoint]"
    )
    missing.append(
        f"for torchrun --nproc-per-node {min(per_node, plan.world)} -m torchtitan.train, {plan.world} ranks in all"
    )
    return Exported("\n".join(lines), "toml", tuple(missing))


def _update(missing: list[str], rule: UpdateRule) -> list[str]:
    """Returns its optimizer's section."""
    optimizer = rule.optimizer
    if not OPTIMIZERS[optimizer.name].is_adam:
        missing.append(adamw_is_left(optimizer.name))
    if optimizer.weight_decay:
        missing.append(f"cannot leave norms out of weight_decay={optimizer.weight_decay:g}: it decays every parameter")
    if not rule.clip:
        missing.append(f"cannot turn clipping off: max_norm = {NEVER_CLIPS} is never reached")
    return [
        *("", "[optimizer]", f'name = "{"Adam" if optimizer.name == "adam" else "AdamW"}"'),
        *(f"beta{number} = {float(beta)}" for number, beta in enumerate(optimizer.betas, 1)),
        *(f"eps = {float(optimizer.eps)}", f"weight_decay = {float(optimizer.weight_decay)}"),
    ]


def _stages(plan: Plan) -> list[list[str]]:
    """Returns the modules of every stage, in model order."""
    names = [[f"layers.{index}" for index in plan.layers_of(stage)] for stage in range(plan.num_stages)]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


def _recompute(plan: Plan, missing: list[str]) -> list[str]:
    kind = plan.recomputes
    if kind.is_none:
        return ['mode = "none"']
    if kind.every == 1:
        return ['mode = "full"']
    if kind.is_selective:
        missing.append("recompute=selective: it also computes every second matmul again")
    option = "op" if kind.is_selective else str(kind.every)
    return ['mode = "selective"', f'selective_ac_option = "{option}"']


def _dtype(name: str) -> str:
    return {"bf16": "bfloat16", "fp32": "float32"}.get(name, "float32")


def _word(value: bool) -> str:
    return str(value).lower()


TORCHTITAN = Framework("torchtitan", "torchtitan 0.2.2", RULES, _refuses, _write)
