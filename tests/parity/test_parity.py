"""The same-loss matrix: every layout trains what one process trains. A pairwise cover here, the full product in `make
parity`."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from cases import Matrix, differences
from cover import EIGHT_RANKS, all_goals, cover, rows, steps_of, values_of
from flips import nudged
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layouts import CLIP, LAYOUTS, MODELS, NUM_STEPS, PRECISIONS, ROUTED, SCHEDULES, Case, plan_fields

from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import trial_plan
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

# The cover -----------------------------------------------------------------------------------------------------------


def test_the_table_has_every_axis_and_every_zero_stage_in_every_schedule() -> None:
    assert len(LAYOUTS) >= 36 and len(set(LAYOUTS)) == len(LAYOUTS)
    found = [plan_fields(layout) for layout in LAYOUTS]
    for zero in range(4):
        for words in SCHEDULES:
            wanted = {"dp": 2, "pp": 2, **plan_fields(words)} | ({"zero": zero} if zero else {})
            assert wanted in found, wanted
    assert any("replicate" in fields and "pp" in fields for fields in found)
    assert any({"dp", "tp", "pp"} <= fields.keys() for fields in found)
    for kind in ("ring", "ulysses"):
        shared = [fields for fields in found if fields.get("cp_kind") == kind]
        assert {fields["cp"] for fields in shared} == {2, 4}
        assert all(any(axis in fields for fields in shared) for axis in ("dp", "zero", "tp", "sequence", "pp"))
    assert {fields.get("zero", 0) for fields in found if "cp" in fields} == {0, 1, 2, 3}


def test_the_cover_reaches_every_pair() -> None:
    """Counted anew from the definition: two columns, two values that some possible row has together."""
    run = [*cover(), *EIGHT_RANKS]
    missing = all_goals(rows()) - all_goals(run)
    assert not missing, sorted(missing)[:5]
    met = {frozenset(pair) for case in run for pair in combinations(values_of(case), 2)}
    for model in MODELS:
        for precision in PRECISIONS:
            assert frozenset({("model", model), ("precision", precision)}) in met
        if MODELS[model].num_experts:
            assert frozenset({("model", model), ("experts", "spread")}) in met
        for words in SCHEDULES if model not in ROUTED else ():
            fields = plan_fields(words)
            pipeline = f"{fields['schedule']} {fields.get('virtual_stages', 1)}"
            assert frozenset({("model", model), ("pipeline", pipeline)}) in met


def test_a_wrong_number_is_over_the_limit() -> None:
    """The comparison itself: a small change of anything, or a NaN, is seen."""
    case = Case("dp=2", "grouped-query", "fp64", "few")
    truth, other = (train_plain(case.spec, case.trial) for _ in range(2))
    assert not differences(other, truth).over(case.limits)
    other.losses[-1] += 2e-9
    assert set(differences(other, truth).over(case.limits)) == {"loss"}
    other.losses[-1] = float("nan")
    assert set(differences(other, truth).over(case.limits)) == {"loss"}
    other.norms[3] *= 1 + 2e-9
    other.gradients["layers.1.attention.k.weight"][3, 3] += 1e-9
    other.parameters["norm.weight"][0] += 2e-9
    assert set(differences(other, truth).over(case.limits)) == {"loss", "norm", "gradient", "parameter"}


def test_clipping_is_at_work_in_every_step() -> None:
    trial = Case("dp=2", "dense", "fp64", "even").trial
    record = train_plain(MODELS["dense"], trial)
    assert len(record.norms) == NUM_STEPS and min(record.norms) > CLIP


# The rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*cover(), *EIGHT_RANKS], ids=str)
def test_same_loss(case: Case, matrix: Matrix) -> None:
    case = replace(case, num_steps=steps_of(case))
    found = matrix.measure(case)
    assert not found.over(case.limits), f"{case}: {found}{matrix.flips(case)}"


def test_a_token_that_goes_to_other_experts_is_named(matrix: Matrix) -> None:
    """What a row that differs says: the first token that was routed differently, and how close its logits were."""
    case = Case("tp=2 sp ep=2", "mixtral", "fp64", "odd", num_steps=2)
    assert "no token" in matrix.flips(case)
    said = matrix.flips(case, job=nudged)
    assert "step 2, layer 1, row 3, token 9" in said and "gap" in said, said


# Layouts and models that nobody chose --------------------------------------------------------------------------------


@st.composite
def layout_strings(draw: st.DrawFn) -> str:
    """Any valid layout on two to four ranks, without a split."""
    degrees = [
        (d, c, t, p)
        for d in (1, 2, 3, 4)
        for c in (1, 2, 4)
        for t in (1, 2, 4)
        for p in (1, 2, 3, 4)
        if 2 <= d * c * t * p <= 4
    ]
    dp, cp, tp, pp = draw(st.sampled_from(degrees))
    words = [f"dp={dp}"]
    if cp > 1:
        words += [f"cp={cp}", f"cp_kind={draw(st.sampled_from(['ring', 'ulysses']))}"]
    if zero := draw(st.integers(0, 3)):
        replicate = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
        words += [f"zero={zero}", f"replicate={replicate}"]
    if tp > 1:
        words += [f"tp={tp}", *(["sp"] if draw(st.booleans()) else [])]
    if pp > 1:
        words += [f"pp={pp}", draw(st.sampled_from([words for words in SCHEDULES if pp < 4 or "=2" not in words]))]
    if dp * tp > 1 and (tp == 1 or "sp" in words):
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if dp * tp % n == 0]))  # of tiny-moe's eight experts
        words += [f"ep={ep}"] if ep > 1 else []
    return " ".join(words)


@st.composite
def specs(draw: st.DrawFn, num_stages: int, routed: bool) -> ModelSpec:
    kind = "tiny-moe" if routed else draw(st.sampled_from(["tiny", "tiny-moe"]))
    return preset(kind).with_overrides(
        {
            "num_layers": num_stages + draw(st.integers(0, 2)),
            "hidden": draw(st.sampled_from([16, 20, 24])),
            "num_heads": 4,
            "num_kv_heads": draw(st.sampled_from([1, 2, 4])),
            "head_dim": draw(st.sampled_from([4, 6])),
            "ffn": draw(st.integers(8, 40)),
            "vocab": draw(st.integers(13, 60)),
            "tied": draw(st.booleans()),
            "qkv_bias": draw(st.booleans()),
            "mlp_bias": kind == "tiny" and draw(st.booleans()),
            "sliding_window": draw(st.sampled_from([0, 3])),
        }
    )


@st.composite
def splits(draw: st.DrawFn, num_layers: int, num_stages: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.permutations(range(1, num_layers)))[: num_stages - 1])
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, num_layers], strict=True))


@given(data=st.data())
@settings(
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_random_layouts_and_models(matrix: Matrix, data: st.DataObject) -> None:
    layout = data.draw(layout_strings())
    fields = plan_fields(layout)
    pp, dp = int(fields.get("pp", 1)), int(fields["dp"])
    num_stages = pp * int(fields.get("virtual_stages", 1))
    spec = data.draw(specs(num_stages, "ep" in fields))
    if pp > 1:
        fields["split"] = data.draw(splits(spec.num_layers, num_stages))
    rows_per_step = data.draw(st.integers(dp, 2 * dp + 3))
    micro = data.draw(st.integers(1, min(3, -(-rows_per_step // dp))))
    trial = Trial(
        num_steps=3,
        global_batch=rows_per_step,
        micro_batch=micro,
        seq_len=8,
        clip=CLIP,
        documents=data.draw(st.booleans()),
    )
    plan = trial_plan(trial, **fields)
    found = matrix.compare(spec, plan, trial)
    limits = dict.fromkeys(("loss", "norm", "gradient", "parameter"), 1e-9)
    assert not found.over(limits), f"{plan.layout} with {spec} and {trial}: {found}"
