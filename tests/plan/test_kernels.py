"""Seconds of operations, against what was measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.kernels import CHOSEN, GENERATIONS, Pricer, interpolate, power_share
from shardwise.plan.prediction.stack import OURS
from shardwise.plan.prediction.work import AttentionCore, Matmul, RankWork
from shardwise.plan.resolve.speed import our_stack

H200 = known_cluster("h200", 1, 1).device
MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/kernels_h200.json").read_text())

# (m, n, k): share of 312 TFLOP/s on an A100-PCIe, published with SimuMax.
A100_PRODUCTS = [
    ((4096, 1536, 5120), 0.788),
    ((4096, 5120, 1536), 0.738),
    ((4096, 24576, 1536), 0.697),
    ((4096, 1024, 4096), 0.458),
    ((4096, 576, 7168), 0.498),
    ((4096, 4096, 4096), 0.721),
    ((4096, 8192, 2048), 0.679),
    ((4096, 14336, 4096), 0.738),
    ((4096, 128256, 8192), 0.745),
    ((4096, 2048, 8192), 0.700),
]


def test_products_on_an_a100_reach_their_published_share():
    pricer = Pricer(known_cluster("a100-pcie", 1, 1).device, "bf16", OURS)
    errors = [
        Matmul(*shape).flops / pricer.matmul(Matmul(*shape)) / 312e12 / share - 1 for shape, share in A100_PRODUCTS
    ]
    assert statistics.median(map(abs, errors)) < 0.08 and max(map(abs, errors)) < 0.25, errors


def test_large_products_on_an_h200_take_what_was_measured():
    """Bursts of one matmul run a little faster than the same inside a training step, where the card is warm: at most
    20 % too slow."""
    pricer = Pricer(H200, "bf16", OURS)
    large = [one for one in MEASURED["matmuls"] if one["seconds"] > 3e-4]
    errors = [pricer.matmul(Matmul(one["m"], one["n"], one["k"])) / one["seconds"] - 1 for one in large]
    assert len(large) > 50 and -0.02 < statistics.median(errors) < 0.12
    assert max(map(abs, errors)) < 0.30


@pytest.mark.parametrize("kernel", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_attention_on_an_h200_takes_what_was_measured(kernel):
    pricer = Pricer(H200, "bf16", replace(OURS, attention={"C": "cudnn", "F": "flash2"}[kernel[0]]))
    errors = []
    for one in MEASURED["attention"]:
        if one["kernel"] != kernel:
            continue
        t = one["tokens"]
        shape = AttentionCore(one["batch"], one["heads"], one["kv_heads"], t, t, t / 2, one["width"], one["width"])
        errors += [pricer.attention(shape, b) / one[k] - 1 for b, k in ((False, "forward_s"), (True, "backward_s"))]
    assert statistics.median(map(abs, errors)) < 0.12 and max(map(abs, errors)) < 0.45, errors


# rows, tokens, heads, key-value heads, width: milliseconds of cuDNN's forward and backward on an H200 at sustained
# power, and of FlashAttention 4's
FLASH4 = {
    (8, 4096, 32, 8, 64): ((1.323, 3.751), (1.198, 3.109)),
    (8, 4096, 32, 8, 128): ((2.025, 6.085), (1.885, 5.515)),
    (1, 32768, 32, 8, 128): ((14.850, 41.480), (13.683, 36.724)),
    (4, 4096, 16, 16, 128): ((0.538, 1.547), (0.479, 1.354)),
    (4, 2048, 32, 8, 128): ((0.291, 0.939), (0.285, 0.861)),
}


@pytest.mark.parametrize("shape", FLASH4, ids=str)
def test_flash4_is_as_much_faster_than_cudnn_as_was_measured(shape):
    """Of both passes within 3 %, of each within 5 %."""
    (rows, tokens, heads, kv_heads, width), (cudnn, flash) = shape, FLASH4[shape]
    work = AttentionCore(rows, heads, kv_heads, tokens, tokens, tokens / 2, width, width)
    usual, other = (
        [Pricer(H200, "bf16", replace(OURS, attention=kernel)).attention(work, backward) for backward in (False, True)]
        for kernel in ("sdpa", "flash4")
    )
    for priced, before, measured, was in zip(other, usual, flash, cudnn, strict=True):
        assert priced / before == pytest.approx(measured / was, rel=0.05)
    assert sum(other) / sum(usual) == pytest.approx(sum(flash) / sum(cudnn), rel=0.03)


def test_measured_curves_are_of_torchs_own_attention():
    curve, work = ((1e9, 4e14), (1e14, 4e14)), AttentionCore(8, 32, 8, 4096, 4096, 2048.0, 128, 128)
    device = replace(H200, curves={"attention/bf16": curve})
    usual, other = (Pricer(device, "bf16", replace(OURS, attention=kernel)) for kernel in ("sdpa", "flash4"))
    assert usual.attention(work) == pytest.approx(work.flops / 4e14)
    assert other.attention(work) == pytest.approx(0.56 / 0.60 * usual.attention(work))
    assert other.attention(work._replace(masked=True)) == usual.attention(work)


@pytest.mark.parametrize("kind", ["a100-80", "h200", "b200"])
@pytest.mark.parametrize("width", [64, 128])
def test_flash4_is_never_priced_slower_than_what_it_would_replace(kind, width):
    device, work = known_cluster(kind, 1, 1).device, AttentionCore(4, 32, 8, 4096, 4096, 2048.0, width, width)
    usual, other = (Pricer(device, "bf16", replace(OURS, attention=kernel)) for kernel in ("sdpa", "flash4"))
    assert all(other.attention(work, backward) <= usual.attention(work, backward) for backward in (False, True))


def test_passes_on_an_h200_take_what_was_measured():
    """Sums and products of two large tensors. Small ones were timed with their launch."""
    pricer = Pricer(H200, "bf16", OURS)
    plain = [one for one in MEASURED["passes"] if one["name"] in ("add", "multiply") and one["bytes"] > 1e8]
    errors = [pricer.pass_(one["bytes"]) / one["seconds"] - 1 for one in plain]
    assert max(map(abs, errors)) < 0.2, errors


def test_whole_waves():
    """132 multiprocessors, tiles of 128 x 256: one tile more than a wave takes longer than a wave."""
    pricer = Pricer(H200, "bf16", OURS)
    full, more = (pricer.matmul(Matmul(128 * n, 256, 8192)) for n in (132, 133))
    assert 1.1 * full < more < 2 * full
    assert pricer.matmul(Matmul(64, 64, 64)) > 0


def test_a_vocabulary_of_odd_size_is_slow():
    pricer = Pricer(H200, "bf16", OURS)
    assert pricer.matmul(Matmul(8192, 50257, 768)) > 4 * pricer.matmul(Matmul(8192, 50304, 768))


def test_eight_bits_are_faster_where_the_card_has_them():
    large = Matmul(8192, 8192, 8192)
    assert Pricer(H200, "fp8", OURS).matmul(large) < 0.7 * Pricer(H200, "bf16", OURS).matmul(large)
    a100 = known_cluster("a100-80", 1, 1).device
    assert Pricer(a100, "fp8", OURS).matmul(large) == Pricer(a100, "bf16", OURS).matmul(large)


def test_a_capped_card_sustains_less():
    assert power_share(H200) == 1.0
    assert power_share(replace(H200, watts=350)) == pytest.approx(0.5**0.25)


def test_measured_curves_replace_the_formula():
    curve = ((1e9, 1e12), (1e12, 4e14))
    device = replace(H200, curves={"matmul/bf16": curve, "elementwise": ((1e6, 1e11), (1e9, 4e12))})
    pricer, product = Pricer(device, "bf16", OURS), Matmul(8192, 8192, 8192)
    assert pricer.matmul(product) == pytest.approx(product.flops / 4e14)
    assert pricer.pass_(1e9) == pytest.approx(1e9 / 4e12)
    assert interpolate(curve, 1e9**0.5 * 1e12**0.5) == pytest.approx((1e12 * 4e14) ** 0.5)
    assert interpolate(curve, 1.0) == 1e12


def test_the_host_needs_its_time_for_every_operation():
    pricer = Pricer(H200, "bf16", OURS)
    assert pricer.host_seconds(RankWork((Matmul(1, 1, 1),), (), (1.0,), 3)) == pytest.approx(
        5 * pricer.host_seconds(RankWork(passes=(1.0,)))
    )


def test_products_of_compiled_steps_end_at_what_power_allows():
    """Narrow ones lose nothing there, because idle tensor cores leave power to others; small ones are as slow as ever;
    eight bits with a scale per row are slower."""
    compiled, chosen = (our_stack(True, False, True, word) for word in (False, True))
    one, other = (Pricer(H200, "bf16", stack) for stack in (compiled, chosen))
    for k in (2048, 8192):
        product = Matmul(32768, 8192, k)
        assert product.flops / one.matmul(product) == pytest.approx(GENERATIONS[9].in_steps * 0.8 * 989e12)
        assert one.matmul(product) / other.matmul(product) == pytest.approx(CHOSEN, rel=0.01)
        assert one.matmul(product) < Pricer(H200, "bf16", OURS).matmul(product)
    assert one.matmul(Matmul(64, 64, 64)) > Matmul(64, 64, 64).flops / (GENERATIONS[9].in_steps * 0.8 * 989e12) * 10
    tensor, row = (
        Pricer(H200, "fp8", our_stack(True, False, True, True, recipe)) for recipe in ("tensorwise", "rowwise")
    )
    assert tensor.matmul(Matmul(32768, 8192, 8192)) == pytest.approx(
        0.8 * row.matmul(Matmul(32768, 8192, 8192)), rel=1e-3
    )
    experts = Matmul(2048, 1024, 2048, 64)
    assert one.matmul(experts) == other.matmul(experts)  # no choice among grouped ones
