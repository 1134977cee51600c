"""Checks the rules of [parallel] that need no model: which degrees, schedules and switches go together.

Invariant: a config that passes may still be too much for its model or its machine (plan/resolve/degrees.py says), but
no two of its own keys contradict each other. Every `fix` is a setting that can be typed.
"""

from __future__ import annotations

import math

from shardwise.config.keys import Origins, where_written
from shardwise.config.values import shown
from shardwise.errors import UserError
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.schema import Config, ParallelConfig
from shardwise.terminal import counted

WITHOUT_PIPELINE = {"schedule": ("1f1b",), "virtual_stages": ("auto", 1), "split": ("auto",), "fill_bubbles": ("none",)}
"""Keys that mean nothing when pp is 1, and the values they may still have."""


def check_layout(config: Config, origins: Origins) -> None:
    parallel = config.parallel
    if parallel.dp != "auto" and parallel.replicate != "auto":
        check_replicas(parallel.dp, parallel.replicate, parallel.zero, origins)
    _context(config, origins)
    _sequence(config, origins)
    _experts_over_slices(config, origins)
    if degree(parallel.pp) == 1:
        _no_pipeline(parallel, origins)
    else:
        _virtual_stages(parallel, origins)
        _entries_of_split(parallel, origins)


def check_world(config: Config, world: int, origins: Origins) -> None:
    """Refuses degrees that do not fit `world` processes: dp x cp x tp x pp = world."""
    parallel = config.parallel
    degrees = {"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp, "pp": parallel.pp}
    fixed = {name: int(value) for name, value in degrees.items() if value != "auto"}
    needed = math.prod(fixed.values())
    if needed == world or (len(fixed) < len(degrees) and world % needed == 0):
        return
    said = [f"{name}={value}" for name, value in fixed.items() if value > 1] or ["dp=1"]
    exact = len(fixed) == len(degrees)
    fixes = [needed] if exact else [world // needed * needed, -(-world // needed) * needed]
    words = [f"--nproc {count}" for count in fixes if count]
    without_dp = needed // fixed.get("dp", 1)
    if "dp" in fixed and world % without_dp == 0:
        words.append(f"parallel.dp={world // without_dp}")
    many = counted(needed, "process", "processes") if exact else f"a multiple of {needed} processes"
    raise UserError(
        f"the layout needs {many}, there are {world}",
        why=" x ".join(said)
        + (f" = {needed}" if len(said) > 1 else "")
        + "; dp x cp x tp x pp must be the number of processes",
        fix=" or ".join(words),
        where=where_written(origins, *(f"parallel.{name}" for name in fixed)),
    )


def check_replicas(dp: int, replicate: int, zero: int | str, origins: Origins) -> None:
    """Refuses replicas that do not divide dp: dp = replicas x shards. Without ZeRO nothing is sharded: every
    data-parallel rank is a replica."""
    where = where_written(origins, "parallel.dp", "parallel.zero", "parallel.replicate")
    if dp % replicate:
        below = max(n for n in range(1, min(replicate, dp + 1)) if dp % n == 0)
        above = min((n for n in range(replicate, dp + 1) if dp % n == 0), default=below)
        raise UserError(
            f"`parallel.replicate = {replicate}` does not divide dp={dp}",
            why="dp = replicas x shards, so the replicas must divide it",
            fix=" or ".join(f"parallel.replicate={n}" for n in ([dp] if zero == 0 else sorted({below, above}))),
            where=where,
        )
    if zero == 0 and replicate != dp:
        raise UserError(
            f"`parallel.replicate = {replicate}` leaves shards, but `parallel.zero = 0` shards nothing",
            why=f"dp={dp} over {counted(replicate, 'replica')} makes {dp // replicate} shards of each",
            fix=f"parallel.zero=1 or parallel.replicate={dp}",
            where=where,
        )


def degree(asked: int | str) -> int:
    """Returns a degree of tp, pp or cp; it is 1 when nobody sets it."""
    return 1 if asked == "auto" else int(asked)


def stages_per_rank(parallel: ParallelConfig) -> int:
    if parallel.virtual_stages != "auto":
        return int(parallel.virtual_stages)
    return SCHEDULES[parallel.schedule].usual_stages if degree(parallel.pp) > 1 else 1


def _context(config: Config, origins: Origins) -> None:
    cp, kind, seq_len = degree(config.parallel.cp), config.parallel.cp_kind, config.train.seq_len
    parts = 2 * cp if kind == "ring" else cp
    if cp == 1 or seq_len % parts == 0:
        return
    lengths = [n for n in (seq_len // parts * parts, -(-seq_len // parts) * parts) if n]
    why = f"a ring gives each of the cp={cp} ranks one piece from the front and one from the back: {parts} equal pieces"
    raise UserError(
        f"`train.seq_len = {seq_len}` cannot be shared by cp={cp} ranks ({kind})",
        why=why if kind == "ring" else f"each of the cp={cp} ranks takes train.seq_len / cp tokens",
        fix=" or ".join(f"train.seq_len={n}" for n in lengths),
        where=where_written(origins, "train.seq_len", "parallel.cp"),
    )


def _experts_over_slices(config: Config, origins: Origins) -> None:
    parallel = config.parallel
    if degree(parallel.ep) == 1 or degree(parallel.tp) == 1:
        return
    seq_len, parts = config.train.seq_len, degree(parallel.tp) * degree(parallel.cp)
    if parallel.sequence is not False and seq_len % parts == 0:
        return
    changes = ["parallel.sequence=auto"] * (parallel.sequence is False)
    changes += [f"train.seq_len={-(-seq_len // parts) * parts}"] * (seq_len % parts > 0)
    raise UserError(
        f"ep={parallel.ep} with tp={parallel.tp} needs sequence parallelism",
        why="each rank sends its own tokens to the experts, so tensor-parallel ranks must share the tokens between "
        "them",
        fix=f"{' '.join(changes)} or parallel.ep=1",
        where=where_written(origins, "parallel.ep", "parallel.tp", "parallel.sequence", "train.seq_len"),
    )


def _sequence(config: Config, origins: Origins) -> None:
    if config.parallel.sequence is not True:
        return
    tp, seq_len = degree(config.parallel.tp), config.train.seq_len
    if tp == 1:
        raise UserError(
            "`parallel.sequence = true` without tensor parallelism",
            why="sequence parallelism splits what tensor-parallel ranks would all hold, and tp is 1",
            fix="parallel.sequence=auto, or set parallel.tp",
            where=where_written(origins, "parallel.tp", "parallel.sequence"),
        )
    cp = degree(config.parallel.cp)
    parts = tp * cp
    if seq_len % parts:
        lengths = [n for n in (seq_len // parts * parts, -(-seq_len // parts) * parts) if n]
        taken = f"each of the tp={tp} ranks takes train.seq_len / tp tokens"
        raise UserError(
            f"`parallel.sequence = true` cannot cut {seq_len} tokens into {parts} equal parts",
            why=taken if cp == 1 else f"the cp={cp} x tp={tp} ranks take train.seq_len / {parts} tokens each",
            fix=" or ".join(["parallel.sequence=false", *(f"train.seq_len={n}" for n in lengths)]),
            where=where_written(origins, "train.seq_len", "parallel.tp", "parallel.sequence"),
        )


def _no_pipeline(parallel: ParallelConfig, origins: Origins) -> None:
    wrong = [name for name, fine in WITHOUT_PIPELINE.items() if getattr(parallel, name) not in fine]
    if wrong:
        raise UserError(
            f"`parallel.{wrong[0]} = {shown(getattr(parallel, wrong[0]))}` without a pipeline",
            why="it says how the ranks of a pipeline work, and pp is 1",
            fix=" ".join(f"parallel.{name}={WITHOUT_PIPELINE[name][0]}" for name in wrong) + ", or set parallel.pp",
            where=where_written(origins, "parallel.pp", *(f"parallel.{name}" for name in wrong)),
        )


def _virtual_stages(parallel: ParallelConfig, origins: Origins) -> None:
    schedule, stages = SCHEDULES[parallel.schedule], stages_per_rank(parallel)
    if schedule.takes_stages(stages):
        return
    instead = f" or parallel.schedule={schedule.instead}" if schedule.instead else ""
    raise UserError(
        f"`parallel.schedule = {shown(schedule.name)}` does not work with `parallel.virtual_stages = {stages}`",
        why=schedule.why_stages,
        fix=f"parallel.virtual_stages={schedule.usual_stages}{instead}",
        where=where_written(origins, "parallel.schedule", "parallel.virtual_stages"),
    )


def _entries_of_split(parallel: ParallelConfig, origins: Origins) -> None:
    pp, stages = degree(parallel.pp), stages_per_rank(parallel)
    if isinstance(parallel.split, str) or len(parallel.split) == pp * stages:
        return
    stages_said = f"pp={pp}" + (f" x virtual_stages={stages}" if stages > 1 else "")
    raise UserError(
        f"`parallel.split = {shown(parallel.split)}` has {len(parallel.split)} entries for {pp * stages} stages",
        why=f"it lists the layers of each stage, and there are {stages_said} of them",
        fix="parallel.split=auto or parallel.split=even",
        where=where_written(origins, "parallel.pp", "parallel.virtual_stages", "parallel.split"),
    )
