"""What a job will need and how long a step will take: memory, time, and how sure that is. No torch.

    predict(model, cluster, job, plan) -> Prediction

How far a step may be off, and what was never measured, is in intervals.toml: what `benchmarks/planner_accuracy.py
--intervals` found, measured over predicted time of published runs, by kind of job, and the range of everything that
ran. Nothing of it is chosen by hand. Read next: memory.py, step_time.py.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.memory import fullest, predict_elsewhere, predict_stages
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction

FEW_NODES = measured("few_nodes")
BUSY = measured("busy_share")


def predict(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack | None = None) -> Prediction:
    """Returns the bytes of every rank at its peak, the seconds of a step, and how sure they are. `stack`: of another
    framework; by default our runtime, with the tricks that the plan says."""
    stack = stack or stack_of(plan)
    stages = predict_stages(model, plan, job.optimizer, job.adapter, stack)
    elsewhere = predict_elsewhere(model, plan, job.optimizer, job.adapter)
    step = step_seconds(model, cluster, job, plan, stack)
    likely, unseen = interval(model, cluster, plan, sum(step.values())), outside(model, cluster, plan)
    return Prediction(fullest(stages).parts, step, elsewhere, likely, unseen, stages)


# How sure -----------------------------------------------------------------------------------------------------------


def kind_of_job(model: ModelSpec, cluster: ClusterSpec, plan: Plan, step_s: float) -> str:
    """Returns the name of the jobs whose predictions are off for the same reasons. On a CPU: as on one node."""
    if model.is_moe:
        return "experts"
    if plan.formats.is_fp8:
        return "fp8"
    nodes = cluster.nodes_of(plan.world)
    where = "one node" if nodes == 1 else "few nodes" if nodes <= FEW_NODES else "many nodes"
    flops = cluster.device.flops
    peak = max(flops.get("bf16", 0.0), flops.get("fp16", 0.0)) or max(flops.values())
    done = model.flops_per_token(plan.seq_len) * plan.tokens_per_step
    return where if done >= BUSY * peak * plan.world * step_s else f"{where}, waiting"


@cache
def table() -> dict[str, Any]:
    """Returns intervals.toml: `step`, the factors by kind of job, and `seen`, the range of everything that ran."""
    return tomllib.loads(files("shardwise.plan.prediction").joinpath("intervals.toml").read_text(encoding="utf-8"))


def interval(model: ModelSpec, cluster: ClusterSpec, plan: Plan, step_s: float) -> tuple[float, float]:
    """Returns two factors on the seconds of a predicted step between which 8 of 10 measured ones lie."""
    found = table()["step"][kind_of_job(model, cluster, plan, step_s)]
    return found["p10"], found["p90"]


def traits(model: ModelSpec, plan: Plan) -> list[str]:
    """Returns in words what a job does that not every job does."""
    does = {
        f"{plan.precision} precision": True,
        f"zero {plan.zero}": plan.zero > 0,
        "replicas of shards": plan.zero > 0 and plan.replicate > 1,
        "tensor parallelism": plan.tp > 1,
        f"context parallelism ({plan.cp_kind})": plan.cp > 1,
        f"pipeline ({plan.schedule})": plan.pp > 1,
        "expert parallelism": plan.ep > 1,
        f"recompute {plan.recompute.partition('-')[0]}": plan.recompute != "none",
        f"offload {plan.offload} to {plan.offload_to}": plan.offload != "none",
        "activation offload": plan.activation_offload,
        "compressed ZeRO collectives": plan.quantize_weights != "none" or plan.quantize_gradients != "none",
        "experts": model.is_moe,
        model.attention.trait: bool(model.attention.trait),
        "sliding windows": model.sliding_window > 0,
    }
    return [name for name, has in does.items() if has]


def outside(model: ModelSpec, cluster: ClusterSpec, plan: Plan) -> tuple[str, ...]:
    """Returns in words what of this job lies outside all runs that predictions were held against. Rates that were
    measured here speak for themselves."""
    seen, device = table()["seen"], cluster.device
    is_measured = cluster.origins.get("achievable") == "measured"
    found = [] if is_measured or device.name in seen["devices"] else [f"{device.name}: no run on it"]
    if device.kind == "cpu":  # published runs are of GPUs
        return tuple(found)
    sizes = (cluster.nodes_of(plan.world), plan.world, plan.seq_len, model.num_parameters)
    for name, size in zip(("nodes", "devices", "sequence", "parameters"), sizes, strict=True):
        if size > seen["most"][name]:
            found.append(f"{name} {size:,}: measured up to {seen['most'][name]:,}")
    return (*found, *(f"{name}: no run with it" for name in traits(model, plan) if name not in seen["traits"]))
