"""Says which words may stand where the cursor is in a `shardwise` command line. No torch: it is asked at each Tab.

An empty answer means a file name, which the shell completes itself.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

RUNS = {"resume": "run", "watch": "run", "stop": "run", "compare": "compared", "generate": "source", "eval": "source",
        "export": "run"}  # fmt: skip
"""The argument of a verb that names a run."""


def candidates(line: str) -> list[str]:
    """Returns the whole words that the last word of `line` may become, sorted; its first word is the command itself."""
    from shardwise.cli.main import VERBS, parser_of

    words = _split(line)
    before, now = words[1:-1], words[-1] if len(words) > 1 else ""
    before = [word for word in before if word != "--plain"]
    if not before:
        return _fitting(now, [*VERBS, "--help", "--version"])
    if before[0] not in VERBS:
        return []
    verb: Any = import_module(f"shardwise.cli.{before[0]}")
    parser = parser_of(before[0])
    for word in before[1:]:  # `data prepare`, `bench layers`: from there on the words of the sub-command
        for action in parser._actions:
            if isinstance(action.choices, dict) and isinstance(action.choices.get(word), argparse.ArgumentParser):
                parser = action.choices[word]
    asked = next((a for a in parser._actions if before[-1] in a.option_strings and a.nargs is None), None)
    if asked is not None:
        return _fitting(now, _values_of_option(asked, before))
    if now.startswith("-"):
        return _fitting(now, [name for action in parser._actions for name in action.option_strings])
    found = _positionals(before[0], parser, before)
    if getattr(verb, "CONFIG", False):
        found = [*found, *_config_words(now)]
    return _fitting(now, found)


def _split(line: str) -> list[str]:
    """Returns the words of a line; the last one is empty where the cursor stands after a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    return words if words and not line[-1].isspace() else [*words, ""]


def _fitting(now: str, words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(now)})


def _values_of_option(action: argparse.Action, before: Sequence[str]) -> list[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    if action.dest == "recipe":
        from shardwise.cli.init import recipes

        return list(recipes())
    if action.dest == "framework":
        from shardwise.interop.frameworks.export import FRAMEWORKS

        return list(FRAMEWORKS)
    if action.dest == "cluster" and before[0] == "plan":
        from shardwise.cluster.describe.table import known_devices

        return ["this", *(f"8x{kind}" for kind in known_devices())]
    return []


def _positionals(verb: str, parser: argparse.ArgumentParser, before: Sequence[str]) -> list[str]:
    """Returns the words that stand without a key: sub-commands, runs, presets, words of `explain`."""
    if verb in RUNS:
        folder = before[before.index("--runs") + 1] if "--runs" in before[:-1] else "runs"
        return ["last", *_run_names(folder)]
    if verb == "plan":
        from shardwise.spec.presets import preset_names

        return preset_names()
    if verb == "explain":
        from shardwise.explain.pages import all_pages

        return list(all_pages())
    return [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]


def _run_names(folder: str) -> list[str]:
    from shardwise.run.rundir import all_runs

    return [run.name for run in all_runs(Path(folder))]


def _config_words(now: str) -> list[str]:
    """Returns sections, then keys, then the values that a key takes, as far as the word has got."""
    from shardwise.config.keys import all_keys, keys_of, model_spec_keys, section_classes
    from shardwise.config.write import is_built

    section, dot, rest = now.partition(".")
    if not dot:
        return [f"{name}." for name in section_classes()]
    if section not in section_classes():
        return []
    name, equals, _ = rest.partition("=")
    if not equals:
        more = model_spec_keys() if section == "model" else ()
        return [f"{section}.{key}=" for key in (*(key.name for key in keys_of(section) if is_built(key)), *more)]
    key = all_keys().get(f"{section}.{name}")
    if key is None:
        return []
    values = [str(value) for value in key.available or key.choices or () if value is not None]
    values += [*(["auto"] if key.auto else []), *key.words, *(["true", "false"] if bool in key.kinds else [])]
    if key.dotted == "model.preset":
        from shardwise.spec.presets import preset_names

        values += preset_names()
    return [f"{key.dotted}={value.lower() if value in ('True', 'False') else value}" for value in values]
