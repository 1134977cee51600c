"""Makes the config as it will run: what the user left open now holds the plan's value, with the reason in a few words.
No torch.

What the run measures at its start (`micro_batch`, `split`) and what follows from other keys (`replicate`) stays open;
plan.json has the answer. Invariant: what the user has set is never changed, and every key that is filled has a reason.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from shardwise.spec.plan import KEEPS_AUTO, Plan
from shardwise.spec.schema import Config

SECTIONS = ("train", "parallel", "memory")  # what an adapter's directory says was read from there, not chosen


def fill(config: Config, plan: Plan, decided: Collection[str], because: str) -> tuple[Config, dict[str, str]]:
    """Returns the config with the plan's values, and why each key has its value. `decided`: keys that the search has
    decided, `because` of this."""
    filled = replace(
        config,
        train=replace(
            config.train,
            steps=config.train.steps if (config.train.tokens or config.train.epochs) else plan.num_steps,
            global_batch=None if config.train.global_batch_tokens else plan.global_batch,
        ),
        parallel=replace(_resolved(config.parallel, plan), cp_kind=plan.cp_kind, schedule=plan.schedule, layout=None),
        memory=_resolved(config.memory, plan),
    )
    if decided and plan.zero and plan.replicate > 1:
        filled = replace(filled, parallel=replace(filled.parallel, replicate=plan.replicate))
    changed = [
        f"{section}.{key}"
        for section in SECTIONS
        for key in getattr(config, section).__dataclass_fields__
        if getattr(getattr(config, section), key) != getattr(getattr(filled, section), key)
    ]
    why = _reasons(plan) | dict.fromkeys(decided, because)
    chosen = {name: why[name] for name in changed}
    if config.train.micro_batch == "auto":
        chosen["train.micro_batch"] = f"{plan.micro_batch} by prediction, measured as the run starts"
    return filled, chosen


STAYS_OPEN = {"split", "replicate", *KEEPS_AUTO}


def _resolved(section: Any, plan: Plan) -> Any:
    """Returns a section of the config with the plan's value in place of every `auto`, but for what stays open."""
    open_keys = [name for name in section.__dataclass_fields__ if getattr(section, name) == "auto"]
    return replace(section, **{name: getattr(plan, name) for name in open_keys if name not in STAYS_OPEN})


def _reasons(plan: Plan) -> dict[str, str]:
    """Returns for every key that can be left open why the rules give it its value."""
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
