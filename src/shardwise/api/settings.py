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
from typing import Any, Protocol

from shardwise.config.check import check_config
from shardwise.config.keys import COMMAND_LINE, DEFAULT, all_keys
from shardwise.config.load import Loaded, load_config
from shardwise.config.units import parse_seconds
from shardwise.errors import UserError
from shardwise.run.known_warnings import known_warnings_left_out
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.schema import Config
from shardwise.terminal import type_of


class HasConfig(Protocol):
    """A planned layout, or a run: its config can be trained and proven again."""

    @property
    def config(self) -> Config: ...


Settings = str | Path | Mapping[str, Any] | Config | HasConfig | None
PROGRAM = "this program"


@contextmanager
def for_programs() -> Iterator[None]:
    """Raises the errors inside with a program's words: `nproc=2` where a person would type `--nproc 2`. Warnings that
    nobody needs to read are left out, as in a command."""
    try:
        with known_warnings_left_out():
            yield
    except UserError as error:
        what, why, fix = (_for_program(text) for text in (error.what, error.why, error.fix))
        is_of_command = error.where == COMMAND_LINE or str(error.where).startswith("--")
        where = PROGRAM if is_of_command else error.where
        raise UserError(what, why=why, fix=fix, where=where, code=error.code) from error.__cause__


COMMAND = re.compile(r"(`[^`]*\bshardwise [^`]*`|^(?:\w+= )?shardwise .*)")


def _for_program(text: str) -> str:
    """Returns a line of an error with arguments for options: `nproc=2` for `--nproc 2`, `merge_lora` for
    `--merge-lora`. Commands of a shell stay what they are."""
    text = text.replace(COMMAND_LINE, PROGRAM)
    parts = COMMAND.split(text)  # every second one is a command
    return "".join(part if number % 2 else _options_as_arguments(part) for number, part in enumerate(parts))


def _options_as_arguments(text: str) -> str:
    text = re.sub(r"--allow (\S+)", r'allow=["\1"]', text)
    text = re.sub(r"`--([a-z-]+) ([^`]*)`", lambda found: f"`{_argument(found[1], found[2])}`", text)
    with_value = r"(?<![\w-])--([a-z]+(?:-[a-z]+)*) ([A-Z]+\b|-?\d(?:[\w.]*\w)?)"
    text = re.sub(with_value, lambda found: _argument(found[1], found[2]), text)
    return re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", lambda found: found[1].replace("-", "_"), text)


def _argument(option: str, value: str) -> str:
    if option == "within" and re.fullmatch(r"[\d.]+[a-z]+", value):
        option, value = "within_s", f"{parse_seconds(value):g}"
    is_bare = re.fullmatch(r"[A-Z]+|-?\d+(\.\d+)?(e[+-]\d+)?", value)
    return f"{option.replace('-', '_')}={value if is_bare else json.dumps(value)}"


def settings_of(
    config: Settings, changes: Mapping[str, Any] | None = None, model: ModelSpec | str | None = None
) -> Loaded:
    """Returns the checked config. `changes` win over `config`, and `model` over both."""
    if config is not None and not isinstance(config, str | Path | Mapping | Config):
        config = _config_of(config)
    words = [*(words_of(config) if isinstance(config, Mapping) else []), *words_of({} if changes is None else changes)]
    words += model_words(model)
    if isinstance(config, Config):
        words = [*words_of(_changed(config)), *words]
    loaded = load_config(config if isinstance(config, str | Path) else None, words)
    check_config(loaded.config, loaded.origins)
    return loaded


def _config_of(given: HasConfig) -> Config:
    if isinstance(config := getattr(given, "config", None), Config):
        return config
    raise UserError(
        f"config is {type_of(given)}",
        why="it is a TOML file's path, a dict of keys, a Config, a planned layout, a Run, or None for the default run",
        fix='shardwise.train({"train.steps": 100})',
    )


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
    if not isinstance(settings, Mapping):
        raise UserError(
            f"settings are {type_of(settings)}",
            why="they are a dict of config keys with their values",
            fix='{"train.steps": 100}',
        )
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
            f"a setting is {type_of(value)}",
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
        f"model is {type_of(model)}",
        why="shardwise.train splits models that it knows from inside: a preset, a directory or a ModelSpec",
        fix="shardwise.parallelize(module, plan) takes any torch module into a loop of your own",
    )


def check_nproc(nproc: int | None) -> None:
    """Refuses what is no number of processes."""
    if nproc is not None and (not isinstance(nproc, int) or nproc < 1):
        raise UserError(f"nproc = {nproc!r} is no number of processes", why="it is 1 or more, or None", fix="nproc=2")


def is_set(loaded: Loaded, key: str) -> bool:
    """Returns whether somebody has set a key."""
    return loaded.origins.get(key, DEFAULT) != DEFAULT
