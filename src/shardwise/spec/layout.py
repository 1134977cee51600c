"""Reads and writes the layout string: one line that says how a model is split, the same in tables, logs, `--why-not`
and configs.

    dp=128 zero=3 tp=4 sp pp=2 schedule=1f1b recompute=selective

Words stand in any order, separated by spaces; `sp` may stand alone; a precision may stand as one word (`fp32`). Values
are checked by the keys they stand for, so an axis that is not built yet is refused there. Invariant: what
`format_layout` prints, `parse_layout` reads back to the same keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from shardwise.errors import UserError
from shardwise.spec.recompute import EVERY_K
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.schema import Axes, MemoryConfig

# Words of the string, in the order they are printed -> config keys.
WORDS = {
    "dp": "parallel.dp",
    "zero": "parallel.zero",
    "replicate": "parallel.replicate",
    "tp": "parallel.tp",
    "sp": "parallel.sequence",
    "cp": "parallel.cp",
    "cp_kind": "parallel.cp_kind",
    "pp": "parallel.pp",
    "schedule": "parallel.schedule",
    "virtual_stages": "parallel.virtual_stages",
    "split": "parallel.split",
    "ep": "parallel.ep",
    "recompute": "memory.recompute",
    "offload": "memory.offload",
    "activation_offload": "memory.activation_offload",
    "precision": "memory.precision",
}
_ALSO = {"sequence": "sp"}
_OF_OTHERS = {"ddp": "dp=2 zero=0", "fsdp": "zero=3", "hsdp": "zero=3 replicate=2", "mp": "tp=2"}
PRECISION_WORDS: tuple[str, ...] = MemoryConfig.__dataclass_fields__["precision"].metadata["choices"]


def parse_layout(text: str, where: str | None = None) -> dict[str, str]:
    """Returns the text of each config key's value, for each word of the string."""
    found: dict[str, str] = {}
    for word in text.split():
        if any("=" in part or part in WORDS for part in word.split(",")[1:]):
            why, fix = "its words are separated by spaces", f"`{text.replace(',', ' ')}`"
            raise UserError(f"commas in the layout `{text}`", why=why, fix=fix, where=where)
        name, equals, value = word.partition("=")
        name = _ALSO.get(name, name)
        if not equals and name in PRECISION_WORDS:
            name, value = "precision", name
        elif not equals and name == "sp":
            value = "true"
        if name not in WORDS:
            close = difflib.get_close_matches(name.lower(), WORDS, n=1, cutoff=0.5)
            fix = f"did you mean `{close[0]}`?" if close else "for example `dp=2 zero=0`"
            if (glued := re.fullmatch(r"([a-z_]+?):?(\d+)", word.lower())) and glued[1] in WORDS:
                fix = f"write `{glued[1]}={glued[2]}`"
            elif name.lower() in _OF_OTHERS:
                fix = f"write `{_OF_OTHERS[name.lower()]}`"
            elif name in ("micro", "micro_batch", "global_batch"):
                fix = f"that is no part of a layout: `train.{'global' if name[0] == 'g' else 'micro'}_batch={value}`"
            why = f"a layout has the words: {', '.join(WORDS)}"
            raise UserError(f"unknown word `{word}` in the layout `{text}`", why=why, fix=fix, where=where)
        if not value:
            why = f"`{name}` needs a value"
            raise UserError(f"`{word}` in the layout has no value", why=why, fix=f"for example `{name}=2`", where=where)
        key = WORDS[name]
        if found.get(key, value) != value:
            why = f"it is {found[key]} and {value}"
            raise UserError(f"`{name}` is set twice in the layout `{text}`", why=why, fix="keep one", where=where)
        found[key] = value
    if not found:
        why = "it has no words"
        raise UserError("the layout is empty", why=why, fix="for example `dp=2 zero=0`, or leave it out", where=where)
    return found


def format_layout(parallel: Axes, memory: MemoryConfig | None = None) -> str:
    """Returns the string for a layout; what is `auto`, 1 or does not apply is left out, dp is always said."""
    words = [f"dp={parallel.dp}"]
    if parallel.zero not in ("auto", 0):
        words.append(f"zero={parallel.zero}")
    if parallel.replicate not in ("auto", 1):
        words.append(f"replicate={parallel.replicate}")
    if parallel.tp not in ("auto", 1):
        words.append(f"tp={parallel.tp}")
    if parallel.sequence is True:
        words.append("sp")
    if parallel.cp not in ("auto", 1):
        words += [f"cp={parallel.cp}", f"cp_kind={parallel.cp_kind}"]
    if parallel.pp not in ("auto", 1):
        words += [f"pp={parallel.pp}", f"schedule={parallel.schedule}"]
        if (
            parallel.virtual_stages not in ("auto", 1)
            and SCHEDULES[parallel.schedule].most_stages != parallel.virtual_stages
        ):  # else it goes without saying
            words.append(f"virtual_stages={parallel.virtual_stages}")
        if parallel.split != "auto":
            layers = (parallel.split,) if isinstance(parallel.split, str) else parallel.split
            words.append(f"split={','.join(map(str, layers))}")
    if parallel.ep not in ("auto", 1):
        words.append(f"ep={parallel.ep}")
    if memory is not None and memory.recompute not in ("auto", "none"):
        words.append(f"recompute={memory.recompute}")
    if memory is not None and memory.offload not in ("auto", "none"):
        words.append(f"offload={memory.offload}")
    if memory is not None and memory.activation_offload:
        words.append("activation_offload=true")
    return " ".join(words)


def degree_of(words: Mapping[str, str], name: str, default: int, *, low: int = 1, high: int | None = None) -> int:
    """Returns the degree that a layout string gives an axis, or `default` where it says nothing or `auto`."""
    text = words.get(name, "auto")
    if text == "auto":
        return default
    if not text.isdecimal() or not low <= int(text) <= (int(text) if high is None else high):
        fits = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
        raise UserError(
            f"`{name}={text}` in the layout", why=f"`{name}` takes {fits}", fix=f"for example `{name}={low}`"
        )
    return int(text)


def word_of(words: Mapping[str, str], name: str, section: type, default: str) -> str:
    """Returns the word that a layout string gives a key of a section, or `default` where it says nothing or `auto`."""
    text = words.get(name, "auto")
    choices = section.__dataclass_fields__[name].metadata["choices"]  # type: ignore[attr-defined]
    if text == "auto":
        return default
    if text not in choices and not (text.startswith("every-") and text[6:].isdecimal() and EVERY_K in choices):
        why = f"`{name}` takes: {', '.join(choices)}"
        raise UserError(f"`{name}={text}` in the layout", why=why, fix=f"`{name}={default}`")
    return text
