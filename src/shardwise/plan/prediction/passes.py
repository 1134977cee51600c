"""Passes over memory around a layer's matmuls: norms, positions, activation, sums, casts. Bytes, one figure per kernel.
No torch.

Which kernels there are is the stack's (stack.py); here they are put together for a layer. Read next: operations.py.
"""

from __future__ import annotations

from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.stack import LOOK, ROUND, Passes, Stack
from shardwise.plan.prediction.work import Matmul, RankShape
from shardwise.spec.model import LayerSpec, ModelSpec

GATHERED = measured("gathered_rows")
NF4_CHUNK, NF4_KERNELS, NF4_BYTES = 2**24, 10, 22.5
"""adapters/nf4.py: weights of a chunk, kernels for it, and bytes per weight: a code becomes an index of four bytes per
pair, two elements of fp32 are looked up, multiplied by their block's magnitude in place, and rounded into the
result."""


def cheap_passes(spec: ModelSpec, layer: LayerSpec, shape: RankShape, stack: Stack) -> tuple[Passes, Passes]:
    """Norms, positions, activation, sums: bytes of each kernel, forward and backward."""
    size = shape.size
    forward, backward = stack.block_passes(spec, shape.outside * spec.hidden, size)
    heads = (spec.num_heads + spec.num_kv_heads) // shape.tp
    rotated = shape.here * heads * spec.head_dim * size
    if spec.qk_norm:
        both = stack.norm_passes(spec, rotated // size, size, spec.head_dim)
        forward, backward = forward + both[0], backward + both[1]
    if spec.positions == "rope":
        rotation = stack.rope_passes(rotated, size)
        forward, backward = forward + rotation, backward + rotation
    act = (
        _expert_activation(spec, shape, stack)
        if layer.is_moe
        else stack.activation_passes(spec, shape.here * -(-layer.ffn // shape.tp), size)
    )
    return forward + act[0], backward + act[1]


def _expert_activation(spec: ModelSpec, shape: RankShape, stack: Stack) -> tuple[Passes, Passes]:
    """Besides the activation: tokens' copies are sorted by expert, and put back with their weights; the router's
    softmax."""
    routed_tokens = shape.here * spec.experts_per_token / (shape.tp if shape.ep > 1 else 1)
    slices = shape.tp if shape.ep == 1 else 1
    act = stack.activation_passes(spec, routed_tokens * spec.expert_ffn / slices, shape.size)
    moved = 2.0 * routed_tokens * spec.hidden * shape.size * GATHERED
    sorts = (moved, 1.5 * moved) + (moved, moved) * (shape.ep > 1)
    routing = (4.0 * shape.here * spec.num_experts,) * 4
    shared = stack.activation_passes(
        spec, shape.here * spec.num_shared_experts * spec.expert_ffn / shape.tp, shape.size
    )
    if not spec.num_shared_experts:
        shared = (), ()
    return act[0] + sorts + routing + shared[0], act[1] + sorts + routing + shared[1]


def head_casts(matmul: Matmul, chunks: int, shape: RankShape, stack: Stack) -> tuple[Passes, Passes, Passes]:
    """Quantizing for a head in fp8 whose loss is fused: outside of blocks, each a kernel of its own. Weights are
    quantized once for all chunks, frozen ones once for all steps, and what a chunk adds to their gradient is not added
    inside of the matmul: it is read, and the sum in fp32 read and written."""
    x, w, g = (float(n) for n in (matmul.m * matmul.k, matmul.k * matmul.n, matmul.m * matmul.n))
    each = LOOK + ROUND
    if shape.trains != "all":
        return (each * x,), (each * g,), ()
    transposed = each if stack.fp8_rows else 2.0  # one scale for all: the same bits, transposed
    return (each * x, each * w), (each * g, transposed * w), (each * g, each * x, 10.0 * w * chunks)


def unpacking_passes(matmuls: tuple[Matmul, ...], shape: RankShape) -> Passes:
    """Four-bit weights are read out into 16 bits before each use, chunk by chunk in plain operations
    (adapters/nf4.py)."""
    if shape.trains != "qlora":
        return ()
    found: list[float] = []
    for p in matmuls:
        weights = p.groups * p.n * p.k
        calls = -(-weights // NF4_CHUNK) * NF4_KERNELS
        found += [weights * NF4_BYTES / calls] * calls
    return tuple(found)
