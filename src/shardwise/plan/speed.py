"""Which of the [speed] tricks a plan uses: fills `auto`, refuses what cannot work. No torch.

Everything here changes how fast a step is computed, not what. Read next: parallel/apply.py, which applies them.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.config.schema import SpeedConfig
from shardwise.errors import UserError
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.schedules import splits_backward


def with_speed(plan: Plan, asked: SpeedConfig, spec: ModelSpec) -> Plan:
    """The plan with its tricks. Called last: what they may do depends on the layout."""
    on_gpu = plan.device == "cuda"
    compiled = asked.compile
    if compiled == "auto":
        compiled = "blocks" if on_gpu and spec.is_ours else "none"
    fuse = compiled != "none" and spec.is_ours if asked.fuse == "auto" else bool(asked.fuse)
    copies = on_gpu and can_copy(plan, spec) if asked.copies == "auto" else bool(asked.copies)
    if copies and not can_copy(plan, spec):
        raise UserError(
            "speed.copies = true is for one rank that computes in 16 bits over fp32 weights, and has all of them itself",
            why=f"this plan is {plan.layout} in {plan.precision}" + _not_copied(plan, spec),
            fix="speed.copies=auto, which uses copies where it can",
        )
    loss = ("fused" if can_fuse_loss(plan) else "recompute") if asked.loss == "auto" else asked.loss
    kernels = "torch" if asked.kernels == "auto" else asked.kernels
    return replace(plan, compile=compiled, fuse=fuse, copies=copies, loss=loss, kernels=kernels)


def can_copy(plan: Plan, spec: ModelSpec) -> bool:
    """One rank alone, whose weights are kept in fp32 and used in 16 bits."""
    stays = plan.zero == 0 and plan.offload == "none"
    return plan.world == 1 and plan.is_mixed and stays and not plan.rounds_sums and spec.is_ours


def _not_copied(plan: Plan, spec: ModelSpec) -> str:
    if not spec.is_ours:
        return ", of a model that transformers builds"
    return f", with gradients summed in {plan.reduce_dtype}" if plan.rounds_sums else ""


def can_fuse_loss(plan: Plan) -> bool:
    """Not where the head's gradient is split in two, nor where its vocabulary is cut."""
    return plan.tp == 1 and not (plan.pp > 1 and splits_backward(plan.schedule))
