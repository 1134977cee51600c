"""Passes over memory around a layer's products: norms, positions, activation, sums, softmax, casts. Bytes, one number per kernel. No torch.

They follow from which kernels a stack has: a chain of plain operations reads and writes its tensors once per operation, a fused kernel once. A pass
that runs below the memory's rate is counted longer. Read next: operations.py, which puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.work import Attention, Product, Shape
from shardwise.spec.model import LayerSpec, ModelSpec

Passes = tuple[float, ...]


def score_passes(core: Attention, stack: Stack, size: int, capped: bool = False) -> tuple[Passes, Passes]:
    """`capped`: softly, by model/attention.py: scaled, divided, tanh, multiplied, masked, softmax in fp32, rounded."""
    numbers = float(core.rows * core.heads * core.queries * core.keys)
    if capped:
        forward = (2 * size,) * 5 + (size + 4, 4 + size)
        backward = (4 + size, 12, 4 + size, 2 * size, 2 * size, 3 * size, 2 * size, 2 * size)
        return tuple(b * numbers for b in forward), tuple(b * numbers for b in backward)
    if stack.attention != "math":
        return (), ()
    softmax = (
        (2 * size * numbers,)
        if stack.fused_softmax
        else tuple(b * numbers for b in (2 * size, 2 * size, size + 4, 8, 4 + size))
    )
    drop = (drop_bytes(numbers * size, size),) if stack.dropout else ()
    back = (
        (3 * size * numbers,) if stack.fused_softmax else tuple(b * numbers for b in (size + 4, 12, 4 + size, 2 * size))
    )
    return softmax + drop, back + drop


def cheap_passes(spec: ModelSpec, layer: LayerSpec, shape: Shape, stack: Stack) -> tuple[Passes, Passes]:
    """Norms, positions, activation, sums: forward and backward."""
    size, x = shape.size, shape.outside * spec.hidden
    norm = norm_passes(spec, x, size, stack)
    norms = 4 if spec.post_norms else 2
    # x + y reads two and writes one. In backward the two gradients that meet at a branch are added.
    plus = 3.0 * x * size
    drop: tuple[float, ...] = ()
    if stack.dropout and stack.fused_activation:  # bias, dropout and sum in one kernel
        plus += x
    elif stack.dropout and not stack.compiled:
        drop = (drop_bytes(x * size, size),) * 2
    forward = norm[0] * norms + (plus, plus) + drop
    backward = norm[1] * norms + (plus, plus) + drop
    if stack.measured:
        # Norm; sum and norm; sum, made anew from all of its parts. Backward reads them again for the norms' weights.
        forward, backward = (9.0 * x * size,), (16.0 * x * size,)
    elif stack.compiled:  # a sum and the norm after it are one kernel
        forward = (2 * (plus + x * size),)
        backward = (2 * (plus + 2.0 * x * size),)
    heads = (spec.num_heads + spec.num_kv_heads) // shape.tp
    rotated = shape.here * heads * spec.head_dim * size
    if spec.qk_norm:
        both = norm_passes(spec, rotated // size, size, stack, spec.head_dim)
        forward, backward = forward + both[0], backward + both[1]
    if spec.positions == "rope":
        turn = _rope(rotated, size, stack)
        forward, backward = forward + turn, backward + turn
    act = (
        _expert_activation(spec, shape, stack)
        if layer.is_moe
        else activation_passes(spec, shape.here * -(-layer.ffn // shape.tp), size, stack)
    )
    return forward + act[0], backward + act[1]


def _rope(rotated: float, size: int, stack: Stack) -> Passes:
    """x1 cos - x2 sin, x2 cos + x1 sin, side by side: four products and two sums of halves, one copy. For queries and keys. As complex numbers: to
    fp32, one product, and back."""
    if stack.fused_rope or stack.compiled:
        return (2.0 * rotated,)
    if stack.complex_rope:
        return tuple(
            part * rotated / size / 2 for part in (CAST * (size + 4.0), 8.0, CAST * (4.0 + size)) for _ in range(2)
        )
    return tuple(part * rotated / 2 for part in (1.0, 1.0, 1.5, 1.0, 1.0, 1.5, 2.0) for _ in range(2))


def norm_passes(spec: ModelSpec, numbers: float, size: int, stack: Stack, width: int = 0) -> tuple[Passes, Passes]:
    """torch has LayerNorm as one kernel. In plain operations RMSNorm goes to fp32 and back: six passes."""
    if stack.fused_norm or stack.compiled or spec.norm == "layer":
        slow = NORM * max(1.0, SHORT_ROW / (width or spec.hidden))
        return (2.0 * numbers * size * slow,), (3.0 * numbers * size * slow, numbers * size)
    forward = tuple(numbers * b for b in (size + 4.0, 8.0, 4.0, 8.0, 4.0 + size, 2.0 * size))
    backward = tuple(numbers * b for b in (3.0 * size, size + 4.0, 12.0, 8.0, 12.0, 12.0, 4.0 + size))
    return forward, backward


SHORT_ROW = 640
"""Numbers of a row that keep the threads of a norm busy: the norms over heads of 128 in qwen3-0.6b take five times as long as over a whole state (H200)."""

GATHERED = 1.6
"""Rows that are fetched by an index, over a copy."""

NORM = 1.6
CAST = 2.0
"""Passes that add up along rows, and those that change the width of numbers, run below the memory's rate: 2.6 and 2.1 TB/s on an H200 where a
sum of two tensors runs at 4.2 (kernels_h200.json)."""


def activation_passes(spec: ModelSpec, numbers: float, size: int, stack: Stack) -> tuple[Passes, Passes]:
    one = numbers * size
    bias = (2.0 * one,) if spec.mlp_bias and not (stack.fused_activation or stack.compiled) else ()
    if not spec.gated:
        return (*bias, 2.0 * one), (3.0 * one,)
    if stack.fused_activation or stack.compiled:
        return (3.0 * one,), (5.0 * one,)
    return (2.0 * one, 3.0 * one), (3.0 * one, 3.0 * one, 3.0 * one)


def _expert_activation(spec: ModelSpec, shape: Shape, stack: Stack) -> tuple[Passes, Passes]:
    """Besides the activation: copies are sorted by expert, and put back with their weights; the router's softmax."""
    copies = shape.here * spec.experts_per_token / (shape.tp if shape.ep > 1 else 1)
    slices = shape.tp if shape.ep == 1 else 1
    act = activation_passes(spec, copies * spec.expert_ffn / slices, shape.size, stack)
    moved = 2.0 * copies * spec.hidden * shape.size * GATHERED
    sorts = (moved, 1.5 * moved) + (moved, moved) * (shape.ep > 1)
    routing = (4.0 * shape.here * spec.num_experts,) * 4
    shared = activation_passes(
        spec, shape.here * spec.num_shared_experts * spec.expert_ffn / shape.tp, shape.size, stack
    )
    if not spec.num_shared_experts:
        shared = (), ()
    return act[0] + sorts + routing + shared[0], act[1] + sorts + routing + shared[1]


def cast_passes(parts: Iterable[tuple[Product, ...]], shape: Shape, stack: Stack) -> tuple[Passes, Passes, Passes]:
    """Eight bits: both factors of each product are measured (their largest number), scaled and rounded. Forward, inputs, weights. A fused kernel
    writes a tensor as it is and turned around, for both products that it takes part in; else each product rounds its own. Frozen weights were rounded
    before. `parts`: products of attention and of the rest, of which all but the last multiply the same input."""
    if not shape.eight_bit:
        return (), (), ()
    wide = [p for part in parts for p in part if p.in_eight]
    x, w, g = ([float(p.groups * numbers) for p in wide for numbers in (f(p),)] for f in (
        lambda p: p.m * p.k, lambda p: p.k * p.n, lambda p: p.m * p.n))  # fmt: skip
    if stack.fused_cast:
        return tuple(4.0 * (a + b) for a, b in zip(x, w, strict=True)), tuple(4.0 * a for a in g), ()
    if stack.measured:
        readers = [[p for p in some if p.in_eight] for *several, last in parts for some in (several, [last])]
        read = [float(some[0].m * some[0].k) for some in readers if some]
        if shape.trains == "lora":  # nothing is turned around
            return tuple(ROUND * one for one in read), tuple(ROUND * one for one in g), ()
        turned = tuple(TURN * ROUND * a + (LOOK + TURN * ROUND) * b for a, b in zip(g, w, strict=True))
        both = (*(ROUND * one for one in read), *((LOOK + ROUND) * one for one in w))
        return both, turned, tuple(TURN * ROUND * one for one in read)
    each = 7.0 if stack.compiled else EAGER_CAST
    if shape.trains == "lora":
        return tuple(each * a for a in x), tuple(each * a for a in g), ()
    pairs = ((x, w), (g, w), (g, x))
    forward, inputs, weights = (tuple(each * (a + b) for a, b in zip(*pair, strict=True)) for pair in pairs)
    return forward, inputs, weights


LOOK, ROUND, TURN = 2.0, 3.0, 3.2
"""Bytes per number in our compiled blocks: looking for the largest number, which whoever makes a tensor does on its way, and rounding; and
how much longer it takes to turn around as well, which is what 8 layers of 8 B with one scale per tensor leave for it (H200)."""


def head_casts(product: Product, chunks: int, shape: Shape, stack: Stack) -> tuple[Passes, Passes, Passes]:
    """The same of a head whose loss is fused: outside of blocks, each a kernel of its own. Weights are rounded once for all chunks, frozen ones once for all steps, and what a chunk
    adds to their gradient is not added inside of the product: it is read, and the sum in fp32 read and written."""
    x, w, g = (float(n) for n in (product.m * product.k, product.k * product.n, product.m * product.n))
    each = LOOK + ROUND
    if shape.trains != "all":
        return (each * x,), (each * g,), ()
    turned = each if stack.fp8_rows else 2.0  # one scale for all: the same bits, turned around
    return (each * x, each * w), (each * g, turned * w), (each * g, each * x, 10.0 * w * chunks)


EAGER_CAST = 60.0
"""Bytes per number that is rounded to fp8 in plain operations: magnitudes, their largest, up to fp32, scaled, clamped, rounded, turned around; the
figure is what 20 matrices on an H200 came to (precision_h200.json)."""


def unpacking_passes(products: tuple[Product, ...], shape: Shape) -> Passes:
    """Four-bit weights are read out into 16 bits before each use, chunk by chunk in plain operations (adapters/nf4.py)."""
    if shape.trains != "qlora":
        return ()
    found: list[float] = []
    for p in products:
        weights = p.groups * p.n * p.k
        calls = -(-weights // NF4_CHUNK) * NF4_KERNELS
        found += [weights * NF4_BYTES / calls] * calls
    return tuple(found)


NF4_CHUNK, NF4_KERNELS, NF4_BYTES = 2**24, 10, 22.5
"""Weights of a chunk, kernels for it, and bytes per weight: a code becomes an index of four bytes per pair, two numbers of fp32 are looked up, multiplied by
their block's magnitude in place, and rounded into the result."""


def drop_bytes(size: float, number: int = 2) -> float:
    """Bytes of a dropout over a tensor of `size` bytes: read, write, and a mask of one byte per number."""
    return 2.0 * size + size / number
