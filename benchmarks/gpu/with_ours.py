"""Our trainer's own step, through the engine that runs use: what [speed] resolves to stands in the notes."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import torch
from gpu.contender import Contender, draw_weights
from gpu.fit import same_numbers
from gpu.shapes import Case
from torch import Tensor

from shardwise.cluster.describe.table import known_cluster
from shardwise.data.loader import StepBatch, TensorBatch
from shardwise.kernels.choose_matmul import summary
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.parallel.apply import parallelize_decoder
from shardwise.plan.prediction.predict import predict
from shardwise.plan.resolve.speed import with_speed
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schema import AdapterConfig, OptimizerConfig, SpeedConfig

TRICKS = ("compile", "fuse", "copies", "loss", "kernels", "products", "fp8_head", "fp8_recipe")
SPEED = {field.name for field in fields(SpeedConfig)}


def options_of(case: Case) -> dict[str, Any]:
    return {**case.shape.ours, **case.options}


def plan_of(case: Case) -> Plan:
    options = {k: v for k, v in options_of(case).items() if k not in ("micro_batch", "optimizer")}
    attention = "flash4" if options.pop("attention", "auto") == "flash4" else "sdpa"
    speed = {key: options.pop(key) for key in SPEED & set(options)}
    if not case.compiles:
        speed["compile"] = "none"
    if case.rehearses:  # what `auto` is on a GPU
        speed = {"compile": "trace", "copies": PRECISIONS[options.get("precision", "bf16")].is_mixed, **speed}
    precision = options.pop("precision", "bf16") if case.is_bf16 else "fp32"
    plan = Plan(
        device=case.device,
        precision=precision,
        seq_len=case.shape.seq_len,
        global_batch=case.micro_batch,
        micro_batch=case.micro_batch,
        num_steps=8,
        threads_per_rank=1,
        reason="a benchmark",
        **options,
    )
    return with_speed(plan, SpeedConfig(**speed), case.shape.spec, attention)


def adapter_of(case: Case) -> AdapterConfig:
    return AdapterConfig(**case.shape.adapter) if case.shape.adapter else AdapterConfig()


def run_with(case: Case, notes: dict[str, Any]) -> Case:
    """With the attention that `auto` took, as a row's notes say it, where the planner knows it by name."""
    took = str(notes.get("attention", "")).removeprefix("attention ")
    return replace(case, options={**case.options, "attention": "flash4"}) if took.startswith("flash4") else case


def predicted(case: Case, kind: str = "h200") -> dict[str, float]:
    """What the planner says of this row, from the data sheet and the constants of the card."""
    plan, optimizer = plan_of(case), options_of(case).get("optimizer", "adamw")
    job = Job(plan.seq_len, plan.global_batch, None, plan.precision, optimizer, adapter_of(case))
    found = predict(case.shape.spec, known_cluster(kind, 1, 1), job, plan)
    return {"step_s": found.step_s, "memory_bytes": found.memory_bytes}


def fill_of(case: Case) -> Any:
    def fill(model: Decoder) -> None:
        if case.seed is not None:
            initialize(model, case.seed)
        elif next(model.parameters()).is_cuda:
            draw_weights(model)
        else:
            same_numbers(model)  # a CPU would draw billions of elements for minutes

    return fill


def build(case: Case) -> Contender:
    options, plan, device = options_of(case), plan_of(case), torch.device(case.device)
    values = OptimizerConfig(name=options.get("optimizer", "adamw"), lr=case.lr)
    attention = options.get("attention", "auto")
    if plan.kernels == "liger":
        import liger_kernel  # noqa: F401  # missing: said here, not in the middle of a graph
    engine = parallelize_decoder(case.shape.spec, plan, 0, device, attention, fill_of(case), adapter=adapter_of(case))
    optimizer, clock = engine.optimizer(values), Clock(device)

    def step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        clock.begin()
        num_targets = targets_BT.numel()
        batch = StepBatch(1, [TensorBatch(tokens_BT, targets_BT, None)], num_targets)
        norm, finish = accumulate(engine, batch, num_targets, clock)
        update(engine, optimizer, norm, lr=case.lr, clip=case.clip, clock=clock)
        if plan.products == "measured" and not notes.get("products found"):
            notes["products found"] = summary()
        return finish()[0] / num_targets

    notes: dict[str, Any] = {key: value for key, value in asdict(plan).items() if key in TRICKS}
    notes |= {"precision": plan.precision, "recompute": plan.recompute, "optimizer": values.name}
    notes |= {
        "attention": engine.models[0].kernel_reason or engine.models[0].kernel.name,
        "fp8": str(engine.float8) if engine.float8 else None,
    }
    return Contender(step, case.shape.spec.num_parameters, notes)
