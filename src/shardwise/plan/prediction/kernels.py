"""Seconds of an operation on a device: products by tiles and waves, attention by kernel, passes by bytes. No torch.

    Pricer(device, precision, stack).seconds(work)

A product's result is cut into tiles; every multiprocessor works on one at a time, so tiles run in waves, and the last wave is as long as a
full one. Filling and draining a tile costs as much as a few more columns of k. On top there is the roofline: nothing is faster than its bytes.
Passes run at the memory's rate once they are large. Constants below belong to GPU generations; where each comes from is said beside it.
Invariant: seconds grow with m, n, k but for steps of whole waves, and are never below FLOPs over the achievable rate. Read next: step_time.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster.describe.table import known_devices
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.work import Attention, Product, Work
from shardwise.spec.cluster import Device
from shardwise.spec.precisions import PRECISIONS


@dataclass(frozen=True)
class Generation:
    """What data sheets do not say."""

    sustained: float  # of the achievable rate, by large products in a step that keeps the card busy
    tiles: tuple[tuple[int, int, float], ...]  # rows, columns, rate of that tile
    ramp: int  # columns of k that a tile's start and end cost
    wave: float  # how much of an unfilled last wave is lost; what is idle leaves power and bandwidth to others
    grouped: float  # grouped products over plain ones
    attention: dict[
        str, tuple[float, float]
    ]  # kernel -> share of the peak in forward and backward, heads of 128, long sequences
    watts: float = (
        0.0  # at which `sustained` holds; with more power more is sustained. 0: all cards of the generation have enough
    )
    eight_bit: float = 0.98  # share of the peak that fp8 reaches over what bf16 does (calib_mamf_stas.csv)
    rows: float = 1.0  # of that, with a scale for every row
    in_steps: float = 0.0  # by products of our compiled steps, a ceiling: what a tile's ends leave idle, power gives to the rest. 0: unknown
    beside: float = 0.0  # bytes per number of queries that kernels beside the backward of `BESIDE` move


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.86), (128, 64, 0.7), (64, 128, 0.7), (64, 64, 0.45))
HOPPER_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, 0.73), (64, 128, 0.73), (64, 64, 0.4))

IN_STEPS = 0.87
"""688 TFLOP/s on an H200 with 700 W. Profiles of our steps have 683 to 721 (1.5 B, 8 B, 32k and 128k tokens), with torch's choice of cuBLAS kernels."""

CHOSEN = 1.01
"""Of that, by the fastest of the library's kernels. One by one and in turns, the products of a step are 1.05 times as fast (benchmarks/gpu/matmuls.py);
in steps, at the power limit, 1.02 (1.5 B), 1.014 (8 layers of 8 B) and 1.0 (8 B) times."""

# Ampere: 195 products and 24 attentions on an A100-PCIe (calib_op_efficiency_simumax.csv; mean error of a product 4 %).
# Blackwell: 622 products and 64 attentions on a B200, same file. Hopper: H200 runs of this package, and the published H100 runs as a whole.
# Its `sdpa`: cuDNN in our steps, 2,048 to 131,072 tokens, where the card is warm; `beside` is out times its gradient, the queries' gradient
# from fp32, and those of keys added up over heads. `flash4`: as much faster than that as it is than cuDNN alone, on an H200 at sustained power,
# 2,048 to 32,768 tokens: 482 to 643 TFLOP/s for 473 to 592 in forward, 399 to 599 for 366 to 530 in backward. Long and short sequences of as
# many tokens say what lies beside: 28 bytes for 27. Nobody measured it on Blackwell, where it has cuDNN's shares.
GENERATIONS = {
    7: Generation(0.90, TILES, 160, 0.75, 0.8, {"flash1": (0.35, 0.30), "flash2": (0.35, 0.30)}),
    8: Generation(
        0.91, TILES, 160, 0.75, 0.93, {"flash1": (0.38, 0.31), "flash2": (0.62, 0.52), "cudnn": (0.62, 0.52)}
    ),
    9: Generation(
        0.82,
        HOPPER_TILES,
        165,
        0.35,
        0.85,
        {
            "flash1": (0.25, 0.18),
            "flash2": (0.36, 0.31),
            "flash3": (0.68, 0.53),
            "cudnn": (0.68, 0.53),
            "sdpa": (0.56, 0.53),
            "flash4": (0.60, 0.60),
        },
        eight_bit=0.9,
        rows=0.8,
        in_steps=IN_STEPS,
        beside=20.0,
    ),
    10: Generation(
        0.59,
        TILES,
        110,
        0.5,
        0.75,
        {
            "flash2": (0.20, 0.16),
            "flash3": (0.44, 0.38),
            "cudnn": (0.44, 0.38),
            "sdpa": (0.44, 0.38),
            "flash4": (0.44, 0.38),
        },
        watts=1000.0,
    ),
}
CPU = Generation(0.85, ((1, 1, 1.0),), 16, 0.0, 0.7, {"flash2": (0.5, 0.4)})
"""One core: no tiles to wait for."""

FLASH_TILE = 128
"""Queries that one multiprocessor of a flash kernel works on."""

FLASH_TAIL = (0.7, 1.4)
"""Times of the longest tile that are lost at the end, forward and backward: from cuDNN and flash 2 on an H200 with 1024 to 32768 tokens."""

NARROW = {"flash3": 0.58, "cudnn": 0.58, "sdpa": 0.58, "flash4": 0.5}
"""How much faster kernels lose to heads narrower than 128: 391 of 596 TFLOP/s with 64 for cuDNN, 277 of 296 for flash 2 (H200). FlashAttention 4 gains
more over cuDNN with 64 than with 128: 0.91 and 0.83 of its time in forward and backward, for 0.93 and 0.91."""

BESIDE = ("sdpa", "flash4")
"""Kernels whose backward has others beside it: out times its gradient before, gradients from fp32 after."""

GAP = 0.12
"""Pause of a GPU between two kernels, over what the host takes to start one: 3 microseconds where that takes 25."""

PASS_HALF = {"cuda": 1.5e7, "cpu": 3e4}
"""Bytes at which a pass over memory reaches half of the memory's rate: below, a kernel ends before all multiprocessors have begun."""

UNALIGNED = {1: 8.0, 2: 1.6, 4: 1.25}
"""Matrices are read 16 bytes at a time where their sides divide by 8; by the largest power of two that divides all sides else. Odd: GPT-2's 50257 tokens
on an H200. The others: assumed, between; heads of 150 in BigScience's sweep are such a case."""


class Pricer:
    def __init__(self, device: Device, precision: str, stack: Stack, threads: int = 1):
        self.device, self.stack = device, stack
        self.generation = CPU if device.kind == "cpu" else GENERATIONS.get(device.capability[0], GENERATIONS[9])
        kind = PRECISIONS[precision].matmul if precision in PRECISIONS else precision  # others' fp4
        exact = "bf16" if kind in ("fp8", "fp4") else kind
        self.eight_bit = kind in ("fp8", "fp4") and kind in device.flops
        self.size = {"fp64": 8, "fp32": 4}.get(kind, 2)
        self.threads = threads if device.kind == "cpu" else 1
        capped, rows = power_share(device), self.generation.rows if stack.fp8_rows else 1.0
        self.exact_peak = self.threads * peak_flops(device, exact) * capped
        self.peak = (
            self.threads * device.flops[kind] * capped * self.generation.eight_bit * rows
            if self.eight_bit
            else self.exact_peak
        )
        self.name = exact
        self.bandwidth = self.threads * device.bandwidth * device.bandwidth_share
        self.launch = device.launch
        self.gap = GAP * device.launch if device.kind == "cuda" else 0.0
        self.curves = device.curves
        self.half = PASS_HALF[device.kind]
        more = (device.watts / self.generation.watts) ** 0.5 if self.generation.watts and device.watts else 1.0
        self.sustained = min(1.0, self.generation.sustained * more)
        self.ceiling = self.generation.in_steps if stack.measured else 0.0
        self.chosen = CHOSEN if stack.chosen else 1.0
        shares = self.generation.attention
        is_faster = stack.attention == "flash4" and "flash4" in shares
        self.faster = (
            tuple(a / b for a, b in zip(shares["flash4"], shares["sdpa"], strict=True)) if is_faster else (1.0, 1.0)
        )
        self._products: dict[Product, float] = {}  # a layer has many twice, and so have layouts

    def seconds(self, work: Work, backward: bool = False) -> float:
        """On the device, one operation after the other."""
        total = sum([self.product(p) for p in work.products])
        total += sum([self.attention(a, backward) for a in work.attention])
        total += sum([self.pass_(size) for size in work.passes])
        return total + self.gap * (len(work.products) + len(work.attention) + len(work.passes))

    def host_seconds(self, work: Work) -> float:
        """What starting it takes, while the device may be busy."""
        return work.launches * self.launch * self.stack.host_share

    def product(self, p: Product) -> float:
        found = self._products.get(p)
        if found is None:
            found = self._products[p] = self._product(p)
        return found

    def _product(self, p: Product) -> float:
        generation, peak = self.generation, self.peak if p.in_eight else self.exact_peak
        size = 1 if self.eight_bit and p.in_eight else self.size
        moved = p.groups * (size * (p.m * p.k + p.k * p.n) + (8 if p.adds else self.size) * p.m * p.n)
        if curve := self.curves.get(f"matmul/{self.name}"):
            rate = self.threads * interpolate(curve, p.flops)
            return max(p.flops / rate, moved / self.bandwidth)
        rate = peak * self.device.achievable * (generation.grouped if p.groups > 1 else 1.0)
        rate *= 1.0 if self.ceiling else self.sustained
        if self.device.kind == "cpu":
            return max(p.flops * (1 + generation.ramp / p.k) / rate, moved / self.bandwidth)
        units, deep = self.device.units, p.k + generation.ramp
        least = math.inf
        for rows, columns, share in generation.tiles:
            waves = p.groups * -(-p.m // rows) * -(-p.n // columns) / units
            if not p.split:
                waves = generation.wave * math.ceil(waves) + (1 - generation.wave) * max(waves, 1.0)
            least = min(least, waves * rows * columns * deep / share)
        sides = (p.m | p.n | p.k) & 7 if p.groups == 1 or p.exact else 0
        uneven = UNALIGNED[sides & -sides] if sides else 1.0
        computed = 2.0 * least * units / rate * uneven
        if self.ceiling:
            faster = 1.0 if p.groups > 1 or (self.eight_bit and p.in_eight) else self.chosen
            computed = max(computed, p.flops / (rate * self.ceiling * faster))
        return max(computed, moved / self.bandwidth)

    def attention(self, a: Attention, backward: bool = False) -> float:
        flops = a.flops * (2.5 if backward else 1.0)
        curve = self.curves.get(f"attention{'-backward' * backward}/{self.name}")
        if curve:
            faster = 1.0 if a.masked else self.faster[backward]  # what was measured is torch's own
            return flops / (self.threads * interpolate(curve, flops) * faster)
        if self.device.kind == "cpu":
            share = self.generation.attention["flash2"][backward]
            return flops / (self.exact_peak * self.device.achievable * share)
        known = self.generation.attention
        kernel = (
            "flash2" if a.masked else self.stack.attention
        )  # torch's memory-efficient kernel, the one that takes masks
        share = known.get(kernel, known["flash2"])[backward]
        # Narrow heads leave the units of the softmax busier than those of the products.
        width = min(1.0, (a.width + a.value_width) / 256) ** NARROW.get(kernel, 0.1)
        rate = self.exact_peak * share * width
        # Tiles on the diagonal are computed whole. The last rows see all keys and end last, when most units have nothing left to do.
        diagonal = (a.context + FLASH_TILE / 2) / a.context
        longest = FLASH_TILE * a.keys * (a.width + a.value_width) * 2.0 * (2.5 if backward else 1.0)
        computed = (flops * diagonal + FLASH_TAIL[backward] * longest * self.device.units) / rate
        moved = self.size * a.rows * a.queries * (a.heads * (a.width + a.value_width) + 2 * a.kv_heads * a.width)
        beside = (
            self.generation.beside * a.rows * a.queries * a.heads * a.width if kernel in BESIDE and backward else 0.0
        )
        return max(computed, moved * (2 + 2 * backward) / self.bandwidth) + beside / self.bandwidth

    def pass_(self, size: float) -> float:
        """Bytes read and written by one kernel."""
        if curve := self.curves.get("elementwise"):
            return size / (self.threads * interpolate(curve, size)) if size else 0.0
        return (size + self.half) / self.bandwidth if size else 0.0


def power_share(device: Device) -> float:
    """Clocks of a card that is capped below its data sheet. Power grows faster than the clock: an A100-PCIe with 300 W reaches 0.93 of what the one with
    400 W does (calib_mamf_stas.csv), which is the fourth root."""
    usual = known_devices().get(device.name, {}).get("watts", 0.0)
    return min(1.0, device.watts / usual) ** POWER if usual and device.watts else 1.0


POWER = 0.25


def peak_flops(device: Device, kind: str) -> float:
    """A card without a format takes a wider one; fp64 without its own line runs at half of fp32."""
    order = {"bf16": ("fp16", "tf32", "fp32"), "fp16": ("bf16", "tf32", "fp32"), "tf32": ("fp32",), "fp64": ()}
    for name in (kind, *order.get(kind, ())):
        if name in device.flops:
            return device.flops[name]
    if kind == "fp64" and "fp32" in device.flops:
        return device.flops["fp32"] / 2
    return max(device.flops.values())


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between measured points, on logarithmic scales; outside of them the nearest one."""
    places = [x for x, _ in points]
    right = bisect_left(places, at)
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    share = math.log(at / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
