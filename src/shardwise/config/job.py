"""Settles what follows from the kind of job: a learning rate that fits it, and what a trained model cannot read. No
torch.

A rate that trains a small model from scratch destroys a trained one, so `auto` asks what the job is. Invariant: a value
that somebody wrote is never changed, and every value that is filled has its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.config.keys import Origins, where_written
from shardwise.config.units import format_count
from shardwise.errors import UserError
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import SMALL_MODEL_LR, Config

AUTO = "auto"  # the origin of what follows from the job; behind a colon, why

FROM_SCRATCH = ((100e6, SMALL_MODEL_LR), (500e6, 6e-4), (3e9, 4e-4), (30e9, 3e-4))
"""Peak learning rates of AdamW for models of up to so many parameters, as GPT-3, Llama and OLMo have published theirs;
LARGEST for more."""
LARGEST = 1.5e-4
LARGE = 10e9
"""Parameters from which on trained weights and adapters take the smaller of their two rates."""
FINE_TUNE, ADAPTERS = (2e-5, 1e-5), (2e-4, 1e-4)


def settle_job(config: Config, spec: ModelSpec, document_mask: bool, packing: str) -> tuple[Config, dict[str, str]]:
    """Returns the config with what follows from the job in place of `auto`, and the origin of each such key.
    `document_mask` and `packing`: what the corpus has decided."""
    origins = {}
    if config.optimizer.lr == "auto":
        rate, why = usual_rate(config, spec)
        config = replace(config, optimizer=replace(config.optimizer, lr=rate))
        origins["optimizer.lr"] = f"{AUTO}: {why}"
    if config.data.document_mask == "auto":
        config = replace(config, data=replace(config.data, document_mask=document_mask))
        why = "conversations that share a row" if document_mask else "no conversations share a row"
        origins["data.document_mask"] = f"{AUTO}: {why}"
    if config.data.packing == "auto" and packing == "single":  # the others follow from the text again
        config = replace(config, data=replace(config.data, packing=packing))
        origins["data.packing"] = f"{AUTO}: this model cannot keep conversations of one row apart"
    return config, origins


def usual_rate(config: Config, spec: ModelSpec) -> tuple[float, str]:
    """Returns the peak learning rate that is usual for this job, and what the job is."""
    size, is_large = format_count(spec.num_parameters), spec.num_parameters >= LARGE
    if config.adapter.kind != "none":
        return ADAPTERS[is_large], f"usual for {config.adapter.kind} adapters on {size} parameters"
    if config.model.path is not None:
        return FINE_TUNE[is_large], f"usual for going on with {size} trained parameters"
    rate = next((rate for most, rate in FROM_SCRATCH if spec.num_parameters <= most), LARGEST)
    return rate, f"usual for {size} parameters from scratch"


def warmup_lines(warmup: float, num_steps: int) -> list[str]:
    """Returns a line where the warm-up is longer than the run, which then ends with it."""
    short = f"a warm-up of {warmup:.0f} steps is cut to this run's {num_steps:,}: its rate rises to the end"
    return [f"lr       {short}; optimizer.warmup=0.1 is a tenth of any run"] if warmup > max(1, num_steps) else []


def rate_line(lr: float, written: Mapping[str, str]) -> str | None:
    """Returns a line on a learning rate that follows from the job; None where somebody has set it. `written`: the
    origins of a run's config."""
    kind, _, why = written.get("optimizer.lr", "").partition(": ")
    return f"lr       {lr:g} at its peak, {why}; optimizer.lr=… sets it" if kind == AUTO else None


def check_length(config: Config, spec: ModelSpec, origins: Origins) -> None:
    """Refuses sequences that a trained model was never shown the positions of; whoever overrides its length or its
    rotary scaling has decided otherwise."""
    overridden = any(name.startswith("rope_") for name, _ in config.model.overrides)
    if config.model.path is None or overridden or config.train.seq_len <= spec.max_seq_len:
        return
    longer = f"model.max_seq_len={config.train.seq_len}" if spec.is_ours else "more in a copy of its config.json"
    raise UserError(
        f"train.seq_len = {config.train.seq_len} is longer than {spec.name} was trained for",
        why=f"its positions end at {spec.max_seq_len}; what it does beyond them is not what it has learned",
        fix=f"train.seq_len={spec.max_seq_len}"
        + (f", or {longer} if you mean it" if spec.positions != "learned" else ""),
        where=where_written(origins, "train.seq_len"),
    )
