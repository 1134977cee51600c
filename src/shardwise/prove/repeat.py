"""Proves a run: computes its first steps once more, in one process, without anything of `parallel/`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from shardwise.config.units import format_bytes, format_seconds
from shardwise.data.corpus import Corpus
from shardwise.data.loader import Loader
from shardwise.data.own_rows import RowStream
from shardwise.data.streaming import TokenStream
from shardwise.interop.transformers.model import TransformersModel
from shardwise.kernels.float8 import apply_float8, apply_float8_head
from shardwise.model.dtypes import KEPT
from shardwise.optim.build import build_optimizer, set_learning_rate
from shardwise.optim.schedule import learning_rate
from shardwise.prove.reference import plain_gradients, plain_scaler, plain_update
from shardwise.run.build import adapted_model, use_losses
from shardwise.run.own_parts import OwnParts
from shardwise.run.session import Session
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

NUM_STEPS = 3
NOTHING_OWN = OwnParts()
LIMIT_S = 60.0  # seconds; a proof that would take longer is left to the user


def repeat_first_steps(
    session: Session, losses: Mapping[int, float], step_s: float | None, peak_bytes: int
) -> tuple[dict[str, Any] | None, str | None]:
    """Repeats the first steps of a run without parallelism. Returns the record for metrics.jsonl and a line for people;
    None where there is none.

    It needs a run from its start, and more than one rank to prove anything. `losses` are those of the run's steps,
    `step_s` the seconds of a usual one, `peak_bytes` those of the fullest rank.
    """
    plan, steps = session.plan, [step for step in range(1, NUM_STEPS + 1) if step in losses]
    if plan.world == 1 or not steps or steps[0] != 1:
        return None, None
    if isinstance(session.corpus.train, RowStream) and not session.corpus.train.can_repeat:
        return None, "proof    left out: data yields its rows once"
    if not all(math.isfinite(losses[step]) for step in steps):
        return None, "proof    left out: one of the first steps was not finite, and skipped"
    alone_s = (step_s or 0.0) * plan.world * len(steps)
    if alone_s > LIMIT_S:
        seconds = format_seconds(alone_s)
        return None, f"proof    left out: {len(steps)} steps in one process would take {seconds}"
    if 2 * peak_bytes > session.memory_limit:
        needed, limit = format_bytes(2 * peak_bytes), format_bytes(session.memory_limit)
        return None, f"proof    left out: a second model needs {needed} of {limit}"
    alone = single_process_losses(
        session.config,
        plan,
        session.spec,
        session.corpus,
        session.device,
        len(steps),
        session.own,
        session.inputs.passed_over.batches,
    )
    difference = max(abs(a - losses[step]) for step, a in zip(steps, alone, strict=True))
    is_same = difference <= plan.formats.proof_limit * max(1.0, *alone)
    text = f"steps 1-{steps[-1]} repeated in one process: largest difference {difference:.1g}"
    if is_same and difference > 1e-5:
        text += f" ({plan.precision} rounds differently in another order; in fp64 this layout is exact)"
    verdict = "" if is_same else "  -> NOT THE SAME; please report this"
    return {"steps": len(steps), "largest_difference": difference, "same": is_same}, f"proof    {text}{verdict}"


def single_process_losses(
    config: Config,
    plan: Plan,
    spec: ModelSpec,
    corpus: Corpus,
    device: torch.device,
    num_steps: int = NUM_STEPS,
    own: OwnParts = NOTHING_OWN,
    passed_over: Collection[int] = (),
) -> list[float]:
    """Returns the losses of steps 1 … num_steps, in nats, when one process computes every row of every batch
    that is not passed over."""
    model = adapted_model(config, spec, plan.precision, KEPT[plan.precision], device)
    if plan.formats.is_fp8:
        blocks = model.blocks() if isinstance(model, TransformersModel) else model.layers.values()
        found = apply_float8(model, blocks, plan.fp8_recipe, emulate=device.type == "cpu", fused=plan.fuse)
        if plan.fp8_head:
            apply_float8_head(model, found, compiled=False)
        found.quantize_frozen()
    if own.loss is not None:
        use_losses([model], own.loss)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = own.optimizer(trained) if own.optimizer else build_optimizer(config.optimizer, trained)
    scaler = plain_scaler(plan.precision, plan.loss_scale)
    rate = learning_rate(config.optimizer, plan.num_steps, plan.global_batch)
    rows, losses = range(plan.global_batch), []
    source = corpus.train.anew() if isinstance(corpus.train, TokenStream) else corpus.train
    cut: dict[str, Any] = dict(global_batch=plan.global_batch, micro_batch=plan.micro_batch)
    with Loader(source, rows=rows, passed_over=passed_over, **cut) as loader:
        for step in range(1, num_steps + 1):
            batch = loader.next()
            micro = (part.to(device) for part in batch.microbatches)
            losses.append(plain_gradients(model, micro, batch.num_targets, plan.precision, scaler.scale))
            set_learning_rate(optimizer, rate(step))
            plain_update(model, optimizer, config.train.clip, scaler)
    return losses
