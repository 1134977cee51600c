"""Says, in a checkpoint of an adapter run, what it does not hold: which adapters, beside which base weights.

No torch here. Invariant: adapters are never put beside another base than the one they were trained with.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.huggingface.directory import find_model_dir
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import AdapterConfig, Config, ModelConfig

END_BYTES = 2**20  # bytes at each end of a weight file that the digest covers


def adapter_state(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Returns what the manifest says about adapters and their base; empty where all weights are trained."""
    if config.adapter.kind == "none":
        return {}
    base = {"digest": base_identity(config.model, spec, config.train.seed), "path": config.model.path}
    return {"adapter": asdict(config.adapter), "base": base}


def check_base(checkpoint: Path, state: dict[str, Any], config: Config, spec: ModelSpec) -> None:
    """Refuses a checkpoint that does not fit the model of a config: other adapters, or another base."""
    is_adapter, wants_adapter = "adapter" in state, config.adapter.kind != "none"
    if is_adapter != wants_adapter:
        has, needs = ("adapters only", "all weights") if is_adapter else ("all weights", "adapters only")
        raise UserError(
            f"{checkpoint} holds {has}, this config trains {needs}",
            why="a run goes on with the parameters it began with",
            fix=f"adapter.kind={state['adapter']['kind'] if is_adapter else 'none'}, or a new run",
        )
    if not is_adapter:
        return
    shapes = ("kind", "rank", "targets", "train_also")
    before = {key: tuple(v) if isinstance(v, list) else v for key, v in state["adapter"].items()}
    changed = [key for key in shapes if before[key] != getattr(config.adapter, key)]
    if changed:
        raise UserError(
            f"{checkpoint} was trained with another adapter.{changed[0]}",
            why=f"{before[changed[0]]!r} then, {getattr(config.adapter, changed[0])!r} now",
            fix="leave it as it was, or start a new run with adapter.path",
        )
    if state["base"]["digest"] != base_identity(config.model, spec, config.train.seed):
        raise UserError(
            f"the adapters of {checkpoint} were trained beside other weights",
            why=f"the base was {state['base']['path'] or 'drawn from a seed'}; its weights or the seed have changed",
            fix="bring the base back to where it was, or give its place as model.path",
        )


def read_adapter_state(
    checkpoint: Path, state: dict[str, Any], config: Config | None, spec: ModelSpec
) -> AdapterConfig | None:
    """Returns the adapters of a checkpoint that is to be used without training; its base must be there."""
    if "adapter" not in state:
        return None
    if config is None:
        raise UserError(
            f"{checkpoint} holds only adapters",
            why="the weights they stand beside are described by the run they come from, and this is no part of one",
            fix="give the run, or RUN/checkpoints/step-N",
        )
    check_base(checkpoint, state, config, spec)
    return config.adapter


def base_identity(config: ModelConfig, spec: ModelSpec, seed: int) -> str:
    """Returns the digest of the weights that adapters stand beside: of the seed and spec that they are drawn from, or
    of their files. Of large files their table of contents and both ends are read, not every byte."""
    digest = hashlib.sha256()
    if not config.path:
        digest.update(f"drawn {seed} {sorted(spec.to_dict().items())}".encode())
        return digest.hexdigest()
    for file in sorted(find_model_dir(config.path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(END_BYTES))
            stream.seek(max(0, size - END_BYTES))
            digest.update(stream.read(END_BYTES))
    return digest.hexdigest()
