"""Time of a step, as a sum of parts, each a size over a rate. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.spec import ClusterSpec
from shardwise.config.schema import AdapterConfig
from shardwise.model.spec import ModelSpec
from shardwise.plan.activations import segments
from shardwise.plan.adapter_share import Held, held_by
from shardwise.plan.job import WHOLE, Job
from shardwise.plan.memory import COMPUTE_BYTES, WEIGHT_BYTES, gathered_bytes, numbers_of, stages_of, state_bytes
from shardwise.plan.offloaded import offload_seconds
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare, rank_shares
from shardwise.plan.stack import OURS, Stack

MATMUL_SHARE = {"cpu": 0.53, "cuda": 0.55}
"""Share of the bare matmul rate that a whole forward and backward pass reaches.
CPU: fitted to the default run on one two-core machine. CUDA: an assumption; runs on an H200 came out -24 to +21 % off it."""

LAUNCH_SECONDS_PER_LAYER = {"cpu": 3e-3, "cuda": 3.5e-3}
"""Time Python and torch need around one layer's forward and backward operations: the floor for small models.
Fitted to one run each: a two-layer model on a CPU, `tiny` on an H200."""

SELECTIVE_SHARE = 0.1
"""What selective recomputation runs again, as a share of a forward pass. `tiny` on a CPU: 1 to 3 % of a step."""


FROZEN_FLOPS = 2 / 3
"""Of a step's matrix work, when weights are frozen: no gradients of the weights. Adapters themselves are not counted."""


@dataclass(frozen=True)
class Rates:
    """What one rank of this machine reaches while all ranks are busy; measured when a run starts."""

    matmul_flops: float  # per second
    memory_bytes: float  # per second, read + written
    all_reduce_bytes: float = float("inf")  # payload per second
    all_reduce_latency: float = 0.0  # seconds per call


def step_seconds(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack = OURS) -> dict[str, float]:
    """Seconds by part; their sum is the step."""
    device, link = cluster.device, cluster.tier(plan.world)
    kind = {"bf16-true": "bf16", "fp16-true": "fp16"}.get(plan.precision, plan.precision)
    flops = device.flops.get(kind, max(device.flops.values())) * device.achievable
    rates = Rates(flops, device.bandwidth * device.bandwidth_share, link.bandwidth * link.share, link.alpha)
    return predict_step(model, plan, job.optimizer, rates, job.adapter)


def _repeated_work(share: RankShare, plan: Plan) -> float:
    """Forward passes that backward runs again, as a share of the rank's one. The last product of a group of blocks is not needed."""
    if plan.recompute in ("none", "selective"):
        return SELECTIVE_SHARE * (plan.recompute == "selective")
    sizes = {layer.index: size for layer, size in zip(share.layers, share.layer_parameters, strict=True)}
    again = 0
    for layers in stages_of(share, plan):
        for part in segments(plan.recompute, numbers_of(layers)):
            last = layers[part[-1] - layers[0].index]
            again += sum(sizes[index] for index in part) - (0 if last.is_moe else last.ffn * share.spec.hidden)
    return again / (sum(sizes.values()) + share.head)


def predict_step(
    spec: ModelSpec, plan: Plan, optimizer: str, rates: Rates, adapter: AdapterConfig = WHOLE
) -> dict[str, float]:
    """Seconds of the slowest rank. Messages between pipeline stages are not counted: they travel while others compute."""
    slowest = max(rank_shares(spec, plan), key=lambda share: share.work)
    blocks = held_by(slowest, spec, adapter)
    held = sum(blocks[1:], blocks[0])
    # The micro-batches of a pipeline have one shape, so the last one is filled up; without one it may be smaller.
    rows = plan.rows_per_rank if plan.pp == 1 else plan.num_microbatches * plan.micro_batch
    flops = rows * plan.seq_len * spec.flops_per_token(plan.seq_len) * slowest.work / (plan.tp * plan.cp)
    flops *= FROZEN_FLOPS if adapter.kind != "none" else 1.0
    launches = len(slowest.layers) * plan.num_microbatches * LAUNCH_SECONDS_PER_LAYER[plan.device]
    compute = max(flops / (rates.matmul_flops * MATMUL_SHARE[plan.device]), launches)
    again = _repeated_work(slowest, plan) * compute / 3  # a forward pass is a third of the work
    # Read gradient and weight, write weight, read and write each state; + 2: the norm for clipping, and its scaling.
    passed = 5 * WEIGHT_BYTES[plan.precision] + 2 * state_bytes(optimizer, plan.precision)
    moved = passed * held.trained / plan.state_shards
    step = {"compute": compute, "optimizer": moved / rates.memory_bytes}
    if again:
        step["recompute"] = again
    if moving := offload_seconds(held.trained / plan.state_shards, plan):
        step["offload"] = moving
    if plan.pp > 1:
        step["bubble"] = (compute + again) * bubble_share(plan)
    if plan.dp * plan.cp > 1:
        step["data-parallel"] = _data_parallel_seconds(slowest, held, plan, rates)
    if plan.tp > 1:
        # Two sums per layer, forward and backward. Sequence parallelism cuts each in two halves of the same total.
        message = plan.micro_batch * plan.seq_len // plan.cp * spec.hidden * COMPUTE_BYTES[plan.precision]
        # A repeated forward has its sums too, but for the one after its last product.
        groups = [part for layers in stages_of(slowest, plan) for part in segments(plan.recompute, numbers_of(layers))]
        repeated = sum(2 * len(part) - 1 for part in groups)
        sums = (4 * len(slowest.layers) + repeated) * plan.num_microbatches
        step["tensor-parallel"] = sums * (rates.all_reduce_latency + message / rates.all_reduce_bytes)
    if plan.ep > 1:
        # Every chosen copy of a token travels there and back, forward and backward: half of what an all-reduce moves.
        routed = sum(layer.is_moe for layer in slowest.layers) * plan.num_microbatches
        tokens = plan.micro_batch * plan.seq_len // (plan.cp * plan.tp) * spec.experts_per_token
        payload = tokens * spec.hidden * COMPUTE_BYTES[plan.precision] * (plan.ep - 1) / plan.ep
        step["expert-parallel"] = 4 * routed * (rates.all_reduce_latency + payload / 2 / rates.all_reduce_bytes)
    return step


def bubble_share(plan: Plan) -> float:
    """Idle time over work, for stages of equal cost whose backward splits into halves as long as a forward."""
    stages = plan.virtual_stages
    filled = {"gpipe": 1, "1f1b": 1, "interleaved": stages, "zero-bubble": 3 * stages, "zbv": 6}[plan.schedule]
    return (plan.pp - 1) / (filled * plan.num_microbatches)


def _data_parallel_seconds(share: RankShare, held: Held, plan: Plan, rates: Rates) -> float:
    """An all-reduce is a reduction to the owners and a gathering from them; ZeRO does the two apart, and how often differs."""
    unmoved = share.spread_parameters if plan.expert_copies == 1 else 0
    is_frozen = held.trained < share.num_parameters
    weight = WEIGHT_BYTES[plan.precision] * (held.trained - (0 if is_frozen else unmoved))
    compute = gathered_bytes(held, COMPUTE_BYTES[plan.precision]) - COMPUTE_BYTES[plan.precision] * unmoved
    if plan.zero == 0:
        return rates.all_reduce_latency + weight / rates.all_reduce_bytes
    reductions = 1 if plan.zero == 1 else plan.num_microbatches
    gathers = 2 * plan.num_microbatches if plan.zero == 3 else 1  # stage 3: for forward, and again for backward
    moved = (reductions * weight + gathers * compute) / 2
    calls = (reductions + gathers) / 2 * (len(share.layers) + 2)  # one per block and end
    if plan.replicate > 1:  # the owners of one shard meet once, at the last micro-batch
        moved += weight / plan.state_shards
        calls += 1
    return calls * rates.all_reduce_latency + moved / rates.all_reduce_bytes
