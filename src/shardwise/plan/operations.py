"""What one rank computes for one micro-batch: products, attention, and passes over memory, layer by layer. No torch.

    layer_work(spec, layer, shape, stack)   one layer         head_work, embedding_work   the ends of the model

Invariant: without tensor, context and expert parallelism the products of a model add up to `spec.flops_per_token`. Counts only; what they
take on a device is kernels.py's. Backward is counted as inputs (gradients that travel on) and weights apart, because pipelines run them apart.

Bytes of passes follow from which kernels a stack has: a chain of plain operations reads and writes its tensors once per operation, a fused
kernel once. Read next: kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.activations import MAX_LOGITS_BYTES
from shardwise.plan.stack import Stack

EXPERT_IMBALANCE = 1.1
"""The fullest expert rank's tokens over the mean, with a router that is balanced by a loss or a bias."""


class Product(NamedTuple):
    """`groups` products of (m x k) by (k x n). `adds`: its result is added to a sum in fp32."""

    m: int
    n: int
    k: int
    groups: int = 1
    adds: bool = False
    exact: bool = False  # not in eight bits, whatever the precision

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups


class Attention(NamedTuple):
    """Causal attention of `queries` tokens per row, each over `context` keys on average of at most `keys`."""

    rows: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    context: float
    width: int  # of queries and keys
    value_width: int

    @property
    def flops(self) -> float:
        """Of forward. Backward has five products for these two."""
        return 2.0 * self.rows * self.heads * self.queries * self.context * (self.width + self.value_width)


@dataclass(frozen=True)
class Work:
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    passes: tuple[float, ...] = ()  # bytes read and written, one number per kernel
    views: int = 0  # operations that only the host notices

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.passes + other.passes,
            self.views + other.views,
        )

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.products) + sum(a.flops for a in self.attention)

    @property
    def launches(self) -> int:
        return len(self.products) + len(self.attention) + len(self.passes) + self.views


@dataclass(frozen=True)
class Training:
    """Of one layer or one end of the model."""

    forward: Work
    inputs: Work  # backward: gradients of what came in, and of what has no weights
    weights: Work
    cheap: Work  # the part of forward that `cheap` selective recomputation repeats
    attention: Work  # the part that `attention` repeats


class Shape(NamedTuple):
    """What of a micro-batch a rank has."""

    rows: int  # sequences
    tokens: int  # of one sequence, on this rank: seq_len / cp
    seq_len: int
    tp: int = 1
    sequence: bool = False
    ep: int = 1
    ulysses: int = 1  # context-parallel ranks that exchange heads for tokens
    size: int = 2  # bytes per number
    eight_bit: bool = False  # large products in fp8
    trains: str = "all"  # all | lora | qlora
    adapters: tuple[int, ...] = ()  # products of a layer that have them
    rank: int = 0  # of the adapters

    @property
    def here(self) -> int:
        """Tokens inside of tensor-parallel regions."""
        return self.rows * self.tokens

    @property
    def outside(self) -> int:
        """Tokens that norms and sums see: a share of them under sequence parallelism."""
        return max(1, self.here // self.tp) if self.sequence else self.here


def layer_work(spec: ModelSpec, layer: LayerSpec, shape: Shape, stack: Stack) -> Training:
    """`spec` is the whole model; slices are taken here."""
    attention = _latent_products(spec, shape) if spec.is_latent else _attention_products(spec, shape, stack)
    ffn = _expert_products(spec, shape) if layer.is_moe else _dense_products(spec, layer.ffn, shape, stack)
    core = _attention_core(spec, layer, shape)
    cheap_forward, cheap_backward = _cheap(spec, layer, shape, stack)
    forward = (*attention, *ffn)
    inputs = tuple(Product(p.m, p.k, p.n, p.groups, exact=p.exact) for p in forward)
    casts = _casts(forward, shape, stack)
    scores = _score_passes(core, stack, shape.size)
    unpacked = _dequantised(forward, shape)
    views = 0 if stack.compiled else VIEWS
    math = stack.attention == "math"
    core_work = Work(_score_products(core), (), scores[0]) if math else Work((), (core,))
    core_back = Work(_score_products(core, backward=True), (), scores[1]) if math else Work((), (core,))
    added = _adapters(forward, shape)
    return Training(
        forward=Work(forward, (), cheap_forward + casts[0] + unpacked, views) + core_work + added[0],
        inputs=Work(inputs, (), cheap_backward + casts[1] + unpacked, views) + core_back + added[1],
        weights=weight_gradients(forward, shape, stack) + Work((), (), casts[2]) + added[2],
        cheap=Work((), (), cheap_forward),
        attention=core_work,
    )


VIEWS = 12
"""Reshapes, splits and transposes of one layer and pass in plain torch: the host works, the device does not."""


def embedding_work(spec: ModelSpec, shape: Shape, stack: Stack) -> Training:
    """A lookup; backward sorts tokens and adds their rows to a gradient as large as the table."""
    x = shape.outside * spec.hidden * shape.size
    table = -(-spec.vocab // shape.tp) * spec.hidden
    drops = (_drop(x),) if stack.dropout else ()
    table_passes = () if shape.trains != "all" else (float(table * max(2, stack.gradient_passes // 2)),)
    return Training(
        Work((), (), (2.0 * x, *drops), 4), Work(), Work((), (), (2.0 * x, *table_passes), 4), Work(), Work()
    )


def head_work(spec: ModelSpec, shape: Shape, stack: Stack) -> Training:
    """Last norm, logits, loss."""
    vocab = -(-spec.vocab // (shape.tp * stack.pads_vocab)) * stack.pads_vocab
    product = Product(shape.here, vocab, spec.hidden, exact=True)
    logits = shape.here * vocab
    norm = _norm(spec, shape.outside * spec.hidden, shape.size, stack)
    again = stack.logits_again and logits * 4 > MAX_LOGITS_BYTES
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    # Written by the product; then: rounded up to fp32, softmax, loss. Backward: the softmax's gradient, rounded down.
    if stack.fused_loss:
        forward, backward = (logits * 2.0 * shape.size,), (logits * 2.0 * shape.size,)
    elif stack.compiled:
        forward, backward = (logits * (shape.size + 4.0),), (logits * (4.0 + shape.size),)
    elif (
        shape.tp > 1 or stack.sharded_loss
    ):  # the largest, the difference, exp, its sum and the division are passes of their own, in fp32
        forward = tuple(logits * b for b in (CAST * (shape.size + 4.0), 4.0, 8.0, 8.0, 4.0, 8.0))
        backward = tuple(logits * b for b in (8.0, CAST * (4.0 + shape.size)))
    else:
        forward = tuple(logits * b for b in (CAST * (shape.size + 4.0), 1.4 * 8.0))
        backward = tuple(logits * b for b in (4.0, 12.0, CAST * (4.0 + shape.size)))
    chunks = -(-logits * 4 // MAX_LOGITS_BYTES) if again else 1
    products = (product,) * (2 if again else 1)
    back = Product(product.m, product.k, product.n, exact=True)
    trained = shape.trains == "all"
    if again:
        forward = forward * 2  # both passes are charged to the stage's backward and forward together
    return Training(
        forward=Work(products, (), norm[0] + forward, 6 * chunks),
        inputs=Work((back,), (), norm[1] + backward, 6 * chunks),
        weights=weight_gradients((product,), shape, stack) if trained else Work(),
        cheap=Work(),
        attention=Work(),
    )


# Products -----------------------------------------------------------------------------------------------------------


def _attention_products(spec: ModelSpec, shape: Shape, stack: Stack) -> tuple[Product, ...]:
    t, h = shape.here, spec.hidden
    queries = spec.num_heads // shape.tp * spec.head_dim
    keys = -(-spec.num_kv_heads // shape.tp) * spec.head_dim
    out = Product(t, h, queries)
    if stack.joined:
        return Product(t, queries + 2 * keys, h), out
    return Product(t, queries, h), Product(t, keys, h), Product(t, keys, h), out


def _latent_products(spec: ModelSpec, shape: Shape) -> tuple[Product, ...]:
    """The projections down to the latents are whole on every rank, over the tokens that are its own."""
    t, h, heads = shape.here, spec.hidden, spec.num_heads // shape.tp
    outside = shape.outside
    query = (
        (Product(outside, spec.q_lora_rank, h), Product(t, heads * spec.head_dim, spec.q_lora_rank))
        if spec.q_lora_rank
        else (Product(t, heads * spec.head_dim, h),)
    )
    return (
        *query,
        Product(outside, spec.kv_lora_rank + spec.qk_rope_head_dim, h),
        Product(t, heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        Product(t, h, heads * spec.v_head_dim),
    )


def _dense_products(spec: ModelSpec, ffn: int, shape: Shape, stack: Stack) -> tuple[Product, ...]:
    t, h, width = shape.here, spec.hidden, -(-ffn // shape.tp)
    down = Product(t, h, width)
    if not spec.gated:
        return Product(t, width, h), down
    return (Product(t, 2 * width, h), down) if stack.joined else (Product(t, width, h), Product(t, width, h), down)


def _expert_products(spec: ModelSpec, shape: Shape) -> tuple[Product, ...]:
    """Router, routed experts as grouped products, shared experts. Spread experts are whole; else each rank has a slice of all of them."""
    h, copies = spec.hidden, shape.here * spec.experts_per_token
    slices = shape.tp if shape.ep == 1 else 1
    width = -(-spec.expert_ffn // slices)
    experts = spec.num_experts // shape.ep
    # An expert-parallel rank has its own experts' tokens of all ranks of the row: as many as its own tokens send out.
    own = copies if shape.ep == 1 else copies // shape.tp
    tokens = max(1, round(own * (EXPERT_IMBALANCE if shape.ep > 1 else 1.0) / experts))
    routed = (Product(tokens, (2 if spec.gated else 1) * width, h, experts), Product(tokens, h, width, experts))
    router = Product(shape.outside if shape.ep > 1 else shape.here, spec.num_experts, h, exact=True)
    shared: tuple[Product, ...] = ()
    if spec.num_shared_experts:
        wide = -(-spec.num_shared_experts * spec.expert_ffn // shape.tp)
        shared = (Product(shape.here, (2 if spec.gated else 1) * wide, h), Product(shape.here, h, wide))
    return router, *routed, *shared


def weight_gradients(forward: Iterable[Product], shape: Shape, stack: Stack) -> Work:
    """One product each, and adding it to what other micro-batches left. Frozen weights have none; adapters' are small."""
    if shape.trains != "all":
        return Work()
    forward = tuple(forward)
    in_product = stack.gradient_passes == IN_PRODUCT
    products = tuple(Product(p.n, p.k, p.m, p.groups, in_product, p.exact) for p in forward)
    if in_product:
        return Work(products)
    added = tuple(float(p.n * p.k * p.groups * stack.gradient_passes) for p in forward) if stack.gradient_passes else ()
    return Work(products, (), added)


IN_PRODUCT = 8
"""Bytes per number when the product itself adds to an fp32 sum: read and write."""


# Attention ----------------------------------------------------------------------------------------------------------


def _attention_core(spec: ModelSpec, layer: LayerSpec, shape: Shape) -> Attention:
    heads = max(1, spec.num_heads // (shape.tp * shape.ulysses))
    kv_heads = max(1, -(-spec.num_kv_heads // (shape.tp * shape.ulysses)))
    queries = shape.tokens * shape.ulysses
    context = spec.attention_context(layer, shape.seq_len)
    keys = min(layer.window or shape.seq_len, shape.seq_len)
    return Attention(shape.rows, heads, kv_heads, queries, keys, context, spec.head_dim, spec.value_dim)


def _score_products(core: Attention, backward: bool = False) -> tuple[Product, ...]:
    """Attention by definition computes masked scores too."""
    groups = core.rows * core.heads
    scores = Product(core.queries, core.keys, core.width, groups, exact=True)
    values = Product(core.queries, core.value_width, core.keys, groups, exact=True)
    return (scores, values) * 2 if backward else (scores, values)


def _score_passes(core: Attention, stack: Stack, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if stack.attention != "math":
        return (), ()
    numbers = float(core.rows * core.heads * core.queries * core.keys)
    softmax = (
        (2 * size * numbers,)
        if stack.fused_softmax
        else tuple(b * numbers for b in (2 * size, 2 * size, size + 4, 8, 4 + size))
    )
    drop = (_drop(numbers * size, size),) if stack.dropout else ()
    back = (
        (3 * size * numbers,) if stack.fused_softmax else tuple(b * numbers for b in (size + 4, 12, 4 + size, 2 * size))
    )
    return softmax + drop, back + drop


# Passes over memory -------------------------------------------------------------------------------------------------


def _cheap(
    spec: ModelSpec, layer: LayerSpec, shape: Shape, stack: Stack
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Norms, positions, activation, sums: forward and backward."""
    size, x = shape.size, shape.outside * spec.hidden
    norm = _norm(spec, x, size, stack)
    norms = 4 if spec.post_norms else 2
    # x + y reads two and writes one. In backward the two gradients that meet at a branch are added.
    plus = 3.0 * x * size
    drop: tuple[float, ...] = ()
    if stack.dropout and stack.fused_activation:  # bias, dropout and sum in one kernel
        plus += x
    elif stack.dropout and not stack.compiled:
        drop = (_drop(x * size, size),) * 2
    forward = norm[0] * norms + (plus, plus) + drop
    backward = norm[1] * norms + (plus, plus) + drop
    if stack.compiled:  # a sum and the norm after it are one kernel
        forward = (2 * (plus + x * size),)
        backward = (2 * (plus + 2.0 * x * size),)
    heads = (spec.num_heads + spec.num_kv_heads) // shape.tp
    rotated = shape.here * heads * spec.head_dim * size
    if spec.qk_norm:
        both = _norm(spec, rotated // size, size, stack)
        forward, backward = forward + both[0], backward + both[1]
    if spec.positions == "rope":
        turn = _rope(rotated, size, stack)
        forward, backward = forward + turn, backward + turn
    act = (
        _expert_activation(spec, shape, stack)
        if layer.is_moe
        else _activation(spec, shape.here * -(-layer.ffn // shape.tp), size, stack)
    )
    return forward + act[0], backward + act[1]


def _rope(rotated: float, size: int, stack: Stack) -> tuple[float, ...]:
    """x1 cos - x2 sin, x2 cos + x1 sin, side by side: four products and two sums of halves, one copy. For queries and keys. As complex numbers: to
    fp32, one product, and back."""
    if stack.fused_rope or stack.compiled:
        return (2.0 * rotated,)
    if stack.complex_rope:
        return tuple(
            part * rotated / size / 2 for part in (CAST * (size + 4.0), 8.0, CAST * (4.0 + size)) for _ in range(2)
        )
    return tuple(part * rotated / 2 for part in (1.0, 1.0, 1.5, 1.0, 1.0, 1.5, 2.0) for _ in range(2))


def _norm(spec: ModelSpec, numbers: float, size: int, stack: Stack) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """torch has LayerNorm as one kernel. In plain operations RMSNorm goes to fp32 and back: six passes."""
    if stack.fused_norm or stack.compiled or spec.norm == "layer":
        return (2.0 * numbers * size * NORM,), (3.0 * numbers * size * NORM, numbers * size)
    forward = tuple(numbers * b for b in (size + 4.0, 8.0, 4.0, 8.0, 4.0 + size, 2.0 * size))
    backward = tuple(numbers * b for b in (3.0 * size, size + 4.0, 12.0, 8.0, 12.0, 12.0, 4.0 + size))
    return forward, backward


NORM = 1.6
CAST = 2.0
"""Passes that add up along rows, and those that change the width of numbers, run below the memory's rate: 2.6 and 2.1 TB/s on an H200 where a
sum of two tensors runs at 4.2 (kernels_h200.json)."""


def _activation(
    spec: ModelSpec, numbers: float, size: int, stack: Stack
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    one = numbers * size
    bias = (2.0 * one,) if spec.mlp_bias and not (stack.fused_activation or stack.compiled) else ()
    if not spec.gated:
        return (*bias, 2.0 * one), (3.0 * one,)
    if stack.fused_activation or stack.compiled:
        return (3.0 * one,), (5.0 * one,)
    return (2.0 * one, 3.0 * one), (3.0 * one, 3.0 * one, 3.0 * one)


def _expert_activation(spec: ModelSpec, shape: Shape, stack: Stack) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Besides the activation: copies are sorted by expert, and put back with their weights; the router's softmax."""
    copies = shape.here * spec.experts_per_token / (shape.tp if shape.ep > 1 else 1)
    slices = shape.tp if shape.ep == 1 else 1
    act = _activation(spec, copies * spec.expert_ffn / slices, shape.size, stack)
    moved = 2.0 * copies * spec.hidden * shape.size
    sorts = (moved, 1.5 * moved) + (moved, moved) * (shape.ep > 1)
    routing = (4.0 * shape.here * spec.num_experts,) * 4
    shared = _activation(spec, shape.here * spec.num_shared_experts * spec.expert_ffn / shape.tp, shape.size, stack)
    if not spec.num_shared_experts:
        shared = (), ()
    return act[0] + sorts + routing + shared[0], act[1] + sorts + routing + shared[1]


def _casts(products: tuple[Product, ...], shape: Shape, stack: Stack) -> tuple[tuple[float, ...], ...]:
    """Eight bits: both factors of each product are measured (their largest number), scaled and rounded. Forward, inputs, weights. A fused kernel
    writes a tensor as it is and turned around, for both products that it takes part in; else each product rounds its own."""
    if not shape.eight_bit:
        return (), (), ()
    wide = [p for p in products if not p.exact]
    x, w, g = ([float(p.groups * numbers) for p in wide for numbers in (f(p),)] for f in (
        lambda p: p.m * p.k, lambda p: p.k * p.n, lambda p: p.m * p.n))  # fmt: skip
    if stack.fused_cast:
        return tuple(4.0 * (a + b) for a, b in zip(x, w, strict=True)), tuple(4.0 * a for a in g), ()
    each = 7.0 if stack.compiled else EAGER_CAST
    pairs = ((x, w), (g, w), (g, x))
    forward, inputs, weights = (tuple(each * (a + b) for a, b in zip(*pair, strict=True)) for pair in pairs)
    return forward, inputs, weights


EAGER_CAST = 60.0
"""Bytes per number that is rounded to fp8 in plain operations: magnitudes, their largest, up to fp32, scaled, clamped, rounded, turned around; the
figure is what 20 matrices on an H200 came to (precision_h200.json)."""


def _dequantised(products: tuple[Product, ...], shape: Shape) -> tuple[float, ...]:
    """Four-bit weights are read out into 16 bits before each use: a few passes, most of them in small integers."""
    return tuple(p.groups * p.n * p.k * NF4_BYTES for p in products) if shape.trains == "qlora" else ()


NF4_BYTES = 36.0
"""Read and written per weight that model/nf4.py unpacks in plain operations: codes become indices of eight bytes per pair, two numbers of fp32 are
looked up, multiplied by their block's magnitude in place, and rounded into the result."""


def _adapters(products: tuple[Product, ...], shape: Shape) -> tuple[Work, Work, Work]:
    """y + s (x A) B beside each adapted product: two narrow products, a scaling, a sum. Forward, inputs, weights."""
    parts = [Work(), Work(), Work()]
    for index in shape.adapters:
        if index >= len(products):
            continue
        p = products[index]
        wide = float(p.m * p.n * shape.size)
        down, up = Product(p.m, shape.rank, p.k, exact=True), Product(p.m, p.n, shape.rank, exact=True)
        parts[0] += Work((down, up), (), (2 * wide, 3 * wide), 4)
        back = (Product(p.m, shape.rank, p.n, exact=True), Product(p.m, p.k, shape.rank, exact=True))
        parts[1] += Work(back, (), (2 * wide, 3.0 * p.m * p.k * shape.size), 4)
        parts[2] += Work((Product(p.k, shape.rank, p.m, exact=True), Product(shape.rank, p.n, p.m, exact=True)))
    return parts[0], parts[1], parts[2]


def _drop(size: float, number: int = 2) -> float:
    """Bytes of a dropout over a tensor of `size` bytes: read, write, and a mask of one byte per number."""
    return 2.0 * size + size / number
