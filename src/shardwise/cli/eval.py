"""`shardwise eval` computes loss and perplexity on held-out text, in one process."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import is_live, say

if TYPE_CHECKING:
    from shardwise.run.weights import StoredWeights

HELP = "Loss and perplexity of a run or a model directory on its held-out text, or on data.source=…"
CONFIG = True
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a run, `last`, a checkpoint directory, a model directory or a hub id")
    parser.add_argument("--batches", type=int, default=None, metavar="N", help="at most N batches of 8 (default: all)")
    parser.add_argument(
        "--split",
        choices=["validation", "train"],
        default="validation",
        help="which documents (default: held-out ones)",
    )
    parser.add_argument(
        "--tasks", metavar="NAMES", help="benchmarks of lm-evaluation-harness instead, such as arc_easy"
    )
    parser.add_argument("--task-dir", metavar="DIR", help="with --tasks: where task files of your own are")
    parser.add_argument("--shots", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: at most N questions of each task")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="with --tasks: texts scored together")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    _check(args)
    from shardwise.config.load import load_config
    from shardwise.data.corpus import open_corpus
    from shardwise.run.build import CACHE
    from shardwise.run.weights import find_weights

    weights = find_weights(args.source, args.runs)
    if args.tasks:
        return _tasks(args, weights)
    config = load_config(weights.run.config if weights.run else None, args.overrides).config
    home = weights.run.path.parent if weights.run else Path(config.run.dir)
    corpus = open_corpus(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        vocab=weights.spec.vocab,
        model_dir=weights.tokenizer_dir,
        cache_dir=home / CACHE,
        progress=True,
        can_mask=weights.can_mask,
    )
    sequences = corpus.validation if args.split == "validation" else corpus.train

    from shardwise.run.device import best_device
    from shardwise.run.evaluate import EVAL_BATCH, evaluate, perplexity, plain_sums

    device = best_device()
    batch = min(EVAL_BATCH, max(1, sequences.num_sequences))
    model = weights.load(device)
    loss = evaluate(
        plain_sums(model),
        sequences,
        global_batch=batch,
        rows=range(batch),
        micro_batch=batch,
        device=device,
        max_rows=None if args.batches is None else EVAL_BATCH * args.batches,
        progress=is_live() and not args.json,
    )
    if loss is None:
        raise UserError(
            "there is nothing to evaluate on",
            why="the corpus has no held-out part",
            fix="data.validation_fraction=0.05, or --split train",
        )
    report = {
        "schema": 1,
        "source": args.source,
        "data": corpus.description,
        "split": args.split,
        "sequences": sequences.num_sequences,
        "loss": loss,
        "perplexity": perplexity(loss),
        "unigram_loss": corpus.unigram_entropy(),
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        say(f"eval     {args.source} on {corpus.description} ({args.split}, {sequences.num_sequences} sequences)")
        say(
            f"loss     {loss:.4f} nats per token (unigram {report['unigram_loss']:.4f}), perplexity "
            f"{perplexity(loss):.3f}"
        )
    return Exit.DONE


def _tasks(args: argparse.Namespace, weights: StoredWeights) -> int:
    """Prints what the model reaches in each benchmark and returns the exit code."""
    from shardwise.cli.eval_tasks import run_tasks
    from shardwise.run.device import best_device

    found = run_tasks(args, weights.load(best_device()), weights.tokenizer(), weights.spec.max_seq_len)
    if args.json:
        print(json.dumps({"schema": 1, "source": args.source, "tasks": found}, indent=1))
        return Exit.DONE
    for name, metrics in found.items():
        shown = ", ".join(f"{key.removesuffix(',none')} {value:.4g}" for key, value in metrics.items())
        say(f"task     {name}: {shown}")
    return Exit.DONE


def _check(args: argparse.Namespace) -> None:
    alone = {"--task-dir": args.task_dir, "--shots": args.shots, "--limit": args.limit}
    given = [name for name, value in alone.items() if value is not None]
    if args.tasks is None and given:
        raise UserError(
            f"`{given[0]}` needs --tasks",
            why="it says how benchmarks are put; a loss on text has no use for it",
            fix=f"add --tasks arc_easy, or leave {given[0]} out",
        )
    if args.tasks is not None:
        if not args.tasks.strip(" ,"):
            raise UserError("--tasks names no benchmark", why="its value is empty", fix="--tasks arc_easy")
        from shardwise.cli.eval_tasks import check_harness

        check_harness()
        if args.overrides or args.batch < 1 or min(args.shots or 0, (args.limit or 1) - 1) < 0:
            raise UserError(
                "--tasks with these words measures nothing",
                why="a benchmark has its own data, --shots is 0 or more, --limit and --batch are 1 or more",
                fix="shardwise eval RUN --tasks arc_easy --limit 100",
            )
    if args.batches is not None and args.batches < 1:
        raise UserError(
            f"--batches {args.batches} evaluates nothing",
            why="one batch is needed at least",
            fix="leave it out for all",
        )
    for word in args.overrides:
        key = word.split("=", 1)[0]
        if not key.startswith("data.") and key != "train.seq_len":
            raise UserError(
                f"`{key}` cannot be used with `eval`",
                why="the model is as it was trained; eval reads [data] and train.seq_len",
                fix="leave it out",
            )
