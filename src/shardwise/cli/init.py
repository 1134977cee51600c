"""`shardwise init` writes a config file: the keys that were asked for, those of a recipe, or every key, each with what
it means."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.config.keys import COMMAND_LINE
from shardwise.config.load import EXCLUSIVE, load_config
from shardwise.config.write import commented_config
from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.terminal import say, shell_word

HELP = (
    "Write a commented config file with the keys given as section.key=value and those of a recipe; every key where "
    "nothing is given."
)
CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("path", nargs="?", default="shardwise.toml", help="where to write (default: shardwise.toml)")
    where.add_argument("--out", metavar="FILE", help="the same, as other commands spell it")
    parser.add_argument(
        "--recipe", metavar="NAME", help=f"begin with the keys of a kind of job: {', '.join(recipes())}"
    )
    parser.add_argument("--all", action="store_true", help="every key that works today, also where some are given")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    recipe = _recipe(args.recipe) if args.recipe else None
    loaded = load_config(None, [*_not_said_otherwise(recipe, args.overrides), *args.overrides])
    path = Path(args.out or args.path)
    if path.is_dir():
        why = "init writes one file"
        raise UserError(f"{path} is a directory", why=why, fix=f"shardwise init {shell_word(path / 'shardwise.toml')}")
    if path.exists() and not args.force:
        why = "init does not overwrite what you may have edited"
        fix = f"give another name, or `shardwise init {shell_word(path)} --force`"
        raise UserError(f"{path} already exists", why=why, fix=fix)
    asked = {key for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
    text = commented_config(loaded.config, None if args.all or not asked else asked)
    if recipe:
        text = f"# {recipe['about']}\n# yours: {recipe['yours']}\n{text}"
    write_atomically(path, text)
    say(f"wrote {path}     next:  shardwise train {shell_word(path)} --dry-run")
    return Exit.DONE


@cache
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """Returns the recipes by their name."""
    return tomllib.loads(files("shardwise.cli").joinpath("recipes.toml").read_text(encoding="utf-8"))


def _recipe(name: str) -> Mapping[str, Any]:
    if name not in recipes():
        about = "; ".join(f"{known}: {recipe['about']}" for known, recipe in recipes().items())
        near = get_close_matches(name.lower(), recipes(), n=1) or list(recipes())
        raise UserError(f"there is no recipe `{name}`", why=about, fix=f"--recipe {near[0]}")
    return recipes()[name]


def _not_said_otherwise(recipe: Mapping[str, Any] | None, typed: Sequence[str]) -> list[str]:
    """Returns a recipe's words without those that say in another key what was typed, such as the length of the run."""
    said = {word.partition("=")[0] for word in typed}
    out = {key for group in EXCLUSIVE if said & set(group) for key in group} | said
    return [word for word in (recipe["words"] if recipe else ()) if word.partition("=")[0] not in out]
