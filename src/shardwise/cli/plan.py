"""`shardwise plan` ranks layouts for a model on a cluster, each explained and written as a config file that `train`
takes."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit, UserError
from shardwise.terminal import patience

if TYPE_CHECKING:
    from shardwise.plan.answer.answer import Answer
    from shardwise.plan.answer.question import Question

HELP = """Find the fastest layouts that fit, predict them, say why, and write each as a config file for `train`.

MODEL is a preset (`shardwise explain presets`), a Hugging Face directory or a config.json. Words such as parallel.tp=4
are constraints."""
PATIENCE_S = 3.0
SEARCHING = "search   ...; large clusters and slow links take longest, and words such as parallel.tp=1 narrow it down"
CONFIG = True
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset, a Hugging Face directory, or a config.json")
    parser.add_argument(
        "--cluster", required=True, metavar="CLUSTER", help="4x8xh100, 4x8xh100:nic=50GB/s, `this`, or a TOML file"
    )
    parser.add_argument(
        "--seq", metavar="N", help="tokens per sequence, such as 8k; default: the model's own, at most 8k"
    )
    parser.add_argument(
        "--batch", metavar="TOKENS", help="tokens per optimizer step, such as 4M; default: usual for the model's size"
    )
    parser.add_argument("--tokens", metavar="N", help="tokens to train in all, such as 1T: adds days, cost and energy")
    parser.add_argument("--price", metavar="MONEY", help="price per GPU and hour, such as 2.50")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="rows to show and write (default: 5)")
    parser.add_argument("--why-not", metavar="LAYOUT", help='compare a layout or a part of one, such as "tp=8 pp=1"')
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help="nic=50GB/s, memory=141GB, gpus=64, seq=16k ...; repeatable",
    )
    parser.add_argument(
        "--within", metavar="TIME", help="the fewest GPUs that train --tokens in this time, such as 30d"
    )
    parser.add_argument(
        "--budget", metavar="MONEY", help="the fastest that trains --tokens for this much, such as 500k"
    )
    parser.add_argument("--fewest-gpus", action="store_true", help="the fewest GPUs that it fits on")
    parser.add_argument(
        "--as",
        dest="framework",
        metavar="FRAMEWORK",
        help="print the best layout that megatron, torchtitan, deepspeed or accelerate runs, as it reads it",
    )
    parser.add_argument("--out", metavar="DIR", help="where the rows go (default: plans/MODEL-CLUSTER)")
    parser.add_argument("--force", action="store_true", help="overwrite files there that were changed by hand")


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.plan_as import as_framework
    from shardwise.cli.plan_folder import digest_of, folder_of
    from shardwise.cli.plan_view import show
    from shardwise.interop.frameworks.export import check_framework, framework_named
    from shardwise.plan.answer.answer import answer, to_json
    from shardwise.plan.answer.question import ask
    from shardwise.plan.answer.what_if import change, what_if
    from shardwise.plan.answer.why import why_not

    if args.framework:
        check_framework(args.framework)
    if args.top < 1:
        raise UserError(f"--top {args.top} shows nothing", why="an answer needs a row", fix="--top 5")
    question = ask(
        args.model,
        args.cluster,
        seq=args.seq,
        batch=args.batch,
        tokens=args.tokens,
        price=args.price,
        words=args.overrides,
    )
    if args.framework:
        framework_named(args.framework, question.spec, question.job)
    within, budget = _inverse(args, question)
    for text in args.what_if:  # a slip is answered now, not after the search
        change(question, text)
    digest = digest_of(question, args.cluster)
    folder = folder_of(question, digest, args.out, args.force)  # refused now, not after the search
    narrow = bool(
        args.why_not or args.what_if or args.framework
    )  # asks for one thing: the rest of the story would take longer
    with patience(SEARCHING, PATIENCE_S), _not_collecting():
        made = answer(question, args.top, within=within, budget=budget, fewest=args.fewest_gpus, detail=not narrow)
        refused = why_not(made, args.why_not) if args.why_not else None
        changed = [what_if(question, text) for text in args.what_if]
        foreign = as_framework(made, args.framework) if args.framework else None
    files = _write(made, folder, digest, args.force)
    if args.json:
        report: dict[str, Any] = to_json(made, files)
        report["why_not"] = refused.to_dict() if refused else None
        report["what_if"] = [one.to_dict() for one in changed]
        report["as"] = foreign.to_dict() if foreign else None
        print(json.dumps(report, indent=1))
    elif foreign:
        print(foreign.exported.to_print(*foreign.title(made.rows[0].candidate, files[0])))
    else:
        show(made, files, refused, changed)
    return Exit.DONE


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Keeps the garbage collector from walking over what a search remembers: it makes hardly any cycles, and the walks
    took up to a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _inverse(args: argparse.Namespace, question: Question) -> tuple[float | None, float | None]:
    """Returns the seconds and the money that training may take. Both need to know how much is trained, one what it
    costs."""
    from shardwise.config.units import parse_money, parse_seconds
    from shardwise.config.values import read_amount

    within = read_amount("--within", args.within, parse_seconds, "30d") if args.within else None
    budget = read_amount("--budget", args.budget.lstrip("$€"), parse_money, "500k") if args.budget else None
    for option, value in (("--within", args.within), ("--budget", args.budget)):
        if value is not None and question.job.tokens is None:
            raise UserError(
                f"{option} {value} needs --tokens",
                why="days and costs follow from the tokens to train",
                fix="--tokens 1T",
            )
    if budget is not None and question.price is None:
        raise UserError(
            f"--budget {args.budget} needs --price", why="the cluster has no price per GPU-hour", fix="--price 2.50"
        )
    return within, budget


def _write(made: Answer, directory: Path, question: str, force: bool) -> list[Path]:
    from shardwise.plan.answer.answer import file_of
    from shardwise.plan.answer.plan_files import write_rows

    reasons = [f"not {region.what}: {region.reason}" for region in made.result.regions]
    texts = {
        f"{number}.toml": file_of(
            made.question, row, f"row {number} of {len(made.rows)}, question {question}", reasons if number == 1 else []
        )
        for number, row in enumerate(made.rows, 1)
    }
    return write_rows(directory, texts, force)
