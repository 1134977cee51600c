"""Which link each axis goes over, also where groups straddle the border of a node."""

import pytest

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.prediction.collectives import Network, placement
from shardwise.spec.plan import Plan


def plan(**degrees):
    zero = {"zero": 3} if degrees.get("dp", 1) * degrees.get("cp", 1) > 1 else {}
    split = {"split": (8,) * degrees["pp"]} if degrees.get("pp", 1) > 1 else {}
    rest = {"micro_batch": 1, "num_steps": 1, "threads_per_rank": 4, "reason": ""}
    fixed = {"device": "cuda", "precision": "bf16", "seq_len": 2048, "global_batch": 5 * 16 * 27, **rest}
    return Plan(**{**fixed, **zero, **split, **degrees})


def really(cluster, ranks, stride, world):
    """The first link of which one domain holds every group whole, rank by rank."""
    block = ranks * stride
    groups = [
        [start + offset + stride * n for n in range(ranks)]
        for start in range(0, world, block)
        for offset in range(stride)
    ]
    for link in cluster.tiers:
        if all(group[0] // link.span == group[-1] // link.span for group in groups):
            return link.name
    return cluster.tiers[-1].name


def test_axes_go_over_the_link_that_joins_all_of_their_ranks():
    cluster = read_cluster("4x8xh100")
    found = {axis.name: axis for axis in placement(cluster, plan(dp=4, replicate=2, tp=4, sequence=True, pp=2))}
    assert (found["tp"].link.name, found["tp"].together) == ("nvlink", 4)
    assert (found["dp"].link.name, found["dp"].together) == ("nic", 2)
    assert found["pp"].link.name == "nic" and "cp" not in found
    assert str(found["tp"]) == "tp=4 over nvlink, 4 per domain"


def test_groups_of_three_straddle_a_node_of_eight():
    """dp=3 tp=3: ranks 6, 7 and 8 are one tensor-parallel group, ranks 2, 5 and 8 one of replicas."""
    cluster = read_cluster("2x8xh100")
    found = {axis.name: axis.link.name for axis in placement(cluster, plan(dp=3, tp=3))}
    assert found == {"tp": "nic", "dp": "nic"}
    assert {axis.link.name for axis in placement(cluster, plan(dp=2, tp=3))} == {"nvlink"}  # six ranks of one node


@pytest.mark.parametrize("where", ["2x8xh100", "4x6xh100", "3x4xa100-80"])
def test_every_odd_layout_is_placed_as_its_ranks_are_numbered(where):
    cluster, compared, crossing = read_cluster(where), 0, 0
    for dp in range(1, 10):
        for tp in range(1, 8):
            for pp in (1, 2, 3, 5):
                if 1 < dp * tp * pp <= cluster.world:
                    for axis in placement(cluster, plan(dp=dp, tp=tp, pp=pp)):
                        expected = really(cluster, axis.ranks, axis.stride, dp * tp * pp)
                        assert axis.link.name == expected, (dp, tp, pp, axis)
                        compared, crossing = compared + 1, crossing + (expected != cluster.tiers[0].name)
    assert compared > 30 and crossing > 10, (compared, crossing)


def test_prices_go_over_the_link_that_is_shown():
    cluster = read_cluster("2x8xh100")
    slow = Network(cluster, 9).all_reduce(2**20, 3)
    assert slow > 2 * Network(cluster, 6).all_reduce(2**20, 3)
