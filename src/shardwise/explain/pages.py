"""Reads the explanations of words/ and lays them out: eight fixed parts, the same for every word.

What a text says about config keys is not written by hand: whether a key works today is looked up in the schema, and
whether a word has a demo in the list of demos, so a page cannot go stale when a technique arrives. Invariant: no torch,
no rich; a page answers at once.
"""

from __future__ import annotations

import difflib
import re
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

from shardwise.config.keys import Key, all_keys
from shardwise.config.units import format_count
from shardwise.config.write import is_built, with_unit
from shardwise.demo import DEMOS
from shardwise.errors import UserError
from shardwise.spec.schedules import SCHEDULES, schedule_actions, stage_owners

WORDS = Path(__file__).parent / "words"
WIDTH = 100
NOT_YET = "not available yet in this version"


@dataclass(frozen=True)
class Page:
    """One word, explained. `table` belongs to the part that ends in a colon; `lists` names a generated table."""

    word: str
    line: str
    splits: str
    sends: str
    saves: str
    link: str
    keys: tuple[str, ...]
    cost: str
    paper: str
    code: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    table: str = ""
    note: str = ""
    lists: str = ""


@cache
def all_pages() -> dict[str, Page]:
    """Returns every page by its word, sorted by word."""
    pages = {}
    for path in sorted(WORDS.glob("*.toml"), key=lambda path: path.stem):
        entry = tomllib.loads(path.read_text(encoding="utf-8"))
        for name in ("keys", "code", "aliases"):
            entry[name] = tuple(entry.get(name, ()))
        pages[path.stem] = Page(word=path.stem, **entry)
    return pages


def find_page(word: str) -> Page:
    """Returns the page of a word or alias, also the field's words for it; `torch.compile`, `Torch Compile` and
    `torch-compile` are one word."""
    wanted = _as_one_word(word)
    pages = all_pages()
    names = {name: page for page in pages.values() for name in page.aliases} | pages
    about = [page for page in pages.values() if word in page.keys]
    if about and wanted not in names:  # a config key: by its own name, or the page with the fewest others
        wanted = _as_one_word(word.partition(".")[2])
        names.setdefault(wanted, min(about, key=lambda page: len(page.keys)))
    names |= dict.fromkeys(SCHEDULES, pages["pipeline-schedules"])
    if wanted in names:
        return names[wanted]
    parts = wanted.split("-")
    within = {names[part].word for part in parts if part in names}  # `lora vs qlora`
    if len(within) == 1 and len(parts) <= 3:
        return pages[within.pop()]
    close = [names[name].word for name in difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)]
    meant = " or ".join(f"`shardwise explain {name}`" for name in sorted(within) or close)
    raise UserError(
        f"nothing is written about `{word}`",
        why=f"the words are: {', '.join(pages)}",
        fix=f"did you mean {meant}?" if meant else "`shardwise explain` lists them",
    )


def _as_one_word(words: str) -> str:
    return "-".join(re.split(r"[-_ ./]+", words.lower().strip()))


def render_index(width: int = WIDTH) -> str:
    pages = all_pages()
    column = max(map(len, pages))
    lines = [_part(f"  {page.word:<{column}}", page.line, width) for page in pages.values()]
    return "\n".join(["shardwise explain WORD", "", *chain.from_iterable(lines)])


def render_page(page: Page, width: int = WIDTH) -> str:
    part = partial(_part, width=width)
    lines = [*textwrap.wrap(f"{page.word}: {page.line}", width, subsequent_indent=" " * 12), ""]
    for label, text in (("splits", page.splits), ("sends", page.sends), ("saves", page.saves)):
        lines += part(label, text)
        if text.endswith(":") and page.table:
            lines += [f"{'':12}{row}" for row in page.table.strip("\n").splitlines()]
        if label == "saves" and page.lists:
            lines += [f"{'':12}{row}" for row in LISTS[page.lists]()]
    if page.note:
        lines += part("note", page.note)
    lines += part("best link", page.link)
    for index, text in enumerate(key_lines(page) or ["none: it is always so"]):
        lines += part("config" if index == 0 else "", text)
    lines += part("cost", page.cost)
    lines += part("paper", page.paper)
    if page.word in DEMOS:
        lines += part("demo", f"shardwise explain {page.word} --demo: a few processes act it out and count the bytes")
    lines += part("code", ", ".join(f"shardwise/{path}" for path in page.code) or NOT_YET)
    return "\n".join(lines)


def key_lines(page: Page) -> list[str]:
    return [f"{name}: {_about(all_keys()[name])}" for name in page.keys]


def preset_rows() -> list[str]:
    """Returns a line per preset: parameters, active parameters where they differ, layers and width."""
    from shardwise.spec.presets import preset, preset_names  # torch-free, but not needed by the other pages

    names = preset_names()
    width = max(map(len, names))
    rows = [f"{'name':<{width}}  parameters  layers  hidden"]
    for name in names:
        spec = preset(name)
        active = spec.num_active_parameters
        more = f"  ({format_count(active)} active)" if active != spec.num_parameters else ""
        rows.append(
            f"{name:<{width}}  {format_count(spec.num_parameters):>10}  {spec.num_layers:>6}  {spec.hidden:>6}{more}"
        )
    return rows


def schedule_rows() -> list[str]:
    """Returns a line per pipeline schedule, simulated on 4 ranks: its idle share, and the micro-batches whose
    activations the fullest rank holds."""
    from shardwise.spec.timeline import peak_in_flight, simulate

    width = max(map(len, SCHEDULES))
    rows = [f"{'schedule':<{width}}   m = 8   m = 32   holds"]
    seconds = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
    for name, schedule in SCHEDULES.items():
        stages = schedule.usual_stages
        few, many = (schedule_actions(name, 4, stages, count) for count in (8, 32))
        idle = [
            simulate(actions, stage_owners(name, 4, stages), lambda action: seconds[action.kind]).bubble_fraction
            for actions in (few, many)
        ]
        held = f"{max(peak_in_flight(few)) / stages:g}"
        rows.append(
            f"{name:<{width}}  {idle[0]:>4.0%}".replace("%", " %")
            + f"  {idle[1]:>5.0%}".replace("%", " %")
            + f"   {held:<5}  {schedule.line}"
        )
    return rows


LISTS = {"presets": preset_rows, "schedules": schedule_rows}
"""Tables that are generated from the code, by the name that a page's `lists` has."""


def _about(key: Key) -> str:
    if not is_built(key):
        return f"{key.help} ({NOT_YET})"
    default = "not set" if key.default is None else with_unit(key, key.default)
    if key.available is not None and key.choices is not None and len(key.available) < len(key.choices):
        return f"{key.help}; works today: {', '.join(map(str, key.available))} (default {default})"
    return f"{key.help} (default {default})"


def _part(label: str, text: str, width: int) -> list[str]:
    head = f"{label:<10}  "
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
