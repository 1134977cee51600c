"""`shardwise compare` sets runs side by side: what differs in their configs, what came of it, and whether that is more
than chance. The first run is what the others are measured against."""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit, UserError
from shardwise.terminal import say

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir
    from shardwise.spec.schema import Config

HELP = (
    "Runs side by side, against the first one: what differs in their configs, their losses, speed and memory, and a "
    "verdict."
)
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("compared", nargs="+", metavar="RUN", help="two or more: run directories, names, or `last`")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.compare_verdict import Judged, judge
    from shardwise.config.load import load_config
    from shardwise.run.rundir import all_runs, find_run, to_json

    if len(args.compared) < 2:
        fix = f"shardwise compare {args.compared[0]} OTHER; `shardwise runs` lists them"
        raise UserError("one run is compared with nothing", why="a comparison needs two runs", fix=fix)
    runs = [find_run(name, args.runs) for name in args.compared]
    values = [_values(load_config(one.config).config) for one in runs]
    figures = [_figures(one) for one in runs]
    beside = [
        one for one in all_runs(runs[0].path.parent) if one.path.resolve() not in {r.path.resolve() for r in runs}
    ]
    others = [Judged(one.name, *found) for one in beside if (found := _readable(one)) is not None]
    judged = [Judged(one.name, *both) for one, both in zip(runs, zip(values, figures))]
    verdicts, band = judge(judged, others)
    shared = [_shared_losses(runs[0], one) for one in runs[1:]]
    settings = _settings(values)
    if args.json:
        report = {
            "schema": 1,
            "a": str(runs[0].path),
            "b": str(runs[1].path),
            "settings": settings,
            "figures": {"a": figures[0], "b": figures[1]},
            "losses": shared[0],
            "band": band.to_dict(),
            "runs": [
                {
                    "run": str(one.path),
                    "figures": figures[n],
                    **({"losses": shared[n - 1], **verdicts[n - 1]} if n else {}),
                }
                for n, one in enumerate(runs)
            ],
        }
        print(to_json(report, indent=1))
        return Exit.DONE
    _print([one.name for one in runs], settings, figures)
    for one, losses in zip(runs[1:], shared):
        _print_losses(f"{one.name}: " if len(runs) > 2 else "", losses)
    for one, verdict in zip(runs[1:], verdicts):
        say(f"{verdict['verdict']:<8} {one.name} against {runs[0].name}: {verdict['why']}")
    say(f"band     {band.said}")
    return Exit.DONE


def _readable(other: RunDir) -> tuple[dict[str, Any], dict[str, float | None]] | None:
    """Returns the settings and figures of a run that only helps to judge; None for one that cannot be read."""
    from shardwise.config.load import load_config

    try:
        return _values(load_config(other.config).config), _figures(other)
    except (UserError, KeyError, TypeError):
        return None


def _settings(values: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the keys that differ, each with its value in every run; None stands for one that is not set."""
    keys = dict.fromkeys(key for one in values for key in one)
    found = {key: [one.get(key) for one in values] for key in keys}
    return {key: row for key, row in found.items() if any(value != row[0] for value in row)}


def _values(config: Config) -> dict[str, Any]:
    """Returns every key of a config but the run's name, as a user types it: fields of the model that replace those of
    its preset are keys of [model]."""
    values = {
        f"{section.name}.{key.name}": getattr(getattr(config, section.name), key.name)
        for section in fields(config)
        for key in fields(getattr(config, section.name))
    }
    del values["run.name"], values["model.overrides"]
    return values | {f"model.{name}": value for name, value in config.model.overrides}


def _figures(run: RunDir) -> dict[str, float | None]:
    """Returns a run's steps, losses in nats, speed and memory, by the label they are printed with; None for what is not
    known."""
    steps = list(run.steps().values())
    timed = steps[1:] or steps

    def middle(key: str) -> float | None:
        return statistics.median(line[key] for line in timed) if timed else None

    return {
        "steps": len(steps),
        "last loss": steps[-1]["loss"] if steps else None,
        "held-out loss": run.held_out_loss(),
        "tok/s (median)": middle("tokens_per_s"),
        "step_s (median)": middle("step_s"),
        "mfu (median)": middle("mfu"),
        "peak memory, GiB": max(line["peak_memory_bytes"] for line in steps) / 2**30 if steps else None,
    }


def _shared_losses(a: RunDir, b: RunDir) -> dict[str, Any]:
    left, right = a.steps(), b.steps()
    shared = sorted(left.keys() & right.keys())
    if not shared:
        return {"shared_steps": 0}
    differences = {step: _difference(left[step]["loss"], right[step]["loss"]) for step in shared}
    first = next((step for step in shared if differences[step] > 0), None)
    return {"shared_steps": len(shared), "largest_difference": max(differences.values()), "first_different_step": first}


def _difference(x: float, y: float) -> float:
    """Returns how far two losses are apart, in nats: infinity if one of them is not a number, 0 if neither is."""
    if math.isnan(x) or math.isnan(y):
        return 0.0 if math.isnan(x) and math.isnan(y) else math.inf
    return abs(x - y)


def _print(names: list[str], settings: dict[str, list[Any]], figures: list[dict[str, float | None]]) -> None:
    from shardwise.config.keys import all_keys
    from shardwise.config.values import shown
    from shardwise.config.write import with_unit

    known = all_keys()

    def text(key: str, value: Any) -> str:
        return "-" if value is None else with_unit(known[key], value) if key in known else shown(value)

    rows = {key: [text(key, value) for value in row] for key, row in settings.items()}
    for key in figures[0]:
        rows[key] = ["-" if (value := one[key]) is None else f"{value:.6g}" for one in figures]
    least = 14 if len(names) == 2 else 8
    widths = [max(least, len(name), *(len(row[n]) for row in rows.values())) for n, name in enumerate(names)]
    label = max([18, *map(len, settings)])
    for key, row in {"": names, **rows}.items():
        print(f"{key:<{label}}  " + "  ".join(f"{value:>{wide}}" for value, wide in zip(row, widths)))


def _print_losses(name: str, shared: dict[str, Any]) -> None:
    if not shared["shared_steps"]:
        say(f"losses   {name}no step in common")
    elif shared["first_different_step"] is None:
        say(f"losses   {name}equal to the last digit over {shared['shared_steps']} steps")
    else:
        say(
            f"losses   {name}differ by at most {shared['largest_difference']:.2g} over {shared['shared_steps']} shared "
            f"steps, first at step {shared['first_different_step']}"
        )
