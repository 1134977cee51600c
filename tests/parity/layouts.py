"""The same-loss matrix as data: layouts, models, precisions, batches, and how close each must come to one process.

A layout is the string that the program prints and reads everywhere. Nothing here runs anything: cases.py does.
Invariant: no size divides evenly where it does not have to (vocabulary, feed-forward width, batch), so that a wrong
rounding shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.spec.layout import parse_layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import SCHEDULES as RECORDS
from shardwise.spec.split import even_split

NUM_STEPS, SEQ_LEN, CLIP = 8, 16, 0.3
SCHEDULES = tuple(
    f"schedule={name}" + f" virtual_stages={stages}" * (stages > 1)
    for name, schedule in RECORDS.items()
    for stages in (1, 2)
    if schedule.takes_stages(stages)
)
"""Every schedule, with one and with two stages per rank where it takes them."""

LAYOUTS: tuple[str, ...] = (
    # Replicas, shards, shards within replicas
    "dp=2",
    "dp=3",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "dp=3 zero=3",
    "dp=4 zero=2",
    "dp=4 zero=1 replicate=2",
    "dp=4 zero=2 replicate=2",
    "dp=4 zero=3 replicate=2",
    "dp=2 zero=3 replicate=2",
    # Tensor and sequence parallelism
    "tp=2",
    "tp=2 sp",
    "tp=4",
    "tp=4 sp",
    "dp=2 tp=2",
    "dp=2 zero=1 tp=2 sp",
    "dp=2 zero=2 tp=2",
    "dp=2 zero=3 tp=2 sp",
    # Pipelines
    *(f"pp=2 {schedule}" for schedule in SCHEDULES),
    "pp=2 schedule=1f1b split=3,1",
    "pp=3 schedule=1f1b",
    "pp=4 schedule=zero-bubble",
    # Every ZeRO stage inside every schedule
    *(f"dp=2{f' zero={zero}' * (zero > 0)} pp=2 {schedule}" for zero in range(4) for schedule in SCHEDULES),
    # Replicas and lonely shards where backward is split: gradients are reduced in unequal portions
    "dp=2 zero=3 replicate=2 pp=2 schedule=zero-bubble",
    "zero=2 pp=2 schedule=zbv virtual_stages=2",
    # Tensor parallelism inside pipelines
    "tp=2 pp=2 schedule=gpipe",
    "tp=2 sp pp=2 schedule=1f1b",
    "tp=2 pp=2 schedule=interleaved virtual_stages=2",
    "tp=2 sp pp=2 schedule=zero-bubble",
    "tp=2 pp=2 schedule=zero-bubble virtual_stages=2",
    "tp=2 sp pp=2 schedule=zbv virtual_stages=2",
    # Experts over data-parallel ranks, over tensor-parallel ones, over both; more copies of each, or one
    "dp=2 ep=2",
    "dp=4 ep=4",
    "dp=4 ep=2",
    *(f"dp=2 zero={zero} ep=2" for zero in (1, 2, 3)),
    "dp=4 zero=1 ep=4",
    "dp=4 zero=2 ep=2",
    "dp=4 zero=3 ep=2",
    "dp=4 zero=3 replicate=2 ep=2",
    "dp=4 zero=2 replicate=2 ep=4",  # a row of experts is longer than a replica
    "tp=2 sp ep=2",
    "tp=4 sp ep=2",
    "dp=2 tp=2 sp ep=2",
    "dp=2 tp=2 sp ep=4",
    "dp=2 zero=3 tp=2 sp ep=4",
    "dp=2 pp=2 schedule=1f1b ep=2",
    "tp=2 sp pp=2 schedule=1f1b ep=2",
    "dp=2 zero=1 pp=2 schedule=interleaved virtual_stages=2 ep=2",
    "dp=2 zero=2 pp=2 schedule=zbv virtual_stages=2 ep=2",
    "dp=2 zero=3 pp=2 schedule=zero-bubble ep=2",
    # Context parallelism: a ring, Ulysses, and either with every other axis
    "cp=2 cp_kind=ring",
    "cp=2 cp_kind=ulysses",
    "cp=4 cp_kind=ring",
    "cp=4 cp_kind=ulysses",
    "zero=1 cp=2 cp_kind=ring",
    "zero=2 cp=2 cp_kind=ulysses",
    "zero=3 cp=2 cp_kind=ring",
    "dp=2 cp=2 cp_kind=ring",
    "dp=2 zero=1 cp=2 cp_kind=ulysses",
    "dp=2 zero=2 cp=2 cp_kind=ring",
    "dp=2 zero=3 cp=2 cp_kind=ring",
    "dp=2 zero=3 replicate=2 cp=2 cp_kind=ring",
    "tp=2 cp=2 cp_kind=ring",
    "tp=2 sp cp=2 cp_kind=ring",
    "tp=2 sp cp=2 cp_kind=ulysses",
    "cp=2 cp_kind=ring pp=2 schedule=1f1b",
    "cp=2 cp_kind=ulysses pp=2 schedule=gpipe",
    "cp=2 cp_kind=ring pp=2 schedule=interleaved virtual_stages=2",
    "cp=2 cp_kind=ring pp=2 schedule=zero-bubble",
    "cp=2 cp_kind=ulysses pp=2 schedule=zero-bubble virtual_stages=2",
    "zero=3 cp=2 cp_kind=ring pp=2 schedule=zbv virtual_stages=2",
    # Context and experts together, over either and over both
    "cp=2 cp_kind=ring ep=2",
    "zero=3 cp=2 cp_kind=ulysses ep=2",
    "dp=2 zero=2 cp=2 cp_kind=ring ep=4",
    "tp=2 sp cp=2 cp_kind=ring ep=2",
    "tp=2 sp cp=2 cp_kind=ulysses ep=4",
    "cp=2 cp_kind=ring pp=2 schedule=zero-bubble ep=2",
    # Three axes, and four with replicas: eight ranks
    "tp=2 sp cp=2 cp_kind=ring pp=2 schedule=1f1b",
    "dp=2 zero=3 tp=2 sp cp=2 cp_kind=ring",
    "dp=2 zero=2 cp=2 cp_kind=ulysses pp=2 schedule=zero-bubble",
    "dp=2 zero=1 tp=2 sp pp=2 schedule=zero-bubble",
    "dp=2 zero=3 tp=2 sp pp=2 schedule=zbv virtual_stages=2",
    "dp=4 zero=2 replicate=2 pp=2 schedule=interleaved virtual_stages=2",
    "dp=4 zero=3 replicate=2 tp=2 sp",
    "dp=2 zero=3 tp=2 sp pp=2 schedule=zero-bubble ep=4",
    "dp=4 zero=2 replicate=2 pp=2 schedule=1f1b ep=2",
    "dp=2 zero=3 tp=2 sp cp=2 cp_kind=ring ep=4",
    # Every axis at once: sixteen ranks
    "dp=2 zero=3 tp=2 sp cp=2 cp_kind=ring pp=2 schedule=1f1b ep=4",
    "dp=2 zero=2 tp=2 sp cp=2 cp_kind=ulysses pp=2 schedule=zero-bubble ep=2",
)

SIZES = {
    "num_layers": 4,
    "hidden": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn": 45,
    "vocab": 61,
    "max_seq_len": 32,
}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 21, "aux_loss_coef": 0.05, "z_loss_coef": 0.02}
LATENT = {
    "num_kv_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_dense_layers": 1,
    "num_expert_groups": 2,
    "topk_groups": 1,
    "bias_update_rate": 0.01,
}
MAIN_MODELS: dict[str, ModelSpec] = {
    "dense": preset("tiny").with_overrides(SIZES | {"num_layers": 5, "num_kv_heads": 4}),
    "tied": preset("tiny").with_overrides(SIZES | {"num_kv_heads": 4, "tied": True}),
    "grouped-query": preset("tiny").with_overrides(SIZES),
    "window": preset("tiny").with_overrides(SIZES | {"num_kv_heads": 1, "sliding_window": 5, "global_every": 2}),
}
FAMILIES: dict[str, ModelSpec] = {
    "experts": preset("tiny-moe").with_overrides(SIZES | EXPERTS),
    "gpt2": preset("gpt2").with_overrides(SIZES | {"num_kv_heads": 4}),
    "gemma2": preset("gemma2-2b").with_overrides(SIZES | {"sliding_window": 5}),
    "latent": preset("deepseek-v3").with_overrides(
        {k: v for k, v in SIZES.items() if k != "head_dim"} | EXPERTS | LATENT
    ),
}
ROUTED: dict[str, ModelSpec] = {  # for layouts that spread experts
    "mixtral": preset("mixtral-8x7b").with_overrides(SIZES | EXPERTS),
    "qwen3-moe": preset("qwen3-30b-a3b").with_overrides(SIZES | EXPERTS | {"num_experts": 8, "experts_per_token": 3}),
}
MODELS = MAIN_MODELS | FAMILIES | ROUTED


@dataclass(frozen=True)
class Batch:
    rows: int
    micro: int  # rows of a micro-batch; a rank that has fewer takes what it has
    documents: bool = False


BATCHES: dict[str, Batch] = {
    "even": Batch(8, 2),
    "ragged": Batch(7, 2, documents=True),  # ranks with unequal rows, a last micro-batch that is short
    "odd": Batch(5, 1),  # an odd number of micro-batches; ranks with unequal numbers of them
    "few": Batch(4, 4, documents=True),  # one micro-batch, however many stages
}
PRECISIONS = ("fp64", "fp32", "bf16")


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    layout: str
    model: str
    precision: str
    batch: str
    num_steps: int = NUM_STEPS

    def __str__(self) -> str:
        return f"{self.layout} | {self.model} | {self.precision} | {self.batch}"

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def plan(self) -> Plan:
        return trial_plan(self.trial, **plan_fields(self.layout, self.spec))

    @property
    def trial(self) -> Trial:
        """bf16 goes without clipping: torch adds a norm up in fp32, in an order that follows the shards, and a factor
        that differs in its seventh digit sends some weight to the other neighbour in bf16, which moves the loss by
        5e-5. Without it, layouts that do not split a sum inside a layer agree to the last bit. Clipping itself is
        proved in fp64 and fp32."""
        batch = BATCHES[self.batch]
        rows_per_rank = -(-batch.rows // degree(self.layout, "dp"))
        return Trial(
            num_steps=self.num_steps,
            global_batch=batch.rows,
            micro_batch=min(batch.micro, rows_per_rank),
            seq_len=SEQ_LEN,
            precision=self.precision,
            clip=CLIP if self.precision != "bf16" else 0.0,
            documents=batch.documents,
        )

    @property
    def is_possible(self) -> bool:
        """Whether this layout can hold this model, and one process does the same arithmetic."""
        fields = plan_fields(self.layout)
        split, stages = fields.get("split"), fields.get("pp", 1) * fields.get("virtual_stages", 1)
        heads = self.spec.num_heads // fields.get("tp", 1)
        if fields.get("cp_kind") == "ulysses" and heads % fields["cp"]:
            return False
        if stages > self.spec.num_layers or (split is not None and sum(split) != self.spec.num_layers):
            return False
        if not self.spec.num_experts if degree(self.layout, "ep") > 1 else self.model in ROUTED:
            return False
        return self.precision != "bf16" or self.is_cut_alike

    @property
    def is_cut_alike(self) -> bool:
        """Whether one process would make the same micro-batches. In bf16 the gradient of a micro-batch is rounded, so
        another cut of the same batch is another calculation; in fp32 and fp64 it is not."""
        trial, dp = self.trial, degree(self.layout, "dp")
        share, more = divmod(trial.global_batch, dp)
        sizes = [share + (index < more) for index in range(dp)]
        return all(size % trial.micro_batch == 0 for size in sizes[:-1])

    @property
    def limits(self) -> dict[str, float]:
        """The largest difference allowed, by what is compared. These are promises: they are never widened."""
        if self.precision == "fp64":
            return {"loss": 1e-9, "norm": 1e-9, "gradient": 1e-9, "parameter": 1e-9}
        if self.precision == "fp32":
            return {"loss": 1e-5, "gradient": 1e-5}
        # Where a sum inside a layer is split, bf16 rounds elsewhere: tensor parallelism adds up two rounded halves,
        # context parallelism parts of a sequence (weights' gradients, attention in a ring), and an expert that gets
        # rows of two ranks rounds one gradient, not two.
        splits_sums = any(degree(self.layout, axis) > 1 for axis in ("tp", "cp", "ep"))
        return {"loss": 5e-3 if splits_sums else 1e-5}


def plan_fields(layout: str, spec: ModelSpec | None = None) -> dict[str, Any]:
    """The fields of `Plan` that a layout string sets; with a model also an even split of its layers."""
    fields: dict[str, Any] = {}
    for key, value in parse_layout(layout).items():
        name = key.split(".")[1]
        if name in ("schedule", "cp_kind"):
            fields[name] = value
        elif name == "sequence":
            fields[name] = value == "true"
        elif name == "split":
            fields[name] = tuple(int(layers) for layers in value.split(","))
        else:
            fields[name] = int(value)
    if spec is not None and "pp" in fields and "split" not in fields:
        num_stages = fields["pp"] * fields.get("virtual_stages", 1)
        fields["split"] = even_split(spec.num_layers, num_stages)
    return fields


@cache
def degree(layout: str, axis: str) -> int:
    return int(plan_fields(layout).get(axis, 1))


@cache
def world(layout: str) -> int:
    return degree(layout, "dp") * degree(layout, "cp") * degree(layout, "tp") * degree(layout, "pp")


def features(layout: str) -> dict[str, str]:
    """What a layout does along each kind of axis: the values that the cover pairs up."""
    words = plan_fields(layout)
    data = "hybrid" if "replicate" in words else f"zero {words.get('zero', 0)}" if "dp" in words else "alone"
    tensor = f"tp{' sp' * ('sequence' in words)}" if "tp" in words else "whole"
    pipeline = f"{words['schedule']} {words.get('virtual_stages', 1)}" if "pp" in words else "one stage"
    experts = "spread" if "ep" in words else "whole"
    context = words["cp_kind"] if "cp" in words else "whole rows"
    return {"data": data, "tensor": tensor, "context": context, "pipeline": pipeline, "experts": experts}
