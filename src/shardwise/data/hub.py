"""Reads a dataset of the Hugging Face hub row by row, through the `datasets` library, without keeping it.

Invariant: rows come in the dataset's own order, and a place in it is plain JSON: the library's own state at an earlier
row, and how many rows to pass over from there. `datasets` runs no code of a dataset's author. Who calls it is
`streaming.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardwise.data.rows import Document
from shardwise.errors import Exit, UserError
from shardwise.spec.addresses import without_secrets

if TYPE_CHECKING:
    from shardwise.data.sources import Reading

NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]*){0,2}")
ROWS_PER_STATE = 256  # the library's state is taken once for so many rows
ANSWER_S = 10.0  # until the hub has answered that it is there


def is_hub_name(name: str) -> bool:
    """Returns whether a source can be `owner/name`, `owner/name:config` or `owner/name:config:split`."""
    return NAME.fullmatch(name) is not None


class HubDataset:
    """A dataset of the hub that can be read from any place."""

    def __init__(self, make_rows: Callable[[], Any], title: str, fingerprint: str, reading: Reading):
        """`make_rows` returns an `IterableDataset` that nobody has read from yet."""
        self.title, self.fingerprint, self.num_bytes = title, fingerprint, 0
        self._reading, self._make_rows = reading, make_rows

    def read(self, place: Any) -> Iterator[tuple[Document, Any]]:
        """Yields the documents behind a place (None: the beginning), each with the place behind it."""
        state, passed, number = place or (None, 0, 0)
        since, found = 0, None
        while True:
            try:
                if found is None:
                    rows = self._make_rows()
                    if state is not None:
                        rows.load_state_dict(state)
                    found = iter(rows)
                row = next(found, None)
            except Exception as error:  # the library's, the network's and those of every format
                raise _failed(self.title, error) from None
            if row is None:
                return
            since += 1
            if since <= passed:
                continue
            number += 1
            document = self._reading.document_of(row, f"{self.title}:{number}", 0)
            if since >= ROWS_PER_STATE:
                state, since, passed = rows.state_dict(), 0, 0
            yield document, [state, since, number]


def open_hub(name: str, reading: Reading) -> HubDataset:
    """Returns the rows of a dataset of the hub; `train` is its split unless the name says another."""
    repository, config, split = [*name.split(":"), "", ""][:3]
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"no such data: {name}",
            why="it is neither a file nor a directory; datasets of the hub need `datasets`, which is not installed",
            fix="give a path, or pip install 'shardwise[datasets]'",
        ) from None
    _be_quiet()
    _check_hub(name, repository)
    try:
        builder = datasets.load_dataset_builder(repository, config or None)
        builder.as_streaming_dataset(split=split or "train")
    except Exception as error:  # the library's and the network's
        raise _failed(name, error) from None

    def make_rows() -> Any:
        return builder.as_streaming_dataset(split=split or "train")

    return HubDataset(make_rows, name, f"{name} {builder.hash} {builder.config.name}", reading)


def _be_quiet() -> None:
    """Keeps the bars and warnings of the libraries from the terminal."""
    import datasets
    import huggingface_hub

    for logging in (datasets.utils.logging, huggingface_hub.utils.logging):
        logging.set_verbosity_error()
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()


def _check_hub(name: str, repository: str) -> None:
    """Asks the hub once whether it has a dataset: `datasets` would ask again for half a minute."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    if datasets.config.HF_HUB_OFFLINE:
        raise UserError(
            f"cannot read the dataset {name}",
            why="HF_DATASETS_OFFLINE or HF_HUB_OFFLINE forbids to ask the hub",
            fix="unset it, or give a path of this machine",
        )
    try:
        huggingface_hub.HfApi().dataset_info(repository, timeout=ANSWER_S)
    except RepositoryNotFoundError:
        raise UserError(
            f"no such data: {name}",
            why=f"there is no such path, and the hub shows no dataset {repository}: it has another name or is private",
            fix="check the name (owner/name:config:split); for a private one set HF_TOKEN",
        ) from None
    except Exception as error:  # the network's
        raise _failed(name, error, Exit.HARDWARE) from None


def _failed(name: str, error: Exception, code: Exit | None = None) -> UserError:
    said = " ".join(without_secrets(str(error)).split())[:300] or "no reason is given"
    is_network = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return UserError(
        f"cannot read the dataset {name}",
        why=f"{type(error).__name__}: {said}",
        fix="check the name (owner/name:config:split), the network and HF_TOKEN; a path of this machine needs no hub",
        code=code or (Exit.HARDWARE if is_network else Exit.USER_MISTAKE),
    )
