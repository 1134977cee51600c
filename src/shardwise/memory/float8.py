"""fp8: the matrix products of blocks in 8 bits, over bf16 copies of fp32 weights (torchao's float8 training).

Both factors of every product, forward and backward, are rounded to fp8 with scales that are taken from their numbers at that moment:
one scale per row, or one for the whole tensor. Everything else is as with bf16. Layers that would lose stay in bf16 and are
named: those whose sides no fp8 kernel takes, and small ones, where finding the scales costs more than the product saves. Weights,
names and shapes stay what they are, so ZeRO, tensor parallelism and checkpoints see plain linears.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwise.memory.low_bit import load_torchao

MULTIPLE = 16  # of both sides of a matrix: what the hardware's products take


@dataclass
class Float8Layers:
    """What became of the linears of a model, for the line that a run prints."""

    recipe: str
    num_converted: int = 0
    kept: dict[str, str] = field(default_factory=dict)  # name, layers as *: why it stays in bf16

    def __str__(self) -> str:
        reasons = sorted(set(self.kept.values()))
        lists = [f"{', '.join(n for n, why in self.kept.items() if why == reason)} ({reason})" for reason in reasons]
        bf16 = "; ".join(["head, embeddings, norms, routers and experts (always)", *lists])
        return f"{self.num_converted} matrices in fp8, {self.recipe} scales; in bf16: {bf16}"


def apply_float8(
    model: nn.Module, blocks: Iterable[nn.Module], recipe: str, *, emulate: bool, found: Float8Layers | None = None
) -> Float8Layers:
    """In place, on `meta` or with weights. `emulate`: the same roundings where the hardware has no fp8; slow, for tests."""
    load_torchao()
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    found = found or Float8Layers(recipe)
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        for parent in list(block.modules()):
            for child, linear in list(parent.named_children()):
                if not isinstance(linear, nn.Linear):
                    continue
                outputs, inputs = linear.weight.shape
                why = why_not(outputs, inputs, recipe, any_size=emulate)
                if why:
                    found.kept.setdefault(re.sub(r"\.\d+\.", ".*.", f"{names[id(parent)]}.{child}"), why)
                    continue
                found.num_converted += 1
                fast = Float8Linear.from_float(linear, config)
                if hasattr(linear, "product"):  # a slice by input: what comes after the product stays
                    linear.product = _product(fast.linear_mm_config, fast.config)  # type: ignore[assignment]
                else:
                    setattr(parent, child, fast)
    return found


def why_not(outputs: int, inputs: int, recipe: str, *, any_size: bool = False) -> str | None:
    """Why a matrix stays in bf16, or None. The sizes are those from which on torchao measured a gain on an H100."""
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return f"{outputs} x {inputs} does not divide by {MULTIPLE}"
    if recipe == "rowwise":
        is_small = outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
    else:
        is_small = inputs <= 4096 and outputs <= 1024
    return f"{outputs} x {inputs} is too small to gain" if is_small and not any_size else None


def _product(mm_config: Any, config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """torchao's product for a weight that somebody else holds."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), mm_config, config)

    return product
