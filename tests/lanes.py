"""Several pytest processes share one run: each takes the next file that nobody has taken yet.

    pytest --lane 1 --lanes-at FOLDER &  pytest --lane 2 --lanes-at FOLDER

A file is taken by creating its name in FOLDER, which only one process can. Odd lanes go through the files from the
first to the last and even ones from the last to the first, so that they do different work and meet somewhere: no lane
waits for another longer than a file takes. A file is the unit because its tests share fixtures; each lane has its own
pool of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--lane", type=int, metavar="NUMBER", help="share the files with other lanes; which one this is")
    # Absolute, because a file of tests may work in a directory of its own.
    at, about = Path.cwd(), "the folder in which lanes note what they take"
    parser.addoption("--lanes-at", type=at.joinpath, metavar="FOLDER", help=about)


def run(session: pytest.Session) -> bool | None:
    """Run the files that this lane gets. Returns None where there are no lanes: pytest then runs everything itself."""
    config = session.config
    if config.getoption("--lane") is None or config.option.collectonly or session.testsfailed:
        return None
    mine = _taken(session.items, config.getoption("--lane"), config.getoption("--lanes-at"), config.rootpath)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)  # whose fixtures stay: pytest must know before it ends those of the item
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _taken(items: list[pytest.Item], lane: int, folder: Path, root: Path) -> Iterator[pytest.Item]:
    files = [(path, list(held)) for path, held in groupby(items, key=lambda item: item.path)]
    for path, held in files if lane % 2 else reversed(files):
        try:
            (folder / f"{path.relative_to(root)}.taken".replace("/", "+")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from held
