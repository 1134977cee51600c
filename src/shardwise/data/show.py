"""Shows training rows to people: the text of a sequence, with what carries loss made visible."""

from __future__ import annotations

from itertools import groupby
from typing import TypedDict

from shardwise.data.sequences import IGNORE, Sequences
from shardwise.data.streaming import TokenStream
from shardwise.data.tokenizer import Tokenizer
from shardwise.terminal import make_console, shows_colour


class Stretch(TypedDict):
    """A stretch of tokens that all carry loss, or all do not."""

    loss: bool
    text: str


class ShownRow(TypedDict):
    """A row as it is shown: its text in stretches, and how many tokens and how much padding it has."""

    runs: list[Stretch]
    tokens: int
    padding: int


def render_rows(sequences: Sequences | TokenStream, tokenizer: Tokenizer, num: int) -> list[ShownRow]:
    """Returns the first rows of step 1. A token carries loss when it is the target of the one before it."""
    if isinstance(sequences, TokenStream):
        sequences = sequences.anew()
    else:
        num = min(num, sequences.num_sequences)
    lengths = sequences.lengths(num)
    batch = sequences.batch(1, range(num), num)
    rows: list[ShownRow] = []
    for row, length in enumerate(lengths):
        ids = batch.tokens[row, :length].tolist()
        loss = [False, *(target != IGNORE for target in batch.targets[row, : length - 1].tolist())]
        runs: list[Stretch] = []
        for trained, members in groupby(zip(ids, loss, strict=True), key=lambda pair: pair[1]):
            runs.append({"loss": trained, "text": tokenizer.decode([id for id, _ in members], keep_special=True)})
        rows.append({"runs": runs, "tokens": length, "padding": sequences.seq_len - length})
    return rows


def about_row(row: ShownRow) -> str:
    padding = f" and {row['padding']} of padding" if row["padding"] else ""
    marks = "bright text carries loss, dim text does not" if shows_colour() else "text between ⟦ and ⟧ carries loss"
    return f"{row['tokens']} tokens{padding}; {marks}"


def print_row(row: ShownRow) -> None:
    if not shows_colour():
        print("".join(f"⟦{run['text']}⟧" if run["loss"] else run["text"] for run in row["runs"]))
        return
    from rich.text import Text

    text = Text()
    for run in row["runs"]:
        text.append(run["text"], style="bold green" if run["loss"] else "dim")
    make_console().print(text)
