"""`shardwise rehearse` runs the program of every class of ranks without its machines and matches all calls."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING

from shardwise.errors import Exit, UserError
from shardwise.terminal import patience, say

if TYPE_CHECKING:
    from shardwise.checkpoint.store import Checkpoint
    from shardwise.rehearse.program import DiskUse
    from shardwise.rehearse.question import RehearsalQuestion
    from shardwise.rehearse.rehearsal import Rehearsal
    from shardwise.spec.prediction import Prediction

HELP = (
    "Run the real program of every class of ranks of a plan on tensors without values, for a cluster of any size: are "
    "all calls matched, does every stage fit, is everything held and trained on once? Exit 1 if not, 3 if it does not "
    "fit."
)
CONFIG = True
REPORTS = True
MOST_STAGES = 8  # in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a TOML file that `train` takes; without one, the default run")
    parser.add_argument("--nproc", "--nproc-per-node", type=int, metavar="N", help="processes of the real job")
    parser.add_argument("--cluster", metavar="CLUSTER", help="its machines, as `plan` takes them (default: the plan's)")
    parser.add_argument("--resume", metavar="RUN", help="also: can the job go on from this run's newest checkpoint?")


def run(args: argparse.Namespace) -> int:
    from shardwise.cli.train import check_nproc
    from shardwise.cluster.describe.machine import usable_cores
    from shardwise.config.load import load_config
    from shardwise.private_names import check_rehearsal_names
    from shardwise.rehearse.question import ask_rehearsal

    if args.nproc is not None:
        check_nproc(args.nproc)
    loaded = load_config(args.config, args.overrides)
    question = ask_rehearsal(loaded, args.config, args.nproc, args.cluster)
    plan = question.plan
    if not args.json:
        count = plan.num_microbatches
        say(f"layout   {plan.layout}, {count} micro-batch{'es' if count > 1 else ''} per step")
        say(f"model    {question.spec.name} on {plan.world:,} of {question.cluster.name}")
    check_rehearsal_names()  # before what stands in for tensors is loaded
    from shardwise.rehearse.even_routing import assumed
    from shardwise.rehearse.perform import RehearsedJob
    from shardwise.rehearse.prices import planner_prices
    from shardwise.rehearse.rehearsal import rehearse, summary

    if question.spec.is_moe and not args.json:
        say(f"assumed  {assumed(question.spec, plan)}")
    config = question.config
    job = RehearsedJob(
        question.spec,
        plan,
        config.optimizer,
        config.adapter,
        config.train.clip,
        config.train.seed,
        "sdpa" if question.spec.is_ours else config.model.attention,
        documents=config.data.document_mask is True,
        device=question.on_cluster.device,
    )
    prices = planner_prices(question.spec, question.cluster, question.job, question.on_cluster)
    checkpoint = _checkpoint(args.resume, config.run.dir) if args.resume else None
    with patience("rehearsing one rank of every class ...", after_s=2.0):
        found = rehearse(job, question.limit, prices, checkpoint, usable_cores(), room=question.room)
    if args.json:
        print(json.dumps({"schema": 1, **summary(found), **_beside(question, found)}))
    else:
        _show(question, found)
    if found.holds:
        return Exit.DONE
    return Exit.OUT_OF_MEMORY if all(fault.kind == "memory" for fault in found.faults) else Exit.FOUND_WRONG


def _checkpoint(name: str, runs: str) -> Checkpoint:
    from shardwise.checkpoint import store
    from shardwise.run.rundir import find_run

    run = find_run(name, runs)
    checkpoint, _ = store.newest_good(run.checkpoints, verify=False)
    if checkpoint is None:
        raise UserError(f"{run.path} has no checkpoint", why="none was committed", fix="leave out --resume")
    return checkpoint


def _beside(question: RehearsalQuestion, found: Rehearsal) -> dict[str, object]:
    """Returns what was predicted, for programs."""
    from shardwise.rehearse.even_routing import assumed

    return {
        "cluster": question.cluster.name,
        "assumed": [assumed(question.spec, question.plan)] if question.spec.is_moe else [],
        "limit_bytes": question.limit,
        "predicted": {"memory_bytes": _tensor_bytes(question.prediction), "step_s": question.prediction.step_s},
        "step_s": _step_seconds(question, found),
    }


def _step_seconds(question: RehearsalQuestion, found: Rehearsal) -> float:
    from shardwise.rehearse.prices import not_simulated

    return found.step_s + not_simulated(question.prediction.step) if found.step_s else 0.0


def _show(question: RehearsalQuestion, found: Rehearsal) -> None:
    from shardwise.config.units import format_bytes, format_seconds

    if found.programs:
        _stages(found)
        _messages(found)
        fullest = found.programs[found.fullest]
        held, tensors = format_bytes(fullest.peak), _tensor_bytes(question.prediction)
        say(
            f"memory   {held} of {format_bytes(question.limit)} on rank {fullest.rank}, in {fullest.moment}; "
            f"predicted {format_bytes(tensors)} ({fullest.peak / tensors - 1:+.0%})"
        )
        _elsewhere(fullest.host, fullest.disk)
        if seconds := _step_seconds(question, found):
            predicted = question.prediction.step_s
            say(
                f"step     {format_seconds(seconds)} on a simulated clock with the planner's prices; "
                f"predicted {format_seconds(predicted)} ({seconds / predicted - 1:+.0%})"
            )
    if question.on_cluster.compile != "none":
        say("note     compiled blocks are rehearsed operation by operation: they hold no more than this")
    for fault in found.faults:
        say(str(fault))
    count, ranks = len(found.classes.first), question.plan.world
    what = f"{count} class{'es' if count > 1 else ''} of {ranks:,} rank{'s' if ranks > 1 else ''}"
    if found.holds:
        calls = sum(found.calls.values())
        say(f"REHEARSED ok: {what}, {calls:,} calls of a step matched, in {format_seconds(found.seconds)}")
    else:
        say(f"REHEARSED {what} in {format_seconds(found.seconds)}: {len(found.faults)} found wrong")


def _elsewhere(host: int, disk: DiskUse) -> None:
    """Prints what the fullest rank has offloaded."""
    from shardwise.config.units import format_bytes

    if host:
        say(f"offload  {format_bytes(host)} of that rank in CPU memory")
    if disk.space:
        read, written = format_bytes(disk.read), format_bytes(disk.written)
        say(f"disk     {format_bytes(disk.space)} of that rank; a step reads {read} and writes {written}")


def _tensor_bytes(prediction: Prediction) -> int:
    """Returns the predicted bytes of tensors: a rehearsal has no process and no allocator around them."""
    return prediction.memory_bytes - sum(prediction.memory.get(part, 0) for part in ("process", "allocator"))


def _messages(found: Rehearsal) -> None:
    """Prints what all ranks call in a step, the axis that moves most first."""
    from shardwise.config.units import format_bytes

    by_axis: dict[str, list[str]] = {}
    total = Counter[str]()
    for (axis, op), calls in sorted(found.calls.items(), key=lambda one: -found.sent[one[0]]):
        if op != "receive":  # as many as sends
            by_axis.setdefault(axis, []).append(f"{calls:,} {op} of {format_bytes(found.sent[axis, op] / calls)}")
            total[axis] += found.sent[axis, op]
    for axis, _ in total.most_common():
        say(f"calls    {axis:<10} {', '.join(by_axis[axis])}")


def _stages(found: Rehearsal) -> None:
    """Prints the fullest class of each stage, those stages first that hold most."""
    from shardwise.config.units import format_bytes

    plan, ranks, fullest = found.job.plan, Counter[int](), dict[int, int]()
    for number, program in enumerate(found.programs):
        stage = plan.coordinates(program.rank).pp
        ranks[stage] += len(found.classes.ranks(number))
        if program.peak > found.programs[fullest.setdefault(stage, number)].peak:
            fullest[stage] = number
    order = sorted(fullest, key=lambda stage: -found.programs[fullest[stage]].peak)
    for stage in order[:MOST_STAGES]:
        program = found.programs[fullest[stage]]
        say(
            f"stage {stage:<3}{ranks[stage]:,} rank{'s' if ranks[stage] > 1 else ''}, {len(program.calls):,} calls "
            f"each; at most {format_bytes(program.peak)}, on rank {program.rank} in {program.moment}"
        )
    if len(order) > MOST_STAGES:
        say(f"         {len(order) - MOST_STAGES} more stages hold less; --json has every class")
