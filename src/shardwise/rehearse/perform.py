"""Rehearses one rank: its real program, built and trained as in a run, alone and on tensors without values.

The model is split by `parallelize_decoder` and two steps are made by `start_step`, as every run makes them; the second
one, with everything in place, is recorded: its calls, the FLOPs between them, and the bytes held at its fullest
moment. Five things are stood in for: process groups (stand_in.py), memory (sizes.py), a disk (no_disk.py), which expert
gets which token (even_routing.py), and the batch, whose rows are as many and as long as the plan's. Read next:
classes.py, which says for how many ranks one record stands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from shardwise.data.loader import StepBatch, TensorBatch, cut_microbatches, number_rows
from shardwise.interop.transformers.model import as_if_run
from shardwise.memory.account import Account
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.engine import Engine
from shardwise.parallel.mesh import Mesh
from shardwise.rehearse.even_routing import EvenRouting
from shardwise.rehearse.no_disk import NoDisk, uncounted
from shardwise.rehearse.program import Channel, HeldShard, Program
from shardwise.rehearse.repeats import NotRepeatable, Repeats
from shardwise.rehearse.sizes import Sizes
from shardwise.rehearse.spans import RehearsalClock, describe
from shardwise.rehearse.stand_in import Recorder, alone_as
from shardwise.run.memory_owners import owners_of
from shardwise.run.step import start_step
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

NUM_ANSWERS = 4  # of run/agreement.py: they travel with the norm
NUM_STEPS = 2


@dataclass(frozen=True)
class RehearsedJob:
    """What is rehearsed: the parts of a job that every rank has alike."""

    spec: ModelSpec
    plan: Plan
    optimizer: OptimizerConfig
    adapter: AdapterConfig
    clip: float | None
    seed: int
    attention: str = "sdpa"
    documents: bool = False  # batches say where documents begin
    device: str = "cpu"  # whose kernels save what backward needs


def perform(job: RehearsedJob, rank: int, *, repeats: bool = True) -> Program:
    """Returns the program of one rank of the plan. Without `repeats` every action is really run, however often."""
    return perform_alike(job, (rank,), repeats=repeats)[0]


def perform_alike(job: RehearsedJob, ranks: Sequence[int], *, repeats: bool = True) -> list[Program]:
    """Returns the programs of ranks whose stages are alike, at several places of a pipeline: the first one is built and
    run, the others go through their own lists of actions over its records."""
    began = time.perf_counter()
    try:
        theirs = nullcontext() if job.spec.is_ours or job.documents else as_if_run()
        with alone_as(ranks[0], job.plan.world) as recorder, theirs:
            sizes = Sizes(recorder.add_flops, job.device)
            engine = parallelize_decoder(
                job.spec,
                job.plan,
                ranks[0],
                torch.device("cpu"),
                job.attention,
                None,
                adapter=job.adapter,
                seed=job.seed,
                memory=sizes.only,
            )
            recorder.program.channels = _axes(engine.mesh)
            with sizes.only():
                programs = _train(job, engine, recorder, ranks if repeats else ranks[:1], repeats)
    except NotRepeatable:
        return [perform(job, rank, repeats=False) for rank in ranks]
    if not repeats:
        programs += [perform(job, rank, repeats=False) for rank in ranks[1:]]
    for program in programs:
        program.seconds = (time.perf_counter() - began) / len(programs)
    return programs


def _train(job: RehearsedJob, engine: Engine, recorder: Recorder, ranks: Sequence[int], repeats: bool) -> list[Program]:
    disk, clock = NoDisk(), RehearsalClock(recorder)
    optimizer = engine.optimizer(job.optimizer, disk=disk)
    clock.follow = EvenRouting(engine, job.device).follow
    owners = uncounted(disk, owners_of(engine, optimizer))
    account, program = Account(engine.mesh.device, owners, clock), recorder.program

    def step(number: int, plan: Plan) -> None:
        engine.follow(plan)
        start_step(
            engine,
            optimizer,
            _batch(engine.mesh, number, job.documents),
            num_targets=plan.tokens_per_step,
            lr=job.optimizer.peak_lr,
            clip=job.clip,
            clock=clock,
            ask=lambda: [0] * NUM_ANSWERS,
        )
        recorder.action_ends()

    step(1, _warm_up(job.plan))
    engine.follow(job.plan)
    recorder.records = True
    repeated = Repeats(engine, recorder, account, clock, disk) if repeats else None
    account.label(everything=True)
    account.begin()
    with account:
        before = disk.use
        step(NUM_STEPS, job.plan)
        program.disk = disk.use.since(before)
    peak = account.peak
    if repeated is not None:
        repeated.outside, peak = account.peak, repeated.peak
    program.memory = peak.by_category()
    program.moment = "" if peak.during is None else describe(peak.during)
    program.shards = [HeldShard(s.name, tuple(s.local.shape), s.local.requires_grad) for s in engine.shards]
    moved = [] if repeated is None else [repeated.moved(program, rank) for rank in ranks[1:]]
    for one in (program, *moved):
        one.host = _leave_device(job, one.memory)
    return [program, *moved]


def _leave_device(job: RehearsedJob, memory: dict[str, int]) -> int:
    """Takes what lies in CPU memory beside a GPU out of the bytes by category, and returns how many these are."""
    if job.device != "cuda" or job.plan.offload == "none":
        return 0
    away = ["optimizer", *(["parameters"] if job.plan.offload == "all" else [])]
    host = sum(memory[name] for name in away)
    memory |= dict.fromkeys(away, 0)
    return host


def _warm_up(plan: Plan) -> Plan:
    """Returns the plan of the first step, which only puts everything in its place: one micro-batch is enough. What is
    read ahead from a disk is learned from two."""
    count = min(2 if plan.offload == "all" else 1, plan.num_microbatches)
    return replace(plan, global_batch=plan.dp * plan.micro_batch * count)


def _batch(mesh: Mesh, step: int, has_documents: bool) -> StepBatch:
    """Returns this rank's rows of a step, cut as its loader cuts them (data/loader.py)."""
    plan, rows = mesh.plan, mesh.plan.rows(mesh.at.dp)
    tokens = torch.zeros(len(rows), plan.seq_len, dtype=torch.int64)
    documents = torch.zeros(len(rows), plan.seq_len, dtype=torch.int32) if has_documents else None
    whole = TensorBatch(tokens, tokens.clone(), documents, number_rows(step, rows))
    microbatches = cut_microbatches(whole, plan.micro_batch, plan.num_microbatches, plan.pp > 1)
    return StepBatch(step, microbatches, len(rows) * plan.seq_len)


def _axes(mesh: Mesh) -> dict[Channel, str]:
    """Returns the axis of every group of a mesh, by the words that its fields have."""
    fields = {"dp": mesh.dp, "shard": mesh.shard, "cp": mesh.cp, "tp": mesh.tp, "tokens": mesh.tokens, "pp": mesh.pp}
    fields |= {"same-kv": mesh.same_kv, "ends": mesh.ends}
    if mesh.fsdp is not None and mesh.fsdp.ndim == 2:
        fields = {"replicate": mesh.fsdp["replicate"].get_group()} | fields
    if mesh.expert is not None:
        fields |= {"ep": mesh.expert.group, "expert-dp": mesh.expert.replicas, "expert-shard": mesh.expert.shard}
    return {group.channel: name for name, group in fields.items() if group is not None}
