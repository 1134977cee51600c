"""Answers a word in the place of a config that is no file: a setting with a space in it, a preset, a model, a run."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from shardwise.config.keys import ALIASES, all_keys
from shardwise.errors import UserError
from shardwise.spec.presets import preset_names


def no_such_file(path: Path) -> UserError:
    """Returns the error for a config that is not there, with what the word in its place may have meant."""
    name, sign, value = re.match(r"([^=:]*)([=:]?)(.*)", path.name).groups()  # type: ignore[union-attr]
    near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    fix = "`shardwise init` writes a commented config"
    if all_keys().get(ALIASES.get(name, name)):
        fix = f"write `{name}={value or 'VALUE'}`, without spaces"
    elif sign == "=":
        fix = "a setting is `section.key=value`, for example `train.steps=100`"
    elif str(path) in preset_names():
        fix = f"write `model.preset={path}`"
    elif path.name == "last":
        fix = "`shardwise resume last` goes on with a run; or give a TOML file"
    elif (Path("runs") / path / "config.toml").is_file():
        fix = f"did you mean runs/{path}/config.toml?"
    elif near:
        close = difflib.get_close_matches(str(path), near, n=1, cutoff=0.75)
        fix = f"did you mean {close[0]}?" if close else f"there is: {', '.join(near[:5])}"
    return UserError(f"there is no config file {path}", why="the file does not exist", fix=fix)


def not_a_file(path: Path) -> UserError:
    """Returns the error for a directory in place of a config, with the file in it that may have been meant."""
    rows = sorted(path.glob("[0-9]*.toml"))
    inside = path / "config.toml"
    fix = "give a TOML file; `shardwise init` writes one"
    if inside.is_file() or rows:
        fix = f"did you mean {inside if inside.is_file() else rows[0]}?"
    elif (path / "config.json").is_file():
        fix = f"for the model in it, write `model.path={path}`"
    return UserError(f"{path} is a directory", why="a config is one TOML file", fix=fix)
