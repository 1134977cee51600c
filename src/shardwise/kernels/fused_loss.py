"""Computes a linear layer and its cross-entropy in one: the loss of a chunk of rows, and at once its gradients. No
matmul is computed twice.

Owns the three matmuls of a head and what happens to a chunk's logits between them: in compiled runs one kernel
(`triton/loss.py`), otherwise two passes. Invariant: only one chunk's logits exist, and their gradient takes their
place. What stays until backward is the gradient of the input and that of the weight, summed over chunks in at least
fp32; backward multiplies both by one factor. Read next: `fused_head.py`, which says when this is used.

Shapes: N rows (tokens), D model width, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.errors import UserError
from shardwise.kernels.gated import uses_kernel
from shardwise.kernels.quantized_weight import QuantizedWeight

CombineRanks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the log-sum-exp and the target's logit of each row over a part of the vocabulary; returns both over all of
it."""


class HeadMatmuls:
    """Computes the three matmuls of a head. A subclass may compute them in another format, which `prepared` may put the
    weights into, once for all chunks."""

    def prepared(self, weight_VD: Tensor | QuantizedWeight) -> Any:
        return weight_VD

    def logits(self, x_ND: Tensor, weight: Any) -> Tensor:
        return F.linear(x_ND, weight)

    def input_gradient(self, grad_NV: Tensor, weight: Any, out_ND: Tensor) -> None:
        torch.mm(grad_NV, weight, out=out_ND)

    def weight_gradient(self, grad_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, is_first: bool) -> None:
        """Adds to the sum, which holds nothing yet when it `is_first`. Inside a GPU's 16-bit matmul sums are in fp32:
        they stay so."""
        beta = 0 if is_first else 1
        if sum_VD.dtype == grad_NV.dtype:
            sum_VD.addmm_(grad_NV.t(), x_ND, beta=beta)
        elif not grad_NV.is_cuda:
            sum_VD.addmm_(grad_NV.t().to(sum_VD.dtype), x_ND.to(sum_VD.dtype), beta=beta)
        elif adds_in_place(grad_NV.device, grad_NV.dtype):
            torch.ops.aten.addmm.dtype_out(sum_VD, grad_NV.t(), x_ND, sum_VD.dtype, beta=beta, out=sum_VD)
        else:  # two more passes over the sum
            part_VD = torch.ops.aten.mm.dtype(grad_NV.t(), x_ND, sum_VD.dtype)
            sum_VD.copy_(part_VD) if is_first else sum_VD.add_(part_VD)


@cache
def adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a 16-bit matmul can be added to an fp32 sum in place: it is tried, because torch's versions
    differ."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones.t(), ones, torch.float32, out=total)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 17).all())


@dataclass(frozen=True)
class FusedLossSettings:
    """How a fused loss is computed."""

    rows: int  # rows of a chunk
    block: int  # rows of a chunk whose logits may be there in fp32, where the passes are plain operations
    softcap: float = 0.0
    matmuls: HeadMatmuls = HeadMatmuls()  # noqa: RUF009  (it has no state)
    compiled: bool = False
    combine: CombineRanks | None = None  # set where ranks have parts of the vocabulary


def fused_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor | QuantizedWeight,
    rows_N: Tensor,
    is_target_N: Tensor,
    is_here_N: Tensor,
    settings: FusedLossSettings,
) -> Tensor:
    """Returns the sum of -log p(target), in nats, over rows that have one. `rows_N` are targets as rows of this weight,
    any where `is_here_N` is false. A quantized weight (`quantized_weight.py`) is for matmuls that take it."""
    trains = (x_ND.requires_grad, isinstance(weight_VD, Tensor) and weight_VD.requires_grad)
    wants = tuple(torch.is_grad_enabled() and one for one in trains)
    if not any(wants):
        return _compute(x_ND, weight_VD, rows_N, is_target_N, is_here_N, settings, None, None)
    return _FusedCrossEntropy.apply(x_ND, weight_VD, rows_N, is_target_N, is_here_N, settings, wants)


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Any,
        rows_N: Tensor,
        is_target_N: Tensor,
        is_here_N: Tensor,
        settings: FusedLossSettings,
        wants: tuple[bool, bool],
    ) -> Tensor:
        dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wants[0] else None
        dw_VD = torch.empty_like(weight_VD, dtype=at_least_fp32(weight_VD.dtype)) if wants[1] else None
        loss = _compute(x_ND, weight_VD, rows_N, is_target_N, is_here_N, settings, dx_ND, dw_VD)
        ctx.save_for_backward(dx_ND, dw_VD)
        dtypes = (x_ND.dtype, weight_VD.dtype if wants[1] else None)
        ctx.dtypes, ctx.run = dtypes, _compiled_times() if settings.compiled else times
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise UserError(
                "the fused loss has no second derivative",
                why="its gradients are computed in forward, where autograd does not look",
                fix="speed.loss=recompute",
            )
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        gradients = [None if one is None else ctx.run(one, factor, dtype) for one, dtype in pairs]
        return *gradients, None, None, None, None, None


def times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns gradient * factor in `dtype`, in one pass. A factor without dimensions would be rounded to 16 bits first:
    every gradient off by the same share."""
    if torch.compiler.is_compiling():  # into one kernel, which rounds at its end
        return (gradient.to(at_least_fp32(gradient.dtype)) * factor).to(dtype)
    return torch.mul(gradient, factor.view(1, 1), out=torch.empty_like(gradient, dtype=dtype))


def _compute(
    x_ND: Tensor,
    weight_VD: Tensor | QuantizedWeight,
    rows_N: Tensor,
    is_target_N: Tensor,
    is_here_N: Tensor,
    settings: FusedLossSettings,
    dx_ND: Tensor | None,
    dw_VD: Tensor | None,
) -> Tensor:
    """Returns the summed loss. Its gradients are written to `dx_ND` and `dw_VD` where those are given."""
    loss_N = x_ND.new_empty(x_ND.shape[0], dtype=at_least_fp32(x_ND.dtype))
    wants_gradient, weight = dx_ND is not None or dw_VD is not None, settings.matmuls.prepared(weight_VD)
    for start in range(0, x_ND.shape[0], settings.rows):
        part = slice(start, start + settings.rows)
        logits_NV = settings.matmuls.logits(x_ND[part], weight)
        run = _with_kernel if settings.compiled and uses_kernel(logits_NV) else _with_passes
        run(logits_NV, rows_N[part], is_target_N[part], is_here_N[part], loss_N[part], settings, wants_gradient)
        if dx_ND is not None:
            settings.matmuls.input_gradient(logits_NV, weight, dx_ND[part])
        if dw_VD is not None:
            settings.matmuls.weight_gradient(logits_NV, x_ND[part], dw_VD, is_first=start == 0)
        del logits_NV  # before the next ones are made
    return loss_N.sum()


# From a chunk's logits to its losses and, in the logits' place, their gradient
# -------------------------------------------


def _with_kernel(
    logits_NV: Tensor,
    rows_N: Tensor,
    is_target_N: Tensor,
    is_here_N: Tensor,
    loss_N: Tensor,
    settings: FusedLossSettings,
    wants: bool,
) -> None:
    from shardwise.kernels.triton.loss import cross_entropy  # Triton takes seconds to load

    cross_entropy(logits_NV, rows_N, is_target_N, is_here_N, loss_N, settings.softcap, settings.combine, wants)


def _with_passes(
    logits_NV: Tensor,
    rows_N: Tensor,
    is_target_N: Tensor,
    is_here_N: Tensor,
    loss_N: Tensor,
    settings: FusedLossSettings,
    wants: bool,
) -> None:
    """Computes what the kernel computes, one operation after the other: for CPUs, fp64 and blocks that are not
    compiled, and to compare it with."""
    # 1. How large all logits of a row are together, and the target's.
    rows_N1, sums_N = rows_N[:, None], torch.empty_like(loss_N)
    _go_over(settings, log_sums, logits_NV, sums_N)
    target_N, slope = _cap(logits_NV.gather(1, rows_N1)[:, 0].to(sums_N.dtype), settings.softcap)
    if settings.combine is not None:
        sums_N, target_N = settings.combine(sums_N, target_N.masked_fill(~is_here_N, 0))
    loss_N.copy_((sums_N - target_N).masked_fill_(~is_target_N, 0))
    if not wants:
        return
    # 2. d loss / d logits: probabilities, less one at the target. The target's is computed apart: near 1, a 16-bit
    # probability less one has lost its digits. Rows without a target get an infinite sum: nothing is probable.
    _go_over(settings, to_probabilities, logits_NV, sums_N.masked_fill(~is_target_N, torch.inf))
    at_target_N1 = (torch.expm1(target_N - sums_N) * slope).to(logits_NV.dtype)[:, None]
    logits_NV.scatter_(1, rows_N1, torch.where(is_here_N[:, None], at_target_N1, logits_NV.gather(1, rows_N1)))


def log_sums(logits_NV: Tensor, sums_N: Tensor, softcap: float) -> None:
    """Writes the log-sum-exp of each row into `sums_N`."""
    capped_NV, _ = _cap(logits_NV.to(sums_N.dtype), softcap)
    largest_N1 = capped_NV.amax(-1, keepdim=True)
    exponentials_N1 = (capped_NV - largest_N1).exp_().sum(-1, keepdim=True)
    sums_N.copy_((exponentials_N1.log() + largest_N1)[:, 0])


def to_probabilities(logits_NV: Tensor, sums_N: Tensor, softcap: float) -> None:
    """Writes probabilities in the logits' place, times the slope of a soft cap where there is one."""
    capped_NV, slope_NV = _cap(logits_NV.to(sums_N.dtype), softcap)
    probabilities_NV = (capped_NV - sums_N[:, None]).exp_()
    logits_NV.copy_(probabilities_NV.mul_(slope_NV) if softcap else probabilities_NV)


def _cap(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Returns softly capped logits, and the slope of the cap at each."""
    if not softcap:
        return logits, 1.0
    tanh = torch.tanh(logits / softcap)
    return tanh * softcap, 1 - tanh * tanh


def _go_over(
    settings: FusedLossSettings, run: Callable[[Tensor, Tensor, float], None], logits_NV: Tensor, sums_N: Tensor
) -> None:
    for logits, sums in zip(logits_NV.split(settings.block), sums_N.split(settings.block), strict=True):
        run(logits, sums, settings.softcap)


@cache
def _compiled_times() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(times)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Returns the format that sums are in: at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
