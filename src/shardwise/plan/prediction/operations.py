"""What one rank computes for one micro-batch: products, attention, and passes over memory, layer by layer. No torch.

    layer_work(spec, layer, shape, stack)   one layer         head_work, embedding_work   the ends of the model

Invariant: without tensor, context and expert parallelism the products of a model add up to `spec.flops_per_token`. Counts only; what they
take on a device is kernels.py's. Backward is counted as inputs (gradients that travel on) and weights apart, because pipelines run them apart.
Read next: passes.py, kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.plan.prediction.activations import MAX_LOGITS_BYTES, fused_chunks, has_chunks
from shardwise.plan.prediction.passes import (
    CAST,
    cast_passes,
    cheap_passes,
    drop_bytes,
    head_casts,
    norm_passes,
    score_passes,
    unpacking_passes,
)
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.work import Attention, Product, Shape, Training, Work
from shardwise.spec.fp8 import FROZEN_WORTH, gains
from shardwise.spec.lora import adds_in_one_kernel
from shardwise.spec.model import LayerSpec, ModelSpec

EXPERT_IMBALANCE = 1.1
"""The fullest expert rank's tokens over the mean, with a router that is balanced by a loss or a bias."""


def layer_work(spec: ModelSpec, layer: LayerSpec, shape: Shape, stack: Stack) -> Training:
    """`spec` is the whole model; slices are taken here."""
    attention = _latent_products(spec, shape) if spec.is_latent else _attention_products(spec, shape, stack)
    ffn = _expert_products(spec, shape) if layer.is_moe else _dense_products(spec, layer.ffn, shape, stack)
    core = _attention_core(spec, layer, shape, stack)
    cheap_forward, cheap_backward = cheap_passes(spec, layer, shape, stack)
    if shape.eight_bit and stack.fp8_least:  # experts are never in eight bits
        least = stack.fp8_least * (1.0 if shape.trains == "all" else FROZEN_WORTH)
        attention, ffn = (
            tuple(p._replace(small=p.groups > 1 or not gains(p.n, p.k, least)) for p in part)
            for part in (attention, ffn)
        )
    forward = (*attention, *ffn)
    if isinstance(spec, TransformersSpec):  # counted, not known: one product with as many weights
        forward = (Product(shape.here, max(1, spec.block_parameters[layer.index] // spec.hidden), spec.hidden),)
    inputs = tuple(Product(p.m, p.k, p.n, p.groups, exact=p.exact, small=p.small) for p in forward)
    casts = cast_passes((attention, ffn), shape, stack)
    capped = bool(spec.attention_softcap) and not stack.windows  # which our fused kernels cannot do
    scores = score_passes(core, stack, shape.size, capped)
    unpacked = unpacking_passes(forward, shape)
    views = 0 if stack.compiled else VIEWS
    math = stack.attention == "math" or capped
    core_work = Work(_score_products(core), (), scores[0]) if math else Work((), (core,))
    core_back = Work(_score_products(core, backward=True), (), scores[1]) if math else Work((), (core,))
    same = [(attention, not spec.is_latent), (ffn, not layer.is_moe)]
    added = _adapters([(forward, False)] if isinstance(spec, TransformersSpec) else same, shape, stack)
    return Training(
        forward=Work(forward, (), cheap_forward + casts[0] + unpacked, views) + core_work + added[0],
        inputs=Work(inputs, (), cheap_backward + casts[1] + unpacked, views) + core_back + added[1],
        weights=weight_gradients(forward, shape, stack)
        + Work((), (), casts[2] + _bias_gradients(spec, forward, shape))
        + added[2],
        cheap=Work((), (), cheap_forward),
        attention=core_work,
    )


VIEWS = 12
"""Reshapes, splits and transposes of one layer and pass in plain torch: the host works, the device does not."""


def num_tensors(spec: ModelSpec, layer: LayerSpec) -> int:
    """Parameters of a layer, each a tensor of its own: hooks and optimizers go through them one by one."""
    norms = (4 if spec.post_norms else 2) * (2 if spec.norm == "layer" else 1) + 2 * spec.qk_norm
    attention = (7 if spec.q_lora_rank else 5) if spec.is_latent else 4 + 3 * spec.qkv_bias + spec.out_bias
    matrices = 3 if spec.gated else 2
    if layer.is_moe:
        return norms + attention + 1 + matrices * (2 if spec.num_shared_experts else 1)
    return norms + attention + matrices * (2 if spec.mlp_bias else 1)


def embedding_work(spec: ModelSpec, shape: Shape, stack: Stack) -> Training:
    """A lookup; backward sorts tokens and adds their rows to a gradient as large as the table."""
    x = shape.outside * spec.hidden * shape.size
    table = -(-spec.vocab // shape.tp) * spec.hidden
    drops = (drop_bytes(x),) if stack.dropout else ()
    table_passes = () if shape.trains != "all" else (float(table * max(2, stack.gradient_passes // 2)),)
    return Training(
        Work((), (), (2.0 * x, *drops), 4), Work(), Work((), (), (2.0 * x, *table_passes), 4), Work(), Work()
    )


def head_work(spec: ModelSpec, shape: Shape, stack: Stack) -> Training:
    """Last norm, logits, loss."""
    vocab = -(-spec.vocab // (shape.tp * stack.pads_vocab)) * stack.pads_vocab
    product = Product(shape.here, vocab, spec.hidden, exact=not (shape.eight_bit and stack.fp8_head))
    logits = shape.here * vocab
    norm = norm_passes(spec, shape.outside * spec.hidden, shape.size, stack)
    again = stack.logits_again and logits * 4 > MAX_LOGITS_BYTES
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    # Written by the product; then: rounded up to fp32, softmax, loss. Backward: the softmax's gradient, rounded down.
    if stack.fused_loss:
        passes = (logits * 2.0 * shape.size,) * stack.loss_passes
        forward, backward = passes[:1], passes[1:]
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
    back = Product(product.m, product.k, product.n, exact=product.exact)
    casts = (
        ((), (), ()) if product.exact else head_casts(product, fused_chunks(logits, shape.size, "cuda"), shape, stack)
    )
    if stack.measured and not stack.logits_again and has_chunks(logits):  # both gradients wait in forward's format
        backward += (6.0 * vocab * spec.hidden * (shape.trains == "all"), 2.0 * shape.size * shape.here * spec.hidden)
    trained = shape.trains == "all"
    if again:
        forward = forward * 2  # both passes are charged to the stage's backward and forward together
    return Training(
        forward=Work(products, (), norm[0] + forward + casts[0], 6 * chunks),
        inputs=Work((back,), (), norm[1] + backward + casts[1], 6 * chunks),
        weights=weight_gradients((product,), shape, stack) + Work((), (), casts[2]) if trained else Work(),
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
    products = tuple(Product(p.n, p.k, p.m, p.groups, in_product, p.exact, p.small) for p in forward)
    if in_product:
        return Work(products)
    added = tuple(float(p.n * p.k * p.groups * stack.gradient_passes) for p in forward) if stack.gradient_passes else ()
    return Work(products, (), added)


def _bias_gradients(spec: ModelSpec, forward: tuple[Product, ...], shape: Shape) -> tuple[float, ...]:
    """Sums over all tokens, a pass over each product's output gradient."""
    if shape.trains != "all" or not spec.mlp_bias:
        return ()
    return tuple(float(p.m * p.n * shape.size) for p in forward)


IN_PRODUCT = 8
"""Bytes per number when the product itself adds to an fp32 sum: read and write."""


# Attention ----------------------------------------------------------------------------------------------------------


def _attention_core(spec: ModelSpec, layer: LayerSpec, shape: Shape, stack: Stack) -> Attention:
    heads = max(1, spec.num_heads // (shape.tp * shape.ulysses))
    kv_heads = max(1, -(-spec.num_kv_heads // (shape.tp * shape.ulysses)))
    queries = shape.tokens * shape.ulysses
    is_cut = layer.window is not None and layer.window < shape.seq_len
    if is_cut and not stack.windows and queries == shape.seq_len:  # heads are repeated for the kernel that takes masks
        context = float(shape.seq_len)
        return Attention(shape.rows, heads, heads, queries, queries, context, spec.head_dim, spec.value_dim, True)
    context = spec.attention_context(layer, shape.seq_len)
    keys = min(layer.window or shape.seq_len, shape.seq_len)
    return Attention(shape.rows, heads, kv_heads, queries, keys, context, spec.head_dim, spec.value_dim)


def _score_products(core: Attention, backward: bool = False) -> tuple[Product, ...]:
    """Attention by definition computes masked scores too."""
    groups = core.rows * core.heads
    scores = Product(core.queries, core.keys, core.width, groups, exact=True)
    values = Product(core.queries, core.value_width, core.keys, groups, exact=True)
    return (scores, values) * 2 if backward else (scores, values)


def _adapters(parts: Iterable[tuple[tuple[Product, ...], bool]], shape: Shape, stack: Stack) -> tuple[Work, Work, Work]:
    """y + (s x A) B beside each adapted product: two narrow products, a narrow scaling, a sum. Forward, inputs, weights. In our compiled blocks, without
    tensor parallelism, layers that multiply the same input have one A, and the product with B is a part of the sum's pass. `parts`: products of
    attention and of the rest, and whether all but the last multiply the same input."""
    ours = stack.measured and shape.tp == 1
    at_once = ours and shape.size == 2 and adds_in_one_kernel(shape.rank)
    found, groups = [Work(), Work(), Work()], []
    first = 0
    for products, is_same in parts:
        adapted = [p if index in shape.adapters else None for index, p in enumerate(products, first)]
        first += len(products)
        cut = len(adapted) - 1 if is_same and ours and not shape.drops else 0
        groups += [adapted[:cut], *([one] for one in adapted[cut:])]
    for group in groups:
        some = [p for p in group if p is not None]
        if not some:
            continue
        m, k, rank = some[0].m, some[0].k, shape.rank * len(some)
        narrow, wide = 2.0 * m * rank * shape.size, [float(m * p.n * shape.size) for p in some]
        ups = () if at_once else tuple(Product(m, p.n, shape.rank, exact=True) for p in some)
        found[0] += Work(
            (Product(m, rank, k, exact=True), *ups), (), (narrow, *((2 if ours else 3) * w for w in wide)), 4
        )
        back = (Product(m, k, rank, exact=True), *(Product(m, shape.rank, p.n, exact=True) for p in some))
        # In compiled blocks x's gradient is read by a kernel that is there anyway.
        found[1] += Work(back, (), (narrow, (1.0 if ours else 3.0) * m * k * shape.size), 4)
        sides = ((k, rank), *((shape.rank, p.n) for p in some))
        found[2] += Work(tuple(Product(a, b, m, exact=True, split=True) for a, b in sides))
    return found[0], found[1], found[2]
