"""`shardwise init` writes a config file with every key that works today, what it means and its value."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.config.load import load_config
from shardwise.config.write import commented_config
from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically

HELP = "Write a commented config file. Settings given as section.key=value are already in it."
CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default="shardwise.toml", help="where to write (default: shardwise.toml)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def run(args: argparse.Namespace) -> int:
    config = load_config(None, args.overrides).config
    path = Path(args.path)
    if path.is_dir():
        why = "init writes one file"
        raise UserError(f"{path} is a directory", why=why, fix=f"shardwise init {path / 'shardwise.toml'}")
    if path.exists() and not args.force:
        why = "init does not overwrite what you may have edited"
        raise UserError(f"{path} already exists", why=why, fix=f"give another name, or `shardwise init {path} --force`")
    write_atomically(path, commented_config(config))
    print(f"wrote {path}     next:  shardwise train {path} --dry-run")
    return Exit.DONE
