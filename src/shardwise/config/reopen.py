"""Reads a run's own config again, for going on with another layout.

config.toml holds every value and, behind it, where it came from. What the planner filled in was right for the layout of
that time: as soon as somebody sets a degree or a number of processes, those choices are made anew. Invariant: without
new settings a run goes on with exactly the layout it had, and values keep their first origin however often it is
resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.config.keys import COMMAND_LINE, DEFAULT, all_keys
from shardwise.config.lines import key_lines
from shardwise.config.load import Loaded, find_key, load_config
from shardwise.config.values import read_typed
from shardwise.spec.layout import WORDS, parse_layout

PLANNER = "planner"  # the origin of what the planner filled; behind a colon, why
CHOSEN_TOGETHER = ("parallel.", "memory.recompute", "memory.offload")


def reopen(path: Path, words: Sequence[str], nproc: int | None = None) -> Loaded:
    """Returns the config of an existing run with `words` applied. Pass `nproc` on to `resolve`, which divides it."""
    load_config(path)  # a damaged file is refused before anything is read out of its comments
    before = written_origins(path.read_text(encoding="utf-8"))
    given = _keys_of(words)
    anew = set()
    if nproc is not None:
        anew.add("parallel.dp")
    if nproc is not None or any(name.startswith("parallel.") for name in given):
        anew |= {name for name, origin in before.items() if _is_planners(origin) and name.startswith(CHOSEN_TOGETHER)}
    if "memory.limit" in given:
        anew |= {name for name in CHOSEN_TOGETHER[1:] if _is_planners(before.get(name, DEFAULT))}
    if any(find_key(word.partition("=")[0].strip().lstrip("-")).dotted == "parallel.layout" for word in words):
        anew |= {
            name for name in WORDS.values() if name in before and name.startswith("parallel.")
        }  # it says all of it
    reset = [f"{name}={all_keys()[name].default}" for name in sorted(anew - given)]
    loaded = load_config(path, [*reset, *words])
    kept = {name: origin for name, origin in before.items() if name in loaded.origins and name not in given | anew}
    return replace(loaded, origins=loaded.origins | kept | dict.fromkeys(anew - given, DEFAULT))


def planner_origins(chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns the origins as config.toml has them: what the planner filled, and why."""
    return {name: f"{PLANNER}: {why}" if why else PLANNER for name, why in chosen.items()}


def _is_planners(origin: str) -> bool:
    return origin.partition(":")[0] == PLANNER


def written_origins(text: str) -> dict[str, str]:
    """Returns the origin behind each key's value in a config.toml that `write_config` wrote."""
    lines = text.splitlines()
    found = ((".".join(keys), lines[line - 1].rpartition("  # ")) for keys, line in key_lines(text) if len(keys) == 2)
    return {name: origin for name, (_, comment, origin) in found if comment}


def _keys_of(words: Sequence[str]) -> set[str]:
    """Returns the keys that these words set, those of a layout string included."""
    names: set[str] = set()
    for word in words:
        name, _, text = word.partition("=")
        key = find_key(name.strip().lstrip("-"))
        is_layout = key.dotted == "parallel.layout" and text.strip()
        names |= set(parse_layout(str(read_typed(key, text)), COMMAND_LINE)) if is_layout else {key.dotted}
    return names
