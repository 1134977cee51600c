"""One GPU: the exchange in a group of one, around torch's grouped matrix product, against experts that never travel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.decoder import Decoder
from shardwise.model.experts import Experts, moe_layers
from shardwise.model.initialize import initialize
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.spec.presets import preset

pytestmark = pytest.mark.cuda

SIZES = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny-moe").with_overrides(SIZES | {"expert_ffn": 64, "num_experts": 4, "num_shared_experts": 1})
LOADS = {"even": [8, 8, 8, 8], "uneven": [31, 1, 0, 7], "no rows": [0, 0, 0, 0]}


@pytest.fixture(autouse=True)
def group_of_one(clean_gpu: None) -> None:
    # An index's backward would add in the order threads arrive.
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_rows_come_back_as_if_they_had_stayed(load: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts_E = torch.tensor(LOADS[load], device="cuda")
    whole = Experts(SPEC).to("cuda", dtype)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    spread = SpreadExperts(whole, dist.group.WORLD)
    x_MD = torch.randn(sum(LOADS[load]), SPEC.hidden, device="cuda", dtype=dtype)
    results: list[tuple[Tensor, ...]] = []
    for experts in (whole, spread):
        rows_MD = x_MD.clone().requires_grad_()
        out_MD = experts(rows_MD, counts_E)
        out_MD.square().sum().backward()
        assert rows_MD.grad is not None
        results.append((out_MD.detach(), rows_MD.grad, *(p.grad for p in experts.parameters() if p.grad is not None)))
    assert len(results[0]) == len(results[1]) == 5
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_model_with_spread_experts_trains_the_same_in_bf16() -> None:
    tokens = torch.randint(0, SPEC.vocab, (2, 32), device="cuda")
    losses: list[list[float]] = []
    for is_spread in (False, True):
        model = Decoder(SPEC, "math")
        initialize(model, 0)
        model.to("cuda", torch.bfloat16)
        if is_spread:
            for layer in moe_layers(model):
                layer.experts = SpreadExperts(layer.experts, dist.group.WORLD)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = torch.stack([part.float() for part in model(tokens, tokens.roll(-1, 1))]).sum() / tokens.numel()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
