"""What a rank needs when its activations were measured (run/micro_batch_search.py) and the rest is predicted. No
torch."""

from __future__ import annotations

from shardwise.plan.prediction.lifetimes import ALLOCATOR_SHARE, APART
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.spec.job import WHOLE
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig


def states_bytes(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE) -> int:
    """Bytes that the fullest rank holds besides activations and temporaries."""
    parts = predict_memory(spec, plan, optimizer, adapter)
    return sum(size for name, size in parts.items() if name not in ("activations", "allocator", APART))


def measured_need(spec: ModelSpec, plan: Plan, states: int, activations: int, temporary: int, pp_rank: int) -> int:
    """Bytes of a rank of this pipeline stage that runs `plan`, beside `states`: one micro-batch's activations as
    measured, as often as the schedule holds them, and its temporaries."""
    held = activations * rank_shares(spec, plan)[pp_rank].in_flight(plan) // plan.virtual_stages
    return states + held + max(temporary, int(ALLOCATOR_SHARE[plan.device] * held))
