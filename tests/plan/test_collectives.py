"""Messages against NCCL's published times, and against arithmetic."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.collectives import Network
from shardwise.spec.cluster import ClusterSpec, Link

MB = 2**20
# NCCL all-reduce on A100 with NVLink: ranks, bytes, microseconds (published with vTrain).
MEASURED = [
    (2, 4 * MB, 61),
    (2, 16 * MB, 132),
    (2, 64 * MB, 405),
    (2, 96 * MB, 572),
    (4, 4 * MB, 77),
    (4, 16 * MB, 180),
    (4, 64 * MB, 544),
    (4, 96 * MB, 763),
    (8, 1 * MB, 93),
    (8, 4 * MB, 96),
    (8, 16 * MB, 232),
    (8, 64 * MB, 580),
    (8, 256 * MB, 2162),
    (8, 1024 * MB, 8193),
]


def test_all_reduce_inside_a_node_takes_what_nccl_takes():
    network = Network(known_cluster("a100-80", 1, 8))
    errors = [network.all_reduce(size, ranks) * 1e6 / took - 1 for ranks, size, took in MEASURED]
    assert statistics.median(map(abs, errors)) < 0.12 and max(map(abs, errors)) < 0.35, errors


def flat(**changes) -> ClusterSpec:
    """Without latency, so that bytes can be counted."""
    cluster = known_cluster("a100-80", 4, 8)
    tiers = (Link("nvlink", 8, 100e9, 0.0, 1.0, 0.0), Link("nic", 32, 10e9, 0.0, 1.0, 0.0))
    return replace(cluster, tiers=tiers, **changes)


def test_a_ring_all_reduce_moves_everything_twice_but_for_a_share():
    """2 GB over 8 GPUs at 25 GB/s: 0.14 s, as every textbook has it."""
    cluster = replace(known_cluster("a100-80", 1, 8), tiers=(Link("nvlink", 8, 25e9, 0.0, 1.0, 0.0),))
    assert Network(cluster).all_reduce(2e9, 8) == pytest.approx(0.14)


def test_one_rank_sends_nothing():
    network = Network(flat())
    assert network.all_reduce(1e9, 1) == network.all_gather(1e9, 1) == network.all_to_all(1e9, 1) == 0.0


def test_members_of_a_node_share_out_their_network_cards():
    """Over four nodes: eight neighbours in each have eight cards, ranks eight apart have one."""
    network = Network(flat())
    wide, narrow = network.all_gather(8e9, 32, 1), network.all_gather(8e9, 4, 8)
    assert wide == pytest.approx(31 / 32 * 8e9 / 80e9)
    assert narrow == pytest.approx(3 / 4 * 8e9 / 10e9)
    assert network.all_gather(8e9, 8, 1) == pytest.approx(7 / 8 * 8e9 / 100e9)


def test_an_all_reduce_is_a_reduction_and_a_gathering():
    network = Network(flat())
    assert network.all_reduce(1e9, 32) == pytest.approx(2 * network.all_gather(1e9, 32))


def test_small_collectives_take_a_tree_between_many_nodes():
    network = Network(known_cluster("h100", 64, 8))
    ring = 2 * 511 * network.tiers[-1].alpha
    assert network.all_reduce(1e5, 512) < ring / 5


def test_all_to_all_leaves_the_node_over_each_ranks_own_card():
    network = Network(flat())
    assert network.all_to_all(8e9, 16) == pytest.approx(0.5 * 8e9 / 10e9)
    assert network.all_to_all(8e9, 8) < 0.1


def test_a_message_goes_over_the_first_link_that_joins_two_ranks():
    network = Network(flat())
    assert network.send(1e9, 1) == pytest.approx(1e9 / 100e9)
    assert network.send(1e9, 8) == pytest.approx(1e9 / 10e9)


def test_groups_that_do_not_line_up_with_nodes_cross_their_borders():
    """Of groups of six ranks on nodes of eight the second lies on two nodes; a single group of six does not."""
    many, alone = Network(flat(), world=12), Network(flat(), world=6)
    assert alone.all_gather(8e9, 6) == pytest.approx(5 / 6 * 8e9 / 100e9)
    assert many.all_gather(8e9, 6) == pytest.approx(5 / 6 * 8e9 / 20e9)  # two of the six are surely together: two cards
    assert many.all_gather(8e9, 4) == alone.all_gather(8e9, 4)


def test_sixty_four_ranks_share_a_rack_of_seventy_two():
    network = Network(known_cluster("gb200", 64, 4))
    assert network.path(64, 1).domains == 1 and network.path(128, 1).domains == 2
