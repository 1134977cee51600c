"""Draws docs/house.md and docs/house.svg from the import graph: rooms, arrows, lines and files.

    python tests/docs/house.py          draws both anew (`make pages` does so too)

test_house.py fails when a room or an arrow is not as drawn, or when a room has grown or shrunk by more than a tenth.
What stands outside of the marks in house.md is written by hand.
"""

from __future__ import annotations

import sys
from functools import cache
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
WIDE, HIGH, GAP_X, GAP_Y, MARGIN = 112, 44, 26, 46, 20


def picture() -> str:
    """The rooms as boxes in layers, with the arrows that do not follow from others."""
    graph, floors = arrows(), layers(arrows())
    width = max(map(len, floors)) * (WIDE + GAP_X) - GAP_X + 2 * MARGIN
    height = len(floors) * (HIGH + GAP_Y) - GAP_Y + 2 * MARGIN
    place: dict[str, tuple[float, float]] = {}
    for number, rooms in enumerate(floors):
        left = (width - len(rooms) * (WIDE + GAP_X) + GAP_X) / 2
        ordered = sorted(rooms, key=lambda room: (_middle(graph[room], place), room))
        for index, room in enumerate(ordered):
            place[room] = left + index * (WIDE + GAP_X), height - MARGIN - HIGH - number * (HIGH + GAP_Y)
    body = []
    for room, named in sorted(direct(graph).items()):
        for other in sorted(named):
            (x1, y1), (x2, y2) = place[room], place[other]
            start, end = (x1 + WIDE / 2, y1 + HIGH), (x2 + WIDE / 2, y2 - 3)
            bend = max(GAP_Y / 2, (end[1] - start[1]) / 2)
            body.append(
                f'<path d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} {start[1] + bend:.0f} '
                f'{end[0]:.0f} {end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}">'
                f"<title>{room} imports {other}</title></path>"
            )
    for room, (x, y) in sorted(place.items()):
        files, lines = sizes()[room]
        body += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDE}" height="{HIGH}" rx="6"/>',
            f'<text x="{x + WIDE / 2:.0f}" y="{y + 18:.0f}">{escape(room)}</text>',
            f'<text class="size" x="{x + WIDE / 2:.0f}" y="{y + 35:.0f}">'
            f"{files} files, {escape(_rounded(lines))} lines</text>",
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img">'
        f"<title>The rooms of shardwise, each above what it imports</title><style>{STYLE}</style>{HEAD}\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _middle(named: frozenset[str], place: dict[str, tuple[float, float]]) -> float:
    """Where the rooms below stand on average, so that arrows cross little."""
    below = [place[one][0] for one in named if one in place]
    return sum(below) / len(below) if below else 0.0


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"drew     {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")
