"""What one rank computes for one micro-batch: matmuls, attention, and passes over memory, layer by layer. No torch.

    layer_work(spec, layer, shape, stack)   one layer         head_work, embedding_work   the ends of the model

Invariant: without tensor, context and expert parallelism the matmuls of a model add up to `spec.flops_per_token`.
Counts only; what they take on a device is kernels.py's. Backward is counted as inputs (gradients that travel on) and
weights apart, because pipelines run them apart. Which kernels run is the stack's (stack.py). Read next: kernels.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.plan.prediction.activations import fused_chunks, has_chunks
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.stack import EXPERT_IMBALANCE, LOOK, QUANTIZE, Passes, Stack
from shardwise.plan.prediction.work import AttentionCore, Matmul, RankShape, RankWork, Training
from shardwise.spec.fp8 import FROZEN_WORTH, gains
from shardwise.spec.layers import Weight
from shardwise.spec.logits import MAX_LOGITS_BYTES
from shardwise.spec.lora import adds_in_one_kernel
from shardwise.spec.model import LayerSpec, ModelSpec

VIEWS = int(measured("views"))
GATHERED = measured("gathered_rows")
NF4_CHUNK, NF4_KERNELS, NF4_BYTES = 2**24, 10, 22.5
"""adapters/nf4.py: weights of a chunk, kernels for it, and bytes per weight: a code becomes an index of four bytes per
pair, two elements of fp32 are looked up, multiplied by their block's magnitude in place, and cast into the
result."""


def layer_work(spec: ModelSpec, layer: LayerSpec, shape: RankShape, stack: Stack) -> Training:
    """Returns the operations of a rank for one layer. `spec` is the whole model; slices are taken here."""
    attention = _matmuls(spec.attention_weights, spec.attention.fused, shape, stack)
    if layer.is_moe:
        ffn = _expert_matmuls(spec, shape)
    else:
        ffn = _matmuls(spec.feedforward_weights(layer), layer.feedforward.fused, shape, stack)
    core = _attention_core(spec, layer, shape, stack)
    cheap_forward, cheap_backward = _cheap_passes(spec, layer, shape, stack)
    if shape.eight_bit and stack.fp8_least:  # experts are never in eight bits
        least = stack.fp8_least * (1.0 if shape.trains == "all" else FROZEN_WORTH)
        attention, ffn = (
            tuple(p._replace(small=p.groups > 1 or not gains(p.n, p.k, least)) for p in part)
            for part in (attention, ffn)
        )
    forward = (*attention, *ffn)
    if isinstance(spec, TransformersSpec):  # counted, not known: one matmul with as many weights
        forward = (Matmul(shape.here, max(1, spec.block_parameters[layer.index] // spec.hidden), spec.hidden),)
    inputs = tuple(Matmul(p.m, p.k, p.n, p.groups, exact=p.exact, small=p.small) for p in forward)
    casts = stack.cast_passes((attention, ffn), shape)
    capped = bool(spec.attention_softcap) and not stack.knows_masks
    scores = stack.score_passes(core, shape.size, capped)
    unpacked = _unpacking_passes(forward, shape)
    views = 0 if stack.compiled else VIEWS
    core_work = core_back = RankWork((), (core,))
    if scores is not None:
        core_work = RankWork(_score_matmuls(core), (), scores[0])
        core_back = RankWork(_score_matmuls(core, backward=True), (), scores[1])
    same = [(attention, bool(spec.attention.fused)), (ffn, bool(layer.feedforward.fused))]
    # Biases' gradients are sums over all tokens, one over each matmul's output gradient.
    sums = shape.trains == "all" and spec.mlp_bias
    biases = tuple(float(p.m * p.n * shape.size) for p in forward) if sums else ()
    added = _adapters([(forward, False)] if isinstance(spec, TransformersSpec) else same, shape, stack)
    return Training(
        forward=RankWork(forward, (), cheap_forward + casts[0] + unpacked, views) + core_work + added[0],
        inputs=RankWork(inputs, (), cheap_backward + casts[1] + unpacked, views) + core_back + added[1],
        weights=stack.weight_gradients(forward, shape) + RankWork((), (), casts[2] + biases) + added[2],
        cheap=RankWork((), (), cheap_forward),
        attention=core_work,
    )


def num_tensors(spec: ModelSpec, layer: LayerSpec) -> int:
    """Returns the number of a layer's parameters, each a tensor of its own: hooks and optimizers go through them one by
    one."""
    norms = (4 if spec.post_norms else 2) * (2 if spec.norm == "layer" else 1)
    return norms + len(spec.attention_weights) + len(spec.feedforward_weights(layer))


def embedding_work(spec: ModelSpec, shape: RankShape, stack: Stack) -> Training:
    """Returns the operations of a rank for a lookup; backward sorts tokens and adds their rows to a gradient as large
    as the table."""
    x = float(shape.outside * spec.hidden * shape.size)
    forward, backward = stack.embedding_passes(x, -(-spec.vocab // shape.tp) * spec.hidden)
    if shape.trains != "all":
        backward = ()
    return Training(RankWork((), (), (2.0 * x, *forward), 4), weights=RankWork((), (), (2.0 * x, *backward), 4))


def head_work(spec: ModelSpec, shape: RankShape, stack: Stack) -> Training:
    """Returns the operations of a rank for the last norm, the logits and the loss."""
    vocab = stack.padded_vocab(spec.vocab, shape.tp)
    matmul = Matmul(shape.here, vocab, spec.hidden, exact=not (shape.eight_bit and stack.fp8_head))
    logits = shape.here * vocab
    norm = stack.norm_passes(spec, shape.outside * spec.hidden, shape.size)
    again = stack.logits_again and logits * 4 > MAX_LOGITS_BYTES
    forward, backward = stack.loss_passes(logits, shape.size, shape.tp)
    chunks = -(-logits * 4 // MAX_LOGITS_BYTES) if again else 1
    matmuls = (matmul,) * (2 if again else 1)
    back = Matmul(matmul.m, matmul.k, matmul.n, exact=matmul.exact)
    casts = _head_casts(matmul, shape, stack)
    if stack.measured and not stack.logits_again and has_chunks(logits):  # both gradients wait in forward's format
        backward += (6.0 * vocab * spec.hidden * (shape.trains == "all"), 2.0 * shape.size * shape.here * spec.hidden)
    trained = shape.trains == "all"
    if again:
        forward = forward * 2  # both passes are charged to the stage's backward and forward together
    return Training(
        forward=RankWork(matmuls, (), norm[0] + forward + casts[0], 6 * chunks),
        inputs=RankWork((back,), (), norm[1] + backward + casts[1], 6 * chunks),
        weights=stack.weight_gradients((matmul,), shape) + RankWork((), (), casts[2]) if trained else RankWork(),
    )


# Matmuls -----------------------------------------------------------------------------------------------------------


def _matmuls(weights: Sequence[Weight], fused: Collection[str], shape: RankShape, stack: Stack) -> tuple[Matmul, ...]:
    """Returns one matmul for each linear layer, or one for all that are `fused`. Layers that are whole on every rank
    (projections down to latents) multiply the tokens that are its own."""
    found, side_by_side = [], 0
    for weight in weights:
        if weight.is_linear:
            out, inputs = weight.slice_shape(shape.tp)
            found.append(Matmul(shape.outside if weight.cut is None else shape.here, out, inputs))
            side_by_side += weight.name.removesuffix(".weight") in fused
    if side_by_side and stack.fused_matmuls:
        found[:side_by_side] = [found[0]._replace(n=sum(p.n for p in found[:side_by_side]))]
    return tuple(found)


def _expert_matmuls(spec: ModelSpec, shape: RankShape) -> tuple[Matmul, ...]:
    """Returns the matmuls of router, routed experts (grouped) and shared experts. Spread experts are whole; else each
    rank has a slice of all of them."""
    h, routed_tokens = spec.hidden, shape.here * spec.experts_per_token
    slices = shape.tp if shape.ep == 1 else 1
    width = -(-spec.expert_ffn // slices)
    experts = spec.num_experts // shape.ep
    # An expert-parallel rank has its own experts' tokens of all ranks of the row: as many as its own tokens send out.
    own = routed_tokens if shape.ep == 1 else routed_tokens // shape.tp
    tokens = max(1, round(own * (EXPERT_IMBALANCE if shape.ep > 1 else 1.0) / experts))
    routed = (Matmul(tokens, (2 if spec.gated else 1) * width, h, experts), Matmul(tokens, h, width, experts))
    router = Matmul(shape.outside if shape.ep > 1 else shape.here, spec.num_experts, h, exact=True)
    shared: tuple[Matmul, ...] = ()
    if spec.num_shared_experts:
        wide = -(-spec.num_shared_experts * spec.expert_ffn // shape.tp)
        shared = (Matmul(shape.here, (2 if spec.gated else 1) * wide, h), Matmul(shape.here, h, wide))
    return router, *routed, *shared


# Attention ----------------------------------------------------------------------------------------------------------


def _attention_core(spec: ModelSpec, layer: LayerSpec, shape: RankShape, stack: Stack) -> AttentionCore:
    heads = max(1, spec.num_heads // (shape.tp * shape.ulysses))
    kv_heads = max(1, -(-spec.num_kv_heads // (shape.tp * shape.ulysses)))
    queries = shape.tokens * shape.ulysses
    keys = min(layer.window or shape.seq_len, shape.seq_len)
    masked = keys < shape.seq_len and not stack.knows_masks and queries == shape.seq_len
    context = spec.attention_context(layer, shape.seq_len)
    if masked:  # heads are repeated for the kernel that takes masks
        kv_heads, keys, context = heads, queries, float(shape.seq_len)
    return AttentionCore(shape.rows, heads, kv_heads, queries, keys, context, spec.head_dim, spec.value_dim, masked)


def _score_matmuls(core: AttentionCore, backward: bool = False) -> tuple[Matmul, ...]:
    """Returns the matmuls of attention by definition, which computes masked scores too."""
    groups = core.rows * core.heads
    scores = Matmul(core.queries, core.keys, core.width, groups, exact=True)
    values = Matmul(core.queries, core.value_width, core.keys, groups, exact=True)
    return (scores, values) * 2 if backward else (scores, values)


def _adapters(
    parts: Iterable[tuple[tuple[Matmul, ...], bool]], shape: RankShape, stack: Stack
) -> tuple[RankWork, RankWork, RankWork]:
    """Returns the operations that adapters add to forward, inputs and weights: y + (s x A) B beside each adapted
    matmul, that is two narrow matmuls, a narrow scaling, a sum. In our compiled blocks, without tensor parallelism,
    layers that multiply the same input have one A, and the matmul with B is a part of the sum's pass. `parts`: matmuls
    of attention and of the rest, and whether all but the last multiply the same input."""
    ours = stack.measured and shape.tp == 1
    at_once = ours and shape.size == 2 and adds_in_one_kernel(shape.rank)
    found, groups = [RankWork(), RankWork(), RankWork()], []
    first = 0
    for matmuls, is_same in parts:
        adapted = [p if index in shape.adapters else None for index, p in enumerate(matmuls, first)]
        first += len(matmuls)
        cut = len(adapted) - 1 if is_same and ours and not shape.drops else 0
        groups += [adapted[:cut], *([one] for one in adapted[cut:])]
    for group in groups:
        some = [p for p in group if p is not None]
        if not some:
            continue
        m, k, rank = some[0].m, some[0].k, shape.rank * len(some)
        narrow, wide = 2.0 * m * rank * shape.size, [float(m * p.n * shape.size) for p in some]
        ups = () if at_once else tuple(Matmul(m, p.n, shape.rank, exact=True) for p in some)
        found[0] += RankWork(
            (Matmul(m, rank, k, exact=True), *ups), (), (narrow, *((2 if ours else 3) * w for w in wide)), 4
        )
        back = (Matmul(m, k, rank, exact=True), *(Matmul(m, shape.rank, p.n, exact=True) for p in some))
        # In compiled blocks x's gradient is read by a kernel that is there anyway.
        found[1] += RankWork(back, (), (narrow, (1.0 if ours else 3.0) * m * k * shape.size), 4)
        sides = ((k, rank), *((shape.rank, p.n) for p in some))
        found[2] += RankWork(tuple(Matmul(a, b, m, exact=True, split=True) for a, b in sides))
    return found[0], found[1], found[2]


# Passes over memory --------------------------------------------------------------------------------------------------


def _cheap_passes(spec: ModelSpec, layer: LayerSpec, shape: RankShape, stack: Stack) -> tuple[Passes, Passes]:
    """Returns the bytes of each kernel of norms, positions, activation and sums, forward and backward."""
    size, rotated = shape.size, shape.here * ((spec.num_heads + spec.num_kv_heads) // shape.tp) * spec.head_dim
    parts = [stack.block_passes(spec, shape.outside * spec.hidden, size)]
    if spec.qk_norm:
        parts.append(stack.norm_passes(spec, rotated, size, spec.head_dim))
    if spec.positions == "rope":
        parts.append((stack.rope_passes(rotated * size, size),) * 2)
    if layer.is_moe:
        parts.append(_expert_activation(spec, shape, stack))
    else:
        parts.append(stack.activation_passes(spec, shape.here * -(-layer.ffn // shape.tp), size))
    return tuple(one for forward, _ in parts for one in forward), tuple(one for _, back in parts for one in back)


def _expert_activation(spec: ModelSpec, shape: RankShape, stack: Stack) -> tuple[Passes, Passes]:
    """Returns the passes of the activation and beside it: tokens' rows are sorted by expert, and put back with their
    weights; the router's softmax."""
    routed_tokens = shape.here * spec.experts_per_token / (shape.tp if shape.ep > 1 else 1)
    slices = shape.tp if shape.ep == 1 else 1
    act = stack.activation_passes(spec, routed_tokens * spec.expert_ffn / slices, shape.size)
    moved = 2.0 * routed_tokens * spec.hidden * shape.size * GATHERED
    sorts = (moved, 1.5 * moved) + (moved, moved) * (shape.ep > 1)
    routing = (4.0 * shape.here * spec.num_experts,) * 4
    shared: tuple[Passes, Passes] = (), ()
    if spec.num_shared_experts:
        width = spec.num_shared_experts * spec.expert_ffn
        shared = stack.activation_passes(spec, shape.here * width / shape.tp, shape.size)
    return act[0] + sorts + routing + shared[0], act[1] + sorts + routing + shared[1]


def _head_casts(matmul: Matmul, shape: RankShape, stack: Stack) -> tuple[Passes, Passes, Passes]:
    """Returns the passes of quantizing for a head in fp8 whose loss is fused: outside of blocks, each a kernel of its
    own. Weights are quantized once for all chunks, frozen ones once for all steps, and what a chunk adds to their
    gradient is not added inside of the matmul: it is read, and the sum in fp32 read and written."""
    if matmul.exact:
        return (), (), ()
    chunks = fused_chunks(matmul.m * matmul.n, shape.size, "cuda")
    x, w, g = (float(n) for n in (matmul.m * matmul.k, matmul.k * matmul.n, matmul.m * matmul.n))
    each = LOOK + QUANTIZE
    if shape.trains != "all":
        return (each * x,), (each * g,), ()
    transposed = each if stack.fp8_rows else 2.0  # one scale for all: the same bits, transposed
    return (each * x, each * w), (each * g, transposed * w), (each * g, each * x, 10.0 * w * chunks)


def _unpacking_passes(matmuls: tuple[Matmul, ...], shape: RankShape) -> Passes:
    """Returns the passes of reading four-bit weights out into 16 bits before each use, chunk by chunk in plain
    operations (adapters/nf4.py)."""
    if shape.trains != "qlora":
        return ()
    found: list[float] = []
    for p in matmuls:
        weights = p.groups * p.n * p.k
        calls = -(-weights // NF4_CHUNK) * NF4_KERNELS
        found += [weights * NF4_BYTES / calls] * calls
    return tuple(found)
