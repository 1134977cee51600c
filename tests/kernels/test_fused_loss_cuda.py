"""The fused loss on a GPU: bf16 against fp64, with its kernel or without, its memory, its matmuls, and that the host
never waits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from test_fused_loss import assert_rounded_once
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardwise.kernels import fused_head
from shardwise.kernels.fused_loss import adds_in_place
from shardwise.model import loss as loss_module
from shardwise.model.decoder import IGNORE
from shardwise.spec.presets import preset

pytestmark = pytest.mark.cuda
V, D, N = 32000, 512, 4096


def learned(dtype: torch.dtype, softcap: float = 0.0, fused: bool = True, compiled: bool = False) -> list[Tensor]:
    spec = preset("tiny").with_overrides({"vocab": V, "hidden": D, "logit_softcap": softcap})
    head = fused_head.FusedHead(spec).to(device="cuda", dtype=dtype)
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
    monkeypatch.setattr(loss_module, "MAX_LOGITS_BYTES", 2 * V * 700 // fused_head.CUDA_TIMES)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_is_as_near_to_fp64_as_computing_logits_again(softcap: float, compiled: bool) -> None:
    true = learned(torch.float64, softcap)
    fused = distances(learned(torch.bfloat16, softcap, compiled=compiled), true)
    again = distances(learned(torch.bfloat16, softcap, fused=False), true)
    print(f"softcap {softcap}, compiled {compiled}: fused {fused}, again {again}")
    assert fused[0] <= max(again[0], 1e-4) and fused[1] <= 1.2 * again[1] and fused[2] <= again[2], (fused, again)


def test_matmuls_add_to_the_fp32_sum_in_place() -> None:
    """Else a chunk costs two more passes over the gradient of the weights: right, but slower."""
    assert adds_in_place(torch.device("cuda", 0), torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_matmul_is_computed_twice_and_one_kernel_goes_over_a_chunks_logits(compiled: bool) -> None:
    learned(torch.bfloat16, compiled=compiled)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learned(torch.bfloat16, compiled=compiled)
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]  # type: ignore[union-attr]
    assert sum(name in ("aten::mm", "aten::addmm") for name in names) == 3 * 6
    assert names.count("_cross_entropy") == (6 if compiled else 0)
    assert not compiled or not {"aten::gather", "aten::scatter_", "aten::exp_"} & set(names)


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
    head = fused_head.FusedHead(preset("tiny").with_overrides({"vocab": V, "hidden": D})).to(
        device="cuda", dtype=torch.bfloat16
    )
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


# The kernel
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "dtype", "softcap", "meets"),
    [
        (37, torch.float32, 0.0, False),
        (32000, torch.bfloat16, 30.0, True),
        (50257, torch.bfloat16, 0.0, True),
        (50257, torch.float16, 30.0, False),
        (128256, torch.bfloat16, 0.0, False),
        (128256, torch.float16, 0.0, True),
        (128256, torch.float32, 30.0, False),
    ],
)
def test_its_losses_and_gradients_are_rounded_once(width: int, dtype: torch.dtype, softcap: float, meets: bool) -> None:
    from shardwise.kernels.triton.loss import cross_entropy

    assert_rounded_once(cross_entropy, width, dtype, softcap, meets, device="cuda")


def without_logits(rows: int, width: int) -> list[Tensor]:
    """Logits that are all 0, and the last column as target."""
    logits_NV = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    is_target_N = torch.ones(rows, dtype=torch.bool, device="cuda")
    return [logits_NV, torch.full((rows,), width - 1, device="cuda"), is_target_N, is_target_N]


def test_a_chunk_may_have_more_logits_than_32_bits_can_count() -> None:
    from shardwise.kernels.triton.loss import cross_entropy

    rows, width = 2**15 + 8, 2**16
    tensors, loss_N = without_logits(rows, width), torch.empty(rows, device="cuda")
    cross_entropy(*tensors, loss_N, 0.0, None, True)
    expected_V = torch.full((width,), 2.0**-16, dtype=torch.bfloat16, device="cuda")
    expected_V[-1] = -1  # less 2^-16, which bf16 does not see
    assert all(torch.equal(row_V, expected_V) for row_V in tensors[0][-16:])
    torch.testing.assert_close(loss_N, torch.full_like(loss_N, 16 * 0.6931471805599453), rtol=1e-6, atol=0)


def test_it_is_compiled_once_for_all_chunks() -> None:
    from shardwise.kernels.triton.loss import _cross_entropy, cross_entropy

    def compiled() -> int:
        return len(_cross_entropy.device_caches[torch.cuda.current_device()][0])

    before, tensors, loss_N = compiled(), without_logits(53, 1008), torch.empty(53, device="cuda")
    for start, stop in ((0, 16), (16, 33), (33, 52), (52, 53)):
        cross_entropy(*(tensor[start:stop] for tensor in tensors), loss_N[start:stop], 0.0, None, True)
    assert compiled() == before + 1


FAILS = """
import torch
from shardwise.kernels.triton.loss import cross_entropy
one = torch.ones(1, dtype=torch.bool, device="cuda")
logits, targets = torch.zeros(1, 64, device="cuda"), torch.full((1,), {id}, device="cuda")
cross_entropy(logits, targets, one, one, torch.empty(1, device="cuda"), 0.0, None, True)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("number", "fails"), [(-1, True), (63, False), (64, True)])
def test_ids_outside_the_vocabulary_fail(number: int, fails: bool) -> None:
    """In a process of its own: CUDA is of no use after that."""
    done = subprocess.run([sys.executable, "-c", FAILS.format(id=number)], capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr
    assert ("out of bounds" in done.stderr) == fails, done.stderr
