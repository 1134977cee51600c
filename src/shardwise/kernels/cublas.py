"""Calls cuBLASLt from Python: asks for the kernels that it proposes for a matmul, and starts them.

torch takes the first proposal and has no way to ask for another. Owns the handful of the library's functions and
constants that this needs (cublasLt.h), by ctypes: torch has loaded the library already. Invariant: a kernel here needs
no memory of its own, and matrices begin at multiples of `ALIGNMENT` bytes, so that one may be started anywhere, on any
stream, any number of times. Read next: `choose_matmul.py`, which chooses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes that the library assumes, unless it is told otherwise
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
SUMS_IN_FP32, TRANSPOSE_A, TRANSPOSE_B = 68, 3, 4

Launch = Callable[[Tensor, Tensor, Tensor, float], None]
"""Called with (a, b, out, beta), it computes out = a b + beta out."""


class _Proposal(ctypes.Structure):
    """The library's cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Returns the library; None where torch does not compute by cuBLAS, or its version is not one of those known
    here."""
    version = (torch.version.cuda or "").split(".")[0]
    if version not in ("12", "13"):
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


@cache
def _handle(_device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "asked for without looking whether it is there"
    return found


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered {status}")


def is_transposed(matrix: Tensor) -> bool | None:
    """Returns whether a matrix's columns lie in memory one after the other, instead of its rows; None where neither
    do."""
    rows, columns = matrix.stride()
    if columns == 1 and rows >= matrix.shape[1]:
        return False
    return True if rows == 1 and columns >= matrix.shape[0] else None


def proposals(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, most: int) -> list[Launch]:
    """Returns kernels for matrices of these shapes, formats and strides, at most `most`, the library's favourite first.
    The library counts columns first, so out' = b' a'."""
    lt, handle = _library(), _handle(out_MN.device.index)
    operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
    _check(lt.cublasLtMatmulDescCreate(ctypes.byref(operation), SUMS_IN_FP32, TYPES[torch.float32]))
    layouts = [_layout(lt, matrix) for matrix in (b_KN, a_MK, out_MN)]
    for attribute, matrix in ((TRANSPOSE_A, b_KN), (TRANSPOSE_B, a_MK)):
        flag = ctypes.c_int(int(bool(is_transposed(matrix))))
        _check(lt.cublasLtMatmulDescSetAttribute(operation, attribute, ctypes.byref(flag), ctypes.c_size_t(4)))
    _check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))  # as it is made, it allows no workspace
    found, count = (_Proposal * most)(), ctypes.c_int()
    b, a, out = layouts
    _check(
        lt.cublasLtMatmulAlgoGetHeuristic(
            handle, operation, b, a, out, out, preference, most, found, ctypes.byref(count)
        )
    )
    lt.cublasLtMatmulPreferenceDestroy(preference)
    one = ctypes.byref(ctypes.c_float(1))

    def launch_of(proposal: _Proposal) -> Launch:
        chosen = ctypes.byref(proposal)

        def launch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, beta: float) -> None:
            at = ctypes.c_void_p(out_MN.data_ptr())
            _check(
                lt.cublasLtMatmul(
                    handle, operation, one, ctypes.c_void_p(b_KN.data_ptr()), b, ctypes.c_void_p(a_MK.data_ptr()), a,
                    ctypes.byref(ctypes.c_float(beta)), at, out, at, out, chosen, None, ctypes.c_size_t(0),
                    ctypes.c_void_p(torch.cuda.current_stream(out_MN.device).cuda_stream),
                )
            )  # fmt: skip

        return launch

    return [launch_of(found[i]) for i in range(count.value) if not found[i].state]


def _layout(lt: ctypes.CDLL, matrix: Tensor) -> ctypes.c_void_p:
    """Returns the layout of a matrix as it lies in memory. It is kept as long as the process: there is one for each
    shape."""
    memory, layout = matrix.t() if is_transposed(matrix) else matrix, ctypes.c_void_p()
    rows, columns = memory.shape
    sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(memory.stride(0))
    _check(lt.cublasLtMatrixLayoutCreate(ctypes.byref(layout), TYPES[matrix.dtype], *sizes))
    return layout
