"""Context parallelism: the ring against plain attention, its balance and its bytes, Ulysses, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ring import Shape, draw, plain, ring_bytes, through_ring, view_of
from torch import Tensor

from shardwise.demo.wire import Wire, of_kind, total
from shardwise.errors import UserError
from shardwise.model.attention_kernels import KERNELS
from shardwise.model.decoder import Decoder
from shardwise.model.experts import moe_layers
from shardwise.model.initialize import initialize
from shardwise.model.masking import MaskBuilder
from shardwise.parallel.context.attention_blocks import (
    Score,
    Sight,
    attend_block,
    attend_block_backward,
    choose_kernel,
    merge,
)
from shardwise.parallel.context.sequence_split import ContextParallel, apply_context_parallel
from shardwise.parallel.context.ulysses import ulysses_attention
from shardwise.parallel.context.zigzag import QueryKeyBlock, Zigzag
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.spec.layers import FEEDFORWARD
from shardwise.spec.model import LayerSpec
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SHAPES = {
    "causal": Shape(2, 24, 3, 3, 5, 5),
    "grouped": Shape(1, 40, 6, 2, 7, 7),
    "one kv head": Shape(3, 8, 4, 1, 4, 4),
    "window inside a piece": Shape(2, 48, 2, 2, 6, 6, window=3),
    "window over pieces": Shape(2, 48, 4, 2, 6, 6, window=13),
    "window of a piece": Shape(2, 48, 2, 2, 6, 6, window=6),
    "soft cap": Shape(2, 24, 4, 2, 5, 5, window=7, softcap=1.5),
    "values narrower than keys": Shape(2, 24, 4, 4, 6, 4),
    "by definition": Shape(2, 24, 4, 2, 5, 5, math=True),
}


# The ring computes what whole attention computes ---------------------------------------------------------------------


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_ring_is_plain_attention_forward_and_backward(name: str, size: int, documents: bool) -> None:
    shape = SHAPES[name]
    tensors, ids = draw(shape, torch.float64, documents=documents)
    found, _ = through_ring(shape, size, tensors, ids)
    for what, ours, truth in zip(("out", "dq", "dk", "dv"), found, plain(shape, tensors, ids), strict=True):
        assert ours.shape == truth.shape
        assert float((ours - truth).abs().max()) < 1e-12, what


def test_documents_that_do_not_grow_along_the_row() -> None:
    """Ids are only names: two stretches with one id see each other."""
    shape = SHAPES["causal"]
    tensors, _ = draw(shape, torch.float64)
    ids = torch.tensor([[5] * 3 + [-1] * 9 + [5] * 12, [2] * 24])
    found, _ = through_ring(shape, 2, tensors, ids)
    for ours, truth in zip(found, plain(shape, tensors, ids), strict=True):
        assert float((ours - truth).abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ring_in_narrow_formats_is_as_close_as_rounding_allows(dtype: torch.dtype) -> None:
    shape = SHAPES["window over pieces"]
    tensors, ids = draw(shape, dtype, documents=True)
    found, _ = through_ring(shape, 4, tensors, ids)
    limit = 1e-5 if dtype == torch.float32 else 4e-2
    for ours, truth in zip(found, plain(shape, [x.double() for x in tensors], ids), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - truth).abs().max()) < limit * float(truth.abs().max())


@pytest.mark.parametrize("math", [False, True], ids=["fused", "by definition"])
def test_rows_that_see_nothing_in_a_block_weigh_nothing(math: bool) -> None:
    """torch's CPU kernel answers LSE 0 for them, as if they had seen a key with score 0."""
    tensors, _ = draw(Shape(1, 6, 2, 2, 4, 4), torch.float64)
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    allowed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    allowed[..., 4:, :3] = False  # the last two see nothing of the first half
    score = Score(0.5, math=math)
    right, left = Sight(allowed_1TS=allowed[..., 3:]), Sight(allowed_1TS=allowed[..., :3])
    out, lse = attend_block(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], _rows(right, 3, 6), score)
    more, more_lse = attend_block(q[:, :, 3:], k[:, :, :3], v[:, :, :3], _rows(left, 3, 6), score)
    assert bool((more_lse[..., 1:] == float("-inf")).all()) and bool(more_lse[..., 0].isfinite().all())
    assert bool((more[:, :, 1:] == 0).all())
    merge(out, lse, more, more_lse)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~allowed, float("-inf"))
    truth = scores.softmax(-1) @ v
    assert float((out - truth[:, :, 3:]).abs().max()) < 1e-14
    dq, dk, dv = attend_block_backward(
        grad[:, :, 3:], q[:, :, 3:], k[:, :, :3], v[:, :, :3], out, lse, _rows(left, 3, 6), score
    )
    assert bool((dq[:, :, 1:] == 0).all()) and all(bool(x.isfinite().all()) for x in (dq, dk, dv))


def _rows(sight: Sight, start: int, stop: int) -> Sight:
    assert sight.allowed_1TS is not None
    return Sight(allowed_1TS=sight.allowed_1TS[:, :, start:stop])


# Who computes what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work_at_every_step(size: int) -> None:
    piece = 5
    places = [Zigzag(size, index, 2 * size * piece) for index in range(size)]
    for step in range(size):
        work = [sum(b.work for b in place.blocks((place.index - step) % size)) for place in places]
        assert work == [2 * piece * piece] * size
    row = torch.arange(2 * size * piece)[None]
    assert sorted(torch.cat([place.take(row) for place in places], 1)[0].tolist()) == row[0].tolist()


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 11, 23, 24])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_hold_every_pair_that_may_look_and_no_other(window: int | None, documents: bool) -> None:
    """Put together from all ranks' blocks, the mask of the whole row comes out, each pair once."""
    shape, size = Shape(2, 24, 1, 1, 4, 4, window=window), 2
    _, ids = draw(shape, torch.float64, documents=documents)
    seen = torch.zeros(2, 24, 24, dtype=torch.int64)
    row = torch.arange(24)[None]
    for index in range(size):
        view = view_of(shape, size, index, ids, CPU)
        for source in range(size):
            for block in view.plan[source]:
                queries, keys = view.place.take(row)[0, block.queries], view.place.take(row, source)[0, block.keys]
                sight = view.sight(block, source)
                pairs = torch.ones(len(queries), len(keys), dtype=torch.bool)
                allowed = (pairs.tril() if sight.causal else pairs)[None]
                allowed = allowed if sight.allowed_1TS is None else sight.allowed_1TS[:, 0]
                seen[:, queries[:, None], keys] += allowed
    builder = MaskBuilder(24, 0, CPU, ids)
    layer = LayerSpec(0, window, FEEDFORWARD["dense"], 1, 1e4, True)
    mask = builder.build((layer,), flex=False)[builder.key(layer)]
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None]
    whole = causal if mask.is_causal else mask.allowed_1TS[:, 0]  # type: ignore[index]
    assert torch.equal(seen, whole.long().expand(2, -1, -1))


def test_blocks_outside_the_window_or_of_other_documents_are_not_computed() -> None:
    place = Zigzag(4, 0, 64)  # pieces of 8: rank 0 has tokens 0-7 and 56-63
    assert [len(place.blocks(source, window=4)) for source in range(4)] == [2, 1, 0, 0]
    assert place.blocks(0, window=8) == [
        QueryKeyBlock(slice(0, 8), slice(0, 8), True),
        QueryKeyBlock(slice(8, 16), slice(8, 16), True),
    ]
    shape = Shape(1, 64, 1, 1, 4, 4)
    quarters = torch.arange(64)[None] // 16  # four documents of two pieces each
    found = [[len(blocks) for blocks in view_of(shape, 4, rank, quarters, CPU).plan] for rank in range(4)]
    # Ranks 0 and 1 have the first and the last document, 2 and 3 the two between: nobody else's keys are looked at.
    assert found == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert not view_of(shape, 4, 2, torch.zeros(1, 64), CPU).plan[2][0].masked  # one document: no mask at all


def test_fused_kernels_are_used_where_they_can_be() -> None:
    q = torch.zeros(1, 4, 2, 8)
    assert choose_kernel(q, q, q, Sight(), Score(1.0)) == "cpu"
    assert choose_kernel(q, q, q[..., :4], Sight(), Score(1.0)) == "math"
    assert choose_kernel(q, q, q, Sight(), Score(1.0, softcap=30.0)) == "math"


def test_bytes_are_those_of_the_formula_and_heads_are_not_repeated() -> None:
    shape, size = SHAPES["one kv head"], 4
    tensors, ids = draw(shape, torch.bfloat16)
    _, rings = through_ring(shape, size, tensors, ids)
    numbers = 2 * shape.batch * shape.tokens // size * shape.kv_heads * shape.width
    assert ring_bytes(size, numbers, 2, 4) == (3 * numbers * 2, 3 * numbers * (2 + 4))
    for ring in rings:
        assert sum(x.nbytes for x in ring.sent) == sum(ring_bytes(size, numbers, 2, 4))


# On ranks ------------------------------------------------------------------------------------------------------------

SMALL = {"num_layers": 2, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
SPEC = preset("tiny").with_overrides(SMALL)
MOE = preset("tiny-moe").with_overrides(SMALL | {"num_experts": 4, "aux_loss_coef": 0.1, "z_loss_coef": 0.1})
TRIAL = Trial(global_batch=3, micro_batch=3, seq_len=16, documents=True)


def group() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def bytes_sent(kind: str) -> dict[str, int]:
    plan = trial_plan(TRIAL, cp=dist.get_world_size(), cp_kind=kind)
    engine = build_trial(SPEC, plan, TRIAL, dist.get_rank(), CPU)
    batch, _ = trial_batch(SPEC, plan, TRIAL, 1, 0)
    micro = batch.microbatches[0]
    engine.evaluate([micro])  # the first pass also compares rows
    with Wire() as wire:
        engine.evaluate([micro])
    return {kind: total(of_kind(wire.transfers, kind)) for kind in ("send", "all-to-all", "all-reduce", "all-gather")}


def test_a_forward_pass_sends_keys_and_values_or_exchanges_heads_and_nothing_else(ranks: Any) -> None:
    tokens, layers, width = 3 * 16 // 2, SPEC.num_layers, SPEC.head_dim
    forward, _ = ring_bytes(2, tokens * 2 * SPEC.num_kv_heads * width, 8, 8)
    nothing = {"all-reduce": 0, "all-gather": 0}
    for found in ranks.run(bytes_sent, 2, "ring"):
        assert found == {"send": layers * forward, "all-to-all": 0, **nothing}
    exchanged = tokens * (SPEC.num_heads + 2 * SPEC.num_kv_heads + SPEC.num_heads) * width * 8  # in, and out again
    for found in ranks.run(bytes_sent, 2, "ulysses"):
        assert found == {"send": 0, "all-to-all": layers * exchanged, **nothing}


def ulysses(shape: Shape, documents: bool) -> tuple[int, int, list[Tensor]]:
    """(ranks, rank, output and gradients of this rank's stretch)"""
    tensors, ids = draw(shape, torch.float64, documents=documents)
    size, index = dist.get_world_size(), dist.get_rank()
    q, k, v, grad = (x.chunk(size, dim=1)[index] for x in tensors)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    layer = LayerSpec(0, shape.window, FEEDFORWARD["dense"], 1, 1e4, True)
    builder = MaskBuilder(shape.tokens, 0, CPU, ids)
    mask = builder.build((layer,), flex=False)[builder.key(layer)]
    kernel = "math" if shape.softcap or shape.value_width != shape.width else "sdpa"
    out = ulysses_attention(group(), q, k, v, mask, KERNELS[kernel], shape.score.scale, shape.softcap)
    return size, index, [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("name", ["one kv head", "window over pieces", "soft cap", "values narrower than keys"])
def test_ulysses_is_plain_attention_forward_and_backward(ranks: Any, name: str) -> None:
    shape = SHAPES[name]
    tensors, ids = draw(shape, torch.float64, documents=True)
    truth = plain(shape, tensors, ids)
    found = ranks.run(ulysses, 4 if name == "one kv head" else 2, shape, True)
    for number, whole in enumerate(truth):
        ours = torch.cat([parts[number] for _, _, parts in found], dim=1)
        assert float((ours - whole).abs().max()) < 1e-12


def router_losses(kind: str) -> tuple[list[float], list[list[int]]]:
    """Loss sums of this rank, and the tokens its experts got."""
    plan = trial_plan(TRIAL, cp=dist.get_world_size(), cp_kind=kind)
    engine = build_trial(MOE, plan, TRIAL, dist.get_rank(), CPU)
    batch, _ = trial_batch(MOE, plan, TRIAL, 1, 0)
    sums = engine.evaluate(batch.microbatches)
    return sums.tolist(), [layer.tokens_per_expert.tolist() for layer in moe_layers(engine.models[0])]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_router_losses_are_those_of_whole_sequences(ranks: Any, kind: str) -> None:
    model = Decoder(MOE).double()
    initialize(model, TRIAL.seed)
    batch = TRIAL.batch(MOE, 1)
    with torch.no_grad():
        truth = model(batch.tokens, batch.targets, documents_BT=batch.documents)
    found = ranks.run(router_losses, 2, kind)
    for number, whole in enumerate(truth):
        assert sum(sums[number] for sums, _ in found) == pytest.approx(float(whole), rel=1e-12)
    assert moe_layers(model)
    for index, layer in enumerate(moe_layers(model)):
        counted = torch.tensor([counts[index] for _, counts in found]).sum(0)
        assert torch.equal(counted, layer.tokens_per_expert)


def unequal_rows(same_shape: bool) -> str:
    model = Decoder(SPEC).double()
    apply_context_parallel(model, ContextParallel(group(), "ring"))
    length = 16 if same_shape else 16 + 16 * dist.get_rank()
    tokens = torch.full((1, length), 1 + dist.get_rank() * same_shape)
    try:
        model(tokens, tokens)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("same_shape", [False, True], ids=["lengths", "tokens"])
def test_ranks_with_different_rows_are_refused_in_the_first_pass(ranks: Any, same_shape: bool) -> None:
    for said in ranks.run(unequal_rows, 2, same_shape):
        assert "were given different rows" in said
        assert ("1 x 16, 1 x 32" in said) is not same_shape


def odd_rows(kind: str) -> str:
    model = Decoder(SPEC).double()
    apply_context_parallel(model, ContextParallel(group(), kind))
    tokens = torch.ones(1, 15, dtype=torch.int64)
    try:
        model(tokens, tokens)
    except UserError as error:
        return f"{error}"
    return ""


def test_rows_that_cannot_be_shared_are_refused(ranks: Any) -> None:
    for said in ranks.run(odd_rows, 2, "ring"):
        assert "15 tokens cannot be shared by cp=2 ranks (ring)" in said and "divisible by 4" in said
    for said in ranks.run(odd_rows, 2, "ulysses"):
        assert "divisible by 2" in said
