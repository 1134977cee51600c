"""What is said of the model for frameworks whose scripts build it, with transformers. No torch."""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.interop.huggingface.export import config_from_spec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec


def model_lines(spec: ModelSpec, job: Job) -> list[str]:
    """Returns what the script must see to, so that the model is this one."""
    found = [f"the model is your script's: {_class(spec)} ({spec.num_parameters:,} parameters), dropout 0"]
    if spec.is_moe and spec.aux_loss_coef:
        found.append(_router_loss(spec))
    if spec.is_moe and spec.z_loss_coef:
        found.append(f"cannot add a z-loss (z_loss_coef={spec.z_loss_coef:g}): transformers' models have none")
    if spec.bias_update_rate:
        found.append(
            f"cannot move the router's biases (bias_update_rate={spec.bias_update_rate:g}): they stay as loaded"
        )
    if job.adapter.kind != "none":
        found.append(f"adapter.kind={job.adapter.kind}: peft adds adapters of rank {job.adapter.rank} in the script")
    return found


def _class(spec: ModelSpec) -> str:
    """Returns what builds the model in a script."""
    try:
        if spec.is_ours:
            config_from_spec(spec)
    except UserError as problem:
        return f"transformers has no model like {spec.name}, {problem.why}, so your own class"
    return f"AutoModelForCausalLM with the config.json of {spec.name}"


def _router_loss(spec: ModelSpec) -> str:
    """Returns how the balancing loss gets there. transformers' is one over all layers of a micro-batch, and is the
    experts per token where the load is even; ours by default is one per layer and sequence, and is 1 then."""
    if spec.router == "sigmoid-bias":
        return f"cannot add the router's loss (aux_loss_coef={spec.aux_loss_coef:g}): transformers' model has none"
    coef, ours = spec.aux_loss_coef, "the whole step"
    if spec.aux_loss_rule == "per-sequence":
        coef *= sum(layer.is_moe for layer in spec.layers) / spec.experts_per_token
        ours = "each layer and sequence"
    return (
        f"aux_loss_coef={spec.aux_loss_coef:g}: output_router_logits=True and router_aux_loss_coef={coef:g} in "
        f"config.json pull as hard; it is taken over all layers of each micro-batch there, ours over {ours}"
    )
