"""Tensor and sequence parallelism compute what one process computes: every family, in fp64, to the ninth digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_families import (
    FAMILIES,
    TOKENS,
    TOLERANCE,
    alone,
    batch,
    check_same,
    learn,
    make,
    make_parallel,
    packed,
    report,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UserError
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.parallel.tensor.slices import TensorParallel, apply_tensor_parallel, placement, share, take
from shardwise.spec.model import ModelSpec

# Jobs that run on every rank -----------------------------------------------------------------------------------------


def learn_in_parallel(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor]) -> dict[str, Any]:
    return learn(make_parallel(spec, sequence), inputs)


def learn_with_recomputation(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor]) -> dict[str, Any]:
    model = make_parallel(spec, sequence)
    for block in model.layers.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return learn(model, inputs)


def learn_in_parts(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Two parts one after the other in the same process, as a pipeline would run them."""
    first, last = (make_parallel(spec, sequence, layers) for layers in (range(1), range(1, spec.num_layers)))
    hidden = first(**inputs)
    assert hidden.x_BTD.shape[1] == TOKENS // (dist.get_world_size() if sequence else 1)
    losses = last(**inputs, x_BTD=hidden.x_BTD)
    aux, z = hidden.aux + losses.aux, hidden.z + losses.z
    (losses.cross_entropy + 2 * aux + 3 * z).backward()
    results = [report(part, []) for part in (first, last)]
    grads: dict[str, Tensor] = {}
    for result in results:  # a tied weight is in both parts and its gradients are summed
        for name, grad in result["grads"].items():
            grads[name] = grads[name] + grad if name in grads else grad
    counts = [count for result in results for count in result["counts"]]
    return {"losses": [losses.cross_entropy.detach(), aux.detach(), z.detach()], "grads": grads, "counts": counts}


@torch.no_grad()
def look(model: Decoder, tokens_BT: Tensor) -> list[Tensor]:
    """Logits of the whole batch, of a length that nothing divides, and piece by piece with a cache."""
    cached = KeyValueCache(TOKENS)
    pieces = [tokens_BT[:, :4], tokens_BT[:, 4:6], *tokens_BT[:, 6:].split(1, dim=1)]
    stepwise = torch.cat([model(piece, cache=cached) for piece in pieces], dim=1)
    return [model(tokens_BT), model(tokens_BT[:, :11]), stepwise]


def look_in_parallel(spec: ModelSpec, sequence: bool, tokens_BT: Tensor) -> list[Tensor]:
    return look(make_parallel(spec, sequence).eval(), tokens_BT)


@torch.no_grad()
def passes_that_split(spec: ModelSpec, sequence: bool) -> list[bool]:
    """With a length that ranks can share, with one they cannot, and with a cache."""
    model, tp = make(spec), TensorParallel(dist.group.WORLD, sequence)
    apply_tensor_parallel(model, tp)
    seen = []
    for tokens, cached in ((8, None), (7, None), (8, KeyValueCache(8))):
        model(batch(tokens=tokens)["tokens_BT"], cache=cached)
        seen.append(tp.active)
    return seen


# Parity --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "six-heads"])
def test_losses_and_gradients_are_those_of_one_process(ranks, family: str, world: int, sequence: bool) -> None:
    spec = FAMILIES[family]
    results = ranks.run(learn_in_parallel, world, spec, sequence, batch())
    check_same(spec, results, alone(family), sequence)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_three_ranks(ranks, sequence: bool) -> None:
    spec = FAMILIES["six-heads"]
    results = ranks.run(learn_in_parallel, 3, spec, sequence, batch())
    check_same(spec, results, alone("six-heads"), sequence)


@pytest.mark.parametrize("family", ["gpt2", "deepseek"])
def test_packed_documents_with_positions_of_their_own(ranks, family: str) -> None:
    spec = FAMILIES[family]
    results = ranks.run(learn_in_parallel, 2, spec, True, packed())
    check_same(spec, results, learn(make(spec), packed()), True)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_parts_one_after_another_learn_what_the_whole_learns(ranks, family: str, sequence: bool) -> None:
    spec = FAMILIES[family]
    check_same(spec, ranks.run(learn_in_parts, 2, spec, sequence, batch()), alone(family), sequence)


@pytest.mark.parametrize("family", ["gpt2", "deepseek"])
def test_recomputed_blocks_change_nothing(ranks, family: str) -> None:
    spec = FAMILIES[family]
    check_same(spec, ranks.run(learn_with_recomputation, 2, spec, True, batch()), alone(family), True)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cached_generation(ranks, family: str) -> None:
    spec, world = FAMILIES[family], 3 if family == "six-heads" else 4
    expected = look(make(spec).eval(), batch()["tokens_BT"])
    results = ranks.run(look_in_parallel, world, spec, True, batch()["tokens_BT"])
    for mine, first, theirs in zip(results[-1], results[0], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE * float(theirs.abs().max()))
        assert torch.equal(mine, first)  # else ranks would sample different tokens


# Slices --------------------------------------------------------------------------------------------------------------


def test_shares_are_contiguous_and_as_even_as_possible() -> None:
    assert [share(10, 4, index) for index in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [share(6, 3, index) for index in range(3)] == [(0, 2), (2, 4), (4, 6)]


def test_placements_say_who_sums_what() -> None:
    spec = FAMILIES["qwen3"]  # 4 heads of 8, 2 key-value heads
    key, norm, inner = (
        "layers.0.attention.k.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.k_norm.weight",
    )
    places = [placement(spec, key, 4, index, False) for index in range(4)]
    assert [(place.slice.start, place.slice.stop) for place in places] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert {place[1:] for place in places} == {(2, True)}
    assert placement(spec, key, 2, 1, False)[1:] == (1, False)
    assert placement(spec, norm, 4, 0, False) == (None, 4, False)
    assert placement(spec, norm, 4, 0, True) == (None, 4, True)
    assert placement(spec, inner, 4, 0, False) == (None, 4, True)
    assert all(placement(spec, name, 1, 0, True) == (None, 1, False) for name in (key, norm, inner))
    with pytest.raises(LookupError, match=r"attention\.x"):
        placement(spec, "layers.0.attention.x.weight", 2, 0, False)


def slices_on_meta(spec: ModelSpec) -> list[str]:
    """Builds on `meta`, fills from full weights by `placement`; returns the names of tensors that are not as sliced."""
    tp = TensorParallel(dist.group.WORLD, True)
    full, sliced = make(spec), make_parallel(spec, True)
    with torch.device("meta"):
        model = Decoder(spec).double()
    apply_tensor_parallel(model, tp)
    model.to_empty(device="cpu")
    state = {
        name: take(tensor, placement(spec, name, tp.size, tp.index, True).slice)
        for name, tensor in full.state_dict().items()
    }
    model.load_state_dict(state)
    assert list(model.state_dict()) == list(full.state_dict())
    assert dict(full.named_buffers()).keys() == dict(model.named_buffers()).keys()
    for name, _ in full.named_buffers():
        assert placement(spec, name, tp.size, tp.index, True) == (None, tp.size, False)
    return [name for name, tensor in sliced.state_dict().items() if not torch.equal(tensor, model.state_dict()[name])]


@pytest.mark.parametrize("family", ["gpt2", "deepseek"])
def test_a_model_on_meta_is_sliced_before_it_has_weights(ranks, family: str) -> None:
    assert ranks.run(slices_on_meta, 4, FAMILIES[family]) == [[]] * 4


# Sequence parallelism, pass by pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_ranks_share_tokens_only_where_they_can(ranks, sequence: bool) -> None:
    assert ranks.run(passes_that_split, 2, FAMILIES["llama"], sequence) == [[sequence, False, False]] * 2


def train_on_odd_length(spec: ModelSpec) -> tuple[str, Tensor]:
    model, inputs = make_parallel(spec, True), batch(tokens=11)
    with torch.no_grad():
        loss = model(**inputs).cross_entropy
    try:
        model(**inputs)
    except UserError as error:
        return str(error), loss
    return "nothing happened", loss


def test_a_length_that_ranks_cannot_share_is_evaluated_but_not_trained(ranks) -> None:
    spec = FAMILIES["llama"]
    expected = make(spec)(**batch(tokens=11)).cross_entropy
    for message, loss in ranks.run(train_on_odd_length, 2, spec):
        assert "11 tokens cannot be trained with sequence parallelism over 2 ranks" in message
        torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=0)
