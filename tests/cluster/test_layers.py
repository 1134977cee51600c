"""How measured curves change a cluster. tests/cli/test_bench.py measures real ones."""

import pytest

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.measure.layers import LayerRates, devices_of, measure_layers, with_layers

CORES = Machine(cores=4, memory_bytes=2**33, gpus=(), platform="linux")


def test_a_process_that_cannot_start_is_a_finding():
    rates = measure_layers(("cuda:99",))
    assert rates.curves == {} and set(rates.problems) == {"start"}


def test_every_device_has_a_process():
    assert devices_of(CORES) == ("cpu",) * 4
    card = Gpu("NVIDIA H200", 150 * 10**9, (9, 0))
    assert devices_of(Machine(16, 2**36, (card, card), "linux")) == ("cuda:0", "cuda:1")


def test_curves_say_what_a_core_reaches():
    curves = {"matmul/fp32": ((1e6, 2e10), (1e9, 5e10)), "elementwise": ((1e4, 2e10), (1e7, 4e9))}
    cluster = with_layers(this_cluster(CORES), LayerRates(("cpu",) * 4, curves, 3e-6))
    assert cluster.device.curves == curves and cluster.device.launch == 3e-6
    assert cluster.device.flops == {"fp32": 5e10} and cluster.device.achievable == 1.0
    assert cluster.device.bandwidth * cluster.device.bandwidth_share == 4e9
    for name in ("flops", "bandwidth", "launch", "matmul/fp32"):
        assert cluster.origins[name] == "measured"


def test_products_say_what_share_of_its_peak_a_card_reaches():
    machine = Machine(16, 2**36, (Gpu("NVIDIA H200", 150 * 10**9, (9, 0)),), "linux")
    before = this_cluster(machine)
    curves = {"matmul/bf16": ((1e9, 1e14), (1e12, 672e12)), "attention/bf16": ((1e9, 1e14),)}
    after = with_layers(before, LayerRates(("cuda:0",), curves, 2e-5))
    assert after.device.flops == before.device.flops and after.device.bandwidth == before.device.bandwidth
    assert after.device.achievable == pytest.approx(before.device.achievable, rel=0.01)  # the table's H200 is this one
    assert set(after.device.curves) == {"attention/bf16"} and after.device.launch == 2e-5
