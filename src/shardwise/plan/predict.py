"""A first prediction of memory and step time, printed beside what was measured.

Memory is counted by what lives at the peak (end of the last backward). Time is a sum of three parts, each a size over a
measured rate: matrix work, the gradient all-reduce, the optimizer's pass over memory. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model.spec import ModelSpec
from shardwise.plan.activations import activation_bytes
from shardwise.plan.plan import Plan

BYTES = {"fp64": 8, "fp32": 4, "bf16-true": 2}
STATES_PER_PARAMETER = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1}
"""Extra tensors of the parameter's size that each optimizer keeps."""

PROCESS_BYTES = {"cpu": 305 * 2**20, "cuda": 0}
"""What a rank holds besides tensors: interpreter, torch and its math libraries. On CUDA only tensors are counted."""

ALLOCATOR_SHARE = {"cpu": 0.45, "cuda": 0.1}
"""Backward's own temporaries, and on a CPU what malloc keeps in holes; as a share of the activations.
CPU: fitted to `tiny` with micro-batches of 1 and 8 on one machine. CUDA: an assumption, not fitted."""

MATMUL_SHARE = {"cpu": 0.53, "cuda": 0.55}
"""Share of the bare matmul rate that a whole forward and backward pass reaches .
CPU: fitted to the default run on one two-core machine. CUDA: an assumption; runs on an H200 came out -24 to +21 % off it."""

LAUNCH_SECONDS_PER_LAYER = {"cpu": 3e-3, "cuda": 3.5e-3}
"""Time Python and torch need around one layer's forward and backward operations: the floor for small models.
Fitted to one run each: a two-layer model on a CPU, `tiny` on an H200."""


@dataclass(frozen=True)
class Rates:
    """What one rank of this machine reaches while all ranks are busy; measured when a run starts."""

    matmul_flops: float  # per second
    memory_bytes: float  # per second, read + written
    all_reduce_bytes: float = float("inf")  # payload per second
    all_reduce_latency: float = 0.0  # seconds per call


@dataclass(frozen=True)
class Prediction:
    memory: dict[str, int]  # bytes per rank by category
    step: dict[str, float]  # seconds by part
    matmul_flops: float  # per second and rank: what the step was predicted from

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.step.values())

    def to_dict(self) -> dict[str, object]:
        return {"memory_bytes": self.memory_bytes, "memory": self.memory, "step_s": self.step_s, "step": self.step}


def predict(spec: ModelSpec, plan: Plan, optimizer: str, rates: Rates) -> Prediction:
    memory, step = predict_memory(spec, plan, optimizer), predict_step(spec, plan, optimizer, rates)
    return Prediction(memory, step, rates.matmul_flops)


def predict_memory(spec: ModelSpec, plan: Plan, optimizer: str) -> dict[str, int]:
    """Bytes of one rank at the peak. With plain data parallelism gradients live inside the all-reduce buckets."""
    size = BYTES[plan.precision] * spec.num_parameters
    activations = activation_bytes(spec, plan.micro_batch, plan.seq_len, BYTES[plan.precision])
    return {
        "weights": size,
        "gradients": size,
        "optimizer": size * STATES_PER_PARAMETER[optimizer],
        "activations": activations,
        "allocator": int(ALLOCATOR_SHARE[plan.device] * activations),
        "process": PROCESS_BYTES[plan.device],
    }


def predict_step(spec: ModelSpec, plan: Plan, optimizer: str, rates: Rates) -> dict[str, float]:
    tokens_per_rank = plan.rows_per_rank * plan.seq_len
    gradient_bytes = BYTES[plan.precision] * spec.num_parameters
    passes = (
        3 + 2 * STATES_PER_PARAMETER[optimizer]
    )  # read gradient and weight, write weight, read and write each state
    compute = tokens_per_rank * spec.flops_per_token(plan.seq_len) / (rates.matmul_flops * MATMUL_SHARE[plan.device])
    launches = spec.num_layers * plan.num_microbatches * LAUNCH_SECONDS_PER_LAYER[plan.device]
    step = {
        "compute": max(compute, launches),
        "optimizer": (passes + 2) * gradient_bytes / rates.memory_bytes,  # + 2: the norm for clipping, and its scaling
    }
    if plan.dp > 1:
        step["all-reduce"] = rates.all_reduce_latency + gradient_bytes / rates.all_reduce_bytes
    return step
