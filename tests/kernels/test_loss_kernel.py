"""The kernel of fused_loss.py without a GPU: its results by Triton's interpreter, and its code for an H200."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from test_fused_loss import assert_rounded_once
from triton_kernels import interpret, ptx_for_h200

from shardwise.kernels.triton.loss import TALL, WARPS, WIDE, _cross_entropy, _expm1, cross_entropy

pytestmark = pytest.mark.triton

ELEMENTS = TALL * WIDE // (32 * WARPS)  # of a tile, in a thread


def test_it_computes_losses_and_gradients() -> None:
    interpret(__file__)


def code(width: int, **flags: bool) -> str:
    rows = {"columns_ptr": "*i64", "is_target_ptr": "*i1", "is_here_ptr": "*i1"}
    numbers = dict.fromkeys(("sums_ptr", "targets_ptr", "losses_ptr"), "*fp32") | {"softcap": "fp32"}
    constants = {"WIDTH": width, "SUMS": True, "GRADIENT": True, "COMBINES": False, "CAPS": False} | flags
    options = {"num_warps": WARPS, "debug": True, "sanitize_overflow": False}
    pointers = {"logits_ptr": "*bf16"} | rows | numbers
    return ptx_for_h200(_cross_entropy, pointers, options, TALL=TALL, WIDE=WIDE, **constants)


def loops(ptx: str) -> list[str]:
    """From a label to the jump back to it."""
    jumps = [(ptx.find(f"\n{jump[1]}:"), jump.start()) for jump in re.finditer(r"bra\S*\s+(\$L\w+);", ptx)]
    return [ptx[label:jump] for label, jump in jumps if label < jump]


def test_an_h200_goes_over_a_row_twice_16_bytes_at_a_time_and_no_thread_waits_for_another() -> None:
    sums, gradient, zeros = loops(code(128256))
    reads = ELEMENTS // 8
    for loop, loads, stores in ((sums, reads, 0), (gradient, reads, reads), (zeros, 0, reads)):
        assert len(re.findall(r"ld\.global\S*\.v4", loop)) == loop.count("ld.global") == loads
        assert len(re.findall(r"st\.global\S*\.v4", loop)) == loop.count("st.global") == stores
        assert "bar.sync" not in loop and "shared" not in loop
    assert sums.count("ex2.approx") == ELEMENTS + ELEMENTS // TALL  # the lanes' totals too
    assert gradient.count("ex2.approx") == ELEMENTS


def test_ranks_that_meet_have_a_launch_for_each_loop() -> None:
    first = loops(code(128256, COMBINES=True, GRADIENT=False))
    second = loops(code(128256, COMBINES=True, SUMS=False))
    assert [loop.count("st.global") for loop in first] == [0]
    assert [loop.count("st.global") for loop in second] == [ELEMENTS // 8, ELEMENTS // 8]


def test_an_id_outside_the_vocabulary_is_noticed() -> None:
    message = re.search(r"assertMessage_0\S* = \{(.*)\}", code(128256))
    assert message is not None and "index out of bounds" in bytes(map(int, message[1].split(","))).decode()


@triton.jit
def expm1(x_ptr, y_ptr):
    at = tl.arange(0, 1024)
    tl.store(y_ptr + at, _expm1(tl.load(x_ptr + at)))


def check_expm1() -> None:
    """By its own size, however near to zero."""
    x = -torch.logspace(-10, 2, 1024)
    y = torch.empty_like(x)
    expm1[(1,)](x, y)
    true = torch.expm1(x.double())
    assert bool(((y - true).abs() <= 4 * torch.finfo(torch.float32).eps * true.abs()).all()), (y / true - 1).abs().max()


if __name__ == "__main__":
    check_expm1()
    for width, dtype, softcap, meets in (
        (37, torch.float32, 0.0, False),
        (2 * TALL * WIDE + 333, torch.float32, 30.0, True),
        (2 * TALL * WIDE, torch.float16, 0.0, True),
        (TALL * WIDE + 1, torch.bfloat16, 30.0, False),
        (TALL * WIDE + 1, torch.bfloat16, 0.0, True),
    ):
        assert_rounded_once(cross_entropy, width, dtype, softcap, meets, nearest=dtype != torch.bfloat16)
