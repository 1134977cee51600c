"""Writes a config as text: the resolved file of a run, and the commented file of `shardwise init`.

Invariant: what is written here loads again as an equal `Config`; nothing is ever half written. Read next: load.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardwise.config.keys import Key, all_keys, keys_of, model_spec_keys, section_classes
from shardwise.config.values import example, shown
from shardwise.files import write_atomically
from shardwise.spec.schema import Config

_COMMENT_COLUMN = 44

UNITS: Mapping[str, Mapping[str, int]] = {
    "bytes": {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "KiB": 2**10, "kB": 10**3},
    "time": {"d": 86400, "h": 3600, "m": 60, "s": 1},
}
"""Units in which sizes and times are written, by the unit of their key; a count of tokens is written out."""


def write_config(config: Config, origins: Mapping[str, str], path: str | Path) -> None:
    """Writes every key with its value to a file; each line ends in where the value came from. Unset keys stand as
    comments."""
    write_atomically(path, resolved_text(config, origins))


def resolved_text(config: Config, origins: Mapping[str, str]) -> str:
    """Returns what `write_config` writes."""
    lines = ["# The resolved configuration: every key, and where its value came from."]
    for section in section_classes():
        lines += ["", f"[{section}]"]
        values = getattr(config, section)
        entries = {key.name: (getattr(values, key.name), key) for key in keys_of(section)}
        if section == "model":
            entries |= {name: (value, model_spec_keys()[name]) for name, value in config.model.overrides}
        for name, (value, key) in entries.items():
            origin = _one_line(origins.get(f"{section}.{name}", "default"))
            # A path replaces the preset, and naming both is refused: the preset is not written then.
            replaced = (section, name) == ("model", "preset") and config.model.path is not None
            unset = replaced or (value is None and key.default is None)
            text = f"# {name} =" if unset else f"{name} = {with_unit(key, value)}"
            lines.append(f"{text:<{_COMMENT_COLUMN}}  # {origin}")
    return "\n".join(lines) + "\n"


def commented_config(config: Config | None = None, only: Collection[str] | None = None) -> str:
    """Returns every key that works today, or those of `only`, with what it means and its value, for people to edit."""
    config = config or Config()
    first = "Every value below is the default unless you changed it; delete what you do not need."
    if only is not None:
        first = "What is not here has its default; `shardwise init --all` writes every key."
    lines = [f"# {first}", "# Any key can also be set on the command line: train.steps=500"]
    for section, cls in section_classes().items():
        keys = [key for key in keys_of(section) if (is_built(key) if only is None else key.dotted in only)]
        overrides = config.model.overrides if section == "model" else ()
        if not keys and not overrides:
            continue
        lines += ["", "", f"[{section}]" + (f"  # {cls.__doc__}" if cls.__doc__ else "")]
        for key in keys:
            written = _explained(key, getattr(getattr(config, section), key.name))
            if key.dotted == "model.preset" and config.model.path is not None:
                written[-1] = f"# {written[-1]}"  # a path replaces it, and naming both is refused
            lines += ["", *written]
        if overrides or (section == "model" and only is None):
            lines += ["", "# any field of the model's shape, for example", "# num_layers = 4"]
            lines += [f"{name} = {shown(value)}" for name, value in overrides]
    if only is not None:
        return "\n".join(lines) + "\n"
    missing = [key.dotted for key in all_keys().values() if not is_built(key)]
    lines += ["", "", "# Not available yet in this version:", *_wrapped(missing)]
    return "\n".join(lines) + "\n"


def is_built(key: Key) -> bool:
    """Returns whether setting this key can change anything today."""
    if key.later:
        return False
    return key.available is None or sum(value != "auto" for value in key.available) > 1


def _explained(key: Key, value: Any) -> list[str]:
    about = [f"# {key.help}"]
    takes = key.available or key.choices
    if takes:
        about.append(f"# one of: {', '.join(str(choice) for choice in takes)}")
    unset = value is None and key.default is None
    return [*about, f"# {key.name} = {example(key)}" if unset else f"{key.name} = {with_unit(key, value)}"]


def with_unit(key: Key, value: Any) -> str:
    """Returns a value as a person would write it, in the largest unit that makes it a whole number: 26214400 bytes as
    "25MiB", 300 seconds as "5m"."""
    units = UNITS.get(key.unit or "", {})
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return shown(value)
    name = next((name for name, size in units.items() if value % size == 0), None)
    return shown(value) if name is None else f'"{value / units[name]:.0f}{name}"'


def _wrapped(names: list[str]) -> list[str]:
    lines, line = [], "#  "
    for name in names:
        if len(line) + len(name) > 110:
            lines.append(line)
            line = "#  "
        line += f" {name}"
    return [*lines, line]


def _one_line(text: str) -> str:
    """Returns the text without control characters: file names may hold anything, a TOML comment may not."""
    return "".join(character if character.isprintable() else "?" for character in text)
