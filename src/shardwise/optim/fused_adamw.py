"""Updates fp32 master weights by AdamW in one pass over memory: gradient, master and moments are read once; master,
moments and the 16-bit weight are written once.

torch's fused AdamW would need the gradient cast to fp32 before and the master cast to 16 bits after: 40 bytes per
element instead of 28, and 4 more at once. Results are those of torch's kernel (kernels/triton/adamw.py has ours) and
the state has its names, so checkpoints do not know who wrote them. Nothing waits for the device: the learning rate
and the number of steps are the host's, the factor that clips is read where it is. Hundreds of small parameters, as
adapters are, would take longer to launch than to update: those go through torch's own kernel, many at a time.
Elsewhere than on CUDA, and for other optimizers, master_weights.py does the same bucket by bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.gated import has_triton
from shardwise.optim.master_weights import BUCKET_ELEMENTS, Groups, LowPrecisionOf, take_gradient

SMALL, MANY = 2**20, 128  # a parameter of fewer elements is small; so many small ones in a group are many

Task = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""One parameter to update: master weight, low-precision weight, gradient, first and second moment."""


def has_kernel() -> bool:
    """Returns whether this machine can compile and run the kernel that updates master weights on CUDA."""
    return torch.cuda.is_available() and has_triton()


def can_update(master: nn.Parameter) -> bool:
    """Returns whether the kernel takes this master weight: on CUDA, in fp32. A proof's masters are fp64."""
    return master.is_cuda and master.dtype == torch.float32 and has_kernel()


class MasterAdamW(torch.optim.AdamW):
    """Is torch's AdamW, with a step that also writes the low-precision weights."""

    grad_factor: Tensor | None = None  # what the next step multiplies gradients by

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float], eps: float, low_precision_of: LowPrecisionOf
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.low_precision_of = low_precision_of

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        update = plain_update
        if self.param_groups[0]["params"][0].is_cuda:
            from shardwise.kernels.triton.adamw import update  # Triton takes seconds to load
        factor, self.grad_factor = self.grad_factor, None
        for group in self.param_groups:
            scalars: dict[int, Tensor] = {}
            small: dict[int, list[Task]] = {}  # by their number of steps
            are_many = _num_small(group["params"]) >= MANY
            for master in group["params"]:
                gradient = take_gradient(master, self.low_precision_of)
                if gradient is None:
                    continue
                state = self.state[master] or self._begin(master)
                state["step"] += 1  # in CPU memory, where torch keeps it unless it is asked for one kernel
                count = int(state["step"])
                task = (master, self.low_precision_of[master], gradient, state["exp_avg"], state["exp_avg_sq"])
                if are_many and master.numel() < SMALL:
                    small.setdefault(count, []).append(task)
                    continue
                if count not in scalars:
                    scalars[count] = _scalars(group, count).to(master.device, non_blocking=True)
                update(*task, scalars[count], factor)
            for count, tasks in small.items():
                update_together(tasks, group, count, factor)

    def _begin(self, master: nn.Parameter) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        self.state[master] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        return self.state[master]


def _num_small(masters: list[nn.Parameter]) -> int:
    """Returns how many of these are on a GPU and small."""
    return sum(master.is_cuda and master.numel() < SMALL for master in masters)


def update_together(tasks: list[Task], group: dict[str, Any], count: int, factor: Tensor | None) -> None:
    """Updates in place by torch's kernel for many tensors, a bucket of at most `BUCKET_ELEMENTS` at a time. `count` is
    their number of steps."""
    done = 0
    while done < len(tasks):
        first, size = done, 0
        while done < len(tasks) and size < BUCKET_ELEMENTS:
            size += tasks[done][0].numel()
            done += 1
        masters, low, gradients, *moments = (list(each) for each in zip(*tasks[first:done], strict=True))
        flat = torch.empty(size, dtype=torch.float32, device=masters[0].device)
        pieces = flat.split([master.numel() for master in masters])
        in_fp32 = [piece.view(master.shape) for piece, master in zip(pieces, masters, strict=True)]
        torch._foreach_copy_(in_fp32, gradients)
        if factor is not None:
            flat *= factor.float()
        step, (beta1, beta2) = torch.full((), float(count), device=flat.device), group["betas"]
        torch._fused_adamw_(
            *(masters, in_fp32, *moments, [], [step] * len(masters)),
            **{"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]},
            eps=group["eps"], amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_(low, masters)


def plain_update(
    master: Tensor,
    low_precision: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: Tensor,
    factor: Tensor | None,
) -> None:
    """Computes in place what the kernel computes, one operation after the other: to read, and to compare the kernel
    with."""
    decay, beta1, beta2, rate, root, eps = scalars.double().tolist()
    g = gradient.float() if factor is None else gradient.float() * factor.float()
    master.copy_(_fma(-decay, master, master))
    first.copy_(_fma(beta1, first, _fma(-beta1, g, g)))
    second.copy_(_fma(beta2, second, _fma(-beta2, g * g, g * g)))
    master -= rate * first / (second.sqrt() / root + eps)
    low_precision.copy_(master)


def _fma(a: float, x: Tensor, y: Tensor) -> Tensor:
    """Returns a x + y with one rounding, as the hardware's fused multiply-add has it."""
    return (a * x.double() + y.double()).float()


def _scalars(group: dict[str, Any], count: int) -> Tensor:
    """Returns the scalars of step `count` in the order in which the kernel reads them, with both moments' bias
    correction, in fp32."""
    lr = group["lr"]
    beta1, beta2 = torch.tensor(group["betas"], dtype=torch.float32).tolist()  # as the moments were made
    corrected = (lr / (1 - beta1**count), (1 - beta2**count) ** 0.5)
    values = (lr * group["weight_decay"], beta1, beta2, *corrected, group["eps"])
    return torch.tensor(values, dtype=torch.float32)
