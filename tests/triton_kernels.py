"""Triton's kernels without a GPU: run by its interpreter on CPU tensors, and compiled for an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def interpret(file: str) -> None:
    """Run a test file as a program in which kernels are Python: Triton decides that when it is loaded. It rounds bf16
    towards zero, unlike any GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def round_once() -> None:
    """Make Triton's interpreter round a product that is added with the sum, as every GPU does."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = fma


def shared_bytes(kernel: Any, types: dict[str, str], options: dict[str, Any], capability: int, **constants: Any) -> int:
    """Of a processor, that one program takes there."""
    return _compiled(kernel, types, options, capability, constants).metadata.shared


def ptx_for_h200(kernel: Any, types: dict[str, str], options: dict[str, Any] | None = None, **constants: Any) -> str:
    return _compiled(kernel, types, options, 90, constants).asm["ptx"]


def _compiled(
    kernel: Any, types: dict[str, str], options: dict[str, Any] | None, capability: int, constants: dict[str, Any]
) -> Any:
    """`types`: of the arguments, as Triton writes them; addresses and sizes divide by 16, as those of most tensors
    do."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    numbers = {name: number for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        {(numbers[name],): value for name, value in constants.items()},
        {(numbers[name],): [["tt.divisibility", 16]] for name in types},
    )
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)
