"""The matrix notices mistakes: one of each kind here, all of them in `make parity`. Its rows have eight steps; two
must be enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import Matrix
from mutations import MUTATIONS, try_mutation

QUICK = [
    "skip_a_reduction",
    "average_shards",
    "forget_an_unshard",
    "forget_replicas",
    "drop_a_scale",
    "forget_ignore",
    "misplace_a_layer",
    "drop_last_w",
    "swap_microbatches",
    "forget_tied_sum",
    "forget_partial_sum",
    "forget_shared_heads",
    "count_replicated_twice",
    "swap_two_experts",
    "average_experts",
    "drop_a_ring_step",
    "swap_the_pieces",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_is_noticed(name: str, matrix: Matrix) -> None:
    row = replace(MUTATIONS[name].row, num_steps=2)
    assert not matrix.measure(row).over(row.limits), f"{row} is wrong even without a mistake"
    assert try_mutation(matrix, name, row), f"{row} does not notice: {MUTATIONS[name].title}"
