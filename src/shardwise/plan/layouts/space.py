"""Every layout that the planner considers for a job: what the runtime accepts, within the job's constraints. No torch.

Invariant: a `Plan` made here is one that `shardwise train` takes (a test sends them through the config's rules and
plan/resolve/degrees.py). Left out is what cannot be better or changes the losses: micro-batches that do not divide a
rank's rows, other splits than the balanced one, other number formats, disks; unless a constraint asks for them. Read
next: parts.py (what a layout is made of), search.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from shardwise.plan.layouts.gpu_counts import divisors, finer_gpu_counts, gpu_counts
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.remembered import remembered
from shardwise.plan.resolve.degrees import tensor_degrees
from shardwise.plan.resolve.speed import (
    asked_speed,
    attention_of,
    bears,
    fp8_of,
    keeps_low_precision,
    kernels_of,
    loss_of,
    norms_of,
    our_stack,
    results_of,
)
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.fp8 import MULTIPLE, keeps_base_whole
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import SECTIONS, Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.recompute import CONSIDERED, recompute_of
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.split import balanced_split, estimated_costs, even_split
from shardwise.spec.zero import ZERO

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
PROPOSED = tuple(
    sorted((name for name, it in SCHEDULES.items() if it.is_proposed), key=lambda name: SCHEDULES[name].holds_all)
)
"""Schedules that are considered where none is asked for, the one that holds most last."""
LEAST_PIECE = 512
"""Tokens: context parallelism does not cut sequences finer than this."""


class Space:
    """All layouts of a job on a cluster. `fixed`: config key -> the value it must have."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, job: Job, fixed: dict[str, Any]):
        self.model, self.cluster, self.job, self.fixed = model, cluster, job, fixed
        self.precision = fixed.get("memory.precision", job.precision)
        self.is_whole = keeps_base_whole(self.precision, job.adapter.kind)
        self.device = cluster.device.kind
        self.speed = asked_speed(fixed)
        kernels = kernels_of(self.speed, self.device, model, 1, "1f1b")
        self.fp8 = fp8_of(
            self.precision, fixed.get("memory.fp8_recipe", "rowwise"), fixed.get("memory.fp8_head", False)
        )
        usual = our_stack(
            kernels["compile"] != "none",
            kernels["fuse"],
            self.speed.loss != "recompute",
            kernels["products"] == "measured",
            *self.fp8,
        )
        # What all layouts may have; only those that are not compiled stop early.
        self.fastest = replace(usual, stops_early=True)

    def among(self, key: str, values: Any) -> list[Any]:
        """Returns the values that the constraints leave: what is asked for, be it among them or not, else all."""
        return [self.fixed[key]] if key in self.fixed else list(values)

    # How many GPUs -------------------------------------------------------------------------------------------------

    @cached_property
    def gpu_counts(self) -> list[int]:
        """The numbers of GPUs that are tried, descending."""
        return [1] if self.speed.copies is True else gpu_counts(self.cluster, self._asked_ranks)

    @cached_property
    def finer_counts(self) -> list[int]:
        """The numbers of GPUs that are tried where their number is the question, ascending."""
        return [1] if self.speed.copies is True else finer_gpu_counts(self.cluster, self._asked_ranks)

    @property
    def _asked_ranks(self) -> int:
        """The number of ranks that the fixed degrees make together."""
        return math.prod(int(self.fixed.get(f"parallel.{axis}", 1)) for axis in ("dp", "tp", "cp", "pp"))

    # The grid ------------------------------------------------------------------------------------------------------

    @remembered
    def grids(self, gpus: int) -> list[Grid]:
        """Returns every choice of degrees that makes so many ranks."""
        return [grid for grid in self._grids_of(gpus) if self._bears_kernels(grid)]

    def _grids_of(self, gpus: int) -> Iterator[Grid]:
        is_ours, seq_len = self.model.is_ours, self.job.seq_len
        for tp in self.among("parallel.tp", self._tensor_degrees if is_ours else [1]):
            if tp not in self._tensor_degrees or gpus % tp or (tp > 1 and not is_ours):
                continue
            for cp, kind in self._context(gpus // tp, tp):
                for pp in self.among("parallel.pp", divisors(gpus // tp // cp) if is_ours else [1]):
                    rest = gpus // tp // cp
                    if rest % pp or pp > self.model.num_layers or (pp > 1 and not is_ours):
                        continue
                    dp = rest // pp
                    if dp > self.job.global_batch or self.fixed.get("parallel.dp", dp) != dp:
                        continue
                    for ep in self._experts(dp * cp * tp):
                        for sequence in self.among("parallel.sequence", (True, False)):
                            if sequence and (tp == 1 or seq_len % (tp * cp)):
                                continue
                            if not sequence and ep > 1 and tp > 1:
                                continue
                            grid = Grid(dp, tp, sequence, cp, kind, pp, ep)
                            if self.sizes(grid) and self.pipelines(pp) and self.states(grid):
                                yield grid

    def some_grids(self) -> Iterator[Grid]:
        return (grid for gpus in self.gpu_counts for grid in self.grids(gpus))

    @cached_property
    def _tensor_degrees(self) -> list[int]:
        return tensor_degrees(self.model)

    def _context(self, ranks: int, tp: int) -> Iterator[tuple[int, str]]:
        seq_len, heads = self.job.seq_len, self.model.num_heads // tp
        for cp in self.among("parallel.cp", divisors(ranks) if self.model.is_ours else [1]):
            if ranks % cp or (cp > 1 and not self.model.is_ours):
                continue
            if "parallel.cp" not in self.fixed and cp > 1 and seq_len // cp < LEAST_PIECE:
                continue
            if PRECISIONS[self.precision].is_fp8 and seq_len // cp % MULTIPLE:
                continue
            if cp == 1:
                yield 1, self.fixed.get("parallel.cp_kind", "ring")
                continue
            kinds = self.among("parallel.cp_kind", ("ring", "ulysses"))
            if "ring" in kinds and seq_len % (2 * cp) == 0:
                yield cp, "ring"
            if "ulysses" in kinds and seq_len % cp == 0 and heads % cp == 0:
                yield cp, "ulysses"

    def _experts(self, stage_world: int) -> list[int]:
        experts = self.model.num_experts if self.model.is_ours else 0
        choices = self.among("parallel.ep", divisors(experts) if experts else [1])
        return [ep for ep in choices if ep == 1 or (experts and experts % ep == 0 and stage_world % ep == 0)]

    # The pace ------------------------------------------------------------------------------------------------------

    def paces(self, grid: Grid) -> Iterator[Pace]:
        return (Pace(size, *how) for how in self.pipelines(grid.pp) for size in self.sizes(grid))

    def sizes(self, grid: Grid) -> list[int]:
        """Returns the sizes of micro-batches in sequences, largest first. Ranks that could take rows of a micro-batch
        each need not cut its sequences: with as many data-parallel ranks more instead of context-parallel ones, every
        rank has as many tokens and nothing to send for them."""
        return self._sizes(grid.dp, grid.cp)

    @remembered
    def _sizes(self, dp: int, cp: int) -> list[int]:
        rows = -(-self.job.global_batch // dp)
        found = [n for n in self.among("train.micro_batch", reversed(divisors(rows))) if n <= rows]
        if self.fixed.keys().isdisjoint({"parallel.dp", "parallel.cp", "train.micro_batch"}):
            found = [n for n in found if math.gcd(n, cp) == 1]
        return found

    @remembered
    def pipelines(self, pp: int) -> list[tuple[str, int]]:
        """Returns every schedule that a pipeline of so many ranks may have, each with its stages per rank."""
        schedules = self.among("parallel.schedule", PROPOSED)
        virtual = self.among("parallel.virtual_stages", VIRTUAL_STAGES)
        if pp == 1:
            alone = "1f1b" in schedules and 1 in virtual and self.fixed.get("parallel.split", "auto") == "auto"
            return [("1f1b", 1)] if alone else []
        able = [name for name in schedules if bears(self.speed, name)]
        return [(name, v) for name in able for v in virtual if SCHEDULES[name].takes_stages(v) and self.split(pp * v)]

    @remembered
    def split(self, num_stages: int) -> tuple[int, ...] | None:
        """Returns the layers of each stage; None if they are not enough for so many stages."""
        asked, num_layers = self.fixed.get("parallel.split", "auto"), self.model.num_layers
        if num_stages > num_layers:
            return None
        if isinstance(asked, tuple):
            return asked if len(asked) == num_stages and sum(asked) == num_layers else None
        if asked == "even":
            return even_split(num_layers, num_stages)
        return _balanced(self.model, self.job.seq_len, num_stages)

    # States and savings --------------------------------------------------------------------------------------------

    def states(self, grid: Grid) -> list[States]:
        """Returns the ZeRO stages with their replicas. Nothing is shared by one rank. Hybrid: replicas of a model that
        is sharded inside, each of at least one domain of the fast link."""
        return self._states(grid.dp, grid.cp, grid.tp)

    @remembered
    def _states(self, dp: int, cp: int, tp: int) -> list[States]:
        found = []
        for zero in self.among("parallel.zero", (0,) if self.is_whole else (0, 1, 2, 3)):
            if zero == 0:
                if self.fixed.get("parallel.replicate", dp) == dp:
                    found.append(States(0, dp))
                continue
            for replicate in self.among("parallel.replicate", divisors(dp)):
                shards = dp // replicate * cp
                is_small = shards * tp < min(self.cluster.tiers[0].span, dp * cp * tp)
                if is_small and "parallel.replicate" not in self.fixed:
                    continue
                if dp % replicate == 0 and (shards > 1 or "parallel.zero" in self.fixed):
                    found.append(States(zero, replicate))
        return found

    @cached_property
    def savings(self) -> list[Saving]:
        """What may be computed again or wait elsewhere, the plainest first: what another one never beats comes before
        it."""
        on_gpus = self.device == "cuda"
        moved = ("optimizer",) if self.is_whole else ("optimizer", "all")
        places = ("none", *moved) if on_gpus and not OPTIMIZERS[self.job.optimizer].is_low_bit else ("none",)
        asked = self.fixed.get("memory.offload")
        offloads = [{"nvme": "optimizer"}.get(asked, asked)] if asked is not None else list(places)
        if self.goes_to_disk and asked is None:
            offloads = [place for place in places if place != "none"][:1]
        elsewhere = self.among("memory.activation_offload", (False, True) if on_gpus else (False,))
        modes = self.among("memory.recompute", CONSIDERED)
        every = [mode for mode in modes if (recompute_of(mode).every or 1) < max(2, self.model.num_layers)]
        return [Saving(mode, place, away) for place in offloads for away in elsewhere for mode in every or modes]

    @property
    def goes_to_disk(self) -> bool:
        return "nvme" in (self.fixed.get("memory.offload"), self.fixed.get("memory.offload_to"))

    def go_together(self, grid: Grid, states: States, offload: str, away: bool = False) -> bool:
        """Returns whether a layout may have both. Parameters in CPU memory are gathered block by block, whatever the
        ZeRO stage: only its name for that is offered. Activations wait elsewhere where there is no pipeline, unless
        they are asked to."""
        if away and grid.pp > 1 and "memory.activation_offload" not in self.fixed:
            return False
        return (
            offload != "all"
            or ZERO[states.zero].drops_parameters
            or grid.dp * grid.cp == 1
            or "parallel.zero" in self.fixed
        )

    # Plans ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _common(self) -> dict[str, Any]:
        job, fixed = self.job, self.fixed
        # Settings that are no part of the search are as the user has them.
        passed = {
            name: fixed[f"{section}.{name}"]
            for section in ("memory", "comm")
            for name in SECTIONS[section].__dataclass_fields__  # type: ignore[attr-defined]
            if f"{section}.{name}" in fixed and name not in Saving._fields and name not in ("precision", "limit")
        }
        if self.goes_to_disk:
            passed |= {"offload_to": "nvme", "offload_dir": fixed.get("memory.offload_dir") or "runs"}
        return passed | {
            "device": self.device,
            "precision": self.precision,
            "seq_len": job.seq_len,
            "global_batch": job.global_batch,
            "num_steps": math.ceil(job.tokens / job.tokens_per_step) if job.tokens else 1,
            "reason": "planned",
            "results": results_of(self.speed, self.device, self.precision),
        }

    def plan(self, grid: Grid, pace: Pace, states: States, saving: Saving, **changes: Any) -> Plan:
        """Returns the layout that is made of these parts."""
        split = self.split(grid.pp * pace.virtual_stages) if grid.pp > 1 else ()
        assert split is not None, (grid, pace)
        return Plan(
            **grid._asdict(),
            **pace._asdict(),
            **states._asdict(),
            **saving._asdict(),
            split=split,
            threads_per_rank=self.threads(grid.gpus),
            copies=self.may_copy(grid) and saving.offload == "none" and states.zero == 0,
            loss=loss_of(self.speed, grid.pp, pace.schedule),
            attention=self.attention(grid),
            **self._kernels(pace.schedule if grid.pp > 1 else "", grid.tp * grid.cp * grid.ep),
            **(self._common | changes),
        )

    @remembered
    def _kernels(self, schedule: str, ranks: int) -> dict[str, Any]:
        """Returns the kernels of a plan. `schedule`: of a pipeline, empty without one. `ranks`: that share a layer."""
        found = kernels_of(self.speed, self.device, self.model, 2 if schedule else 1, schedule or "1f1b")
        return found | {"kernels": norms_of(found["kernels"], self.model, self.precision, ranks)}

    def _bears_kernels(self, grid: Grid) -> bool:
        """Returns whether ranks with these degrees can have the kernels that are asked for outright."""
        ranks = grid.tp * grid.cp * grid.ep
        return self.speed.kernels != "own" or norms_of("own", self.model, self.precision, ranks) == "own"

    def attention(self, grid: Grid) -> str:
        return attention_of(self.job.attention, self.model, self.precision, grid.cp, grid.cp_kind)

    def may_copy(self, grid: Grid) -> bool:
        return keeps_low_precision(self.speed, self.device, self.precision, self.model, grid.gpus, "none", 0)

    def threads(self, ranks: int) -> int:
        return max(1, self.cluster.world // ranks) if self.device == "cpu" else 4

    def size(self, grid: Grid) -> int:
        """Returns the number of layouts with these degrees."""
        paces = len(self.sizes(grid)) * len(self.pipelines(grid.pp))
        return paces * len(self.states(grid)) * len(self.savings)

    def __iter__(self) -> Iterator[tuple[Grid, Pace, States, Saving]]:
        """Yields all layouts, which only small spaces bear."""
        return self.on(self.gpu_counts)

    def on(self, counts: Iterable[int]) -> Iterator[tuple[Grid, Pace, States, Saving]]:
        """Yields all layouts on these numbers of GPUs."""
        for grid in (grid for gpus in counts for grid in self.grids(gpus)):
            for pace in self.paces(grid):
                for states in self.states(grid):
                    for saving in self.savings:
                        if self.go_together(grid, states, saving.offload, saving.activation_offload):
                            yield grid, pace, states, saving


@lru_cache(4096)
def _balanced(model: ModelSpec, seq_len: int, num_stages: int) -> tuple[int, ...]:
    return balanced_split(*estimated_costs(model, seq_len), num_stages)
