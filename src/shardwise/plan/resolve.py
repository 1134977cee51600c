"""From what the user asked for to a `Plan`: fills every `auto` and refuses what cannot work, before torch is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.cluster.machine import Machine
from shardwise.config.schema import Config, ParallelConfig
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.predict import predict_memory

DEFAULT_STEPS = 340
DEFAULT_GLOBAL_BATCH = 8
MAX_DEFAULT_CPU_RANKS = 4  # beyond this, ranks on one CPU mostly wait for its memory


@dataclass(frozen=True)
class Resolved:
    """A plan, and the config with the same values filled in for people to read."""

    plan: Plan
    config: Config
    chosen: tuple[str, ...]  # the keys that the planner filled


def resolve(config: Config, spec: ModelSpec, machine: Machine, nproc: int | None, num_sequences: int) -> Resolved:
    """`num_sequences`: sequences in one pass over the training data, which `epochs` needs."""
    train, parallel, memory = config.train, config.parallel, config.memory
    if spec.positions == "learned" and train.seq_len > spec.max_seq_len:
        raise UserError(
            f"train.seq_len = {train.seq_len} is longer than {spec.name} can read",
            why=f"its learned positions end at {spec.max_seq_len}",
            fix=f"train.seq_len={spec.max_seq_len}",
        )
    device = "cuda" if machine.gpus else "cpu"
    global_batch = train.global_batch or _from_tokens(train.global_batch_tokens, train.seq_len) or DEFAULT_GLOBAL_BATCH
    dp, why_dp = _choose_dp(parallel, machine, device, nproc, global_batch)
    rows = global_batch // dp
    micro_batch = rows if train.micro_batch == "auto" else int(train.micro_batch)
    if micro_batch > rows:
        raise UserError(
            f"train.micro_batch = {micro_batch} is larger than a rank's share of the batch",
            why=f"a global batch of {global_batch} over dp={dp} leaves {rows} sequences per rank",
            fix=f"train.micro_batch={rows}, or train.global_batch={micro_batch * dp}",
        )
    plan = Plan(
        device=device,
        precision=_choose_precision(memory.precision, device),
        seq_len=train.seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        num_steps=_num_steps(config, global_batch, num_sequences),
        threads_per_rank=max(1, machine.cores // dp) if device == "cpu" else max(1, min(4, machine.cores // dp)),
        reason=why_dp,
        dp=dp,
    )
    limit = rank_memory_limit(config, machine, plan)
    if train.micro_batch == "auto":  # a first guess by the formula; the run measures and corrects it
        sizes = [n for n in range(rows, 0, -1) if rows % n == 0]
        fitting = (n for n in sizes if _needed(spec, replace(plan, micro_batch=n), config) <= 0.9 * limit)
        plan = replace(plan, micro_batch=next(fitting, 1))
    _refuse_what_cannot_fit(spec, plan, config, limit)
    return Resolved(plan, *_fill(config, plan))


def rank_memory_limit(config: Config, machine: Machine, plan: Plan) -> int:
    """Bytes one rank may use: the user's limit, a GPU's memory, or an equal share of the machine's."""
    if config.memory.limit != "auto":
        return int(config.memory.limit)
    if plan.device == "cuda":
        return min(gpu.memory_bytes for gpu in machine.gpus)
    return machine.memory_bytes // plan.world


def _choose_dp(
    parallel: ParallelConfig, machine: Machine, device: str, nproc: int | None, global_batch: int
) -> tuple[int, str]:
    if nproc and parallel.dp not in ("auto", nproc):
        raise UserError(
            f"--nproc {nproc} does not match parallel.dp = {parallel.dp}",
            why="with data parallelism every process is one replica",
            fix=f"drop one of them, or say --nproc {parallel.dp}",
        )
    asked = nproc or (parallel.dp if parallel.dp != "auto" else None)
    if asked is None:
        available = len(machine.gpus) if device == "cuda" else min(machine.cores, MAX_DEFAULT_CPU_RANKS)
        dp = max(n for n in range(1, max(1, available) + 1) if global_batch % n == 0)
        reason = f"one replica per {'GPU' if device == 'cuda' else 'core'}, {dp} in all"
        return dp, reason if dp > 1 else "one device: nothing to split"
    dp = int(asked)
    if device == "cuda" and dp > len(machine.gpus):
        raise UserError(
            f"dp={dp} needs {dp} GPUs, this machine has {len(machine.gpus)}",
            why="each data-parallel rank needs its own GPU",
            fix=f"--nproc {len(machine.gpus)}",
        )
    if global_batch % dp:
        near = [n for n in (global_batch // dp * dp, -(-global_batch // dp) * dp) if n]
        raise UserError(
            f"a global batch of {global_batch} does not divide over dp={dp}",
            why="every rank takes the same number of sequences",
            fix=" or ".join(f"train.global_batch={n}" for n in near),
        )
    return dp, "as asked"


def _choose_precision(asked: str, device: str) -> str:
    if asked == "fp64" and device == "cuda":
        raise UserError(
            "memory.precision = fp64 is for CPUs only", why="it exists for proofs", fix="memory.precision=fp32"
        )
    return "fp32" if asked == "auto" else asked


def _from_tokens(tokens: int | None, seq_len: int) -> int | None:
    return tokens // seq_len if tokens else None


def _num_steps(config: Config, global_batch: int, num_sequences: int) -> int:
    train = config.train
    if train.tokens:
        return math.ceil(train.tokens / (global_batch * train.seq_len))
    if train.epochs:
        return max(1, math.ceil(train.epochs * num_sequences / global_batch))
    return train.steps or DEFAULT_STEPS


def _needed(spec: ModelSpec, plan: Plan, config: Config) -> int:
    return sum(predict_memory(spec, plan, config.optimizer.name).values())


def _refuse_what_cannot_fit(spec: ModelSpec, plan: Plan, config: Config, limit: int) -> None:
    parts = predict_memory(spec, plan, config.optimizer.name)
    if sum(parts.values()) <= limit:
        return
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    raise UserError(
        f"{spec.name} does not fit: {format_bytes(sum(parts.values()))} per rank of {format_bytes(limit)}",
        why=f"{plan.layout} with micro-batch {plan.micro_batch} holds {largest}",
        fix="a smaller model.preset, train.seq_len, train.micro_batch=1, or optimizer.name=sgd; "
        "splitting the model over ranks is not available yet",
        code=Exit.OUT_OF_MEMORY,
    )


def _fill(config: Config, plan: Plan) -> tuple[Config, tuple[str, ...]]:
    """The config as it will run: what the user left open now holds the plan's value. `micro_batch` stays open: the run
    measures it at every start, and plan.json holds the answer."""
    filled = replace(
        config,
        train=replace(
            config.train,
            steps=config.train.steps if (config.train.tokens or config.train.epochs) else plan.num_steps,
            global_batch=None if config.train.global_batch_tokens else plan.global_batch,
        ),
        parallel=replace(config.parallel, dp=plan.dp, zero=plan.zero, tp=1, cp=1, pp=1, ep=1, layout=None),
        memory=replace(config.memory, precision=plan.precision),
    )
    sections = ("train", "parallel", "memory")
    chosen = tuple(
        f"{section}.{key}"
        for section in sections
        for key in getattr(config, section).__dataclass_fields__
        if getattr(getattr(config, section), key) != getattr(getattr(filled, section), key)
    )
    return filled, chosen
