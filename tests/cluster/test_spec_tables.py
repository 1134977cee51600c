"""The table against what was measured elsewhere, and this machine against the table."""

import pytest

from shardwise.cluster.describe.here import table_name, this_cluster
from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.table import known_cluster
from shardwise.spec.cluster import Link

GIB = 2**30


def all_reduce(link: Link, ranks: int, size: float) -> float:
    moved = 2 * (ranks - 1) / ranks * size
    return 2 * (ranks - 1) * link.alpha + (moved + link.half) / (link.rate(ranks) * link.summing)


# Seconds that NCCL took on 8 GPUs, published with vTrain.
@pytest.mark.parametrize(
    ("kind", "size", "seconds", "within"),
    [
        ("a100-80", 2**20, 92.8e-6, 0.15),
        ("a100-80", 2**24, 232.4e-6, 0.15),
        ("a100-80", 2**27, 1162e-6, 0.10),
        ("a100-80", 2**30, 8193e-6, 0.05),
        ("v100-32", 2**24, 273.8e-6, 0.15),
        ("v100-32", 2**27, 1777e-6, 0.05),
        ("v100-32", 2**30, 13969e-6, 0.05),
    ],
)
def test_all_reduces_inside_a_node(kind, size, seconds, within):
    link = known_cluster(kind, 1, 8).tiers[0]
    assert all_reduce(link, 8, size) == pytest.approx(seconds, rel=within)


def test_bus_bandwidth_of_h100_nodes():
    """Measured: 458 GB/s on one node, 341 on two."""
    inside, nic = known_cluster("h100", 2, 8).tiers
    assert inside.rate(8) * inside.summing == pytest.approx(458e9, rel=0.01)
    assert 8 * nic.rate() == pytest.approx(341e9, rel=0.01)


def test_two_cards_of_a_mesh_share_one_wire():
    link = known_cluster("mi300x", 1, 8).tiers[0]
    assert link.rate(2) == pytest.approx(link.rate(8) / 7)


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100", 95.0, "h100-96"),
        ("NVIDIA H200", 139.7, "h200"),
        ("NVIDIA GH200 480GB", 95.0, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("Tesla V100-SXM3-32GB", 31.7, "v100-sxm3"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("NVIDIA GeForce RTX 3060", 11.6, None),
        ("NVIDIA H20", 95.0, "h20"),
        ("NVIDIA H800", 79.1, "h800"),
        ("NVIDIA A10", 22.1, "a10"),
        ("NVIDIA L4", 22.2, "l4"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"),
    ],
)
def test_drivers_names(name, gib, kind):
    assert table_name(Gpu(name, int(gib * GIB), (9, 0))) == kind


def _machine(*gpus):
    return Machine(cores=16, memory_bytes=64 * GIB, gpus=gpus, platform="linux")


@pytest.mark.parametrize(
    ("kind", "bf16", "watts", "gib"),
    [
        ("h800", 989, 700, 79),
        ("h20", 148, 400, 95),
        ("b100", 1750, 700, 178),
        ("mi325x", 1307, 1000, 256),
        ("mi355x", 2517, 1400, 288),
        ("a10", 125, 150, 22),
        ("l4", 121, 72, 22),
        ("a6000", 154.8, 300, 47),
        ("rtx5090", 209.5, 575, 31),
    ],
)
def test_data_sheets(kind, bf16, watts, gib):
    """Dense rates: data sheets print those with every second element zero beside them, twice as high."""
    device = known_cluster(kind, 1, 8).device
    assert device.flops["bf16"] == bf16 * 1e12 and device.watts == watts and round(device.memory / GIB) == gib


def test_this_machine_with_cards_of_the_table():
    card = Gpu("NVIDIA H200", 150_100_000_000, (9, 0), 1)
    cluster = this_cluster(_machine(card, card))
    assert (cluster.world, cluster.device.name, cluster.device.memory) == (2, "h200", 150_100_000_000)
    assert cluster.tiers[0].name == "nvlink" and cluster.origins["memory"] == "this machine's driver"


def test_unequal_cards_count_as_the_smaller_and_slower_one():
    big = Gpu("NVIDIA H100 80GB HBM3", 85 * 10**9, (9, 0), 1)
    small = Gpu("NVIDIA L40S", 47 * 10**9, (8, 9), 1)
    cluster = this_cluster(_machine(big, small))
    assert cluster.device.name == "l40s" and cluster.device.memory == 47 * 10**9
    assert "unequal cards" in cluster.origins["device"]


def test_no_peer_access_is_what_the_driver_says():
    card = Gpu("NVIDIA L40S", 47 * 10**9, (8, 9), 0)
    with_peers = Gpu("NVIDIA L40S", 47 * 10**9, (8, 9), 1)
    slow, fast = this_cluster(_machine(card, card)), this_cluster(_machine(with_peers, with_peers))
    assert "no peer access" in slow.origins["link"] and "no peer access" not in fast.origins["link"]
    assert slow.tiers[0].rate() < fast.tiers[0].rate()


def test_an_unknown_card_is_assumed_and_said_to_be():
    cluster = this_cluster(_machine(Gpu("NVIDIA GeForce RTX 3060", 12 * 10**9, (8, 6))))
    assert cluster.device.name == "NVIDIA GeForce RTX 3060" and cluster.device.memory == 12 * 10**9
    assert cluster.origins["flops"].startswith("assumed")


def test_this_machine_without_cards_is_its_cores():
    cluster = this_cluster(_machine())
    assert (cluster.nodes, cluster.per_node, cluster.device.kind) == (1, 16, "cpu")
    assert cluster.device.memory == 4 * GIB
