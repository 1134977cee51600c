"""Tensors that are sizes only: a model of any size is built and trained on them in the memory of a laptop.

torch's FakeTensorMode computes shapes, dtypes and storages of all operations and no values. What a program reads from
a tensor all the same (is the norm above the clip, how long is a list) gets a fixed answer here. Invariant: an
operation holds and frees as many bytes as on real tensors, so memory/account.py counts both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten
GROUPED_MM = getattr(aten._grouped_mm, "default", None) if hasattr(aten, "_grouped_mm") else None
READ = 1.0
"""What every value is that a program reads. It is finite, and as a gradient norm it is at the usual clip."""


class Sizes:
    """The tensors of one rehearsed rank. `computed` is told the FLOPs of every matmul."""

    def __init__(self, computed: Callable[[float], None], device: str = "cpu"):
        self._fake, self._values = FakeTensorMode(allow_non_fake_inputs=True), _Values(computed)
        self._kernels = _KernelsOfCuda() if device == "cuda" else nullcontext()

    @contextmanager
    def only(self) -> Iterator[None]:
        """Makes tensors that are sizes only, while it is open. It may be opened again."""
        with self._fake, self._values, self._kernels:
            yield


class _KernelsOfCuda(TorchFunctionMode):
    """Takes kernels that save for backward what those of CUDA do, where a CPU's save more: RMSNorm keeps its input
    alone, as one kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.rms_norm:
            return _NormKernel.apply(args[0], kwargs["weight"] if "weight" in kwargs else args[2])
        return func(*args, **kwargs)


class _NormKernel(torch.autograd.Function):
    """The sizes of CUDA's RMSNorm: on CPUs torch makes it of several operations, each of which keeps something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Values(TorchDispatchMode):
    """Answers what tensors without values cannot, and counts matmuls."""

    def __init__(self, computed: Callable[[float], None]):
        super().__init__()
        self.computed = computed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: see memory/account.py."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return READ if args[0].dtype.is_floating_point else int(READ)
        if func is aten.empty.memory_format and kwargs.get("dtype") is torch.int32:
            with unset_fake_temporarily():  # DDP's bucket numbers, which its C++ part writes and reads
                return func(*args, **kwargs)
        if func is GROUPED_MM and args[0].ndim == 2:
            return self._grouped(args[0], args[1], kwargs["offs"] if "offs" in kwargs else args[2])
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.computed(float(flop_registry[packet](*args, **kwargs, out_val=result)))
        return result

    def _grouped(self, a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
        """Returns the sizes of a grouped matmul of rows, or of the sums over each expert's rows, in any format: torch
        knows them in bf16 only, where CPUs compute others too."""
        self.computed(2.0 * a.numel() * b.shape[-1])  # over the rows of all experts together
        shape = (a.shape[0], b.shape[2]) if b.ndim == 3 else (ends_E.shape[0], a.shape[0], b.shape[1])
        return a.new_empty(shape)
