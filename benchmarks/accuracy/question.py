"""A row as a question to the planner: (model, cluster, job, plan, stack). What a row leaves open is assumed, and each
assumption is said."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from stacks.foreign import ForeignStack, check_fields, load_stack

from accuracy.process import USUAL, outside_bytes
from accuracy.run import Run, Skip
from accuracy.shape import shape_of
from shardwise.cluster.describe.table import known_cluster, known_devices
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig
from shardwise.spec.split import even_split

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Question:
    run: Run
    model: ModelSpec
    cluster: ClusterSpec
    job: Job
    plan: Plan
    stack: ForeignStack
    assumed: tuple[str, ...]  # what the row does not say
    memory_comparable: bool = True
    outside_bytes: int = 0  # of the process, besides torch's memory

    @property
    def recompute_known(self) -> bool:
        return _recompute_of(self.run.text("recompute")) != ""

    def mfu(self, step_s: float) -> float:
        """Of the 16-bit peak; causal attention counted once, repeated work not at all."""
        peak = max(self.cluster.device.flops.get(name, 0.0) for name in ("bf16", "fp16"))
        done = self.model.flops_per_token(self.job.seq_len) * self.job.tokens_per_step
        return done / (step_s * self.plan.world * peak)


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((HERE / "machines.toml").read_text(encoding="utf-8"))


def _entry(kind: str, text: str, gpu: str = "") -> dict[str, Any] | None:
    lower = text.lower()
    for entry in table()[kind]:
        test: Callable[[Any], bool] = any if kind == "stack" else all
        if test(word in lower for word in entry["words"]) and entry.get("gpu", "") in gpu.lower():
            return entry
    return None


def question_of(run: Run) -> Question:
    if "BATCH-MISMATCH" in run.note:
        raise Skip("its source says that batch and layout do not match")
    assumed: list[str] = []
    model = shape_of(run)
    about, stack = _stack_of(run, assumed)
    cluster = _cluster_of(run, assumed)
    job, plan, comparable = _plan_of(run, model, cluster, about, assumed)
    outside = outside_bytes(plan, cluster, tuple(about.get("groups", USUAL)))
    return Question(run, model, cluster, job, plan, stack, tuple(assumed), comparable, outside)


def _stack_of(run: Run, assumed: list[str]) -> tuple[dict[str, Any], ForeignStack]:
    about = _entry("stack", f"{run.text('stack')} {run.text('source')}") or _entry("stack", run.note)
    if about is None:
        name = "torchtitan" if run.text("zero")[-1:] in ("2", "3") else "megatron-core"
        about = _stack_named(name)
        assumed.append(f"stack {run.text('stack') or 'unknown'}: as {name}")
    elif "beyond" in about and _zero_of(run, [])[0] >= about["beyond"]["stage"]:
        assumed.append(f"{about['name']} has no such ZeRO stage: as {about['beyond']['name']}")
        about = _stack_named(about["beyond"]["name"])
    stack = load_stack(about["name"])
    for fact in _facts():
        if re.search(fact["words"], run.text(fact["column"]), re.IGNORECASE):
            stack = replace(stack, **fact["set"])
    return about, stack


def _stack_named(name: str) -> dict[str, Any]:
    return next(entry for entry in table()["stack"] if entry["name"] == name)


@cache
def _facts() -> list[dict[str, Any]]:
    facts = tomllib.loads((HERE / "facts.toml").read_text(encoding="utf-8")).get("fact", [])
    for fact in facts:
        check_fields(fact["set"], "facts.toml")
    return facts


def _by_name(kind: str) -> dict[str, Any] | None:
    """A GPU that our own table knows, by its longest name that is in the row's."""
    plain = re.sub(r"[^a-z0-9]", "", kind.lower())
    names = {
        re.sub(r"[^a-z0-9]", "", also): name
        for name, about in known_devices().items()
        for also in (name, *about.get("also", ()))
    }
    found = [name for name in names if name in plain and name != "cpu"]
    return {"kind": names[max(found, key=len)]} if found else None


def _cluster_of(run: Run, assumed: list[str]) -> ClusterSpec:
    kind = run.text("gpu_kind")
    about = _entry("gpu", kind) or _by_name(kind)
    if about is None:
        raise Skip(f"unknown GPU kind {kind!r}")
    gpus = run.count("gpus")
    nodes = run.nodes or -(-gpus // about.get("per_node", 8))
    per_node = -(-gpus // nodes)
    network = _entry("network", f"{run.text('source')} {run.text('stack')}", kind) or {}
    nic = run.nic or network.get("nic")
    if nodes > 1 and nic is None:
        assumed.append("network: the vendor's reference system")
    return _build_cluster(about["kind"], nodes, per_node, nic, network.get("alpha"), about.get("link"))


@cache
def _build_cluster(
    kind: str, nodes: int, per_node: int, nic: float | None, alpha: float | None, link: float | None
) -> ClusterSpec:
    cluster = known_cluster(kind, nodes, per_node, nic)
    tiers = list(cluster.tiers)
    if link is not None:
        tiers[0] = replace(tiers[0], bandwidth=link)
    if alpha is not None and len(tiers) > 1:
        tiers[-1] = replace(tiers[-1], alpha=alpha)
    return replace(cluster, tiers=tuple(tiers))


# The layout -----------------------------------------------------------------------------------------------------------


FORMATS = {
    "fp4": "",
    "fp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
}
REPEATS = {
    "none": "none",
    "no": "none",
    "off": "none",
    "false": "none",
    "0": "none",
    "full": "full",
    "uniform": "full",
    "all": "full",
    "true": "full",
    "yes": "full",
    "1": "full",
    "selective": "selective",
    "": "",
}
SHARDED = {
    "": 0,
    "none": 0,
    "no": 0,
    "ddp": 0,
    "fsdp": 3,
    "fsdp2": 3,
    "hsdp": 3,
    "full_shard": 3,
    "shard_grad_op": 2,
    "distopt": 1,
    "os": 1,
}
"""What people write for number formats, recomputation and ZeRO stages."""


def _precision_of(text: str) -> str:
    for word, ours in FORMATS.items():
        if word in text.lower():
            if not ours:
                raise Skip("4-bit training is not ours")
            return ours
    if not text:
        return "bf16"
    raise Skip(f"unknown precision {text!r}")


def _recipe_of(run: Run) -> str:
    """One scale per tensor, unless the row says that there are more."""
    return "rowwise" if re.search(r"row|mx|block", run.text("precision").lower()) else "tensorwise"


def _recompute_of(text: str) -> str:
    word = text.lower().partition("(")[0].strip()
    if word not in REPEATS:
        raise Skip(f"unknown recomputation {text!r}")
    return REPEATS[word]


def _schedule_of(run: Run, model: ModelSpec, pp: int, assumed: list[str]) -> tuple[str, int, bool]:
    """Name, stages per rank, and whether memory can be compared."""
    if pp == 1:
        return "1f1b", 1, True
    note, chunks = run.note, run.text("vpp")
    if re.search(r"\bZB-?V\b", note):
        return "zbv", 2, True
    if "ZB-2p" in note:
        assumed.append("ZB-2p: timed as zero-bubble, memory not compared")
        return "zero-bubble", 1, False
    if "ZB-1p" in note:
        return "zero-bubble", 1, True
    if re.search(r"\bgpipe\b", note, re.IGNORECASE):
        return "gpipe", 1, True
    if chunks == "L/p":
        assumed.append("vpp L/p: the whole part of layers / pp")
        stages = max(1, model.num_layers // pp)
    elif chunks == "" and re.search(r"interleaved", note, re.IGNORECASE):
        stages = next((count for count in (2, 3, 4) if model.num_layers % (pp * count) == 0), 2)
        assumed.append("virtual stages not stated: 2, or as layers divide")
    else:
        stages = run.count("vpp", 1)
    return ("interleaved", stages, True) if stages > 1 else ("1f1b", 1, True)


def _split_of(model: ModelSpec, stages: int, by: str) -> tuple[int, ...]:
    if stages > model.num_layers:
        raise Skip("more pipeline stages than layers")
    if by == "cost":
        return _cost_split(model, stages)
    if model.num_layers % stages and (model.num_layers + 2) % stages == 0 and stages > 1:
        share = (model.num_layers + 2) // stages  # embedding and head count as a layer each
        if share > 1:
            return (share - 1, *[share] * (stages - 2), share - 1)
    return even_split(model.num_layers, stages)


def _cost_split(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """A stage takes blocks (embedding, layers, norm, head, cast, loss) until the running number of multiplied weights
    has reached its share of the whole. Every stage of ours has a layer, so one that would have later blocks alone gets
    one."""
    layers = [model.num_attention_parameters + model.num_feedforward_parameters(layer, True) for layer in model.layers]
    running = list(accumulate([0, *layers, 0, model.vocab * model.hidden, 0, 0]))
    owners, stage = [], 0
    for cost in running:
        owners.append(stage)
        stage += cost * stages >= running[-1] * (stage + 1) and stage < stages - 1
    if set(owners) != set(range(stages)):
        raise Skip("its framework would leave a stage without work, and fails")
    counts = [owners[1 : len(layers) + 1].count(stage) for stage in range(stages)]
    for short in [stage for stage, count in enumerate(counts) if count == 0]:
        giver = max(stage for stage in range(short) if counts[stage] > 1)  # those before it keep what they have
        counts[giver] -= 1
        counts[short] = 1
    return tuple(counts)


def _zero_of(run: Run, assumed: list[str]) -> tuple[int, dict[str, Any]]:
    text = run.text("zero").lower()
    extra: dict[str, Any] = {}
    if "zero++" in text or "qwz" in text:
        # Its three parts: 8-bit gathers, 4-bit reductions, a second copy of the weights inside each node.
        extra = {
            "quantize_weights": "int8",
            "quantize_gradients": "int4",
            "secondary_shard": run.count("gpus_per_node", 8),
        }
    if text in SHARDED:
        if text == "" and run.count("dp", 1) > 1:
            assumed.append("ZeRO stage not stated: 0")
        return SHARDED[text], extra
    match = re.search(r"[0-3]", text)
    if match is None:
        raise Skip(f"unknown sharding {text!r}")
    return int(match[0]), extra


def _plan_of(
    run: Run, model: ModelSpec, cluster: ClusterSpec, about: dict[str, Any], assumed: list[str]
) -> tuple[Job, Plan, bool]:
    tp, pp, cp, ep = (run.count(name, 1) for name in ("tp", "pp", "cp", "ep"))
    dp = run.count("dp", run.count("gpus") // (tp * pp * cp))
    if tp * pp * cp * dp != run.count("gpus"):
        raise Skip("tp x pp x cp x dp is not the number of GPUs")
    seq = run.number("seq") or run.found(r"(\d+) tokens per GPU")
    if not seq:
        raise Skip("no sequence length")
    zero, extra = _zero_of(run, assumed)
    zero = min(zero, about.get("pipeline_zero", zero)) if pp > 1 else zero
    schedule, chunks, comparable = _schedule_of(run, model, pp, assumed)
    batch = _global_batch(run, dp)
    micro = _micro_batch(run, batch, dp, pp * chunks, about, assumed)
    recompute = _recompute_of(run.text("recompute"))
    if recompute == "":
        assumed.append("recomputation not stated: none if that fits, else selective")
        recompute = "none"
    group = run.found(r"zero1 group=(\d+)") if zero else None
    sharded = zero > 0 and dp * cp > 1
    precision = _precision_of(run.text("precision"))
    try:
        plan = Plan(
            device="cuda",
            precision=precision,
            seq_len=int(seq),
            global_batch=batch,
            micro_batch=micro,
            num_steps=1,
            threads_per_rank=1,
            reason="as published",
            dp=dp,
            zero=zero if sharded else 0,
            replicate=(dp // group if group and group < dp and dp % group == 0 else 1) if sharded else dp,
            tp=tp,
            sequence=tp > 1 and (run.text("sp").lower() in ("1", "1.0", "true", "yes") or ep > 1),
            cp=cp,
            cp_kind="ulysses" if re.search(r"all-to-all|ulysses", run.note) and cp > 1 else "ring",
            pp=pp,
            schedule=schedule,
            virtual_stages=chunks,
            split=_split_of(model, pp * chunks, about.get("split", "even")) if pp > 1 else (),
            ep=ep,
            recompute=recompute,
            fp8_recipe=_recipe_of(run),
            **extra,
        )
    except AssertionError as error:
        raise Skip(f"not a layout of ours: {error}") from None
    adapter = AdapterConfig(kind="lora") if re.search(r"\bLoRA\b", run.note) else AdapterConfig()
    return Job(int(seq), batch, None, precision, "adamw", adapter), plan, comparable


def _global_batch(run: Run, dp: int) -> int:
    if run.number("global_batch"):
        return run.count("global_batch")
    count, micro = run.found(r"micro_num=(\d+)"), run.number("micro_batch")
    if count and micro:
        return count * int(micro) * dp
    if run.found(r"(\d+) tokens per GPU"):
        return dp
    raise Skip("no global batch")


def _micro_batch(run: Run, batch: int, dp: int, stages: int, about: dict[str, Any], assumed: list[str]) -> int:
    rows = -(-batch // dp)
    if run.number("micro_batch"):
        return min(run.count("micro_batch"), rows)
    if stages > 1 and about.get("micro_batches") == "stages":
        assumed.append("micro-batch not stated: as many as stages")
        return max(1, rows // stages)
    assumed.append("micro-batch not stated: 4 at most, 1 in a pipeline")
    return 1 if stages > 1 else next(size for size in (4, 2, 1) if rows % size == 0)
