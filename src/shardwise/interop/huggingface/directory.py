"""Finds a Hugging Face model on this machine and reads its config.json. No torch, no network.

Owns the lookup order: a directory as given, then the local hub cache. Invariant: nothing is ever downloaded; what is
absent is answered with the command that fetches it. Read next: `config.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.foreign_json import read_object
from shardwise.terminal import shell_word

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_model_dir(path_or_hub_id: str) -> Path:
    """Returns the directory with config.json: a local one, or the cached snapshot of a hub id."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        fix = "give the directory that config.json is in"
        if (path / "config.toml").is_file():
            fix = f"`shardwise export {shell_word(path)} --out DIR` makes one of a run"
        elif (path / "manifest.json").is_file():
            fix = f"`shardwise convert {shell_word(path)} --to hf --out DIR` makes one of these weights"
        raise UserError(
            f"no model in {path}",
            why="a model directory holds config.json and .safetensors files; there is no config.json",
            fix=fix,
        )
    if path.is_file():
        beside = (path.parent / "config.json").is_file()
        raise UserError(
            f"no model at {path}",
            why="it is a file; a model is a directory of config.json and .safetensors files",
            fix=f"give its directory: {shell_word(path.parent)}" if beside else "check the path",
        )
    if not HUB_ID.fullmatch(path_or_hub_id) or path.parent.is_dir():
        raise UserError(
            f"no model at {path_or_hub_id}",
            why="it is neither a directory here nor a hub id such as HuggingFaceTB/SmolLM2-135M",
            fix="check the path",
        )
    cached = _cached_snapshot(path_or_hub_id)
    if cached is None:
        raise UserError(
            f"{path_or_hub_id} is not on this machine",
            why=f"it is no directory, and not in the Hugging Face cache at {hub_cache()}",
            fix=f"hf download {path_or_hub_id}",
        )
    return cached


def hub_cache() -> Path:
    """Returns the folder where huggingface_hub keeps its downloads, by its own rules."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _cached_snapshot(hub_id: str) -> Path | None:
    folder = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = folder / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if (snapshot / "config.json").is_file() else None


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        return read_object(path)
    except (OSError, ValueError) as problem:
        raise UserError(f"cannot read {path}", why=str(problem), fix="fetch the model again") from problem
