"""The whole same-loss matrix and all mutations: `make parity`. Prints a table and writes
benchmarks/results/parity.md; exit 1 if a row is over.

    python tests/parity/full.py                             everything
    python tests/parity/full.py --mutations                 only the mutations; writes nothing
    python tests/parity/full.py --part 2/4 --json FILE      a quarter of it into a file: parts may run side by side
    python tests/parity/full.py --page FILE ...             the page from such files

Every layout meets every main model in every precision; the other families are spread over the layouts so that each
layout meets at least one of them. Batches take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from cases import Differences, Matrix  # noqa: E402
from layouts import (  # noqa: E402
    BATCHES,
    CLIP,
    FAMILIES,
    LAYOUTS,
    MAIN_MODELS,
    NUM_STEPS,
    PRECISIONS,
    ROUTED,
    Case,
    degree,
)
from mutations import MUTATIONS, try_mutation  # noqa: E402
from ranks import RankFailure, RankHang, RankPool  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

PAGE = HERE.parents[1] / "benchmarks" / "results" / "parity.md"
PARTS = [part.name for part in fields(Differences)]
Rows = dict[Case, Differences | str]  # what was measured, or why nothing was


def all_cases() -> list[Case]:
    cases: list[Case] = []
    for number, layout in enumerate(LAYOUTS):
        others = list(product(FAMILIES, PRECISIONS))
        chosen = [others[(5 * number + step) % len(others)] for step in (0, 4, 8)]  # every precision, three families
        if degree(layout, "ep") > 1:
            chosen = list(product(("experts", "latent", *ROUTED), PRECISIONS))
        for model, precision in [*product(MAIN_MODELS, PRECISIONS), *chosen]:
            names = list(BATCHES)
            turns = names[len(cases) % len(names) :] + names
            possible = [case for name in turns if (case := Case(layout, model, precision, name)).is_possible]
            cases += possible[:1]
    return cases


def run_cases(matrix: Matrix, cases: list[Case], console: Console, seconds: float) -> Rows:
    found: Rows = {}
    began = time.monotonic()
    for case in track(cases, "rows", console=console):
        if time.monotonic() - began > seconds:
            break
        try:
            found[case] = matrix.measure(case)
        except (RankFailure, RankHang, AssertionError) as error:
            found[case] = str(error).splitlines()[0]
        if not is_good(case, found[case]):
            console.print(f"[red]{case}: {found[case]}")
    return found


def is_good(case: Case, found: Differences | str) -> bool:
    return isinstance(found, Differences) and not found.over(case.limits)


def run_mutations(matrix: Matrix, names: list[str], console: Console) -> dict[str, str | None]:
    found = {name: try_mutation(matrix, name) for name in track(names, "mutations", console=console)}
    for name, how in found.items():
        console.print(f"{MUTATIONS[name].title}: {how or '[red]not noticed'}")
    return found


# The page ------------------------------------------------------------------------------------------------------------


def page(found: Rows, mutations: dict[str, str | None], run: dict[str, Any], seconds: float) -> str:
    return "\n".join([*_head(found, run, seconds), *_worst(found), *_rows(found), *_mutations(mutations, run), ""])


def _head(found: Rows, run: dict[str, Any], seconds: float) -> list[str]:
    good = sum(is_good(case, result) for case, result in found.items())
    batches = [
        f"`{name}` {batch.rows} rows in micro-batches of {batch.micro}" + ", with documents" * batch.documents
        for name, batch in BATCHES.items()
    ]
    return [
        "# The same-loss matrix",
        "",
        f"Written by `make parity` on {date.today()} with torch {run['torch']}, Python {run['python']}, on CPUs "
        f"over gloo, in {seconds / 60:.0f} minutes: {good} of {len(found)} rows within their limits"
        + (f"; {missing} more rows were not run." if (missing := len(all_cases()) - len(found)) else "."),
        "",
        f"Each row trains {NUM_STEPS} steps in a layout and in one process (`src/shardwise/prove/reference.py`: the "
        "plain model, torch's own optimizer and clipping) and measures the largest difference of",
        "",
        "- **loss**: over all steps, absolute",
        "- **norm**: of the gradient, over all steps, relative",
        "- **gradient**: of the first step, over all tensors, relative to the tensor's largest entry",
        "- **parameter**: after the last step, absolute",
        "",
        "| precision | what must hold |",
        "|---|---|",
        f"| fp64 | everything within 1e-9, with clipping at {CLIP} in every step |",
        "| fp32 | loss and gradient within 1e-5, with clipping |",
        "| bf16 | (fp32 weights, bf16 compute) loss within 1e-5, with tp, cp or ep 5e-3; without clipping |",
        "",
        "bf16 goes without clipping because torch adds a norm up in fp32, in an order that follows the shards: a "
        "factor that differs in its seventh digit sends some weight to the other neighbour in bf16, which moves the "
        "loss by 5e-5. For the same reason one process must cut the batch into the same micro-batches, whose gradients "
        "are rounded, and have two bf16 replicas of a tied weight where a pipeline has two. With tensor, context or "
        "expert parallelism a sum inside a layer is split, and its parts are rounded.",
        "",
        f"Batches: {'; '.join(batches)}. What does not divide over ranks is meant not to.",
        "",
    ]


def _worst(found: Rows) -> list[str]:
    lines = [
        "## Largest differences",
        "",
        "| precision | rows | loss | norm | gradient | parameter |",
        "|---|---|---|---|---|---|",
    ]
    kinds: dict[str, Callable[[Case], bool]] = {
        "fp64": lambda case: case.precision == "fp64",
        "fp32": lambda case: case.precision == "fp32",
        "bf16 without tp, cp, ep": lambda case: case.precision == "bf16" and case.limits["loss"] < 1e-3,
        "bf16 with one of them": lambda case: case.precision == "bf16" and case.limits["loss"] > 1e-3,
    }
    for title, belongs in kinds.items():
        results = [result for case, result in found.items() if belongs(case) and isinstance(result, Differences)]
        worst = [f"{max((getattr(result, part) for result in results), default=0.0):.1e}" for part in PARTS]
        lines.append(f"| {title} | {len(results)} | {' | '.join(worst)} |")
    return [*lines, ""]


def _rows(found: Rows) -> list[str]:
    lines = [
        "## Rows",
        "",
        "| layout | model | precision | batch | loss | norm | gradient | parameter | |",
        "|---" * 9 + "|",
    ]
    for case, result in found.items():
        numbers = (
            [f"{getattr(result, part):.1e}" for part in PARTS]
            if isinstance(result, Differences)
            else [result, "", "", ""]
        )
        mark = "" if is_good(case, result) else "**over**"
        lines.append(
            f"| {case.layout} | {case.model} | {case.precision} | {case.batch} | {' | '.join(numbers)} | {mark} |"
        )
    return [*lines, ""]


def _mutations(found: dict[str, str | None], run: dict[str, Any]) -> list[str]:
    lines = [
        "## Mistakes made on purpose",
        "",
        "One thing is broken on all ranks for one row (`tests/parity/mutations.py`); the row must notice. "
        f"With torch {run['mutations_torch']}.",
        "",
        "| mistake | row | noticed by |",
        "|---|---|---|",
    ]
    lines += [
        f"| {MUTATIONS[name].title} | {_row(MUTATIONS[name].row)} | {how or '**nobody**'} |"
        for name, how in found.items()
    ]
    return lines


def _row(case: Case) -> str:
    return f"{case.layout}, {case.model}, {case.precision}, {case.batch}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", action="store_true", help="only the mutations; writes nothing")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="part I of N, counted from 1")
    parser.add_argument("--rows", action="store_true", help="only the rows")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no row after so long; the page then says how many are missing"
    )
    parser.add_argument("--backwards", action="store_true", help="begin with the last rows, the largest layouts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was found, instead of the page")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="FILE", help="only write the page, from files of --json"
    )
    asked, console = parser.parse_args(), Console()
    parts = [json.loads(file.read_text()) for file in asked.page or ()] or [_run_part(asked, console)]
    if asked.json:
        asked.json.write_text(json.dumps(parts[0]))
    rows = {Case(*key.split("|")): _found(value) for part in parts for key, value in part["rows"].items()}
    rows = {case: rows[case] for case in all_cases() if case in rows}
    mutations = {name: how for part in parts for name, how in part["mutations"].items()}
    bad = sum(not is_good(case, result) for case, result in rows.items())
    unnoticed = sum(how is None for how in mutations.values())
    if rows and not asked.json:
        of_rows = [part for part in parts if part["rows"]]
        versions = {(part["torch"], part["python"]) for part in of_rows}
        assert len(versions) == 1, f"rows of different runs: {versions}"
        broken = next((part["torch"] for part in parts if part["mutations"]), torch.__version__)
        PAGE.write_text(
            page(rows, mutations, of_rows[0] | {"mutations_torch": broken}, max(part["seconds"] for part in parts)),
            encoding="utf-8",
        )
        console.print("\n".join(_worst(rows)))
    console.print(f"{len(rows)} rows, {bad} over their limits; {len(mutations)} mutations, {unnoticed} not noticed")
    return 1 if bad or unnoticed else 0


def _run_part(asked: argparse.Namespace, console: Console) -> dict[str, Any]:
    part, parts = map(int, asked.part.split("/"))
    began, matrix = time.monotonic(), Matrix(RankPool())
    cases = all_cases()[:: -1 if asked.backwards else 1]
    try:
        found = {} if asked.mutations else run_cases(matrix, cases[part - 1 :: parts], console, asked.seconds)
        mutations = {} if asked.rows else run_mutations(matrix, list(MUTATIONS)[part - 1 :: parts], console)
    finally:
        matrix.ranks.close()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": time.monotonic() - began,
        "rows": {
            "|".join((case.layout, case.model, case.precision, case.batch)): result
            if isinstance(result, str)
            else asdict(result)
            for case, result in found.items()
        },
        "mutations": mutations,
    }


def _found(value: Any) -> Differences | str:
    return value if isinstance(value, str) else Differences(**value)


if __name__ == "__main__":
    sys.exit(main())
