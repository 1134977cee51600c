"""Answers a name that is no key of ours: another section's, another framework's, or a slip of the fingers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from shardwise.config.foreign import ForeignName, foreign_name, foreign_section
from shardwise.config.keys import ALIASES, COMMAND_LINE, all_keys, keys_of, model_spec_keys, section_classes
from shardwise.config.values import read_value, shown_or_repr
from shardwise.errors import UserError

_REFERENCE = "`shardwise init` writes a file with every key and what it means"


def unknown_key(section: str, name: str, raw: Any, where: str | None) -> UserError:
    """Returns the error for a `section.name` that is not a key, though the section exists."""
    names = _names_in(section)
    what = f"unknown key `{section}.{name}`"
    has = f"[{section}] has: {', '.join(key.name for key in keys_of(section))}"
    if section == "model":
        has += ", and the fields of ModelSpec (num_layers, hidden, ...)"
    if answer := foreign_name(f"{section}.{name}"):
        return _foreign(what, answer, raw, where)
    if elsewhere := _sections_with(name):
        belongs = " or ".join(f"[{other}]" for other in elsewhere)
        fix = f"write `{_line(f'{elsewhere[0]}.{name}', raw, where)}`"
        return UserError(what, why=f"`{name}` belongs to {belongs}", fix=fix, where=where)
    if answer := foreign_name(name):
        return _foreign(what, answer, raw, where)
    if close := difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6):
        return UserError(what, why=has, fix=f"did you mean `{close[0]}`?", where=where)
    return UserError(what, why=has, fix=_closest_elsewhere(name) or _REFERENCE, where=where)


def unknown_section(section: str, raw: Any, where: str | None) -> UserError:
    """Returns the error for a table, or a key before any table, whose name is not one of our sections."""
    sections = list(section_classes())
    if not isinstance(raw, Mapping):
        return key_without_section(section, raw, where)
    what = f"unknown section `[{section}]`"
    why = f"the sections are: {', '.join(sections)}"
    if ours := foreign_section(section):
        return UserError(what, why=why, fix=f"here it is called `[{ours}]`", where=where)
    if close := difflib.get_close_matches(section.lower(), sections, n=1, cutoff=0.6):
        return UserError(what, why=why, fix=f"did you mean `[{close[0]}]`?", where=where)
    if answer := foreign_name(section):
        return _foreign(what, answer, raw, where)
    return UserError(what, why=why, fix=_REFERENCE, where=where)


def key_without_section(name: str, raw: Any, where: str | None) -> UserError:
    """Returns the error for `steps = 100` at the top of a file, or `steps=100` on the command line."""
    what = f"`{name}` stands in no section"
    why = f"every key belongs to one of: {', '.join(section_classes())}"
    if name in section_classes():
        keys = [key.name for key in keys_of(name)]
        fix = f"write `{name}.KEY=VALUE`, for example `{_line(f'{name}.{keys[0]}', raw, where)}`"
        return UserError(
            f"`{name}` is a section, not a key", why=f"its keys are: {', '.join(keys)}", fix=fix, where=where
        )
    if sections := _sections_with(name):
        return UserError(what, why=why, fix=f"write `{_line(f'{sections[0]}.{name}', raw, where)}`", where=where)
    if answer := foreign_name(name):
        return _foreign(f"unknown key `{name}`", answer, raw, where)
    return UserError(what, why=why, fix=_closest_elsewhere(name) or _REFERENCE, where=where)


def _foreign(what: str, answer: ForeignName, raw: Any, where: str | None) -> UserError:
    if answer.key is None:
        return UserError(what, why=f"that is a name of {answer.origin}", fix=answer.say, where=where)
    why = f"that is a name of {answer.origin}; here it is `{answer.key}`: {answer.say}"
    fix = f"set `{answer.key}` instead"
    if answer.same:
        fix = f"write `{_line(answer.key, raw, where)}`"
        try:  # the value may be one that we name otherwise, or do not have yet: then that is the answer
            key = all_keys().get(answer.key) or model_spec_keys()[answer.key.partition(".")[2]]
            read_value(key, raw, where)
        except UserError as problem:
            fix = f"{problem.what}; {problem.why}"
    return UserError(what, why=why, fix=fix, where=where)


def _line(dotted: str, raw: Any, where: str | None) -> str:
    """Returns the finished setting, as it is written where the mistake was made."""
    if raw is None or isinstance(raw, Mapping):
        return dotted
    if where == COMMAND_LINE:
        return f"{dotted}={raw}" if isinstance(raw, str) else f"{dotted}={shown_or_repr(raw)}"
    return f"{dotted} = {shown_or_repr(raw)}"


def _names_in(section: str) -> list[str]:
    names = [key.name for key in keys_of(section)]
    names += [alias.partition(".")[2] for alias in ALIASES if alias.startswith(f"{section}.")]
    return names + (list(model_spec_keys()) if section == "model" else [])


def _sections_with(name: str) -> list[str]:
    sections = [section for section in section_classes() if name in {key.name for key in keys_of(section)}]
    sections += [alias.partition(".")[0] for alias in ALIASES if alias.endswith(f".{name}")]
    if not sections and name in model_spec_keys():
        sections = ["model"]
    return sections


def _closest_elsewhere(name: str) -> str | None:
    by_name = {key.name: key.dotted for key in all_keys().values()}
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return f"did you mean `{by_name[close[0]]}`?" if close else None
