"""What is said of the model for frameworks whose scripts build it, with transformers. No torch."""

from __future__ import annotations

from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec

OURS_OVER = {"per-sequence": "each sequence", "transformers": "the whole step"}


def model_lines(spec: ModelSpec, job: Job) -> list[str]:
    """Returns what the script must see to, so that the model is this one."""
    found = [
        f"the model is your script's: AutoModelForCausalLM with the config.json of {spec.name} "
        f"({spec.num_parameters:,} parameters), dropout 0"
    ]
    if spec.is_moe and spec.aux_loss_coef:
        found.append(
            f"aux_loss_coef={spec.aux_loss_coef:g}: output_router_logits=True and router_aux_loss_coef in config.json; "
            f"it is taken over each micro-batch there, ours over {OURS_OVER[spec.aux_loss_rule]}"
        )
    if spec.is_moe and spec.z_loss_coef:
        found.append(f"cannot add a z-loss (z_loss_coef={spec.z_loss_coef:g}): transformers' models have none")
    if spec.bias_update_rate:
        found.append(
            f"cannot move the router's biases (bias_update_rate={spec.bias_update_rate:g}): they stay as loaded"
        )
    if job.adapter.kind != "none":
        found.append(f"adapter.kind={job.adapter.kind}: peft adds adapters of rank {job.adapter.rank} in the script")
    return found
