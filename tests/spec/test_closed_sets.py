"""Closed sets are records: the rest of the package asks them and knows no member by name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from shardwise.spec.layers import ATTENTION, FEEDFORWARD
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import SECTIONS, Plan
from shardwise.spec.precisions import FORMAT_BYTES, PRECISIONS
from shardwise.spec.recompute import CONSIDERED, recompute_of
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.schema import Config
from shardwise.spec.zero import ZERO

PACKAGE = Path(__file__).parents[2] / "src" / "shardwise"

KNOWS = {
    "interleaved": set(),
    "zbv": {"demo/pipeline.py"},  # acts four of them out
    "dualpipev": set(),
    "bf16-true": set(),
    "fp16-true": {"parallel/any_module/parallelize.py"},  # refuses it for hand-written loops
    "adagrad": {"optim/build.py"},
    "rmsprop": {"optim/build.py"},
    "momentum": {"optim/build.py"},
    "latent": {"model/decoder.py", "interop/huggingface/architectures.py"},
    "grouped-query": {"model/decoder.py"},
}
"""Members of closed sets, and the files outside of spec/ that may name them."""


@cache
def constants() -> dict[str, set[object]]:
    """What stands in each file outside of spec/."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {
        file: {node.value for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Constant)}
        for file, path in files.items()
        if not file.startswith("spec/")
    }


@pytest.mark.parametrize("member", KNOWS)
def test_a_member_is_named_where_it_is_defined_and_where_its_algorithm_is(member: str) -> None:
    assert {file for file, values in constants().items() if member in values} == KNOWS[member]


def test_every_optimizer_has_a_constructor() -> None:
    from shardwise.optim.build import BUILDERS

    assert BUILDERS.keys() == OPTIMIZERS.keys()


def test_every_kind_of_layer_has_a_module() -> None:
    from shardwise.model import decoder

    assert decoder.ATTENTION.keys() == ATTENTION.keys()
    assert decoder.FEEDFORWARD.keys() == FEEDFORWARD.keys()


def test_records_name_each_other_and_known_formats() -> None:
    for precision in PRECISIONS.values():
        assert {precision.kept, precision.computed, precision.states} <= FORMAT_BYTES.keys()
        assert precision.alone is None or PRECISIONS[precision.alone].kept == precision.computed
        assert precision.is_mixed == (precision.alone is not None)
    for kind in OPTIMIZERS.values():
        assert kind.full is None or not OPTIMIZERS[kind.full].is_low_bit
        assert kind.low_bit is None or OPTIMIZERS[kind.low_bit].is_low_bit
    for schedule in SCHEDULES.values():
        assert schedule.takes_stages(schedule.usual_stages)
        assert schedule.instead is None or schedule.instead in SCHEDULES
    assert list(ZERO) == [stage.stage for stage in ZERO.values()] == [0, 1, 2, 3]
    assert [recompute_of(mode).name for mode in CONSIDERED] == list(CONSIDERED)


def test_a_plan_has_every_key_of_its_sections_once() -> None:
    names = [name for section in SECTIONS.values() for name in section.__dataclass_fields__]  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
    assert set(names) <= Plan.__dataclass_fields__.keys()


def test_what_nobody_resolves_reaches_the_plan_as_it_was_written() -> None:
    batch = dict(seq_len=8, global_batch=2, micro_batch=1, num_steps=1, threads_per_rank=1, reason="")
    plan = Plan.of(Config(), device="cpu", precision="fp32", **batch)
    assert (plan.timeout, plan.offload_buffer, plan.cp_kind) == (300.0, 256 * 2**20, "ring")
    assert (plan.dp, plan.recompute, plan.compile, plan.results) == (1, "none", "none", "at-once")
    assert Plan.from_dict(plan.to_dict()) == plan
