"""Reads settings as a Python program gives them: a TOML file, a dict of keys, or a `Config`. No torch.

Errors speak of the program where they would speak of the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwise.config.check import check_config
from shardwise.config.keys import COMMAND_LINE, DEFAULT, all_keys
from shardwise.config.load import Loaded, load_config
from shardwise.errors import UserError
from shardwise.run.known_warnings import known_warnings_left_out
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.schema import Config

Settings = str | Path | Mapping[str, Any] | Config | None
PROGRAM = "this program"


@contextmanager
def for_programs() -> Iterator[None]:
    """Raises the errors inside with a program's words: `nproc=2` where a person would type `--nproc 2`. Warnings that
    nobody needs to read are left out, as in a command."""
    try:
        with known_warnings_left_out():
            yield
    except UserError as error:
        where = PROGRAM if error.where == COMMAND_LINE else error.where
        raise UserError(
            error.what, why=error.why, fix=_as_argument(error.fix), where=where, code=error.code
        ) from error.__cause__


def _as_argument(fix: str) -> str:
    """Returns a fix with arguments for options: `nproc=2` for `--nproc 2`, `merge_lora` for `--merge-lora`."""
    fix = re.sub(r"--allow (\S+)", r'allow=["\1"]', fix.replace("--nproc ", "nproc="))
    return re.sub(r"(?<!\S)--([a-z]+(?:-[a-z]+)*)", lambda option: option[1].replace("-", "_"), fix)


def settings_of(
    config: Settings, changes: Mapping[str, Any] | None = None, model: ModelSpec | str | None = None
) -> Loaded:
    """Returns the checked config. `changes` win over `config`, and `model` over both."""
    words = [*(words_of(config) if isinstance(config, Mapping) else []), *words_of(changes or {}), *model_words(model)]
    if isinstance(config, Config):
        words = [*words_of(_changed(config)), *words]
    if config is not None and not isinstance(config, str | Path | Mapping | Config):
        raise UserError(
            f"config is a {type(config).__name__}",
            why="it is a TOML file's path, a dict of keys, a Config, or None for the default run",
            fix='shardwise.train({"train.steps": 100})',
        )
    loaded = load_config(config if isinstance(config, str | Path) else None, words)
    check_config(loaded.config, loaded.origins)
    return loaded


def _changed(config: Config) -> dict[str, Any]:
    """Returns the keys in which a config differs from the default one."""
    default = Config()
    found: dict[str, Any] = {}
    for section in fields(config):
        ours, usual = getattr(config, section.name), getattr(default, section.name)
        for key in fields(ours):
            value = getattr(ours, key.name)
            if key.name == "overrides":
                found |= {f"model.{name}": size for name, size in value}
            elif value != getattr(usual, key.name):
                found[f"{section.name}.{key.name}"] = value
    return found


def words_of(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns settings as `section.key=value` words. Sections may be dicts: {"train": {"steps": 3}}."""
    words = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            words += words_of(value, f"{prefix}{name}.")
        elif value is not None:
            words.append(f"{prefix}{name}={_toml(value)}")
    return words


def _toml(value: Any) -> str:
    if isinstance(value, Path):
        value = str(value)
    try:
        return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    except (TypeError, ValueError):
        raise UserError(
            f"a setting is a {type(value).__name__}",
            why="settings are numbers, texts, true or false, or lists of them, as in a TOML file",
            fix="functions and data have arguments of their own: loss=, data=, optimizer=, evaluate=",
        ) from None


def model_words(model: ModelSpec | str | None) -> list[str]:
    """Returns the words that choose a model: a preset, a Hugging Face directory, or a preset with other shapes."""
    if model is None:
        return []
    if isinstance(model, ModelSpec):
        try:
            base = preset(model.name)
        except UserError:
            raise UserError(
                f"the model `{model.name}` is no preset with other shapes",
                why="a run is made again from its config file, which names a preset or a directory",
                fix='shardwise.ModelSpec.preset("llama3.2-1b").with_overrides({"num_layers": 4})',
            ) from None
        other = {key: value for key, value in vars(model).items() if value != getattr(base, key, None)}
        known = {name.removeprefix("model.") for name in all_keys()} | set(base.__dataclass_fields__)
        return [f'model.preset="{model.name}"', *words_of({f"model.{k}": v for k, v in other.items() if k in known})]
    if isinstance(model, str | Path):
        is_directory = Path(model).exists() or "/" in str(model)
        return [f"model.{'path' if is_directory else 'preset'}={json.dumps(str(model))}"]
    raise UserError(
        f"model is a {type(model).__name__}",
        why="shardwise.train splits models that it knows from inside: a preset, a directory or a ModelSpec",
        fix="shardwise.parallelize(module, plan) takes any torch module into a loop of your own",
    )


def is_set(loaded: Loaded, key: str) -> bool:
    """Returns whether somebody has set a key."""
    return loaded.origins.get(key, DEFAULT) != DEFAULT
