"""`shardwise eval --tasks`: benchmarks of lm-evaluation-harness on a model that shardwise holds, in one process.

The harness owns the tasks, their prompts and metrics. It asks three things of a model, which are answered here: how
likely a continuation is, how likely a whole text, and what the model writes until a stop string.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError
from shardwise.spec.extras import TASKS_INSTALL

if TYPE_CHECKING:
    from shardwise.data.tokenizer import Tokenizer

MAX_NEW = 256
"""Tokens that are written at most where a task does not say."""


def check_harness() -> None:
    """Refuses --tasks where the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs lm-evaluation-harness, which is not installed",
            why="the benchmarks, their prompts and metrics are the harness's",
            fix=TASKS_INSTALL,
        )


def run_tasks(args: argparse.Namespace, model: Any, tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    """Returns the metrics of each task by its name, as the harness reports them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=args.task_dir)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise UserError(
            f"there is no task {', '.join(f'`{name}`' for name in unknown) or 'given'}",
            why=f"the harness knows {len(manager.all_tasks)} tasks, and those of --task-dir",
            fix="`lm_eval ls tasks` lists them",
        )
    asked = _for_harness(model, tokenizer, max_len, args.batch)
    try:
        found = lm_eval.simple_evaluate(
            model=asked, tasks=names, num_fewshot=args.shots, limit=args.limit, task_manager=manager, bootstrap_iters=0
        )
    except (OSError, ConnectionError) as error:  # the data of most tasks is on the hub
        first = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "load it where there is a network; it is then kept in Hugging Face's cache"
        raise UserError("the data of a task cannot be loaded", why=first, fix=fix) from None
    return {
        name: {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        for name, metrics in found["results"].items()
    }


def _for_harness(model: Any, tokenizer: Tokenizer, max_len: int, batch: int) -> Any:
    """Returns the model as the harness wants it; its class is the harness's, so it is made here."""
    from lm_eval.api.model import LM

    from shardwise.cli.until_stop import UntilStop
    from shardwise.run.generate import Sampling, generate
    from shardwise.run.score import score_continuations

    class HarnessModel(LM):
        """Answers the harness from a plain model."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            rows = [split_pair(tokenizer, *request.args) for request in requests]
            scores = score_continuations(model, rows, max_len, batch)
            return [(score.log_probability, score.is_greedy) for score in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                windows = windows_of([tokenizer.separator, *tokenizer.encode(request.args[0])], max_len)
                scores = score_continuations(model, windows, max_len, batch)
                found.append(sum(score.log_probability for score in scores))
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._written(*request.args) for request in requests]

        def _written(self, context: str, settings: dict[str, Any]) -> str:
            stops = settings.get("until") or []
            until = UntilStop([stops] if isinstance(stops, str) else [stop for stop in stops if stop])
            max_new = int(settings.get("max_gen_toks", MAX_NEW))
            heat = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
            prompt = (tokenizer.encode(context) or [tokenizer.separator])[-max(1, max_len - max_new) :]
            text, stream = "", tokenizer.stream()
            for token in generate(model, prompt, max_new, Sampling(heat, 1.0), frozenset({tokenizer.separator})):
                text += until.push(stream.push(token))
                if until.has_ended:
                    return text
            return text + until.push(stream.finish()) + until.finish()

    return HarnessModel()


def split_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Returns the ids of both, cut where the context alone ends; spaces at its end belong to what follows, as
    tokenizers have them."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before, whole = list(tokenizer.encode(context)), list(tokenizer.encode(context + continuation))
    return before or [tokenizer.separator], whole[len(before) :]


def windows_of(ids: list[int], max_len: int) -> list[tuple[list[int], list[int]]]:
    """Returns (context, continuation) pairs in which every id but the first is scored once, each after one id of
    context and what stands before it in its window."""
    return [(ids[at : at + 1], ids[at + 1 : at + 1 + max_len]) for at in range(0, len(ids) - 1, max_len)]
