"""Seconds of an operation on a device: matmuls by tiles and waves, attention by kernel, passes by bytes. No torch.

    Pricer(device, precision, stack).seconds(work)

A matmul's result is cut into tiles; every multiprocessor works on one at a time, so tiles run in waves, and the last
wave is as long as a full one. Filling and draining a tile costs as much as a few more columns of k. On top there is the
roofline: nothing is faster than its bytes. Passes run at the memory's rate once they are large. Constants below belong
to GPU generations; where each comes from is said beside it. Invariant: seconds grow with m, n, k but for steps of whole
waves, and are never below FLOPs over the achievable rate. Read next: step_time.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from shardwise.cluster.describe.table import known_devices
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.work import AttentionCore, Matmul, RankWork
from shardwise.spec.cluster import Device
from shardwise.spec.precisions import PRECISIONS


@dataclass(frozen=True)
class Generation:
    """A generation of GPUs in figures that data sheets do not have; calibration.toml says where they are from."""

    sustained: float  # of the achievable rate, by large matmuls in a step that keeps the card busy
    tiles: tuple[tuple[int, int, float], ...]  # rows, columns, rate of that tile
    ramp: int  # columns of k that a tile's start and end cost
    wave: float  # how much of an unfilled last wave is lost; what is idle leaves power and bandwidth to others
    grouped: float  # rate of grouped matmuls over plain ones
    attention: dict[str, tuple[float, float]]  # kernel -> share of the peak, forward and backward
    watts: float = 0.0  # at which `sustained` holds; with more power more is sustained. 0: all cards have enough
    eight_bit: float = measured("fp8_share")  # share of the peak that fp8 reaches over what bf16 does
    rows: float = 1.0  # of that, with a scale for every row
    # A ceiling for matmuls of our compiled steps: what a tile's ends leave idle, power gives to the rest. 0: unknown.
    in_steps: float = 0.0
    beside: float = 0.0  # bytes per element of queries that kernels beside the backward of `BESIDE` move


def _generation(name: str) -> Generation:
    """Returns a generation's entry of calibration.toml with the tiles that it names."""
    values = dict(measured(f"generation_{name}"))
    tiles = tuple(tuple(tile) for tile in measured("tiles")[values.pop("tiles")])
    shares = {kernel: tuple(both) for kernel, both in values.pop("attention").items()}
    return Generation(tiles=tiles, attention=shares, **values)


GENERATIONS = {number: _generation(str(number)) for number in (7, 8, 9, 10)}
CPU = _generation("cpu")

FLASH_TILE = 128
"""Queries that one multiprocessor of a flash kernel works on."""

BESIDE = ("sdpa", "flash4")
"""Kernels whose backward has others beside it: out times its gradient before, gradients from fp32 after."""

CHOSEN = measured("chosen_matmul")
FLASH_TAIL = measured("flash_tail")
NARROW = measured("narrow_heads")
GAP = measured("kernel_gap")
PASS_HALF = measured("pass_half")
UNALIGNED = dict(zip((1, 2, 4), measured("unaligned"), strict=True))  # by the largest power of two in all sides
POWER = measured("power_exponent")


class Pricer:
    """Prices of a device for one precision. It remembers matmuls: a layer has many twice, and so have layouts."""

    def __init__(self, device: Device, precision: str, stack: Stack, threads: int = 1):
        self.device, self.stack = device, stack
        self.generation = CPU if device.kind == "cpu" else GENERATIONS.get(device.capability[0], GENERATIONS[9])
        kind = PRECISIONS[precision].matmul if precision in PRECISIONS else precision  # others' fp4
        exact = "bf16" if kind in ("fp8", "fp4") else kind
        self.eight_bit = kind in ("fp8", "fp4") and kind in device.flops
        self.size = {"fp64": 8, "fp32": 4}.get(kind, 2)
        self.threads = threads if device.kind == "cpu" else 1
        capped, rows = power_share(device), self.generation.rows if stack.fp8_rows else 1.0
        self.peak = self.exact_peak = self.threads * peak_flops(device, exact) * capped
        if self.eight_bit:
            self.peak = self.threads * device.flops[kind] * capped * self.generation.eight_bit * rows
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
        shares, self.faster = self.generation.attention, (1.0, 1.0)  # than torch's own kernel, forward and backward
        if stack.attention == "flash4" and "flash4" in shares:
            flash, usual = shares["flash4"], shares["sdpa"]
            self.faster = flash[0] / usual[0], flash[1] / usual[1]
        self.matmul = cache(self._matmul)

    def seconds(self, work: RankWork, backward: bool = False) -> float:
        """Returns the seconds on the device, one operation after the other."""
        total = sum([self.matmul(p) for p in work.matmuls])
        total += sum([self.attention(a, backward) for a in work.attention])
        total += sum([self.pass_(size) for size in work.passes])
        return total + self.gap * (len(work.matmuls) + len(work.attention) + len(work.passes))

    def host_seconds(self, work: RankWork) -> float:
        """Returns the seconds that the host takes to start it, while the device may be busy."""
        return work.launches * self.launch

    def _matmul(self, p: Matmul) -> float:
        """Returns the seconds of one matmul; asked as `matmul`, which remembers them."""
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

    def attention(self, a: AttentionCore, backward: bool = False) -> float:
        """Returns the seconds of attention's own kernel, forward or backward."""
        flops = a.flops * (2.5 if backward else 1.0)
        curve = self.curves.get(f"attention{'-backward' * backward}/{self.name}")
        if curve:
            faster = 1.0 if a.masked else self.faster[backward]  # what was measured is torch's own
            return flops / (self.threads * interpolate(curve, flops) * faster)
        if self.device.kind == "cpu":
            share = self.generation.attention["flash2"][backward]
            return flops / (self.exact_peak * self.device.achievable * share)
        # The kernel that takes masks is torch's memory-efficient one.
        known, kernel = self.generation.attention, "flash2" if a.masked else self.stack.attention
        share = known.get(kernel, known["flash2"])[backward]
        # Narrow heads leave the units of the softmax busier than those of the matmuls.
        width = min(1.0, (a.width + a.value_width) / 256) ** NARROW.get(kernel, NARROW["other"])
        rate = self.exact_peak * share * width
        # Tiles on the diagonal are computed whole. The last rows see all keys and end last, when most units have
        # nothing left to do.
        diagonal = (a.context + FLASH_TILE / 2) / a.context
        longest = FLASH_TILE * a.keys * (a.width + a.value_width) * 2.0 * (2.5 if backward else 1.0)
        computed = (flops * diagonal + FLASH_TAIL[backward] * longest * self.device.units) / rate
        moved = self.size * a.rows * a.queries * (a.heads * (a.width + a.value_width) + 2 * a.kv_heads * a.width)
        least = max(computed, moved * (2 + 2 * backward) / self.bandwidth)
        if kernel not in BESIDE or not backward:
            return least
        return least + self.generation.beside * a.rows * a.queries * a.heads * a.width / self.bandwidth

    def pass_(self, size: float) -> float:
        """Returns the seconds of one kernel that reads and writes `size` bytes."""
        if curve := self.curves.get("elementwise"):
            return size / (self.threads * interpolate(curve, size)) if size else 0.0
        return (size + self.half) / self.bandwidth if size else 0.0


def power_share(device: Device) -> float:
    """Returns the share of its clocks that a card keeps which is capped below its data sheet. Power grows faster than
    the clock: an A100-PCIe with 300 W reaches 0.93 of what the one with 400 W does (Stas Bekman's maximum achievable
    matmul FLOPS), which is the fourth root."""
    usual = known_devices().get(device.name, {}).get("watts", 0.0)
    return min(1.0, device.watts / usual) ** POWER if usual and device.watts else 1.0


def peak_flops(device: Device, kind: str) -> float:
    """Returns the peak in FLOP/s. A card without a format takes a wider one; fp64 without its own line runs at half of
    fp32."""
    order = {"bf16": ("fp16", "tf32", "fp32"), "fp16": ("bf16", "tf32", "fp32"), "tf32": ("fp32",), "fp64": ()}
    for name in (kind, *order.get(kind, ())):
        if name in device.flops:
            return device.flops[name]
    if kind == "fp64" and "fp32" in device.flops:
        return device.flops["fp32"] / 2
    return max(device.flops.values())


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value between measured points, on logarithmic scales; outside of them the nearest one's."""
    right = bisect_left([x for x, _ in points], at)
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    share = math.log(at / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
