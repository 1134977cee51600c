"""Ring attention on one GPU: all ranks in one process, a thread each, by the kernels that a GPU uses."""

from __future__ import annotations

import pytest
import torch
from local_ring import Shape, draw, plain, through_ring, view_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.parallel.context.attention_blocks import Score, Sight, attend_block, choose_kernel

pytestmark = pytest.mark.cuda

SHAPES = {
    "causal": Shape(2, 256, 4, 4, 64, 64),
    "grouped": Shape(2, 192, 8, 2, 64, 64),
    "odd pieces": Shape(1, 8 * 37, 4, 2, 32, 32),
    "window": Shape(2, 256, 4, 2, 64, 64, window=50),
    "soft cap": Shape(1, 128, 4, 2, 32, 32, softcap=20.0),
    "values narrower than keys": Shape(1, 128, 4, 4, 48, 32),
    "width that no kernel takes": Shape(1, 64, 2, 2, 12, 12),
}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_ring_is_plain_attention_forward_and_backward(name: str, dtype: torch.dtype, documents: bool) -> None:
    shape = SHAPES[name]
    tensors, ids = draw(shape, dtype, "cuda", documents)
    found, _ = through_ring(shape, 4, tensors, ids)
    truth = plain(shape, [x.double() for x in tensors], ids)
    for what, ours, whole in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - whole).abs().max()) < LIMITS[dtype] * float(whole.abs().max()), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing_in_a_block_weigh_nothing(dtype: torch.dtype) -> None:
    """The memory-efficient kernel answers LSE 0 for them."""
    q = torch.randn(1, 2, 40, 64, device="cuda", dtype=dtype)
    allowed = torch.ones(1, 1, 40, 40, dtype=torch.bool, device="cuda").tril(-1)
    assert choose_kernel(q, q, q, Sight(allowed_1TS=allowed), Score(0.1)) == "efficient"
    out, lse = attend_block(q, q, q, Sight(allowed_1TS=allowed), Score(0.1))
    assert bool((lse[..., 0] == float("-inf")).all()) and bool(lse[..., 1:].isfinite().all())
    assert bool((out[:, :, 0] == 0).all())


def test_kernels_by_format_and_mask() -> None:
    q = torch.zeros(1, 2, 16, 64, device="cuda")
    masked = Sight(allowed_1TS=torch.ones(1, 1, 16, 16, dtype=torch.bool, device="cuda"))
    found = [
        choose_kernel(x, x, x, sight, Score(1.0))
        for x in (q.bfloat16(), q, q.double())
        for sight in (Sight(True), masked)
    ]
    assert found[0] in ("cudnn", "flash")  # as torch decides for this GPU
    assert found[1:] == ["efficient", "efficient", "efficient", "math", "math"]


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], ids=["cudnn", "flash"])
@pytest.mark.parametrize("name", ["causal", "grouped", "odd pieces"])
def test_both_kernels_for_16_bits(name: str, backend: SDPBackend) -> None:
    shape = SHAPES[name]
    tensors, _ = draw(shape, torch.bfloat16, "cuda")
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    wanted = "cudnn" if backend == SDPBackend.CUDNN_ATTENTION else "flash"
    with sdpa_kernel(backend):
        if choose_kernel(q, k, v, Sight(True), Score(0.1)) != wanted:
            pytest.skip(f"this GPU has no {wanted} kernel")
        found, _ = through_ring(shape, 4, tensors, None)
    truth = plain(shape, [x.double() for x in tensors], None)
    for what, ours, whole in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        assert float((ours.double() - whole).abs().max()) < LIMITS[torch.bfloat16] * float(whole.abs().max()), what
    view = view_of(SHAPES["causal"], 4, 1, None, q.device)
    assert not any(block.masked for blocks in view.plan for block in blocks)  # so flash it is
