"""Reads rows out of .json, .csv and .tsv files (of .arrow: `columns.py`), and finds the .arrow files of Hugging Face
datasets on this disk.

Invariant: memory does not grow with a file; rows come in the file's own order, each with about the bytes it takes on
disk. Rows are understood in `rows.py`.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.data.columns import MAX_ROW, arrow_rows, too_large
from shardwise.data.remote import RemoteFile
from shardwise.errors import UserError

TABLE_SUFFIXES = (".json", ".csv", ".tsv", ".arrow")
BLOCK = 2**20  # characters of a .json file that are read at once
BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")


def read_table(path: Path | RemoteFile, text_field: str, replace_invalid: bool) -> Iterator[tuple[Any, int]]:
    """Yields the rows of a file, each with its share of the bytes; what is not a table of that kind is refused with
    its place."""
    suffix, errors = path.suffix.lower(), "replace" if replace_invalid else "strict"
    rows = (
        arrow_rows(path, text_field)
        if suffix == ".arrow"
        else _json_rows(path, errors)
        if suffix == ".json"
        else _separated_rows(path, errors, "\t" if suffix == ".tsv" else ",")
    )
    number = 0
    try:
        for row in rows:
            number += 1
            yield row
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not valid UTF-8",
            why=f"behind row {number}, 0x{error.object[error.start]:02x}: {error.reason}",
            fix="convert it (iconv -t utf-8), or accept replacement marks: data prepare --invalid-utf8 replace",
            where=f"{path}:{number + 1}",
        ) from None


def is_list_of_rows(path: Path | RemoteFile) -> bool:
    """Returns whether a .json file begins as a list: beside text, most others are settings."""
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def _json_rows(path: Path | RemoteFile, errors: str) -> Iterator[tuple[Any, int]]:
    """Yields the entries of a list, or one object per line, decoding as few characters at once as an entry has."""
    decoder, text, at, number = json.JSONDecoder(), "", 0, 0
    with path.open(encoding="utf-8-sig", errors=errors) as file:
        is_list = is_list_of_rows(path)
        if is_list:
            text = file.read(BLOCK)
            at = text.index("[") + 1
        while True:
            at = BETWEEN_ROWS.match(text, at).end()  # type: ignore[union-attr]
            if is_list and text[at : at + 1] == "]":
                return
            try:
                row, end = decoder.raw_decode(text, at)
                is_whole = end < len(text)
            except (ValueError, RecursionError) as error:
                problem: Exception | None = error
                is_whole = False
            else:
                problem = None
            if is_whole:
                yield row, end - at
                at, number = end, number + 1
                continue
            # The entry goes on behind what was read, or the file is damaged: read more, as much again if it is long.
            more = file.read(max(BLOCK, len(text) - at)) if len(text) - at <= MAX_ROW else ""
            if more:
                text, at = text[at:] + more, 0
            elif problem is None:
                yield row, end - at
                text, at, number = text[end:], 0, number + 1
            elif len(text) - at > MAX_ROW and str(problem).startswith("Unterminated string"):
                raise too_large(path, number + 1)
            elif text[at:].strip() or is_list:
                raise UserError(
                    f"{path} is not a list of rows",
                    why=f"{problem}; row {number + 1} begins with {text[at : at + 40]!r}",
                    fix="a .json file is [{...}, {...}], or one object per line; repair it",
                    where=f"{path}:{number + 1}",
                )
            else:
                return


def _separated_rows(path: Path | RemoteFile, errors: str, separator: str) -> Iterator[tuple[Any, int]]:
    """Yields the rows of a .csv or .tsv file whose first line names the columns; an empty cell is a field that is not
    there."""
    csv.field_size_limit(MAX_ROW)
    with path.open(encoding="utf-8-sig", errors=errors, newline="") as file:
        taken = 0  # characters of the row at hand, which may have many lines

        def lines() -> Iterator[str]:
            nonlocal taken
            while line := file.readline(MAX_ROW + 1):
                taken += len(line)
                if taken > MAX_ROW:
                    raise too_large(path, rows.line_num + 1)
                yield line

        rows = csv.reader(lines(), delimiter=separator, strict=True)
        try:
            names = next(rows, [])
            for row in rows:
                taken = 0
                if not row:
                    continue
                if len(row) != len(names):
                    raise UserError(
                        f"a row of {len(row)} fields in a table of {len(names)} columns",
                        why=f"the first line names {', '.join(names)}",
                        fix="quote fields that hold commas or line breaks",
                        where=f"{path}:{rows.line_num}",
                    )
                size = sum(map(len, row)) + len(row)
                yield {name: cell or None for name, cell in zip(names, row, strict=True)}, size
        except csv.Error as error:
            fix = "quote fields that hold commas, quotes or line breaks"
            raise UserError(
                f"{path} is not a table", why=str(error), fix=fix, where=f"{path}:{rows.line_num}"
            ) from None


# Datasets of Hugging Face ---------------------------------------------------------------------------------------------


def training_split(directory: Path) -> Path:
    """Returns the folder of the `train` split where `save_to_disk` wrote several; else the directory itself."""
    if not (directory / "dataset_dict.json").is_file():
        return directory
    if (directory / "train").is_dir():
        return directory / "train"
    splits = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    raise UserError(
        f"{directory} has no split `train`",
        why=f"its splits are {', '.join(splits) or '(none)'}",
        fix=f"name the one to train on: data.source={directory / (splits[0] if splits else 'SPLIT')}",
    )


def cached_dataset(name: str) -> list[Path]:
    """Returns the files of a dataset's `train` split that the `datasets` library has in its cache, for a name of the
    hub; nothing where it is not there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    found = sorted(cache.glob("*/*/*/*-train*.arrow")) if name.count("/") <= 1 and name[:1] not in "./~" else []
    folders = sorted({file.parent for file in found})
    if len(folders) > 1:
        raise UserError(
            f"{name} is in the cache of `datasets` more than once",
            why=", ".join(str(folder.relative_to(cache)) for folder in folders[:4]),
            fix=f"name the one to train on: data.source={folders[0]}/*-train*.arrow",
        )
    return found
