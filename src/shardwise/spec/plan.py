"""Defines `Plan`: exactly what the runtime executes, with every `auto` resolved. It is written to plan.json; no torch
is needed to read it.

    world = dp x cp x tp x pp        dp = replicate x shard        ep divides dp x cp x tp

Ranks are numbered with the pipeline outermost, then replicas, shards, context and tensor parallelism, whose ranks are
neighbours and share the fastest links. Expert-parallel ranks are neighbours too: `ep` of them in a row. Invariant: a
`Plan` that exists is consistent; whether the model and the machine can bear it was checked before (degrees.py). Read
next: resolve.py, which makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.errors import UserError
from shardwise.spec.layout import degree_of, format_layout, parse_layout, word_of
from shardwise.spec.precisions import PRECISIONS, Precision
from shardwise.spec.recompute import Recompute, recompute_of
from shardwise.spec.schema import Axes, CommConfig, Config, MemoryConfig, ParallelConfig, SpeedConfig
from shardwise.spec.split import even_split
from shardwise.spec.zero import ZERO, ZeroStage
from shardwise.terminal import counted

SECTIONS: Mapping[str, type] = {"parallel": Axes, "memory": MemoryConfig, "speed": SpeedConfig, "comm": CommConfig}
"""The sections of a config that a plan resolves."""

KEEPS_AUTO = ("loss_scale", "reduce_dtype", "limit", "backend", "all_reduce", "bucket", "allocator")
"""The keys whose `auto` is a rule of the runtime, or is settled by what a rank finds when it starts."""


def values_of(section: type, holder: object) -> dict[str, Any]:
    """Returns the value of every key of a section, as `holder` has it: the section itself, or a plan."""
    return {name: getattr(holder, name) for name in section.__dataclass_fields__}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the grid: an index along each axis."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    num_shards: int | None = field(default=None, compare=False, repr=False)  # set by `Plan.coordinates`

    @property
    def dp(self) -> int:
        """The index of the part of the batch that this rank works on."""
        assert self.num_shards is not None, f"{self} was not made by Plan.coordinates"
        return self.replicate * self.num_shards + self.shard


@dataclass(frozen=True, kw_only=True)
class Plan(Axes, MemoryConfig, SpeedConfig, CommConfig):
    """One resolved job: the sections [parallel], [memory], [speed] and [comm] of the config with every `auto` resolved,
    and the batch.

    A key that a section has is a field here, by the same name: it is written in the schema and read where it acts. What
    follows below are the keys whose type or default is another once `auto` is resolved. A data-parallel index owns a
    fixed range of each step's rows."""

    device: str  # cpu | cuda
    precision: str = field()
    seq_len: int
    global_batch: int  # sequences per optimizer step, over all ranks
    micro_batch: int  # sequences per forward pass of one rank
    num_steps: int
    threads_per_rank: int
    reason: str
    attention: str = "sdpa"  # sdpa | flash4: what it is priced as; config decides what runs

    # [parallel]
    dp: int = 1
    zero: int = 0
    replicate: int = 1  # with zero = 0 always dp: every rank is a replica. Whoever changes zero says replicate too
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    pp: int = 1
    virtual_stages: int = 1  # stages per rank
    split: tuple[int, ...] = ()  # layers of each stage, in model order; empty without a pipeline
    ep: int = 1
    # [memory]. `loss_scale` and `reduce_dtype` keep `auto`: the runtime's rule, which follows from the precision.
    recompute: str = "none"
    offload: str = "none"  # none | optimizer | all; that it goes to a disk is said by `offload_to` alone
    offload_dir: str = ""  # the directory for offload_to = nvme
    # [speed]
    compile: str = "none"
    fuse: bool = False
    copies: bool = False
    loss: str = "fused"
    kernels: str = "torch"
    products: str = "library"
    results: str = "at-once"
    # [comm]
    secondary_shard: int = 0  # neighbouring ranks that together keep gathered parameters for backward; 0: none do

    def __post_init__(self) -> None:
        if self.zero == 0:
            assert self.replicate in (1, self.dp), (self.replicate, self.dp)
            object.__setattr__(self, "replicate", self.dp)
        assert self.dp % self.replicate == 0, (self.dp, self.replicate)
        assert self.global_batch >= self.dp, (self.global_batch, self.dp)
        assert 1 <= self.micro_batch <= self.rows_per_rank, (self.micro_batch, self.rows_per_rank)
        assert self.tp > 1 or not self.sequence, "sequence parallelism needs tp > 1"
        assert len(self.split) == (self.num_stages if self.pp > 1 else 0), (self.split, self.num_stages)
        assert min(self.split, default=1) >= 1, self.split
        assert self.pp > 1 or self.virtual_stages == 1, self.virtual_stages
        assert self.stage_world % self.ep == 0, (self.ep, self.layout)
        assert self.ep == 1 or self.tp == 1 or self.sequence, (
            "experts over tensor-parallel ranks need sequence parallelism"
        )

    # Number formats and memory -------------------------------------------------------------------------------------

    @property
    def formats(self) -> Precision:
        """The number formats of weights, activations, states and matmuls."""
        return PRECISIONS[self.precision]

    @property
    def recomputes(self) -> Recompute:
        """What backward computes again (activation checkpointing)."""
        return recompute_of(self.recompute)

    @property
    def stage(self) -> ZeroStage:
        """What ZeRO shards."""
        return ZERO[self.zero]

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are kept in fp32 and computed with in a narrower format."""
        return self.formats.is_mixed

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 holds the parameters: to shard them, to cast them or their gradients, or to keep them in CPU
        memory."""
        return self.zero > 0 or (self.is_mixed and not self.copies) or self.rounds_sums or self.offload == "all"

    @property
    def rounds_sums(self) -> bool:
        """Whether gradients are reduced in another format than they are kept in."""
        return self.reduce_dtype not in ("auto", self.formats.kept)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, because fp16 has too small a range for gradients as they are."""
        return self.formats.scales_loss

    def parameter_home(self, device: str) -> str:
        """Returns the device on which parameters lie between uses."""
        return "cpu" if self.offload == "all" else device

    # The grid of ranks --------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stage_world(self) -> int:
        """The number of ranks that have the same layers."""
        return self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """The number of data-parallel ranks of one replica."""
        return self.dp // self.replicate

    @property
    def state_shards(self) -> int:
        """The number of parts into which ZeRO cuts one replica's states: context-parallel ranks take part."""
        return self.shard * self.cp if self.zero else 1

    @property
    def expert_copies(self) -> int:
        """The number of ranks of a stage that hold, or share by ZeRO, the same experts."""
        return self.stage_world // self.ep

    @property
    def expert_replicas(self) -> int:
        """How many of those hold the same rows. Hybrid sharding keeps its replicas, unless a row of experts is longer
        than a replica."""
        if not self.zero:
            return self.expert_copies
        return self.replicate if self.stage_world // self.replicate % self.ep == 0 else 1

    @property
    def expert_shards(self) -> int:
        """The number of parts into which ZeRO cuts the experts of a rank."""
        return self.expert_copies // self.expert_replicas

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world, (rank, self.world)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, shard = divmod(rest, self.shard)
        pp, replicate = divmod(rest, self.replicate)
        return Coordinates(pp, replicate, shard, cp, tp, num_shards=self.shard)

    def rank_at(self, at: Coordinates) -> int:
        line = (at.pp * self.replicate + at.replicate) * self.shard + at.shard
        return (line * self.cp + at.cp) * self.tp + at.tp

    # The batch ----------------------------------------------------------------------------------------------------

    def rows(self, dp_index: int) -> range:
        """Returns the rows of every global batch that the ranks of this data-parallel index train on; the first may
        have one more."""
        assert 0 <= dp_index < self.dp, (dp_index, self.dp)
        share, more = divmod(self.global_batch, self.dp)
        first = dp_index * share + min(dp_index, more)
        return range(first, first + share + (dp_index < more))

    @property
    def rows_per_rank(self) -> int:
        """The largest share of the batch that a data-parallel rank has, in sequences."""
        return -(-self.global_batch // self.dp)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step, the same for every rank: who has fewer rows adds micro-batches that
        have no targets."""
        return -(-self.rows_per_rank // self.micro_batch)

    @property
    def batch_in_words(self) -> str:
        """The batch as a product, and where the product is more than the batch, what the rest is."""
        ranks = counted(self.dp, "rank" if self.world == self.dp else "replica")
        parts = f"{self.micro_batch} micro x {self.num_microbatches:,} accumulated x {ranks}"
        places = self.micro_batch * self.num_microbatches * self.dp
        batch, empty = f"{counted(self.global_batch, 'sequence')} x {self.seq_len:,} tokens", places - self.global_batch
        if empty:
            return f"{batch} in {parts}: {places:,} places, {empty:,} empty, without loss"
        return f"{batch} = {parts}"

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    # The pipeline -------------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def layers_of(self, stage: int) -> range:
        """Returns the indices of the layers that a stage of a pipeline owns."""
        first = sum(self.split[:stage])
        return range(first, first + self.split[stage])

    # Writing and reading ------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """The layout string that is used everywhere: plan table, logs, `parallel.layout`. An even split goes without
        saying."""
        is_even = self.split == () or self.split == even_split(sum(self.split), self.num_stages)
        said = {"replicate": self.replicate if self.zero else "auto", "split": "auto" if is_even else self.split}
        parallel = ParallelConfig(**values_of(Axes, self) | said)
        return format_layout(parallel, MemoryConfig(**values_of(MemoryConfig, self) | {"offload": self._offload_word}))

    @property
    def _offload_word(self) -> str:
        """The word that `memory.offload` has for it. Whether `all` goes to a disk is said by `offload_to` alone."""
        return "nvme" if (self.offload, self.offload_to) == ("optimizer", "nvme") else self.offload

    @classmethod
    def of(cls, config: Config, **resolved: Any) -> Plan:
        """Returns a plan with the config's own values, and what was resolved in place of every `auto`. What is neither
        has the field's default."""
        values = {
            name: value
            for section, keys in SECTIONS.items()
            for name, value in values_of(keys, getattr(config, section)).items()
        }
        unset = [name for name, value in values.items() if value in ("auto", None) and name not in KEEPS_AUTO]
        return cls(**{name: value for name, value in values.items() if name not in unset} | resolved)

    @classmethod
    def from_layout(
        cls, layout: str, *, world: int | None = None, precision: str = "fp32", device: str = "cpu"
    ) -> Plan:
        """Returns a plan for a hand-written loop (`shardwise.parallelize`), which has its batches itself: it only says
        who holds what.

        `world` is the number of processes, for a layout without dp. A precision in the string comes before the
        argument.
        """
        words = {key.partition(".")[2]: text for key, text in parse_layout(layout).items()}
        cut = [axis for axis in ("tp", "pp", "cp", "ep") if words.get(axis, "1") not in ("1", "auto")]
        if cut:
            raise UserError(
                f"{cut[0]}={words[cut[0]]} needs a model to cut, and a layout alone has none",
                why="layers, heads, experts and sequences are cut by a model's shape; dp, zero and replicate are not",
                fix=f"leave out {' and '.join(cut)} here; `shardwise train` plans them together with the model",
            )
        dp, zero = degree_of(words, "dp", world or 1), degree_of(words, "zero", 0, low=0, high=3)
        replicate = degree_of(words, "replicate", 1 if zero else dp)
        if dp % replicate or (zero == 0 and replicate != dp):
            raise UserError(
                f"`replicate={replicate}` does not go with dp={dp} and zero={zero}",
                why="dp = replicas x shards, and zero=0 shards nothing: every data-parallel rank is a replica",
                fix=f"replicate={dp}" + (" or replicate=1" if zero else " or zero=1"),
            )
        offload = word_of(words, "offload", MemoryConfig, "none")
        return cls(
            device=device,
            precision=word_of(words, "precision", MemoryConfig, precision),
            seq_len=1,
            global_batch=dp,
            micro_batch=1,
            num_steps=1,
            threads_per_rank=1,
            reason="as asked",
            dp=dp,
            zero=zero,
            replicate=replicate,
            recompute=word_of(words, "recompute", MemoryConfig, "none"),
            offload="optimizer" if offload == "nvme" else offload,
            offload_to="nvme" if offload == "nvme" else "cpu",
            activation_offload=words.get("activation_offload", "false") == "true",
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "layout": self.layout, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Returns the plan that plan.json holds: lists become tuples again, and what an older file does not have takes
        its default."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"split": tuple(known.get("split", ()))})
