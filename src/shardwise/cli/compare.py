"""`shardwise compare` sets two runs side by side, what differs in their configs first."""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir
    from shardwise.spec.schema import Config

HELP = "Two runs side by side: what differs in their configs, and their losses, speed and memory."
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a run directory, a name, or `last`")
    parser.add_argument("b", help="another run, named in the same way")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.rundir import find_run, to_json

    a, b = find_run(args.a, args.runs), find_run(args.b, args.runs)
    settings, figures, shared = _settings(a, b), {"a": _figures(a), "b": _figures(b)}, _shared_losses(a, b)
    if args.json:
        report = {
            "schema": 1,
            "a": str(a.path),
            "b": str(b.path),
            "settings": settings,
            "figures": figures,
            "losses": shared,
        }
        print(to_json(report, indent=1))
        return Exit.DONE
    _print(a, b, settings, figures, shared)
    return Exit.DONE


def _settings(a: RunDir, b: RunDir) -> dict[str, list[Any]]:
    """Returns the keys that differ, each with its value in both runs; None stands for one that is not set."""
    from shardwise.config.load import load_config

    left, right = _values(load_config(a.config).config), _values(load_config(b.config).config)
    keys = [*left, *(key for key in right if key not in left)]
    return {key: [left.get(key), right.get(key)] for key in keys if left.get(key) != right.get(key)}


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
    evaluations = [line["eval_loss"] for line in run.lines() if "eval_loss" in line]
    timed = steps[1:] or steps

    def middle(key: str) -> float | None:
        return statistics.median(line[key] for line in timed) if timed else None

    return {
        "steps": len(steps),
        "last loss": steps[-1]["loss"] if steps else None,
        "held-out loss": evaluations[-1] if evaluations else None,
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


def _print(a: RunDir, b: RunDir, settings: dict, figures: dict, shared: dict) -> None:
    from shardwise.config.values import shown

    width = max([len(a.name), len(b.name), 14])
    label = max([18, *(len(key) for key in settings)])
    print(f"{'':<{label}}  {a.name:>{width}}  {b.name:>{width}}")
    for key, values in settings.items():
        x, y = ("-" if value is None else shown(value) for value in values)
        print(f"{key:<{label}}  {x:>{width}}  {y:>{width}}")
    for key in figures["a"]:
        x, y = (f"{figures[side][key]:.6g}" if figures[side][key] is not None else "-" for side in "ab")
        print(f"{key:<{label}}  {x:>{width}}  {y:>{width}}")
    if not shared["shared_steps"]:
        print("losses   no step in common")
    elif shared["first_different_step"] is None:
        print(f"losses   equal to the last digit over {shared['shared_steps']} steps")
    else:
        print(
            f"losses   differ by at most {shared['largest_difference']:.2g} over {shared['shared_steps']} shared "
            f"steps, first at step {shared['first_different_step']}"
        )
