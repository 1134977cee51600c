"""Explains that a rank ran out of memory: what it held and by what, how far over it was, and what to type so that the
run fits.

The changes are those of plan/resolve/fit.py, for a job that takes as much more than predicted as this one did. Read
next: memory/account.py, which saw the moment.
"""

from __future__ import annotations

from shardwise.cluster.describe.machine import this_machine
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.memory.points import OverLimit
from shardwise.plan.layouts.remedies import Remedy
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.resolve.fit import needed_memory, ways_to_fit
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.usual import plan_of
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import FREE_TO_CHANGE, RunDir
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

NOTHING_FITS = (
    "a smaller model or train.seq_len, or more ranks to split it over (parallel.tp, parallel.pp, parallel.cp)"
)


def out_of_memory(
    error: BaseException, run: RunDir, ranks: Ranks, config: Config, plan: Plan, spec: ModelSpec, limit: int
) -> UserError:
    """Returns the error to show. `error` is what the account of memory raised (OverLimit), or the system where no
    account was open; `limit` is in bytes."""
    predicted = predict_memory(spec, plan, config.optimizer.name, config.adapter)
    if isinstance(error, OverLimit):
        what, why, scale = *_seen(error, ranks.rank), error.needed / max(1, sum(predicted.values()))
        why += f"; a whole step was predicted to need {format_bytes(sum(predicted.values()))}"
    else:
        said = str(error).splitlines()[0] if str(error) else "the system gave no more memory"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in predicted.items() if size)
        what, why, scale = f"out of memory on rank {ranks.rank}: {said}", f"predicted were {parts}", 1.1
    needed = needed_memory(spec, plan, config)
    scale = max(1.0, scale, 1.01 * limit / needed if needed < limit else 1.0)  # it did not fit, whatever was predicted
    saved = ("optimizer.name",) if any(run.checkpoints.glob("step-*")) else ()  # whose state is in the checkpoints
    asked = Asked(config, spec, this_machine().times(ranks.nodes), None)
    found = ways_to_fit(asked, plan, lambda other: plan_of(other, plan.num_steps), scale=scale, without=saved)
    return UserError(
        what,
        why=why,
        fix=" or ".join(_command(run, way) for way in found) or NOTHING_FITS,
        code=Exit.OUT_OF_MEMORY,
    )


def _seen(error: OverLimit, rank: int) -> tuple[str, str]:
    span = error.at.during
    where = "" if span is None else f" in {span.name}"
    if span is not None and span.microbatch is not None:
        where += f" of micro-batch {span.microbatch}" + (f", stage {span.stage}" if span.stage else "")
    over = f"{format_bytes(error.needed)} of {format_bytes(error.limit)}"
    over += f", {format_bytes(error.needed - error.limit)} over" if error.needed > error.limit else f" ({error.said})"
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in error.at.by_category().items() if size)
    rest = error.needed - error.at.total
    held += f", process {format_bytes(rest)}" if rest > 0 else ""
    largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in error.largest)
    return f"out of memory on rank {rank}{where}: {over}", f"it held {held}; largest: {largest}"


def _command(run: RunDir, way: Remedy) -> str:
    """Returns the command as it is typed. What changes the run's own numbers needs to be allowed."""
    guarded = [key for key in way.change if key.partition(".")[0] not in FREE_TO_CHANGE and not key.startswith("--")]
    return f"`{run.how_to_resume(*way.what.split(), allow=guarded)}` ({way.cost})"
