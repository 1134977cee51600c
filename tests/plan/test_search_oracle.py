"""The pruned search against predicting everything: small models, clusters and jobs at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.candidate import Candidate, family, rank_of
from shardwise.plan.layouts.effort import effort
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.predict import predict
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

Layout = tuple[Grid, Pace, States, Saving]
MOST = 4000
"""Layouts that the oracle predicts in one example."""

FAMILIES = {
    "dense": {},
    "latent": {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "windows": {"sliding_window": 256, "global_every": 2},
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 128, "first_dense_layers": 1},
    "tied": {"tied": True, "norm": "layer", "gated": False, "activation": "gelu"},
}


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModelSpec, ClusterSpec, Job, dict[str, object], float]:
    """With few enough layouts: values of some axes are fixed."""
    hidden = draw(st.sampled_from([256, 1024, 4096]))
    model = ModelSpec(
        num_layers=draw(st.integers(2, 9)), hidden=hidden, num_heads=4, num_kv_heads=draw(st.sampled_from([2, 4])),
        ffn=3 * hidden, vocab=draw(st.sampled_from([500, 32000])),
    )  # fmt: skip
    changes = dict(draw(st.sampled_from(list(FAMILIES.values()))))
    if "kv_lora_rank" in changes:
        changes["num_kv_heads"] = 4
    model = model.with_overrides(changes)
    nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (3, 2), (2, 4)]))
    device, slow = draw(st.sampled_from(["h100", "a100-80", "l40s"])), draw(st.booleans())
    cluster = read_cluster(f"{nodes}x{per_node}x{device}" + ":nic=1GB/s" * (slow and nodes > 1))
    job = Job(
        seq_len=draw(st.sampled_from([512, 1024, 4096, 32768])),
        global_batch=draw(st.integers(1, 12)),
        precision=draw(st.sampled_from(["bf16", "fp32", "bf16-true", "fp8"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd"])),
        adapter=AdapterConfig(kind=draw(st.sampled_from(["none", "none", "lora", "qlora"])), targets=("all-linear",)),
    )
    fixed: dict[str, object] = {}
    if draw(st.booleans()):
        fixed["memory.recompute"] = draw(st.sampled_from(["none", "selective", "full", "sqrt", "every-2"]))
    if draw(st.booleans()):
        fixed["memory.offload"] = draw(st.sampled_from(["none", "optimizer"]))
    if draw(st.booleans()):
        fixed["parallel.zero"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        fixed["parallel.pp"] = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        fixed["parallel.schedule"] = draw(st.sampled_from(["1f1b", "interleaved", "zero-bubble", "zbv", "gpipe"]))
    if job.precision == "fp8" and draw(st.booleans()):
        fixed |= {"memory.fp8_recipe": "tensorwise", "memory.fp8_head": draw(st.booleans())}
    if draw(st.booleans()):
        fixed["speed.fuse"] = draw(st.booleans())
    share = draw(st.floats(0.0, 1.0))
    return model, cluster, job, fixed, share


def layouts(space: Space) -> list[Layout] | None:
    found = []
    for layout in space:
        found.append(layout)
        if len(found) > MOST:
            return None
    return found


def all_predicted(space: Space, every: list[Layout]) -> list[Candidate]:
    model, cluster, job = space.model, space.cluster, space.job
    plans = [space.plan(*layout) for layout in every]
    return [Candidate(plan, predict(model, cluster, job, plan)) for plan in plans]


def test_the_search_finds_what_predicting_everything_finds():
    compared = 0

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(questions())
    def agree(question):
        nonlocal compared
        model, cluster, job, fixed, share = question
        space = Space(model, cluster, job, fixed)
        every = layouts(space)
        assume(every)
        predicted = all_predicted(space, every)
        sizes = sorted(candidate.prediction.memory_bytes for candidate in predicted)
        limit = sizes[int(share * (len(sizes) - 1))]  # so that some fit and some do not
        fitting = sorted((c for c in predicted if c.prediction.memory_bytes <= limit), key=rank_of)
        best = list({family(c.plan, c.plan.zero): c for c in reversed(fitting)}.values())
        best.sort(key=rank_of)
        found = BestFirst(space, limit).best(5)
        assert [(c.plan, c.prediction.step_s) for c in found] == [(c.plan, c.prediction.step_s) for c in best[:5]]
        compared += len(every) > 1

    agree()
    assert compared >= 15, "too few questions had layouts to compare"


def test_no_lower_bound_is_above_the_prediction():
    compared = 0

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(questions(), st.randoms(use_true_random=False))
    def hold(question, random):
        nonlocal compared
        model, cluster, job, fixed, _ = question
        space = Space(model, cluster, job, fixed)
        every = layouts(space)
        assume(every)
        no_bound_is_above(space, random.sample(every, min(len(every), 60)))
        compared += 1

    hold()
    assert compared >= 15, "too few questions had layouts to compare"


def test_bounds_know_how_few_ranks_lie_together():
    """Three of the four cards of a node: nothing is sent out of it."""
    model = ModelSpec(num_layers=2, hidden=1024, num_heads=4, num_kv_heads=2, ffn=3072, vocab=32000)
    fixed = {"memory.recompute": "none", "parallel.zero": 0, "parallel.pp": 1}
    space = Space(model, read_cluster("2x4xh100"), Job(seq_len=512, global_batch=11), fixed)
    no_bound_is_above(space, layouts(space) or [])


def test_bounds_know_that_states_in_cpu_memory_have_no_copies():
    model = ModelSpec(num_layers=2, hidden=4096, num_heads=4, num_kv_heads=2, ffn=12288, vocab=500)
    fixed = {"memory.recompute": "none", "memory.offload": "optimizer"}
    space = Space(model, read_cluster("1x1xl40s"), Job(seq_len=512, global_batch=11), fixed)
    no_bound_is_above(space, layouts(space) or [])


def test_whole_weights_may_take_less_than_shards() -> None:
    """Two frozen layers on two ranks: ZeRO-3 holds half of them and gathers both."""
    model = ModelSpec(num_layers=2, hidden=4096, num_heads=4, num_kv_heads=2, ffn=12288, vocab=500)
    job = Job(seq_len=512, global_batch=2, adapter=AdapterConfig(kind="lora", targets=("all-linear",)))
    fixed = {"memory.recompute": "none", "memory.offload": "none"}
    space = Space(model, read_cluster("1x2xh100"), job, fixed | {"parallel.dp": 2})
    every = layouts(space) or []
    no_bound_is_above(space, every)
    least = min(all_predicted(space, every), key=lambda candidate: candidate.prediction.memory_bytes)
    assert least.plan.zero == 0
    limit = least.prediction.memory_bytes + 1
    assert [found.plan for found in BestFirst(space, limit).best(5)] == [least.plan]
    assert BestFirst(space, 0).smallest([2]).plan == least.plan


def test_bounds_do_not_depend_on_what_was_asked_before():
    """One rank has wider gradients where it adds up several micro-batches."""
    model = ModelSpec(num_layers=2, hidden=4096, num_heads=4, num_kv_heads=2, ffn=12288, vocab=500)
    fixed = {"memory.recompute": "none", "memory.offload": "none", "parallel.zero": 0, "parallel.pp": 1}
    space = Space(model, read_cluster("1x4xl40s"), Job(seq_len=512, global_batch=11), fixed)
    for some in (layouts(space) or [], (layouts(space) or [])[::-1]):
        no_bound_is_above(space, some)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_bounds_know_what_fused_matmuls_keep(compiled: str, mode: str) -> None:
    """Fused gate and up matmuls keep no activated gate; plain ones that are computed again keep no result either."""
    model = preset("tiny").with_overrides({"num_layers": 4})
    fixed = {"memory.recompute": mode, "parallel.zero": 0, "speed.fuse": True, "speed.compile": compiled}
    space = Space(model, read_cluster("1x2xh100"), Job(seq_len=512, global_batch=4), fixed)
    every = layouts(space)
    assert every
    no_bound_is_above(space, every)


@pytest.mark.parametrize("attention", ["measured", "flash4"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_bounds_know_which_layouts_have_flash_attention(attention: str, schedule: str) -> None:
    """A ring has its own attention, and where sequences are cut nobody measures, so layouts of one question differ."""
    model = ModelSpec(num_layers=4, hidden=512, num_heads=4, num_kv_heads=4, ffn=1024, vocab=500)
    fixed = {"memory.recompute": "none", "memory.offload": "none", "parallel.schedule": schedule}
    job = Job(seq_len=16384, global_batch=4, attention=attention)
    space = Space(model, read_cluster("1x4xh100"), job, fixed)
    every = layouts(space)
    assert every
    found = {(grid.cp > 1, grid.cp_kind, space.attention(grid)) for grid, *_ in every}
    ulysses = "flash4" if attention == "flash4" else "sdpa"
    assert found == {(False, "ring", "flash4"), (True, "ring", "sdpa"), (True, "ulysses", ulysses)}
    no_bound_is_above(space, every)
    assert [c.plan for c in BestFirst(space, 2**40).best(1)] == [min(all_predicted(space, every), key=rank_of).plan]


def no_bound_is_above(space: Space, some: list[Layout]) -> None:
    """The prediction."""
    assert some
    engine = BestFirst(space, 0)
    time, memory = engine.time, engine.memory
    for (grid, pace, states, saving), candidate in zip(some, all_predicted(space, some), strict=True):
        said, seconds, size = (
            candidate.plan.layout,
            candidate.prediction.step_s * (1 + 1e-9),
            candidate.prediction.memory_bytes + 1,  # which is rounded down
        )
        sharing = time.of_states(grid, pace.micro_batch, states, saving.offload)
        assert time.of_grid(grid) <= seconds, said
        assert time.of_size(grid, pace.micro_batch) <= seconds, said
        assert time.of_saving(grid, pace.micro_batch, saving, sharing) <= seconds, said
        room = engine.within(size).branches
        place = (saving.offload, saving.activation_offload)
        assert room.size(grid, pace.micro_batch, place) <= seconds * effort(candidate.plan), said
        assert time.courses(grid, pace.micro_batch, saving.recompute)[pace].bound(sharing) <= seconds, said
        assert time.of_plan(candidate.plan) <= seconds, said
        assert engine.layouts.seconds(candidate.plan) <= candidate.prediction.step_s, said
        kept = 0.0 if saving.activation_offload else memory.kept(grid, pace.micro_batch, saving.recompute)
        weights = memory.of_grid(grid, pace.micro_batch, states, saving.offload)
        assert weights.beside(kept) <= memory.of_layout(grid, pace, states, saving) <= size, said
        assert weights.host <= candidate.prediction.elsewhere["host"] + 1, said
        assert engine.layouts.first_rank(candidate.plan) < size, said


def test_a_twin_that_does_less_is_never_slower():
    """What the search relies on when it drops layouts whose plainer twin fits."""
    model, cluster = preset("llama3.2-1b"), read_cluster("2x4xa100-80")
    space = Space(model, cluster, Job(4096, 32), {"parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 2})
    for grid, pace, states, saving in space:
        if pace.micro_batch != 4 or saving == space.savings[0] or pace.virtual_stages > 2:
            continue
        plain = space.plan(grid, pace, states, saving._replace(recompute="none", offload="none"))
        plan = space.plan(grid, pace, states, saving)
        seconds = [predict(model, cluster, space.job, one).step_s for one in (plain, plan)]
        assert seconds[0] <= seconds[1] * (1 + 1e-12), (plan.layout, seconds)
    assert replace(plain, recompute="full") != plain
