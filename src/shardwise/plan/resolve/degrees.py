"""The degree of every axis: what is set is checked against the model, the batch and the machine, for `train` and for
`plan`; what a run leaves open has its usual value.

    world = dp x cp x tp x pp        ep divides dp x cp x tp

What only depends on the config itself was checked when it was loaded (config/check_layout.py). Invariant: degrees that
leave this file multiply to the number of processes that will be started. Read next: refusal.py (how a fix is found),
usual.py (the rest of a run's usual layout), layouts/space.py (which other layouts there are).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.check_layout import check_replicas, check_world, degree, stages_per_rank
from shardwise.config.keys import Origins
from shardwise.config.values import shown
from shardwise.plan.layouts.parts import Grid
from shardwise.plan.resolve.refusal import Asked, Fix, Refusal, explained
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.schema import Config, TrainConfig
from shardwise.spec.split import even_split
from shardwise.terminal import counted

DEFAULT_GLOBAL_BATCH = 8
MAX_DEFAULT_CPU_RANKS = 4  # beyond this, ranks on one CPU mostly wait for its memory


class Degrees(NamedTuple):
    """The degrees of a run, its stages per rank, and why it has so many replicas."""

    grid: Grid
    virtual_stages: int
    reason: str  # why there are so many replicas


def choose_degrees(asked: Asked, origins: Origins) -> Degrees:
    """Returns the degrees of a run: those that are set, 1 for other axes, and as many replicas as there is room for."""
    try:
        return _choose(asked, origins)
    except Refusal as problem:
        raise explained(problem, asked, origins, lambda other: _choose(other, origins)) from None


def check_constraints(
    spec: ModelSpec, cluster: ClusterSpec, constraints: Mapping[str, Any], global_batch: int, seq_len: int
) -> None:
    """Refuses constraints of a search that no layout meets. Axes that are not among them are the search's to choose."""
    devices = (Gpu(cluster.device.name, cluster.device.memory, cluster.device.capability),) * cluster.world
    machine = Machine(cluster.world, cluster.host_share * cluster.world, devices, "")
    batch = {"train.global_batch": global_batch, "train.seq_len": seq_len}
    asked = Asked(Config(), spec, machine, None, cluster, f"--cluster {cluster.name}").changed({**constraints, **batch})
    try:
        _check_open(asked)
    except Refusal as problem:
        raise explained(problem, asked, {}, _check_open) from None


def global_batch_of(train: TrainConfig) -> int:
    """Returns the number of sequences per optimizer step."""
    if train.global_batch_tokens:
        return train.global_batch_tokens // train.seq_len
    return train.global_batch or DEFAULT_GLOBAL_BATCH


def _choose(asked: Asked, origins: Origins) -> Degrees:
    parallel, train = asked.config.parallel, asked.config.train
    tp, pp, cp, ep = (degree(getattr(parallel, axis)) for axis in ("tp", "pp", "cp", "ep"))
    stages = stages_per_rank(parallel)
    _check_model(asked, tp, pp, cp, stages)
    dp, reason = _usual_dp(asked, origins, cp * tp, pp)
    _check_gpus(asked, dp, cp, tp, pp)
    _check_batch(asked, dp, cp * tp, pp)
    _check_experts(asked, _said(dp=dp, cp=cp, tp=tp), dp * cp * tp, ep)
    if parallel.replicate != "auto":
        check_replicas(dp, int(parallel.replicate), parallel.zero, origins)
    divides = train.seq_len % (tp * cp) == 0
    sequence = tp > 1 and divides if parallel.sequence == "auto" else bool(parallel.sequence)
    _check_split(asked)
    return Degrees(Grid(dp, tp, sequence, cp, parallel.cp_kind, pp, ep), stages, reason)


def _check_open(asked: Asked) -> None:
    parallel = asked.config.parallel
    dp, tp, pp, cp, ep = (degree(getattr(parallel, axis)) for axis in ("dp", "tp", "pp", "cp", "ep"))
    _check_model(asked, tp, pp, cp, stages_per_rank(parallel))
    _check_gpus(asked, dp, cp, tp, pp)
    _check_batch(asked, dp, cp * tp, pp)
    is_open = "auto" in (parallel.dp, parallel.cp, parallel.tp)
    _check_experts(asked, _said(dp=dp, cp=cp, tp=tp), ep if is_open else dp * cp * tp, ep)


def _check_model(asked: Asked, tp: int, pp: int, cp: int, stages: int) -> None:
    if not asked.spec.is_ours:
        _check_whole(asked)
    _check_tensor(asked, tp)
    _check_heads(asked, cp, tp)
    _check_stages(asked, pp, stages)


# Data parallelism, and how many processes there are -------------------------------------------------------------------


def _usual_dp(asked: Asked, origins: Origins, per_stage: int, pp: int) -> tuple[int, str]:
    """Returns how many replicas a run has, and why: one per device, as many as share the batch evenly."""
    parallel, machine, per_replica = asked.config.parallel, asked.machine, per_stage * pp
    if asked.nproc:
        whole = replace(parallel, tp=degree(parallel.tp), cp=degree(parallel.cp), pp=pp)
        check_world(replace(asked.config, parallel=whole), asked.nproc, origins)
        return asked.nproc // per_replica, "as asked"
    if parallel.dp != "auto":
        return int(parallel.dp), "as asked"
    on_gpus = asked.device == "cuda"
    devices = len(machine.gpus) if on_gpus else default_cpu_ranks(machine)
    replicas, global_batch = degree(parallel.replicate), global_batch_of(asked.config.train)
    most = replicas if parallel.zero == 0 and parallel.replicate != "auto" else devices // per_replica
    even = [n for n in range(replicas, most + 1, replicas) if global_batch % n == 0]
    even = [n for n in even if n * per_replica % machine.nodes == 0] or even  # as many ranks on every node
    dp = max(even, default=replicas)
    if not on_gpus and dp * per_replica > machine.cores:
        cores = counted(machine.cores, "core")
        return dp, f"the degrees need {dp * per_replica} processes, which share {cores}"
    unit, full = "GPU" if on_gpus else "core", most // replicas * replicas
    odd = f"a batch of {global_batch} does not divide by {full}" if dp < full else ""
    if dp * per_replica == 1:
        return dp, f"one process, as {odd}" if odd else "one device: nothing to split"
    each = f"{per_replica} {unit}s" if per_replica > 1 else unit
    return dp, f"one replica per {each}, {dp} in all{odd and f', as {odd}'}"


def default_cpu_ranks(machine: Machine) -> int:
    """Returns how many ranks are started on CPUs where nobody says."""
    return machine.nodes * min(machine.cores // machine.nodes, MAX_DEFAULT_CPU_RANKS)


def _check_gpus(asked: Asked, dp: int, cp: int, tp: int, pp: int) -> None:
    num_gpus, world = len(asked.machine.gpus), dp * cp * tp * pp
    if asked.device != "cuda" or world <= num_gpus:
        return
    most = min(dp, num_gpus // (cp * tp * pp))
    smaller: list[list[Fix]] = [
        [{"parallel.dp": n} for n in range(most, 0, -1) if asked.config.parallel.dp != "auto"],
        [{"--nproc": n} for n in range(num_gpus, 0, -1) if asked.nproc],
        [{"parallel.tp": n} for n in reversed(tensor_degrees(asked.spec)) if n <= tp * num_gpus // world],
        [_shorter_pipeline(asked, n) for n in range(pp * num_gpus // world, 0, -1)],
        [{"parallel.cp": n} for n in range(cp * num_gpus // world, 0, -1)],
    ]
    in_turn = [fix for fixes in zip_longest(*smaller) for fix in fixes if fix is not None]  # one of each axis first
    raise Refusal(
        f"{_said(dp=dp, cp=cp, tp=tp, pp=pp)} needs {world} GPUs, {asked.place} has {num_gpus}",
        why="every rank needs a GPU of its own",
        keys=("parallel.dp", "parallel.pp", "parallel.tp", "parallel.cp"),
        fixes=[other for fix in in_turn for other in _with_nproc(asked, fix, num_gpus)],
    )


def _check_batch(asked: Asked, dp: int, per_stage: int, pp: int) -> None:
    train = asked.config.train
    global_batch, rows = global_batch_of(train), -(-global_batch_of(train) // dp)
    keys = ("train.global_batch", "train.global_batch_tokens")
    if global_batch >= dp:
        size = 1 if train.micro_batch == "auto" else int(train.micro_batch)
        if size > rows:
            raise Refusal(
                f"train.micro_batch = {size} is larger than a rank's share of the batch",
                why=f"a global batch of {global_batch} over dp={dp} leaves {rows} sequences per rank",
                keys=(*keys, "train.micro_batch"),
                fixes=[{"train.micro_batch": rows}, _batch_of(train, size * dp)],
            )
        return
    larger = _batch_of(train, dp)
    fewer: Fix = {} if asked.config.parallel.dp == "auto" else {"parallel.dp": global_batch}
    if asked.nproc:
        fewer["--nproc"] = global_batch * per_stage * pp
    raise Refusal(
        f"a global batch of {global_batch} is smaller than dp={dp}",
        why="every data-parallel rank needs at least one sequence per step",
        keys=(*keys, "parallel.dp"),
        fixes=[larger, fewer],
    )


def _batch_of(train: TrainConfig, sequences: int) -> Fix:
    """Returns the change after which a step has so many sequences, in the unit that the config has."""
    if train.global_batch_tokens:
        return {"train.global_batch_tokens": sequences * train.seq_len}
    return {"train.global_batch": sequences}


def _check_whole(asked: Asked) -> None:
    """Refuses to cut a model that transformers builds: it is replicated or held in rows, and nobody here knows where
    else to cut it."""
    parallel = asked.config.parallel
    cut = [axis for axis in ("tp", "pp", "cp", "ep") if degree(getattr(parallel, axis)) > 1]
    if not cut:
        return
    fix: Fix = {f"parallel.{axis}": 1 for axis in cut}
    fix |= _shorter_pipeline(asked, 1) if "pp" in cut else {}
    fix |= {"parallel.sequence": "auto"} if parallel.sequence is True else {}
    raise Refusal(
        f"{asked.spec.name} cannot be cut over {cut[0]}={getattr(parallel, cut[0])}",
        why="transformers builds this model, and it is not known inside: dp, zero and replicate work, tp, pp, cp and "
        "ep do not",
        keys=[f"parallel.{axis}" for axis in cut],
        fixes=[other for more in ({"parallel.zero": 3}, {}) for other in _with_nproc(asked, fix | more)],
    )


# What the model allows ------------------------------------------------------------------------------------------------


def tensor_degrees(spec: ModelSpec) -> list[int]:
    """Returns every tp that this model can be cut into, ascending."""
    return [tp for tp in range(1, spec.num_heads + 1) if _tensor_problem(spec, tp) is None]


def _check_tensor(asked: Asked, tp: int) -> None:
    problem = _tensor_problem(asked.spec, tp)
    if problem is None:
        return
    near = sorted(tensor_degrees(asked.spec), key=lambda n: abs(n - tp))
    raise Refusal(
        f"{asked.spec.name} cannot be cut over tp={tp}",
        why=problem,
        keys=("parallel.tp",),
        fixes=[fix for n in near for fix in _with_nproc(asked, {"parallel.tp": n})],
    )


def _tensor_problem(spec: ModelSpec, tp: int) -> str | None:
    if (problem := spec.attention.tensor_problem(spec, tp)) is not None:
        return problem
    widths = {"vocabulary": spec.vocab}
    for layer in spec.layers:
        widths |= layer.feedforward.widths(spec, layer.ffn)
    name, width = min(widths.items(), key=lambda item: item[1])
    return f"each rank needs a part of everything, and the {name} is only {width}" if width < tp else None


def _check_heads(asked: Asked, cp: int, tp: int) -> None:
    """Refuses heads that do not divide: Ulysses gives every context-parallel rank some of the heads for all tokens."""
    heads = asked.spec.num_heads // tp
    if cp == 1 or asked.config.parallel.cp_kind != "ulysses" or heads % cp == 0:
        return
    fitting = [n for n in range(cp - 1, 0, -1) if heads % n == 0]
    has = f"{asked.spec.num_heads} heads" + (f" over tp={tp} are {heads} per rank" if tp > 1 else "")
    raise Refusal(
        f"{asked.spec.name} cannot be shared by cp={cp} ranks the way of Ulysses",
        why=f"each rank takes the same number of whole heads: {has}, which do not divide by {cp}",
        keys=("parallel.cp", "parallel.cp_kind"),
        fixes=[{"parallel.cp_kind": "ring"}, *(fix for n in fitting for fix in _with_nproc(asked, {"parallel.cp": n}))],
    )


def _check_experts(asked: Asked, said: str, ranks: int, ep: int) -> None:
    """Refuses experts that cannot be shared out evenly. `said`: the degrees that make `ranks`, which share the
    experts."""
    if ep == 1:
        return
    spec = asked.spec
    fixes: list[Fix] = [{"parallel.ep": n} for n in range(min(ep, ranks), 0, -1)]
    if not spec.num_experts:
        what = f"ep={ep} needs experts, and {spec.name} has none"
        why = "it shares out the experts of a model between ranks"
    elif spec.num_experts % ep:
        what = f"the {spec.num_experts} experts of {spec.name} cannot be shared out over ep={ep} ranks"
        why = f"each rank takes the same number of experts, and {spec.num_experts} does not divide by {ep}"
    elif ranks % ep:
        what = f"ep={ep} does not divide the {ranks} ranks of {said or 'dp=1'}"
        why = "ranks of dp x cp x tp share the experts between them, the same number in every group"
    else:
        return
    raise Refusal(what, why=why, keys=("parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp"), fixes=fixes)


def _check_stages(asked: Asked, pp: int, stages: int) -> None:
    num_layers = asked.spec.num_layers
    if pp == 1 or pp * stages <= num_layers:
        return
    parallel = asked.config.parallel
    fixes: list[Fix] = []
    if stages > 1 and SCHEDULES[parallel.schedule].most_stages is None:
        fixes += [{"parallel.virtual_stages": n} for n in range(num_layers // pp, 0, -1)]
    longest = max(1, min(pp - 1, num_layers // stages))
    fixes += [_shorter_pipeline(asked, n) for n in range(longest, 0, -1)]
    raise Refusal(
        f"{_said(pp=pp, virtual_stages=stages)} makes more stages than {asked.spec.name} has layers",
        why=f"{pp * stages} stages of at least one layer each, {counted(num_layers, 'layer')}",
        keys=("parallel.virtual_stages", "parallel.pp"),
        fixes=[other for fix in fixes for other in _with_nproc(asked, fix)],
    )


def _check_split(asked: Asked) -> None:
    split, num_layers = asked.config.parallel.split, asked.spec.num_layers
    if isinstance(split, tuple) and sum(split) != num_layers:
        raise Refusal(
            f"`parallel.split = {shown(split)}` splits {sum(split)} layers, {asked.spec.name} has {num_layers}",
            why="it lists the layers of each stage, and every layer belongs to one",
            keys=("parallel.split",),
            fixes=[{"parallel.split": even_split(num_layers, len(split))}, {"parallel.split": "auto"}],
        )


# Fixes ----------------------------------------------------------------------------------------------------------------


def _shorter_pipeline(asked: Asked, pp: int) -> Fix:
    """Returns a change of pp. With a list of layers go the settings of stages that are no longer there."""
    parallel = asked.config.parallel
    fix: Fix = {"parallel.pp": pp}
    if not isinstance(parallel.split, str):
        fix["parallel.split"] = "auto"
    if pp == 1 and parallel.schedule != "1f1b":
        fix["parallel.schedule"] = "1f1b"
    if pp == 1 and parallel.virtual_stages not in ("auto", 1):
        fix["parallel.virtual_stages"] = "auto"
    return fix


def _with_nproc(asked: Asked, fix: Fix, most: int | None = None) -> list[Fix]:
    """Returns the fix as it is, and with the number of processes that goes with it."""
    if not asked.nproc or "--nproc" in fix:
        return [fix]
    parallel = asked.changed(fix).config.parallel
    per_replica = degree(parallel.tp) * degree(parallel.cp) * degree(parallel.pp)
    replicas = max(1, min(asked.nproc, most or asked.nproc) // per_replica)
    dp = replicas if parallel.dp == "auto" else int(parallel.dp)
    return [fix] if dp * per_replica == asked.nproc else [fix, {**fix, "--nproc": dp * per_replica}]


def _said(**degrees: int) -> str:
    return " ".join(f"{name}={value}" for name, value in degrees.items() if value > 1)
