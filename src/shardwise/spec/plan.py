"""`Plan`: exactly what the runtime executes, with every `auto` resolved. Written to plan.json, no torch needed to read it.

    world = dp x cp x tp x pp        dp = replicate x shard        ep divides dp x cp x tp

Ranks are numbered with the pipeline outermost, then replicas, shards, context and tensor parallelism, whose ranks are
neighbours and share the fastest links. Expert-parallel ranks are neighbours too: `ep` of them in a row. Invariant: a `Plan` that exists is consistent; whether the model and the machine
can bear it was checked before (degrees.py). Read next: resolve.py, which makes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.config.layout import format_layout
from shardwise.errors import UserError
from shardwise.spec.schema import MemoryConfig, ParallelConfig
from shardwise.spec.split import even_split

MIXED = ("bf16", "fp16", "fp8")
GRADIENTS = {"fp64": "fp64", "bf16-true": "bf16", "fp16-true": "fp16"}
"""The format of gradients that stay where they are; for all others it is fp32."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the grid: an index along each axis."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    num_shards: int | None = field(default=None, compare=False, repr=False)  # known when `Plan.coordinates` made this

    @property
    def dp(self) -> int:
        """Which part of the batch this rank works on."""
        assert self.num_shards is not None, f"{self} was not made by Plan.coordinates"
        return self.replicate * self.num_shards + self.shard


@dataclass(frozen=True)
class Plan:
    """One resolved job. A data-parallel index owns a fixed range of each step's rows."""

    device: str  # cpu | cuda
    precision: str
    seq_len: int
    global_batch: int  # sequences per optimizer step, over all ranks
    micro_batch: int  # sequences per forward pass of one rank
    num_steps: int
    threads_per_rank: int
    reason: str
    dp: int = 1
    zero: int = 0
    replicate: int = 1  # with zero = 0 always dp: every rank is a replica. Whoever changes zero says replicate too
    tp: int = 1
    sequence: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    pp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1  # stages per rank
    split: tuple[int, ...] = ()  # layers of each stage, in model order; empty without a pipeline
    ep: int = 1
    recompute: str = "none"  # none | full | selective | sqrt | every-K
    offload: str = "none"  # none | optimizer | all
    offload_to: str = "cpu"  # cpu | nvme
    offload_dir: str = ""  # of offload_to = nvme
    offload_buffer: int = 256 * 2**20  # bytes of memory through which it goes
    activation_offload: bool = False
    loss_scale: float | str = "auto"  # auto: dynamic for fp16, none for other formats
    reduce_dtype: str = "auto"  # auto | fp32 | bf16 | fp16: of gradients while data-parallel ranks add them up
    fp8_recipe: str = "rowwise"  # rowwise | tensorwise
    fp8_head: bool = False
    compile: str = "none"  # none | blocks | graphs | trace
    fuse: bool = False  # q, k, v are one product; gate and up another
    copies: bool = False  # 16-bit copies of fp32 weights stay between steps
    loss: str = "fused"  # recompute | fused: logits that are too many at once
    kernels: str = "torch"  # torch | own | liger
    products: str = "library"  # library | measured
    attention: str = "sdpa"  # sdpa | flash4: what it is priced as; config decides what runs
    quantize_weights: str = "none"  # none | int8: of ZeRO's gathers
    quantize_gradients: str = "none"  # none | int8 | int4: of its reductions
    secondary_shard: int = 0  # neighbouring ranks that keep gathered parameters for backward between them; 0: nobody

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
    def is_mixed(self) -> bool:
        """Parameters are kept in fp32 and computed with in a narrower format."""
        return self.precision in MIXED

    @property
    def uses_fsdp(self) -> bool:
        """FSDP2 holds the parameters: to share them, to round them or their gradients, or to keep them in CPU memory."""
        return self.zero > 0 or (self.is_mixed and not self.copies) or self.rounds_sums or self.offload == "all"

    @property
    def rounds_sums(self) -> bool:
        """Gradients travel in another format than they are kept in."""
        return self.reduce_dtype not in ("auto", GRADIENTS.get(self.precision, "fp32"))

    @property
    def scales_loss(self) -> bool:
        """fp16 has too small a range for gradients as they are."""
        return self.precision in ("fp16", "fp16-true")

    def parameter_home(self, device: str) -> str:
        """Where parameters lie between uses."""
        return "cpu" if self.offload == "all" else device

    # The grid of ranks --------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stage_world(self) -> int:
        """Ranks that have the same layers."""
        return self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Data-parallel ranks of one replica."""
        return self.dp // self.replicate

    @property
    def state_shards(self) -> int:
        """Parts into which ZeRO cuts one replica's states: context-parallel ranks take part."""
        return self.shard * self.cp if self.zero else 1

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold, or share by ZeRO, the same experts."""
        return self.stage_world // self.ep

    @property
    def expert_replicas(self) -> int:
        """Of those, how many hold the same rows. Hybrid keeps its replicas, unless a row of experts is longer than a replica."""
        if not self.zero:
            return self.expert_copies
        return self.replicate if self.stage_world // self.replicate % self.ep == 0 else 1

    @property
    def expert_shards(self) -> int:
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
        """The rows of every global batch that the ranks of this data-parallel index train on; the first may have one more."""
        assert 0 <= dp_index < self.dp, (dp_index, self.dp)
        share, more = divmod(self.global_batch, self.dp)
        first = dp_index * share + min(dp_index, more)
        return range(first, first + share + (dp_index < more))

    @property
    def rows_per_rank(self) -> int:
        """The largest share of the batch."""
        return -(-self.global_batch // self.dp)

    @property
    def num_microbatches(self) -> int:
        """The same for every rank: who has fewer rows fills up with micro-batches that have no targets."""
        return -(-self.rows_per_rank // self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    # The pipeline -------------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def layers_of(self, stage: int) -> range:
        """Indices of the layers that a stage of a pipeline owns."""
        first = sum(self.split[:stage])
        return range(first, first + self.split[stage])

    # Writing and reading ------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """The layout string that is used everywhere: plan table, logs, `parallel.layout`. An even split goes without saying."""
        is_even = self.split == () or self.split == even_split(sum(self.split), self.num_stages)
        return format_layout(
            ParallelConfig(
                dp=self.dp,
                zero=self.zero,
                replicate=self.replicate if self.zero else "auto",
                tp=self.tp,
                sequence=self.sequence,
                cp=self.cp,
                cp_kind=self.cp_kind,
                pp=self.pp,
                schedule=self.schedule,
                virtual_stages=self.virtual_stages,
                split="auto" if is_even else self.split,
                ep=self.ep,
            ),
            MemoryConfig(
                recompute=self.recompute, offload=self._offload_word, activation_offload=self.activation_offload
            ),
        )

    @property
    def _offload_word(self) -> str:
        """As `memory.offload` has it. Whether `all` goes to a disk is said by `offload_to` alone."""
        return "nvme" if (self.offload, self.offload_to) == ("optimizer", "nvme") else self.offload

    @classmethod
    def from_layout(
        cls, layout: str, *, world: int | None = None, precision: str = "fp32", device: str = "cpu"
    ) -> Plan:
        """A plan for a hand-written loop (`shardwise.parallelize`), which has its batches itself: only who holds what.

        `world`: the number of processes, for a layout without dp. A precision in the string comes before the argument."""
        from shardwise.config.check_layout import check_replicas, degree
        from shardwise.config.load import load_config  # the schema's own checks of every word

        config = load_config(None, [f"parallel.layout={layout}"]).config
        parallel, memory = config.parallel, config.memory
        cut = [axis for axis in ("tp", "pp", "cp", "ep") if degree(getattr(parallel, axis)) > 1]
        if cut:
            raise UserError(
                f"{cut[0]}={getattr(parallel, cut[0])} needs a model to cut, and a layout alone has none",
                why="layers, heads, experts and sequences are cut by a model's shape; dp, zero and replicate are not",
                fix=f"leave out {' and '.join(cut)} here; `shardwise train` plans them together with the model",
            )
        dp = (world or 1) if parallel.dp == "auto" else int(parallel.dp)
        zero = 0 if parallel.zero == "auto" else int(parallel.zero)
        if parallel.replicate != "auto":
            check_replicas(dp, int(parallel.replicate), zero, {})
        return cls(
            device=device,
            precision=precision if memory.precision == "auto" else memory.precision,
            seq_len=1,
            global_batch=dp,
            micro_batch=1,
            num_steps=1,
            threads_per_rank=1,
            reason="as asked",
            dp=dp,
            zero=zero,
            replicate=degree(parallel.replicate) if zero else dp,
            recompute="none" if memory.recompute == "auto" else memory.recompute,
            offload={"auto": "none", "nvme": "optimizer"}.get(memory.offload, memory.offload),
            offload_to="nvme" if memory.offload == "nvme" else "cpu",
            activation_offload=memory.activation_offload,
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "layout": self.layout, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """From plan.json: lists become tuples again, and what an older file does not have takes its default."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**known | {"split": tuple(known.get("split", ()))})
