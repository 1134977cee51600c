"""Shrinking keeps what matters for a proof and fits what verify may start."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.prove.shrink import MAX_RANKS, SEQ_LEN, left_out, shrink_plan, shrink_spec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

FAMILIES = ("llama3-70b", "gpt2", "gemma2-2b", "gemma3-1b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3", "mistral-7b")


def plan_of(**layout: object) -> Plan:
    values = dict(device="cpu", precision="bf16", seq_len=4096, num_steps=9, threads_per_rank=1, reason="")
    batch = dict(global_batch=1024, micro_batch=1)
    return Plan(**values | batch | layout)  # type: ignore[arg-type]


def test_a_layout_that_fits_keeps_its_degrees() -> None:
    plan = plan_of(dp=2, zero=3, pp=2, split=(5, 3))
    small = shrink_plan(plan)
    assert (small.dp, small.zero, small.pp, small.split) == (2, 3, 2, (2, 1))
    assert small.seq_len == SEQ_LEN


def test_a_large_layout_keeps_every_axis() -> None:
    plan = plan_of(
        dp=64, zero=2, replicate=8, tp=8, sequence=True, pp=4, schedule="zbv", virtual_stages=2, split=(10,) * 8
    )
    small = shrink_plan(plan)
    assert small.world <= MAX_RANKS
    assert (small.dp, small.tp, small.pp, small.sequence, small.schedule) == (2, 2, 2, True, "zbv")


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        (dict(dp=64, zero=3, tp=8, sequence=True, pp=2, split=(10, 10)), []),
        (dict(dp=2, tp=2, sequence=True, cp=2, pp=2, split=(5, 5)), ["dp=2"]),
        (dict(dp=2, tp=2, sequence=True, cp=2, pp=2, ep=8, split=(5, 5)), ["dp=2"]),
        (dict(dp=4, zero=3, replicate=2, tp=2, pp=2, split=(5, 5)), ["replicate=2"]),
    ],
)
def test_what_a_smaller_plan_lacks_is_said(layout: dict[str, object], missing: list[str]) -> None:
    plan = plan_of(**layout)
    assert left_out(plan, shrink_plan(plan)) == missing


def test_hybrid_sharding_stays_hybrid_where_ranks_allow() -> None:
    small = shrink_plan(plan_of(dp=64, zero=3, replicate=8))
    assert small.dp <= MAX_RANKS and small.shard > 1 and small.replicate > 1


def test_a_batch_that_does_not_divide_stays_so() -> None:
    small = shrink_plan(plan_of(dp=4, global_batch=10, micro_batch=1))
    assert small.global_batch % 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_family_shrinks_to_what_the_layout_divides(name: str, tp: int) -> None:
    spec = preset(name)
    if spec.num_heads % tp or (spec.num_kv_heads % tp and tp % spec.num_kv_heads):
        pytest.skip("the model itself does not divide")
    small = shrink_spec(spec, shrink_plan(plan_of(tp=tp, dp=2)))
    assert small.num_parameters < 200_000
    assert small.num_heads % tp == 0
    assert small.num_kv_heads % tp == 0 or tp % small.num_kv_heads == 0
    kept = ("tied", "qk_norm", "qkv_bias", "mlp_bias", "norm", "positions", "router", "post_norms", "attention")
    assert all(getattr(small, field) == getattr(spec, field) for field in kept)
    assert bool(small.num_experts) == bool(spec.num_experts) and bool(small.sliding_window) == bool(spec.sliding_window)
    kinds = {(layer.window is None, layer.is_moe) for layer in spec.layers}
    assert {(layer.window is None, layer.is_moe) for layer in small.layers} == kinds


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
def test_heads_stay_shareable_for_ulysses(name: str, tp: int, cp: int) -> None:
    spec = preset(name)
    if spec.num_heads % (tp * cp) or (spec.num_kv_heads % tp and tp % spec.num_kv_heads):
        pytest.skip("the model itself does not divide")
    plan = shrink_plan(plan_of(tp=tp, cp=cp, cp_kind="ulysses"))
    assert (plan.cp, plan.cp_kind, plan.seq_len % (2 * cp)) == (cp, "ulysses", 0)
    small = shrink_spec(spec, plan)
    assert small.num_heads % (tp * cp) == 0 and small.num_parameters < 200_000


@settings(max_examples=200)
@given(st.data())
def test_any_plan_shrinks_to_a_valid_one(data: st.DataObject) -> None:
    draw = data.draw
    zero = draw(st.integers(0, 3))
    dp, tp, pp = (draw(st.integers(1, 12)) for _ in range(3))
    replicate = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0])) if zero else dp
    stages = 1 if pp == 1 else draw(st.integers(1, 2))
    schedule = "interleaved" if stages > 1 else "1f1b"
    split = tuple(draw(st.integers(1, 4)) for _ in range(pp * stages)) if pp > 1 else ()
    plan = plan_of(
        dp=dp, zero=zero, replicate=replicate, tp=tp, pp=pp, virtual_stages=stages, schedule=schedule, split=split,
        global_batch=draw(st.integers(dp, 100)), micro_batch=1,
    )  # fmt: skip
    small = shrink_plan(plan)
    assert small.world <= MAX_RANKS
