"""Matrix products on a GPU, each by the kernel that was fastest for it, here, with the same bits.

torch takes the kernel that cuBLASLt's rule of thumb puts first. On a card that works at its power limit the first is often not the fastest: 3 to 5 % of all products of a step lie between the two (docs/log.md). So the first time a large product
is computed, the library's proposals take turns with torch's own and the fastest is kept. Invariant: only kernels whose result equals torch's bit for bit take part, so that what is chosen decides how long a step takes and nothing
else: not the loss, not whether two ranks or two runs agree.

Three ways lead here: an operation (`shardwise::mm`), a pass that puts it in the place of `aten.mm` in compiled graphs, forward and backward, and the products of a fused head. Adapters of
compiled blocks have a sum of their own (`shardwise::add_narrow`), which rounds once where two operations round twice.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from shardwise.model import cublas
from shardwise.model.fused_loss import Products, adds_in_place

LEAST_FLOPS = 3e10  # 0.05 ms on an H200: below, choosing saves less than the operation's way through Python costs
LEAST_BYTES = 2**24  # the same of a sum with a narrow product
MOST_PROPOSALS, FINALISTS, ROUNDS = 20, 4, 4
TURN_MS = 25.0  # of a finalist, so that each works at the clock that its own power leaves it: what is fastest for a moment may draw more
TRIES = 2  # of a product that is all zeros, as gradients can be in a first step
WORTH = 0.99  # of torch's time: less of a gain is within the noise

Key = tuple[Any, ...]
Start = Callable[[], None]


@dataclass(frozen=True)
class Found:
    """torch's milliseconds and the winner's, which is None where torch's own won."""

    torch_ms: float
    ms: float
    launch: cublas.Launch | None


TORCH = Found(0.0, 0.0, None)  # not measured
_found: dict[Key, Found] = {}
_zeros: Counter[Key] = Counter()
_lock = threading.Lock()  # backward has a thread of its own


def multiply(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    multiply_into(a_MK, b_KN, out_MN)
    return out_MN


def multiply_into(
    a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, beta: float = 0.0, added_MN: Tensor | None = None
) -> None:
    """out = a b + beta added, or beta out; `out` may be fp32 where a and b are 16 bits."""
    (_launch(a_MK, b_KN, out_MN, added_MN) or _as_torch)(a_MK, b_KN, out_MN, beta, added_MN)


def _as_torch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, beta: float = 0.0, added_MN: Tensor | None = None) -> None:
    if added_MN is not None:
        out_MN.copy_(added_MN)
    if out_MN.dtype != a_MK.dtype:
        torch.ops.aten.addmm.dtype_out(out_MN, a_MK, b_KN, out_MN.dtype, beta=beta, out=out_MN)
    elif beta:
        out_MN.addmm_(a_MK, b_KN, beta=beta)
    else:
        torch.mm(a_MK, b_KN, out=out_MN)


def _launch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, added_MN: Tensor | None) -> cublas.Launch | None:
    flops, moved = 2 * a_MK.numel() * b_KN.shape[1], out_MN.nbytes if added_MN is not None else 0
    if not out_MN.is_cuda or (flops < LEAST_FLOPS and moved < LEAST_BYTES):
        return None
    alignment, matrices = cublas.ALIGNMENT, (a_MK, b_KN, out_MN, *(() if added_MN is None else (added_MN,)))
    if added_MN is not None and any(matrix.data_ptr() % alignment for matrix in matrices):
        alignment = cublas.LEAST_ALIGNMENT  # a narrow factor may be a part of another matrix's rows
    if any(matrix.data_ptr() % alignment for matrix in matrices):
        return None
    if added_MN is not None and (added_MN.stride(), added_MN.dtype) != (out_MN.stride(), out_MN.dtype):
        return None
    kinds = tuple((matrix.dtype, matrix.stride()) for matrix in matrices)
    key = (a_MK.shape, b_KN.shape[1], kinds, out_MN.device.index, alignment)
    found = _found.get(key)
    if found is None:
        with _lock:
            found = _found.get(key) or _measure(a_MK, b_KN, out_MN, added_MN, key)
            if found is None:
                return None
            _found[key] = found
    return found.launch


def _measure(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, added_MN: Tensor | None, key: Key) -> Found | None:
    """With the numbers at hand: how long a product takes depends on them. None where this is not the time: there is no memory for a second result, the result is all zeros, which any kernel
    gets right, or launches are being recorded."""
    if torch.cuda.is_current_stream_capturing():
        return None
    if not can_measure(a_MK.dtype) or any(cublas.turned(matrix) is None for matrix in (a_MK, b_KN, out_MN)):
        return TORCH
    try:
        truth_MN = torch.empty_like(out_MN)
    except torch.OutOfMemoryError:
        return None
    _as_torch(a_MK, b_KN, truth_MN)
    if not truth_MN.any():
        _zeros[key] += added_MN is None  # an adapter's product is zero until its first update
        return TORCH if _zeros[key] == TRIES else None
    beta = 0.0 if added_MN is None else 1.0
    if added_MN is not None:
        _as_torch(a_MK, b_KN, truth_MN, beta, added_MN)
    try:
        proposals = cublas.proposals(a_MK, b_KN, out_MN, MOST_PROPOSALS, key[-1])
    except RuntimeError:  # the library has none for these
        return TORCH
    starts = [partial(launch, a_MK, b_KN, out_MN, beta, added_MN) for launch in (_as_torch, *proposals)]
    same = [0, *(index for index in range(1, len(starts)) if _is_same(starts[index], out_MN, truth_MN))]
    del truth_MN
    winner, torch_ms, ms = _fastest([starts[index] for index in same])
    return Found(torch_ms, ms, proposals[same[winner] - 1] if winner else None)


def _is_same(start: Start, out_MN: Tensor, truth_MN: Tensor) -> bool:
    bits = torch.int32 if out_MN.element_size() == 4 else torch.int16
    try:
        start()
    except RuntimeError:
        return False
    return torch.equal(out_MN.view(bits), truth_MN.view(bits))


def _fastest(starts: list[Start]) -> tuple[int, float, float]:
    """Which, the milliseconds of the first, which is torch's, and of that one. All for a moment, then those that did best and torch's, taking turns: the card slows down and speeds up for all alike."""

    def milliseconds(start: Start, repeats: int = 2) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start()  # the other's matrices have left the caches
        began.record()
        for _ in range(repeats):
            start()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / repeats

    first = {index: milliseconds(start) for index, start in enumerate(starts)}
    best = sorted((index for index in first if index), key=first.__getitem__)[:FINALISTS]
    times: dict[int, list[float]] = {index: [] for index in (0, *best)}
    repeats = max(2, round(TURN_MS / first[0]))
    for _ in range(ROUNDS):
        for index, each in times.items():
            each.append(milliseconds(starts[index], repeats))
    medians = {index: statistics.median(each) for index, each in times.items()}
    winner = min(medians, key=medians.__getitem__)
    if medians[winner] > WORTH * medians[0]:
        winner = 0
    return winner, medians[0], medians[winner]


def can_measure(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and cublas.library() is not None


def summary() -> str | None:
    """Of what was measured in this process so far: for the log."""
    measured = [found for found in _found.values() if found.torch_ms]
    if not measured:
        return None
    torch_ms, ms = sum(found.torch_ms for found in measured), sum(found.ms for found in measured)
    won = sum(found.launch is not None for found in measured)
    return f"products: cuBLASLt's fastest kernel with the same bits, {won} of {len(measured)} shapes by another than torch takes ({torch_ms:.2f} -> {ms:.2f} ms, one of each)"


# In compiled graphs ---------------------------------------------------------------------------------------------------


@cache
def operation() -> Any:
    """`shardwise::mm`, known to torch from the first call on."""
    torch.library.define("shardwise::mm", "(Tensor a, Tensor b) -> Tensor", lib=_here())
    torch.library.impl("shardwise::mm", "CUDA", multiply, lib=_here())
    torch.library.impl("shardwise::mm", "CPU", torch.mm, lib=_here())
    torch.library.register_fake("shardwise::mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=_here())
    return torch.ops.shardwise.mm.default


@cache
def add_narrow() -> Any:
    """`shardwise::add_narrow`, y + x B^T with x of an adapter's few columns, in one pass and one rounding: apart, the product is written and y and it are read
    wherever their sum is wanted. torch's own sum copies y first."""
    torch.library.define("shardwise::add_narrow", "(Tensor y, Tensor x, Tensor b) -> Tensor", lib=_here())
    torch.library.impl("shardwise::add_narrow", "CUDA", _add_narrow, lib=_here())
    torch.library.impl("shardwise::add_narrow", "CPU", lambda y, x, b: y + F.linear(x, b), lib=_here())
    torch.library.register_fake("shardwise::add_narrow", lambda y, x, b: y.new_empty(y.shape), lib=_here())
    torch.library.register_autograd("shardwise::add_narrow", _narrow_gradients, setup_context=_keep_narrow, lib=_here())
    return torch.ops.shardwise.add_narrow.default


def _add_narrow(y: Tensor, x: Tensor, b_OR: Tensor) -> Tensor:
    y_NO, x_NR = y.flatten(0, -2), x.flatten(0, -2)
    out_NO = y_NO.new_empty(y_NO.shape)
    multiply_into(x_NR, b_OR.t(), out_NO, 1.0, y_NO)
    return out_NO.view(y.shape)


def _keep_narrow(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # torch names its arguments
    ctx.save_for_backward(*inputs[1:])


def _narrow_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, b_OR = ctx.saved_tensors
    return gradient, gradient @ b_OR, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


@cache
def _here() -> torch.library.Library:
    return torch.library.Library("shardwise", "FRAGMENT")


class MeasureProducts(CustomGraphPass):
    """Large 16-bit products of a graph go by `shardwise::mm`."""

    def __init__(self, least_flops: float = LEAST_FLOPS):
        self.least_flops, self.operation = (
            least_flops,
            operation(),
        )  # now: a graph from torch's cache is not passed over

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            a, b = (arg.meta["val"] for arg in node.args)
            if not isinstance(a, Tensor) or not all(isinstance(size, int) for size in (*a.shape, *b.shape)):
                continue
            if can_measure(a.dtype) and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= self.least_flops:
                node.target = self.operation

    def uuid(self) -> Any:
        """Graphs that torch keeps on disk are told apart by it."""
        return ("shardwise products", 1, self.least_flops)


class MeasuredProducts(Products):
    """Of a fused head."""

    def logits(self, x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return multiply(x_ND, weight_VD.t())

    def input_gradient(self, grad_NV: Tensor, weight_VD: Tensor, out_ND: Tensor) -> None:
        multiply_into(grad_NV, weight_VD, out_ND)

    def weight_gradient(self, grad_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, is_first: bool) -> None:
        if not grad_NV.is_cuda or not adds_in_place(grad_NV.device, grad_NV.dtype):
            return super().weight_gradient(grad_NV, x_ND, sum_VD, is_first)
        multiply_into(grad_NV.t(), x_ND, sum_VD, 0.0 if is_first else 1.0)
