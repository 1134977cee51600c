"""What a rank computes, against the model's own count and against arithmetic."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.plan.prediction.operations import embedding_work, head_work, layer_work
from shardwise.plan.prediction.stack import LOOK, OURS, QUANTIZE, TRANSPOSE
from shardwise.plan.prediction.work import RankShape, RankWork, Training
from shardwise.plan.resolve.speed import our_stack
from shardwise.spec.presets import preset

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stacks.foreign import ForeignStack

FAMILIES = ("llama2-7b", "llama3-8b", "gpt2", "gemma2-2b", "qwen3-0.6b", "tiny-moe", "deepseek-v3")


OTHERS = ForeignStack()
SKIPS = replace(OTHERS, windows=True)
"""A stack whose kernel skips what windows leave out, and knows soft caps."""


def flops_of(work: RankWork) -> float:
    return sum(one.flops for one in (*work.matmuls, *work.attention))


def everything(name: str, shape: RankShape, stack=OURS) -> tuple[list[Training], Training]:
    spec = preset(name)
    return [layer_work(spec, layer, shape, stack) for layer in spec.layers], head_work(spec, shape, stack)


@pytest.mark.parametrize("name", FAMILIES)
def test_products_and_attention_are_the_models_flops(name):
    spec, tokens = preset(name), 1024
    layers, head = everything(name, RankShape(1, tokens, tokens), replace(SKIPS, logits_again=False))
    forward = sum(flops_of(work.forward) for work in [*layers, head])
    assert 3 * forward == pytest.approx(tokens * spec.flops_per_token(tokens), rel=0.01)


@pytest.mark.parametrize("name", FAMILIES)
def test_backward_has_as_many_products_for_inputs_and_for_weights(name):
    layers, _ = everything(name, RankShape(1, 512, 512), SKIPS)
    for work in layers:
        forward, inputs, weights = (
            sum(p.flops for p in part.matmuls) for part in (work.forward, work.inputs, work.weights)
        )
        assert inputs == forward == weights


def test_degrees_divide_the_work():
    spec = preset("llama3-8b")
    whole = layer_work(spec, spec.layers[0], RankShape(2, 4096, 4096), OURS)
    slices = layer_work(spec, spec.layers[0], RankShape(2, 4096, 4096, tp=4, sequence=True), OURS)
    part = layer_work(spec, spec.layers[0], RankShape(2, 1024, 4096), OURS)
    assert flops_of(slices.forward) == pytest.approx(flops_of(whole.forward) / 4)
    assert flops_of(part.forward) == pytest.approx(flops_of(whole.forward) / 4)
    assert sum(slices.forward.passes) == pytest.approx(sum(whole.forward.passes) / 4)
    # Without sequence parallelism norms and sums see every token on every rank.
    tensor_only = layer_work(spec, spec.layers[0], RankShape(2, 4096, 4096, tp=4), OURS)
    assert sum(slices.forward.passes) < sum(tensor_only.forward.passes) < sum(whole.forward.passes)


def test_ulysses_has_fewer_heads_of_longer_sequences():
    spec = preset("llama3-8b")
    ring, ulysses = (
        layer_work(spec, spec.layers[0], RankShape(1, 1024, 4096, ulysses=n), OURS).forward.attention[0] for n in (1, 4)
    )
    assert ulysses.flops == ring.flops and ulysses.heads == ring.heads // 4 and ulysses.queries == 4096


def test_a_window_shortens_attention():
    spec = replace(preset("llama3-8b"), sliding_window=1024)
    near, ours = (
        layer_work(spec, spec.layers[0], RankShape(1, 8192, 8192), s).forward.attention[0] for s in (SKIPS, OURS)
    )
    assert ours.context == 8192 and ours.masked  # our kernels go over all pairs, with a mask
    assert near.context == 1024 - 1024 * 1024 / (2 * 8192)


def test_fused_and_compiled_stacks_move_less():
    spec, shape = preset("llama3-8b"), RankShape(1, 4096, 4096)
    plain, fused, compiled = (
        sum(layer_work(spec, spec.layers[0], shape, stack).forward.passes)
        for stack in (
            replace(OTHERS, fused_norm=False),
            replace(OTHERS, fused_rope=True, fused_activation=True),
            replace(OURS, compiled=True),
        )
    )
    assert compiled < fused < plain


def test_attention_by_definition_moves_its_scores():
    """Scores of every head, read and written by the softmax, on top of the two products."""
    spec, shape = preset("gpt2"), RankShape(1, 1024, 1024)
    math = layer_work(spec, spec.layers[0], shape, replace(OTHERS, attention="math")).forward
    flash = layer_work(spec, spec.layers[0], shape, OURS).forward
    assert not math.attention and len(math.matmuls) == len(flash.matmuls) + 2
    assert sum(math.passes) - sum(flash.passes) == pytest.approx(2 * 2 * 12 * 1024 * 1024)
    assert flops_of(math) > flops_of(flash)  # the masked half is computed too


def test_frozen_weights_have_no_gradients_and_adapters_have_small_ones():
    spec, shape = preset("llama3-8b"), RankShape(1, 2048, 2048)
    lora = layer_work(spec, spec.layers[0], shape._replace(trains="lora", adapters=tuple(range(7)), rank=16), OURS)
    whole = layer_work(spec, spec.layers[0], shape, OURS)
    assert 0 < flops_of(lora.weights) < 0.02 * flops_of(whole.weights)
    assert flops_of(lora.inputs) == pytest.approx(flops_of(whole.inputs), rel=0.02)
    qlora = layer_work(spec, spec.layers[0], shape._replace(trains="qlora", adapters=(0,), rank=16), OURS)
    assert sum(qlora.forward.passes) > sum(lora.forward.passes)


NARROW = dict(trains="lora", adapters=tuple(range(7)), rank=16)


@pytest.mark.parametrize(
    "changes, products",
    [
        ({}, (4, 7 + 4, 7 + 4)),  # q k v, o, gate up, down
        ({"drops": True}, (7, 14, 14)),
        ({"tp": 2}, (14, 14, 14)),
        ({"rank": 12}, (4 + 7, 7 + 4, 7 + 4)),
        ({"size": 4}, (4 + 7, 7 + 4, 7 + 4)),
        ({"adapters": (0, 2)}, (1, 2 + 1, 2 + 1)),
        ({"adapters": ()}, (0, 0, 0)),
    ],
    ids=str,
)
def test_compiled_adapters_share_a_product_and_add_at_once(changes, products):
    """As the engine has it: layers that read the same states have one A, without dropout and tensor parallelism; the
    kernel takes 16 bits and whole 16 bytes."""
    spec, shape = preset("llama3-8b"), RankShape(1, 2048, 2048, **(NARROW | changes))
    ours, plain = (
        layer_work(spec, spec.layers[0], shape._replace(adapters=some), replace(OURS, compiled=True))
        for some in (shape.adapters, ())
    )
    parts = ("forward", "inputs", "weights")
    assert tuple(len(getattr(ours, part).matmuls) - len(getattr(plain, part).matmuls) for part in parts) == products


@pytest.mark.parametrize(
    "name, index, fewer", [("deepseek-v3", 0, 1), ("deepseek-v3", 60, 0), ("tiny-moe", 0, 3), ("tiny-moe", 1, 2)]
)
def test_adapters_of_other_layers_stay_apart(name, index, fewer):
    """Latents are not made of what the others are made of, and experts have their own tokens: gate and up of a plain
    layer share, and q, k, v."""
    spec, stacks = preset(name), (OURS, replace(OURS, compiled=True))
    apart, ours = (layer_work(spec, spec.layers[index], RankShape(1, 2048, 2048, **NARROW), stack) for stack in stacks)
    assert len(apart.weights.matmuls) - len(ours.weights.matmuls) == fewer
    assert flops_of(apart.weights) == flops_of(ours.weights)


def test_large_logits_are_computed_twice():
    spec = preset("llama3-8b")
    few, many = (head_work(spec, RankShape(1, tokens, tokens), OURS).forward for tokens in (256, 4096))
    assert (len(few.matmuls), len(many.matmuls)) == (1, 2)


def test_a_model_that_transformers_builds_has_the_products_of_its_counted_weights():
    spec = TransformersSpec(
        name="other",
        num_layers=2,
        hidden=64,
        num_heads=4,
        ffn=100,
        vocab=1000,
        tied=True,
        block_parameters=(64000, 32000),
        other_parameters=64000,
    )
    work = [layer_work(spec, layer, RankShape(2, 128, 128), OURS) for layer in spec.layers]
    assert [sum(p.flops for p in one.forward.matmuls) for one in work] == [2 * 256 * 64000, 2 * 256 * 32000]


def test_an_embedding_multiplies_nothing():
    work = embedding_work(preset("llama3-8b"), RankShape(1, 4096, 4096), OURS)
    assert flops_of(work.forward) == flops_of(work.weights) == 0 and work.weights.passes


@pytest.mark.parametrize("recipe, small", [("tensorwise", 0), ("rowwise", 2)])
def test_fp8_takes_what_gains(recipe, small):
    """llama3-8b's keys and values are too small for a scale per row. An input that several products read is rounded
    once."""
    shape, spec = RankShape(8, 4096, 4096, eight_bit=True), preset("llama3-8b")
    work = layer_work(spec, spec.layers[0], shape, our_stack(True, False, True, False, recipe))
    for part in (work.forward, work.inputs, work.weights):
        assert sum(p.small for p in part.matmuls) == small and len(part.matmuls) == 7
    plain = layer_work(spec, spec.layers[0], RankShape(8, 4096, 4096), our_stack(True, False, True))
    read = 8 * 4096 * (3 * spec.hidden + spec.ffn)
    turned = sum(work.weights.passes) - sum(plain.weights.passes)
    assert turned == pytest.approx(TRANSPOSE * QUANTIZE * read)


def test_a_head_in_fp8_rounds_its_weights_once_and_adds_chunk_by_chunk():
    shape, spec = RankShape(8, 4096, 4096, eight_bit=True), preset("llama3-8b")
    plain, narrow = (
        head_work(spec, shape, our_stack(True, False, True, False, "tensorwise", word)) for word in (False, True)
    )
    assert plain.forward.matmuls[0].exact and not narrow.forward.matmuls[0].exact
    logits, weights = 8 * 4096 * spec.vocab, spec.vocab * spec.hidden
    more = sum(sum(getattr(narrow, part).passes) - sum(getattr(plain, part).passes) for part in ("forward", "inputs"))
    x = 8 * 4096 * spec.hidden
    assert more == pytest.approx((LOOK + QUANTIZE) * (x + weights + logits) + 2 * weights)  # turned around as bytes
    frozen = head_work(spec, shape._replace(trains="lora"), our_stack(True, False, True, False, "tensorwise", True))
    assert sum(narrow.forward.passes) - sum(frozen.forward.passes) == pytest.approx((LOOK + QUANTIZE) * weights)
    added = sum(narrow.weights.passes) - sum(plain.weights.passes)
    assert added == pytest.approx((LOOK + QUANTIZE) * (logits + x) + 10 * 4 * weights)  # four chunks


def test_a_fused_loss_goes_over_the_logits_so_often():
    shape, spec = RankShape(8, 4096, 4096), preset("llama3-8b")
    stack = our_stack(True, False, True)
    one, two = (head_work(spec, shape, some) for some in (stack, replace(OTHERS, fused_loss=True, compiled=True)))
    moved = 2 * 2 * 8 * 4096 * spec.vocab
    assert moved in one.forward.passes and moved not in one.inputs.passes and moved in two.inputs.passes


def test_experts_stay_in_16_bits():
    spec = preset("tiny-moe").with_overrides({"hidden": 4096, "num_heads": 32, "num_kv_heads": 32, "expert_ffn": 4096})
    shape, stack = RankShape(8, 4096, 4096, eight_bit=True), our_stack(True, False, True, False, "tensorwise")
    work = layer_work(spec, spec.layers[-1], shape, stack)
    assert all(p.small for p in work.forward.matmuls if p.groups > 1)
    assert sum(p.in_eight for p in work.forward.matmuls) == 4
