"""The fused loss on a GPU: bf16 against fp64, compiled or not, its memory, its products, and that the host never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardwise.model import loss as loss_module
from shardwise.model.decoder import IGNORE, Head
from shardwise.model.fused_loss import adds_in_place
from shardwise.model.presets import preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
V, D, N = 32000, 512, 4096


def learned(dtype: torch.dtype, softcap: float = 0.0, fused: bool = True, compiled: bool = False) -> list[Tensor]:
    spec = preset("tiny").with_overrides({"vocab": V, "hidden": D, "logit_softcap": softcap})
    head = Head(spec).to(device="cuda", dtype=dtype)
    head.fused, head.compiled = fused, compiled
    draw = torch.Generator().manual_seed(0)
    assert head.weight is not None
    head.weight.data.copy_((torch.randn(V, D, generator=draw) / 16).bfloat16())
    x_BTD = torch.randn(2, N // 2, D, generator=draw).bfloat16().to(device="cuda", dtype=dtype).requires_grad_()
    targets_BT = torch.randint(0, V, (2, N // 2), generator=draw)
    targets_BT[:, ::7] = IGNORE
    loss = head(x_BTD, targets_BT.cuda())
    (loss / 3500).backward()
    return [loss.detach(), x_BTD.grad, head.weight.grad]  # type: ignore[list-item]


def distances(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, true, strict=True)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """700 rows: six chunks of 683 rows, the last one smaller."""
    monkeypatch.setattr(loss_module, "MAX_LOGITS_BYTES", 2 * V * 700 // loss_module.CUDA_TIMES)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_is_as_near_to_fp64_as_computing_logits_again(softcap: float, compiled: bool) -> None:
    true = learned(torch.float64, softcap)
    fused = distances(learned(torch.bfloat16, softcap, compiled=compiled), true)
    again = distances(learned(torch.bfloat16, softcap, fused=False), true)
    print(f"softcap {softcap}, compiled {compiled}: fused {fused}, again {again}")
    assert fused[0] <= max(again[0], 1e-4) and fused[1] <= 1.2 * again[1] and fused[2] <= again[2], (fused, again)


def test_products_add_to_the_fp32_sum_in_place() -> None:
    """Else a chunk costs two more passes over the gradient of the weights: right, but slower."""
    assert adds_in_place(torch.device("cuda", 0), torch.bfloat16)


def names_of_products(fused: bool) -> list[str]:
    learned(torch.bfloat16, fused=fused)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learned(torch.bfloat16, fused=fused)
        torch.cuda.synchronize()
    return [event.name for event in found.events() if event.name in ("aten::mm", "aten::addmm")]  # type: ignore[union-attr]


def test_no_product_is_computed_twice() -> None:
    assert len(names_of_products(fused=True)) == 3 * 6


def test_only_one_chunk_of_logits_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    learned(torch.bfloat16, compiled=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    learned(torch.bfloat16, compiled=True)
    peak = torch.cuda.max_memory_allocated() - before
    weights, chunk, inputs = 2 * V * D, 2 * V * 683, 2 * N * D
    assert peak < weights + inputs + 2 * weights + inputs + max(chunk, weights + inputs) + 16 * 2**20


def test_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(preset("tiny").with_overrides({"vocab": V, "hidden": D})).to(device="cuda", dtype=torch.bfloat16)
    head.compiled = True
    torch.nn.init.normal_(head.weight)  # type: ignore[arg-type]
    x_BTD = torch.randn(1, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets_BT = torch.randint(0, V, (1, N), device="cuda")

    def step() -> Any:
        head(x_BTD, targets_BT).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
