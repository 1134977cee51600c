"""The vocabulary over ranks: loss, logits and strange ids are as on one device, and no rank holds all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_families import FAMILIES, alone, batch, check_same, learn, make, make_parallel, report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model import loss as loss_module
from shardwise.model.decoder import Decoder
from shardwise.spec.model import ModelSpec


def learn_in_chunks(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor], limit: int) -> dict[str, Any]:
    before = loss_module.MAX_LOGITS_BYTES
    loss_module.MAX_LOGITS_BYTES = limit
    try:
        return learn(make_parallel(spec, sequence), inputs)
    finally:
        loss_module.MAX_LOGITS_BYTES = before


def learn_from_logits(model: Decoder, inputs: dict[str, Tensor]) -> dict[str, Any]:
    loss = F.cross_entropy(model(inputs["tokens_BT"]).flatten(0, 1), inputs["targets_BT"].flatten(), reduction="sum")
    loss.backward()
    return report(model, [loss.detach()])


def learn_from_logits_in_parallel(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor]) -> dict[str, Any]:
    return learn_from_logits(make_parallel(spec, sequence), inputs)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_batch_too_large_for_its_logits_goes_in_chunks(ranks, family: str) -> None:
    spec = FAMILIES[family]
    limit = 4 * 16 * 8  # room for 8 tokens on the rank with 16 words, for 7 on those with 17: all must take 7
    check_same(spec, ranks.run(learn_in_chunks, 4, spec, True, batch(), limit), alone(family), True)


def test_logits_can_be_learned_from(ranks) -> None:
    spec = FAMILIES["gemma2"]
    results = ranks.run(learn_from_logits_in_parallel, 2, spec, True, batch())
    check_same(spec, results, learn_from_logits(make(spec), batch()), True)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned, forward and backward."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel())
        return result


def largest_tensor(model: Decoder, inputs: dict[str, Tensor]) -> int:
    with Largest() as largest:
        learn(model, inputs)
    return largest.size


def largest_tensor_in_parallel(spec: ModelSpec, sequence: bool, inputs: dict[str, Tensor]) -> int:
    return largest_tensor(make_parallel(spec, sequence), inputs)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_no_rank_ever_has_all_logits(ranks, sequence: bool) -> None:
    spec = FAMILIES["gemma2"].with_overrides({"vocab": 501, "hidden": 16})
    inputs, world = batch(501), 4
    num_tokens = inputs["tokens_BT"].numel()
    assert largest_tensor(make(spec), inputs) == num_tokens * spec.vocab  # nothing else is as large
    for size in ranks.run(largest_tensor_in_parallel, world, spec, sequence, inputs):
        assert num_tokens * (spec.vocab // world) <= size <= num_tokens * -(-spec.vocab // world)


def train_in_bf16(spec: ModelSpec, inputs: dict[str, Tensor]) -> tuple[Tensor, torch.dtype]:
    model = make_parallel(spec, True).to(torch.bfloat16)
    losses = model(**inputs)
    losses.cross_entropy.backward()
    return losses.cross_entropy.detach(), next(model.parameters()).grad.dtype


def test_bf16_loss_is_computed_in_fp32(ranks) -> None:
    expected = alone("gemma2")["losses"][0]
    for loss, grad_dtype in ranks.run(train_in_bf16, 2, FAMILIES["gemma2"], batch()):
        assert loss.dtype == torch.float32 and grad_dtype == torch.bfloat16
        assert float(loss) == pytest.approx(float(expected), rel=0.02)


def fail_on_strange_ids(spec: ModelSpec, key: str, value: int) -> str:
    inputs = batch()
    inputs[key][0, 5] = value
    try:
        make_parallel(spec, False)(**inputs)
    except (IndexError, RuntimeError) as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("key", ["tokens_BT", "targets_BT"])
@pytest.mark.parametrize("value", [67, -1])
def test_ids_outside_the_vocabulary_fail_on_every_rank(ranks, key: str, value: int) -> None:
    for message in ranks.run(fail_on_strange_ids, 2, FAMILIES["llama"], key, value):
        assert "out of" in message
