"""The config as it will run: what the user left open now holds the plan's value, with the reason in a few words. No torch.

What the run measures at its start (`micro_batch`, `split`) and what follows from other keys (`replicate`) stays open; plan.json has the
answer. Invariant: what the user has set is never changed, and every key that is filled has a reason.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.resolve.searched import Better
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

SECTIONS = ("train", "parallel", "memory")  # what an adapter's directory says was read from there, not chosen


def fill(config: Config, plan: Plan, found: Better | None) -> tuple[Config, dict[str, str]]:
    """`found`: what the search has decided, where it was asked."""
    filled = replace(
        config,
        train=replace(
            config.train,
            steps=config.train.steps if (config.train.tokens or config.train.epochs) else plan.num_steps,
            global_batch=None if config.train.global_batch_tokens else plan.global_batch,
        ),
        parallel=replace(
            config.parallel,
            dp=plan.dp,
            zero=plan.zero,
            tp=plan.tp,
            sequence=plan.sequence,
            cp=plan.cp,
            cp_kind=plan.cp_kind,
            pp=plan.pp,
            schedule=plan.schedule,
            virtual_stages=plan.virtual_stages,
            ep=plan.ep,
            layout=None,
        ),
        memory=replace(
            config.memory,
            precision=plan.precision,
            recompute=plan.recompute,
            offload=plan.offload if config.memory.offload == "auto" else config.memory.offload,
        ),
    )
    if found and plan.zero and plan.replicate > 1:
        filled = replace(filled, parallel=replace(filled.parallel, replicate=plan.replicate))
    changed = [
        f"{section}.{key}"
        for section in SECTIONS
        for key in getattr(config, section).__dataclass_fields__
        if getattr(getattr(config, section), key) != getattr(getattr(filled, section), key)
    ]
    why = _reasons(plan) | (dict.fromkeys(found.settings, found.short) if found else {})
    chosen = {name: why[name] for name in changed}
    if config.train.micro_batch == "auto":
        chosen["train.micro_batch"] = f"{plan.micro_batch} by prediction, measured as the run starts"
    return filled, chosen


def _reasons(plan: Plan) -> dict[str, str]:
    """Of every key that can be left open, for the value that the rules give it."""
    shared = plan.dp * plan.cp > 1
    saved = "it does not fit without"
    return {
        "train.steps": "the usual length",
        "train.global_batch": "the usual batch",
        "parallel.dp": plan.reason.partition(";")[0],
        "parallel.zero": "the smallest stage that fits" if shared else "one replica: nobody to share with",
        "parallel.tp": "fits without",
        "parallel.sequence": ("tp divides the sequence" if plan.sequence else "tp does not divide the sequence")
        if plan.tp > 1
        else "needs tp > 1",
        "parallel.cp": "fits without",
        "parallel.pp": "fits without",
        "parallel.virtual_stages": f"usual for {plan.schedule}" if plan.pp > 1 else "no pipeline",
        "parallel.ep": "fits without",
        "parallel.layout": "its words are the keys above",
        "memory.precision": "what CPUs compute fastest"
        if plan.device == "cpu"
        else "what GPUs compute fastest"
        if plan.precision == "bf16"
        else "a GPU here has no bf16",
        "memory.recompute": "fits without" if plan.recompute == "none" else saved,
        "memory.offload": "fits without"
        if plan.offload == "none" and plan.device == "cuda"
        else saved
        if plan.offload != "none"
        else "CPU memory is all there is",
    }
