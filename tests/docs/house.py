"""Draws docs/house.md and docs/house.svg from the import graph: rooms, arrows, lines and files.

    python tests/docs/house.py          draws both anew (`make pages` does so too)

test_house.py fails when a room or an arrow is not as drawn, or when a room has grown or shrunk by more than a tenth.
What stands outside of the marks in house.md is written by hand.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

from import_graph import FILES, PACKAGE, ROOMS, ROOT, arrows, reachable, room_of

PAGE, PICTURE = ROOT / "docs" / "house.md", ROOT / "docs" / "house.svg"
MARKS = ("<!-- drawn: begin -->", "<!-- drawn: end -->")
Graph = dict[str, frozenset[str]]


@cache
def sizes() -> dict[str, tuple[int, int]]:
    """Room, or folder inside a room, -> its Python files and their lines, folders inside it included."""
    found: dict[str, tuple[int, int]] = {}
    for file in FILES:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        folders = file.relative_to(PACKAGE).parts[:-1]
        for depth in range(1, len(folders) + 1):
            name = "/".join(folders[:depth])
            files, so_far = found.get(name, (0, 0))
            found[name] = files + 1, so_far + lines
    return found


def layers(graph: Graph) -> list[list[str]]:
    """The rooms from the bottom up: each stands one layer above the highest room that it imports. Rooms of a cycle
    share one."""
    together = {room: frozenset({room} | {one for one in graph if _is_cycle(room, one, graph)}) for room in graph}
    height: dict[frozenset[str], int] = {}

    def height_of(group: frozenset[str]) -> int:
        if group not in height:
            below = {together[named] for room in group for named in graph[room]} - {group}
            height[group] = 1 + max(map(height_of, below), default=-1)
        return height[group]

    found: list[list[str]] = []
    for room in sorted(graph, key=lambda room: (height_of(together[room]), room)):
        while len(found) <= height_of(together[room]):
            found.append([])
        found[height_of(together[room])].append(room)
    return found


def _is_cycle(one: str, other: str, graph: Graph) -> bool:
    return other in reachable(one, graph) and one in reachable(other, graph)


def direct(graph: Graph) -> Graph:
    """The arrows that do not follow from others: of a path and its shortcut, only the path."""
    return {
        room: frozenset(
            one for one in named if not any(one in reachable(other, graph) for other in named if other != one)
        )
        for room, named in graph.items()
    }


# The page -------------------------------------------------------------------------------------------------------------


def drawn() -> str:
    """What stands between the marks of house.md."""
    graph = arrows()
    files, lines = (sum(column) for column in zip(*(sizes()[room] for room in ROOMS), strict=True))
    beside = [file for file in FILES if room_of(file) not in ROOMS]
    paths = direct(graph)
    out = [
        f"{len(ROOMS)} rooms, {files + len(beside)} files, {_rounded(lines)} lines; {sum(map(len, graph.values()))} "
        f"arrows, of which {sum(map(len, paths.values()))} do not follow from others.",
        "",
        "![the rooms in layers, each above what it imports](house.svg)",
        "",
        "Each room stands above all rooms that it imports. Bottom up:",
        "",
        "```text",
        *(f"{number:>2}  {', '.join(rooms)}" for number, rooms in enumerate(layers(graph), 1)),
        "```",
        "",
        "| room | files | lines | imports | is imported by |",
        "|---|---:|---:|---|---|",
    ]
    for rooms in reversed(layers(graph)):
        for room in rooms:
            by = [other for other in ROOMS if room in graph[other]]
            count, size = sizes()[room]
            cells = f"`{room}`", str(count), _rounded(size), ", ".join(sorted(graph[room])) or "nothing", ", ".join(by)
            out.append(f"| {' | '.join(cells)} |")
    out += ["", "Folders inside rooms:", "", "| folder | files | lines |", "|---|---:|---:|"]
    inside = [name for name in sorted(sizes()) if "/" in name]
    out += [f"| `{name}` | {sizes()[name][0]} | {_rounded(sizes()[name][1])} |" for name in inside]
    return "\n".join(out)


def _rounded(lines: int) -> str:
    """To the hundred, from a hundred on."""
    return f"{round(lines, -2):,}" if lines >= 100 else "< 100"


def page(old: str) -> str:
    """The page with its drawn part anew; the rest as it is."""
    before, rest = old.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{drawn()}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


# The picture ----------------------------------------------------------------------------------------------------------

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.size { font-size: 11px; fill: #59636e }
rect { fill: #f6f8fa; stroke: #afb8c1 } .floor { stroke: #d8dee4; stroke-dasharray: 2 4 }
path { fill: none; stroke: #8c959f; stroke-width: 1.2; marker-end: url(#head) } .head { fill: #8c959f; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .size { fill: #9198a1 } rect { fill: #151b23; stroke: #515a64 }
  path { stroke: #656c76 } .head { fill: #656c76 } .floor { stroke: #2a313c }
}
"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)
WIDE, HIGH, LANE, GAP_X, GAP_Y, MARGIN = 112, 44, 10, 22, 50, 20
Place = dict[str, tuple[float, float]]
"""Box, or point of an arrow on its way past a layer, -> middle and top."""


def picture() -> str:
    """The rooms as boxes in layers, with the arrows that do not follow from others; an arrow passes between boxes."""
    graph = arrows()
    paths = _paths(direct(graph), layers(graph))
    place, width, height = _placed(layers(graph), paths)
    body = []
    for path in paths:
        points = [(place[path[0]][0], place[path[0]][1] + HIGH)]
        for lane in path[1:-1]:
            points += [place[lane], (place[lane][0], place[lane][1] + HIGH)]
        points.append((place[path[-1]][0], place[path[-1]][1] - 3))
        name = f"<title>{path[0]} imports {path[-1]}</title>"
        body.append(f'<path d="{_curve(points)}">{name}</path>')
    for room in ROOMS:
        (x, y), (files, lines) = place[room], sizes()[room]
        body += [
            f'<rect x="{x - WIDE / 2:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" rx="6"/>',
            f'<text x="{x:.0f}" y="{y + 18:.0f}">{escape(room)}</text>',
            f'<text class="size" x="{x:.0f}" y="{y + 35:.0f}">{files} files, {escape(_rounded(lines))} lines</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">'
        f"<title>The rooms of shardwise, each above what it imports</title><style>{STYLE}</style>{HEAD}\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _paths(graph: Graph, floors: list[list[str]]) -> list[list[str]]:
    """Each arrow as its room, a lane in every layer that it passes, and the room that is imported."""
    level = {room: number for number, rooms in enumerate(floors) for room in rooms}
    return [
        [room, *(f"{room} {other} {number}" for number in range(level[room] - 1, level[other], -1)), other]
        for room in sorted(graph)
        for other in sorted(graph[room])
    ]


def _placed(floors: list[list[str]], paths: list[list[str]]) -> tuple[Place, float, float]:
    """Where everything stands, and the size of the picture. Neighbours in a layer are ordered by what they are joined
    to, in a few sweeps up and down, so that arrows cross little (Sugiyama et al. 1981)."""
    rows = [list(rooms) for rooms in floors]
    joined: dict[str, set[str]] = {}
    for path in paths:
        for lane in path[1:-1]:
            rows[int(lane.split()[2])].append(lane)
        for one, other in pairwise(path):
            joined.setdefault(one, set()).add(other)
            joined.setdefault(other, set()).add(one)
    order = {name: index / max(1, len(row) - 1) for row in rows for index, name in enumerate(sorted(row))}
    for sweep in range(12):
        for number in range(len(rows)) if sweep % 2 == 0 else reversed(range(len(rows))):
            beside = {name for row in rows[max(0, number - 1) : number + 2] for name in row} - {*rows[number]}
            pull = {
                name: _mean([order[one] for one in joined.get(name, ()) if one in beside], order[name])
                for name in rows[number]
            }
            rows[number].sort(key=lambda name: (pull[name], name))
            order |= {name: (index + 0.5) / len(rows[number]) for index, name in enumerate(rows[number])}
    spans = [sum(LANE if " " in name else WIDE for name in row) + GAP_X * (len(row) - 1) for row in rows]
    width, height = max(spans) + 2 * MARGIN, len(rows) * (HIGH + GAP_Y) - GAP_Y + 2 * MARGIN
    place: Place = {}
    for number, row in enumerate(rows):
        x = (width - spans[number]) / 2
        for name in row:
            wide = LANE if " " in name else WIDE
            place[name] = x + wide / 2, height - MARGIN - HIGH - number * (HIGH + GAP_Y)
            x += wide + GAP_X
    return place, width, height


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _curve(points: list[tuple[float, float]]) -> str:
    """Straight down through each lane, bent between two layers."""
    text = "M{:.0f} {:.0f}".format(*points[0])
    for (x1, y1), (x2, y2) in pairwise(points):
        middle = (y1 + y2) / 2
        text += (
            f" L{x2:.0f} {y2:.0f}" if x1 == x2 else f" C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"drew     {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")
