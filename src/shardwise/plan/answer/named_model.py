"""The model that `shardwise plan` is asked about: a preset, a Hugging Face directory or a config.json. No torch."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from pathlib import Path

from shardwise.config.values import shown
from shardwise.errors import UserError
from shardwise.foreign_json import read_object
from shardwise.interop.huggingface.load_save import find_model_dir, read_spec, spec_from_config
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset, preset_names
from shardwise.terminal import shell_word


def read_model(text: str) -> tuple[list[str], ModelSpec]:
    """Returns the config words that name a model, and its shape. `text`: a preset, a Hugging Face directory, a hub id
    in the cache, or a config.json."""
    if text in preset_names():
        return [f"model.preset={text}"], preset(text)
    path = Path(text).expanduser()
    if path.is_file():
        if path.name == "config.json":
            return [f"model.path={path.parent}"], _named(read_spec(path.parent), path.parent)
        return _words_of(spec := _spec_of_file(path)), spec
    if path.is_dir() or text.count("/") == 1:
        return [f"model.path={text}"], _named(read_spec(directory := find_model_dir(text)), directory)
    close = difflib.get_close_matches(text.lower(), preset_names(), n=3, cutoff=0.5)
    raise UserError(
        f"unknown model `{text}`",
        why=f"it is no file or directory here, and no preset; presets are: {', '.join(preset_names())}",
        fix=f"did you mean {' or '.join(f'`{name}`' for name in close)}?"
        if close
        else "name a preset, a Hugging Face directory or its config.json",
    )


def _named(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Returns the shape under its directory's name: most config.json files say only their architecture."""
    name = directory.resolve().name
    return replace(spec, name=name) if type(spec) is ModelSpec and not name.startswith("snapshot") else spec


def _spec_of_file(path: Path) -> ModelSpec:
    if path.suffix == ".toml":
        raise UserError(
            f"{path} is the config of a run",
            why="plans are made for a model, on a cluster",
            fix=f"name the model that it trains; `shardwise train {shell_word(path)} --dry-run` shows how it would run",
        )
    try:
        config = read_object(path)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"cannot read {path}", why=str(problem), fix="give a Hugging Face config.json, its directory, or a preset"
        ) from None
    return replace(spec_from_config(config), name=path.stem)


def _words_of(spec: ModelSpec) -> list[str]:
    """Returns the config words, over a preset, of a shape that no preset and no directory has."""
    base, derived = preset("tiny"), ("head_dim", "num_kv_heads")  # which `with_overrides` would derive again
    names = [field.name for field in fields(ModelSpec) if field.name != "name"]
    changed = {
        name: getattr(spec, name) for name in names if name in derived or getattr(spec, name) != getattr(base, name)
    }
    return ["model.preset=tiny", *(f"model.{name}={shown(value)}" for name, value in changed.items())]
