"""Training rows that a Python program brings itself: anything with `len` and `[]`, or anything that can be iterated.

A row is a sequence of token ids. Its targets are the next tokens; a row of seq_len + 1 ids fills a sequence, a shorter
one is padded without loss. A pair (ids, targets) of equal lengths sets the targets, where -100 has no loss. Invariant:
row r of step s is the same for every number of ranks: indexable rows are dealt as prepared data is (order.py), an
iterator is read by every rank in the same order. Read next: sequences.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.data.corpus import Corpus
from shardwise.data.order import combine, mix64, permute
from shardwise.data.sequences import IGNORE, Batch
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import UserError, in_part_of_program
from shardwise.terminal import type_of

SAMPLED_ROWS = 64  # whose tokens are counted for the unigram entropy


class OwnRows:
    """Rows by index, in an order drawn from (seed, epoch), as `Sequences` has them."""

    def __init__(self, rows: Any, *, seq_len: int, vocab: int, padding: int, seed: int, fixed_order: bool = False):
        self.name = "eval_data" if fixed_order else "data"
        self.rows, self.seq_len, self.vocab, self.padding = rows, seq_len, vocab, padding
        self.seed, self.fixed_order = seed, fixed_order
        self.num_sequences = len(rows)
        if not self.num_sequences:
            raise UserError(f"{self.name} has no rows", why="its len() is 0", fix="give rows of token ids")

    def batch(self, step: int, rows: range, global_batch: int) -> Batch:
        """Returns rows `rows` of the global batch of step `step` (the first step is 1)."""
        samples = (step - 1) * global_batch + np.arange(rows.start, rows.stop, dtype=np.int64)
        epochs, within = np.divmod(samples, self.num_sequences)
        keys = mix64((0 * epochs if self.fixed_order else epochs).astype(np.uint64), combine(self.seed, 1, 0))
        return self._batch([int(index) for index in permute(within, self.num_sequences, keys)])

    def check(self) -> None:
        """Looks at the first rows before anything starts."""
        self._batch(range(min(SAMPLED_ROWS, self.num_sequences)))

    def _batch(self, indices: Sequence[int]) -> Batch:
        names = [f"{self.name}[{index}]" for index in indices]
        return batch_of([self._row(index) for index in indices], self.seq_len, self.vocab, self.padding, names)

    def first_rows(self, count: int) -> list[Any]:
        """Returns at most `count` rows, as the program gave them."""
        return [self._row(index) for index in range(min(count, self.num_sequences))]

    def _row(self, index: int) -> Any:
        with in_part_of_program(f"{self.name}[{index}]"):
            return self.rows[index]

    def state_after(self, step: int) -> Any:
        """Returns None: what a step reads follows from its number."""
        return None


class RowStream:
    """Rows in the order in which an iterable yields them, which starts again at its end.

    Steps are asked for one after the other. Where the iterable has `state_dict` and `load_state_dict`, as torchdata's
    have, a checkpoint keeps its state; else a resumed run passes over the rows that were trained on."""

    num_sequences = 0  # nobody knows

    def __init__(self, source: Iterable[Any], *, seq_len: int, vocab: int, padding: int):
        self.source, self.seq_len, self.vocab, self.padding = source, seq_len, vocab, padding
        self._iterator: Iterator[Any] | None = None
        self._next_step: int | None = None
        self._first: list[Any] = []  # rows that were looked at before the first step
        self._states: dict[int, Any] = {}
        self.has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.can_repeat = not isinstance(source, Iterator) and not self.has_state

    def batch(self, step: int, rows: range, global_batch: int) -> Batch:
        """Returns rows `rows` of the global batch of step `step`, which comes after the step that was asked for last;
        step 1 begins anew."""
        if step == 1 and self._next_step not in (None, 1):
            self._iterator, self._first = iter(self.source), []
        elif self._next_step is None and step > 1:
            for _ in range((step - 1) * global_batch):  # an iterable without a state
                self._take()
        found = [self._take() for _ in range(global_batch)]
        self._next_step = step + 1
        if self.has_state:
            self._states[step] = self.source.state_dict()  # type: ignore[attr-defined]
            self._states.pop(step - 16, None)  # the loader is a few steps ahead of the checkpoint
        return batch_of(found[rows.start : rows.stop], self.seq_len, self.vocab, self.padding)

    def begin_anew(self) -> None:
        """Forgets how far the iterable was read: the next step that is asked for may be an earlier one."""
        self._iterator, self._next_step, self._first = None, None, []

    def _take(self) -> Any:
        if self._first:
            return self._first.pop(0)
        if self._iterator is None:
            self._iterator = iter(self.source)
        for _ in range(2):
            with in_part_of_program("data"):
                for row in self._iterator:
                    return row
            if isinstance(self.source, Iterator):
                break
            self._iterator = iter(self.source)
        raise UserError(
            "data ended before the last step",
            why="an iterator or generator yields its rows once",
            fix="give something that can be iterated again (a list, or an object with __iter__), or fewer train.steps",
        )

    def first_rows(self, count: int) -> list[Any]:
        """Returns the first `count` rows, which the first step gets as well; none after that."""
        if self._next_step is not None or self.has_state:
            return []
        while len(self._first) < count:
            try:
                self._first = [*self._first, self._take_new()]
            except UserError:
                break
        return self._first[:count]

    def check(self) -> None:
        """Looks at the first row before anything starts; an iterable with a state is left where it is."""
        batch_of(self.first_rows(1), self.seq_len, self.vocab, self.padding)

    def _take_new(self) -> Any:
        kept, self._first = self._first, []
        try:
            return self._take()
        finally:
            self._first = kept

    def state_after(self, step: int) -> Any:
        """Returns the state in which the iterable was when this step had been read; None where it has none. It is
        JSON, because checkpoints hold no pickle."""
        if not self.has_state or step not in self._states:
            return None
        try:
            return json.loads(json.dumps(self._states[step]))
        except (TypeError, ValueError) as error:
            raise UserError(
                "data.state_dict() cannot be kept in a checkpoint",
                why=f"it must be JSON (numbers, texts, lists and dicts): {error}",
                fix="return plain values from state_dict()",
            ) from None

    def restore(self, state: Any, next_step: int) -> None:
        """Puts the iterable into a state that `state_after` returned, before `next_step` is read."""
        self.source.load_state_dict(state)  # type: ignore[attr-defined]
        self._iterator, self._next_step, self._first = None, next_step, []


def own_rows(data: Any, *, seq_len: int, vocab: int, padding: int, seed: int) -> OwnRows | RowStream:
    """Returns rows that a run can train on, from what a program gave as `data`."""
    if _has_rows_by_index(data):
        return OwnRows(data, seq_len=seq_len, vocab=vocab, padding=padding, seed=seed)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | dict):
        raise _no_rows("data", data, " or one after the other", "; text files belong into data.source")
    return RowStream(data, seq_len=seq_len, vocab=vocab, padding=padding)


def held_rows(data: Any, *, seq_len: int, vocab: int, padding: int) -> OwnRows:
    """Returns rows that are evaluated, in one order for ever, from what a program gave as `eval_data`."""
    if not _has_rows_by_index(data):
        raise _no_rows("eval_data", data)
    rows = OwnRows(data, seq_len=seq_len, vocab=vocab, padding=padding, seed=0, fixed_order=True)
    rows.check()
    return rows


def _has_rows_by_index(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | dict)


def _no_rows(name: str, data: Any, or_how: str = "", or_what: str = "") -> UserError:
    return UserError(
        f"{name} is {type_of(data)}",
        why=f"rows of token ids are needed, by index{or_how}",
        fix=f"{name}=[[1, 2, 3], ...], a numpy array, a torch dataset{or_what}",
    )


def batch_of(rows: Sequence[Any], seq_len: int, vocab: int, padding: int, names: Sequence[str] | None = None) -> Batch:
    """Returns rows as arrays of (rows, seq_len), padded without loss. Errors call rows by their names."""
    tokens = np.full((len(rows), seq_len), padding, dtype=np.int64)
    targets = np.full((len(rows), seq_len), IGNORE, dtype=np.int64)
    for number, row in enumerate(rows):
        name = names[number] if names else "a row of data"
        ids, wanted = _ids_and_targets(row, name)
        if len(ids) > seq_len or len(ids) == 0:
            more = 0 if isinstance(row, tuple) and len(row) == 2 else 1  # the last one is a target only
            raise UserError(
                f"{name} has {len(ids) + more} token ids",
                why=f"train.seq_len = {seq_len} takes {1 + more} to {seq_len + more}"
                + (": every id but the first is a target" if more else " beside their targets"),
                fix=f"cut rows to {seq_len + more} ids, or another train.seq_len",
            )
        if ids.min() < 0 or ids.max() >= vocab or wanted.max() >= vocab:
            bad = ids.min() if ids.min() < 0 else max(ids.max(), wanted.max())
            raise UserError(
                f"{name} has the token id {bad}",
                why=f"the model's vocabulary has the ids 0 to {vocab - 1}",
                fix="another tokenizer, or model.vocab",
            )
        tokens[number, : len(ids)], targets[number, : len(ids)] = ids, wanted
    return Batch(tokens, targets, None)


def _ids_and_targets(row: Any, name: str = "a row of data") -> tuple[np.ndarray, np.ndarray]:
    if isinstance(row, tuple) and len(row) == 2 and not isinstance(row[0], int | np.integer):
        ids, targets = (np.asarray(part, dtype=np.int64) for part in row)
        if ids.shape != targets.shape or ids.ndim != 1:
            raise UserError(
                f"{name} has ids of shape {ids.shape} and targets of shape {targets.shape}",
                why="each id has one target",
                fix="give both the same length; -100 is a target without loss",
            )
        return ids, targets
    if isinstance(row, tuple) and len(row) == 1 and np.ndim(row[0]) == 1:
        row = row[0]  # as torch's TensorDataset has them
    try:
        ids = np.asarray(row)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"it has shape {ids.shape} and type {ids.dtype}")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} is {type_of(row)}, which holds no token ids",
            why=str(error),
            fix=_fix_of(row),
        ) from None
    ids = ids.astype(np.int64)
    return ids[:-1], ids[1:]


def _fix_of(row: Any) -> str:
    if isinstance(row, str):
        return "text belongs into files, as data.source; or give the ids of each text from a tokenizer"
    if isinstance(row, Mapping):
        return 'data=[row["input_ids"] for row in data], or pairs (ids, targets)'
    if np.ndim(row) == 0:
        return "data=ids[: n * m].reshape(n, m) with m = train.seq_len + 1 cuts one long array into rows"
    return "rows are lists of token ids, or pairs (ids, targets)"


class OwnCorpus(Corpus):
    """The rows of a program in the place of prepared text."""

    def __init__(self, tokenizer: Tokenizer, train: OwnRows | RowStream, validation: OwnRows | None, template: Any):
        held_out = validation or _NoRows()
        super().__init__(tokenizer, [], train, held_out, "rows", template)  # type: ignore[arg-type]

    @property
    def description(self) -> str:
        """What is trained on, in words."""
        count = self.train.num_sequences
        return f"the program's own data, {f'{count:,} rows' if count else 'one row after the other'}"

    def unigram_entropy(self) -> float:
        """Returns the entropy, in nats per token, of a model that knows only how frequent each token is, from the first
        rows; nan where none can be looked at."""
        rows = self.train.first_rows(SAMPLED_ROWS if self.train.num_sequences else 1)  # type: ignore[attr-defined]
        if not rows:
            return float("nan")
        counts = np.bincount(np.concatenate([_ids_and_targets(row)[0] for row in rows]))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    @property
    def can_begin_anew(self) -> bool:
        return not isinstance(self.train, RowStream) or self.train.can_repeat or self.train.has_state

    def begin_anew(self) -> None:
        if isinstance(self.train, RowStream):
            self.train.begin_anew()

    def held_out_start(self, num_tokens: int) -> list[int]:
        """Returns the first tokens of a row: a prompt for samples."""
        for rows in (self.validation, self.train):
            if found := rows.first_rows(1):  # type: ignore[attr-defined]
                return [int(token) for token in _ids_and_targets(found[0])[0][:num_tokens]]
        return [self.tokenizer.separator]


class _NoRows:
    """Nothing is held out."""

    num_sequences = 0

    def first_rows(self, count: int) -> list[Any]:
        """Returns no rows."""
        return []
