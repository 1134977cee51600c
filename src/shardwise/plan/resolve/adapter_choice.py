"""What [adapter] comes to for one model: values that `adapter.path` brings along, and refusals. No torch.

Invariant: settings that leave this file name layers that the model has.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.config.keys import Origins, where_written
from shardwise.errors import UserError
from shardwise.interop.peft.format import open_adapter
from shardwise.interop.peft.targets import find_targets, find_trained, linears_of, modules_of, their_modules
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import Config

FROM_DIRECTORY = ("rank", "alpha", "targets", "train_also")


def settle_adapter(config: Config, spec: ModelSpec, origins: Origins) -> Config:
    """Returns the config with what `adapter.path` says filled in; raises where the model has no such layers."""
    adapter = config.adapter
    if adapter.kind == "none":
        return config
    if adapter.dropout and not spec.is_ours:
        raise UserError(
            f"adapter.dropout does not work with {spec.name}",
            why="transformers builds this model; what is dropped follows from the row of the batch, which its layers "
            "do not know",
            fix="adapter.dropout=0",
            where=where_written(origins, "adapter.dropout"),
        )
    if adapter.path:
        found = open_adapter(adapter.path, spec)
        values = {key: getattr(found, key) for key in FROM_DIRECTORY}
        for key, value in values.items():
            asked = getattr(adapter, key)
            if where_written(origins, f"adapter.{key}") and asked != value:
                raise UserError(
                    f"adapter.{key} = {_shown(asked)}, but the adapter in {adapter.path} has {_shown(value)}",
                    why="an adapter that is continued keeps its shape and its layers",
                    fix=f"leave adapter.{key} out",
                    where=where_written(origins, f"adapter.{key}"),
                )
        return replace(config, adapter=replace(adapter, **values))
    if not adapter.targets:
        raise UserError(
            "adapter.targets is empty",
            why="there would be no adapter",
            fix="adapter.targets=q,v",
            where=where_written(origins, "adapter.targets"),
        )
    if spec.is_ours:
        theirs = their_modules(spec)
        find_targets(adapter, linears_of(spec), theirs, spec.name)
        find_trained(adapter, modules_of(spec), theirs, spec.name)
    return config


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
