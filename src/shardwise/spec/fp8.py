"""Says which matmuls fp8 takes: those whose sides the hardware bears, and that gain more than quantization costs. No
torch.

Invariant: what the runtime converts (kernels/float8.py) is what is predicted; both ask here.
"""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.spec.precisions import PRECISIONS

MULTIPLE = 16  # that both sides of a matrix must divide by: what the hardware's matmuls take
WORTH = {"rowwise": 1000, "tensorwise": 600}
"""The least outputs * inputs / (outputs + inputs) from which on fp8 gains. For every token the three matmuls save 6 O I
/ rate of the matmul, and quantizing both sides both ways moves 6 (O + I) bytes. On an H200 (bf16 700, fp8 1250 TFLOP/s
with one scale and 1000 with one per row, 4 TB/s) that is even at 400 and 580; half as much again pays for launches and
for sums that are refreshed."""
FROZEN_WORTH = 0.75
"""The share of that for a frozen matrix: two matmuls save 4 O I, and what is quantized moves 3 (O + I)."""


def why_not(outputs: int, inputs: int, recipe: str, *, together: int | None, is_frozen: bool = False) -> str | None:
    """Returns why a matrix stays in bf16, or None. `together` are the outputs of the matmul that it takes part in; None
    where any size will do."""
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return f"{outputs} x {inputs} does not divide by {MULTIPLE}"
    if together is None or gains(together, inputs, WORTH[recipe] * (FROZEN_WORTH if is_frozen else 1.0)):
        return None
    return f"{together} x {inputs} is too small to gain"


def gains(outputs: int, inputs: int, least: float) -> bool:
    """Returns whether a matrix is large enough that fp8 gains."""
    return outputs * inputs >= least * (outputs + inputs)


def keeps_base_whole(precision: str, adapter: str) -> bool:
    """Returns whether frozen weights are held in fp8: in two layouts, quantized once, by every replica, in the memory
    of its device."""
    return PRECISIONS[precision].is_fp8 and adapter == "lora"


def check_float8_base(precision: str, adapter: str, zero: int, offload: str, where: str | None = None) -> None:
    """Refuses adapters and layouts that frozen weights in fp8 cannot have. `where` is the file and line of the
    setting."""
    if PRECISIONS[precision].is_fp8 and adapter == "qlora":
        raise UserError(
            "adapter.kind = qlora does not work with memory.precision = fp8",
            why="weights in four bits are read into 16 before they are multiplied",
            fix="memory.precision=bf16 or adapter.kind=lora, which keeps frozen weights in fp8",
            where=where,
        )
    if not keeps_base_whole(precision, adapter) or (zero == 0 and offload != "all"):
        return
    word, instead = (
        (f"parallel.zero = {zero}", "parallel.zero=0") if zero else ("memory.offload = all", "memory.offload=none")
    )
    raise UserError(
        f"{word} does not work with memory.precision = fp8 and adapter.kind = lora",
        why="frozen weights are quantized to fp8 once, and every replica keeps them whole",
        fix=f"{instead} or memory.precision=bf16",
        where=where,
    )
