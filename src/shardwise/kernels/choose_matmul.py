"""Computes matmuls on a GPU, each by the kernel that was fastest for it, here, with the same bits.

torch takes the kernel that cuBLASLt's rule of thumb puts first. On a card that works at its power limit the first is
often not the fastest: 3 to 5 % of all matmuls of a step lie between the two (docs/log.md). So the first time a large
matmul is computed, the library's proposals take turns with torch's own and the fastest is kept. Invariant: only kernels
whose result equals torch's bit for bit take part, so that what is chosen decides how long a step takes and nothing
else: not the loss, not whether two ranks or two runs agree.

Three ways lead here: an operation (`shardwise::mm`), a pass that puts it in the place of `aten.mm` in compiled graphs,
forward and backward, and the matmuls of a fused head.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from shardwise.kernels import cublas
from shardwise.kernels.fused_loss import HeadMatmuls, adds_in_place
from shardwise.kernels.timing import median_seconds

LEAST_FLOPS = 3e10  # of a matmul, 0.05 ms on an H200: below, choosing saves less than a call through Python costs
MOST_PROPOSALS, FINALISTS, ROUNDS = 20, 4, 4
TURN_S = 0.025
"""Seconds of a finalist's turn, so long that each works at the clock that its own power leaves it: what is fastest for
a moment may draw more."""
TRIES = 2  # attempts to measure a matmul whose result is all zeros, as gradients can be in a first step
WORTH = 0.99  # the share of torch's time that another kernel may take at most: less of a gain is within the noise

Key = tuple[Any, ...]


@dataclass(frozen=True)
class FoundKernel:
    """What was measured: torch's milliseconds and the winner's, whose launch is None where torch's own won."""

    torch_ms: float
    ms: float
    launch: cublas.Launch | None


TORCH = FoundKernel(0.0, 0.0, None)  # not measured
_found: dict[Key, FoundKernel] = {}
_zeros: Counter[Key] = Counter()
_lock = threading.Lock()  # backward has a thread of its own


def multiply(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    multiply_into(a_MK, b_KN, out_MN)
    return out_MN


def multiply_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, beta: float = 0.0) -> None:
    """Computes out = a b + beta out; `out` may be fp32 where a and b are 16 bits."""
    (_launch(a_MK, b_KN, out_MN) or _as_torch)(a_MK, b_KN, out_MN, beta)


def _as_torch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, beta: float) -> None:
    if out_MN.dtype != a_MK.dtype:
        torch.ops.aten.addmm.dtype_out(out_MN, a_MK, b_KN, out_MN.dtype, beta=beta, out=out_MN)
    elif beta:
        out_MN.addmm_(a_MK, b_KN, beta=beta)
    else:
        torch.mm(a_MK, b_KN, out=out_MN)


def _launch(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> cublas.Launch | None:
    if 2 * a_MK.numel() * b_KN.shape[1] < LEAST_FLOPS or not out_MN.is_cuda:
        return None
    if any(matrix.data_ptr() % cublas.ALIGNMENT for matrix in (a_MK, b_KN, out_MN)):
        return None
    kinds = tuple((matrix.dtype, matrix.stride()) for matrix in (a_MK, b_KN, out_MN))
    key = (a_MK.shape, b_KN.shape[1], kinds, out_MN.device.index)
    found = _found.get(key)
    if found is None:
        with _lock:
            found = _found.get(key) or _measure(a_MK, b_KN, out_MN, key)
            if found is None:
                return None
            _found[key] = found
    return found.launch


def _measure(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, key: Key) -> FoundKernel | None:
    """Returns the fastest kernel, measured with the elements at hand: how long a matmul takes depends on them. Returns
    None where this is not the time: there is no memory for a second result, the result is all zeros, which any kernel
    gets right, or launches are being recorded."""
    if torch.cuda.is_current_stream_capturing():
        return None
    if not can_measure(a_MK.dtype) or any(cublas.is_transposed(matrix) is None for matrix in (a_MK, b_KN, out_MN)):
        return TORCH
    try:
        truth_MN = torch.empty_like(out_MN)
    except torch.OutOfMemoryError:
        return None
    _as_torch(a_MK, b_KN, truth_MN, 0.0)
    if not truth_MN.any():
        _zeros[key] += 1
        return TORCH if _zeros[key] == TRIES else None
    try:
        proposals = cublas.proposals(a_MK, b_KN, out_MN, MOST_PROPOSALS)
    except RuntimeError:  # the library has none for these
        return TORCH
    launches = [launch for launch in proposals if _is_same(launch, a_MK, b_KN, out_MN, truth_MN)]
    del truth_MN
    return _fastest([_as_torch, *launches], a_MK, b_KN, out_MN)


def _is_same(launch: cublas.Launch, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, truth_MN: Tensor) -> bool:
    bits = torch.int32 if out_MN.element_size() == 4 else torch.int16
    try:
        launch(a_MK, b_KN, out_MN, 0.0)
    except RuntimeError:
        return False
    return torch.equal(out_MN.view(bits), truth_MN.view(bits))


def _fastest(launches: list[cublas.Launch], a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> FoundKernel:
    """Returns the fastest of these launches, of which the first is torch's. All run for a moment, then those that did
    best and torch's take turns: the card slows down and speeds up for all alike."""
    actions = [partial(launch, a_MK, b_KN, out_MN, 0.0) for launch in launches]
    # The untimed call of each turn: the other's matrices have left the caches.
    first = median_seconds(actions, out_MN.device, turns=1, calls=2, untimed=1)
    finalists = [0, *sorted(range(1, len(actions)), key=first.__getitem__)[:FINALISTS]]
    calls = max(2, round(TURN_S / first[0]))
    times = median_seconds([actions[i] for i in finalists], out_MN.device, turns=ROUNDS, calls=calls, untimed=1)
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] > WORTH * times[0]:
        best = 0
    return FoundKernel(1e3 * times[0], 1e3 * times[best], launches[finalists[best]] if best else None)


def can_measure(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and cublas.library() is not None


def summary() -> str | None:
    """Returns one line for the log about what was measured in this process so far; None where nothing was."""
    measured = [found for found in _found.values() if found.torch_ms]
    if not measured:
        return None
    torch_ms, ms = sum(found.torch_ms for found in measured), sum(found.ms for found in measured)
    won = sum(found.launch is not None for found in measured)
    shapes = f"{won} of {len(measured)} shapes by another than torch takes"
    return (
        f"matmuls: cuBLASLt's fastest kernel with the same bits, {shapes} ({torch_ms:.2f} -> {ms:.2f} ms, one of each)"
    )


# In compiled graphs ---------------------------------------------------------------------------------------------------


@cache
def operation() -> Any:
    """Returns `shardwise::mm`, which torch knows from the first call on."""
    torch.library.define("shardwise::mm", "(Tensor a, Tensor b) -> Tensor", lib=_here())
    torch.library.impl("shardwise::mm", "CUDA", multiply, lib=_here())
    torch.library.impl("shardwise::mm", "CPU", torch.mm, lib=_here())
    torch.library.register_fake("shardwise::mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=_here())
    return torch.ops.shardwise.mm.default


@cache
def _here() -> torch.library.Library:
    return torch.library.Library("shardwise", "FRAGMENT")


class MeasureMatmuls(CustomGraphPass):
    """Replaces the large 16-bit matmuls of a graph by `shardwise::mm`."""

    def __init__(self, least_flops: float = LEAST_FLOPS):
        self.least_flops = least_flops
        self.operation = operation()  # known to torch now: a graph from its cache is not passed over

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            a, b = (arg.meta["val"] for arg in node.args)
            if not isinstance(a, Tensor) or not all(isinstance(size, int) for size in (*a.shape, *b.shape)):
                continue
            if can_measure(a.dtype) and 2 * a.shape[0] * a.shape[1] * b.shape[1] >= self.least_flops:
                node.target = self.operation

    def uuid(self) -> Any:
        """Returns what tells graphs apart that torch keeps on disk."""
        return ("shardwise matmuls", 1, self.least_flops)


class MeasuredHeadMatmuls(HeadMatmuls):
    """Computes the three matmuls of a fused head by the fastest kernels."""

    def logits(self, x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return multiply(x_ND, weight_VD.t())

    def input_gradient(self, grad_NV: Tensor, weight_VD: Tensor, out_ND: Tensor) -> None:
        multiply_into(grad_NV, weight_VD, out_ND)

    def weight_gradient(self, grad_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, is_first: bool) -> None:
        if not grad_NV.is_cuda or not adds_in_place(grad_NV.device, grad_NV.dtype):
            return super().weight_gradient(grad_NV, x_ND, sum_VD, is_first)
        multiply_into(grad_NV.t(), x_ND, sum_VD, 0.0 if is_first else 1.0)
