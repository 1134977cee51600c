"""Lists the precisions that a model can be trained in, as records: which number formats weights, matmuls, gradients and
states have. No torch.

To add one, write a `Precision` here; if it needs a conversion of the model, that goes where the model is built
(`parallel/apply.py`). The config's choices, the bytes that the planner counts, the dtypes of the runtime and the names
in other frameworks all follow from the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FORMAT_BYTES: Mapping[str, int] = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2})
"""The bytes of one element in each number format that tensors are kept, computed or reduced in."""


@dataclass(frozen=True)
class Precision:
    """One value of `memory.precision`."""

    name: str
    kept: str
    """The number format of the weights between steps. Optimizer states have it too, but for `states`."""
    computed: str
    """The number format of activations, and of matmuls but for those that `matmul` names."""
    states: str
    """The number format of the optimizer's states."""
    matmul: str
    """The rate of a device that its large matmuls run at: fp64 fp32 bf16 fp16 fp8."""
    proof_limit: float
    """The largest relative difference of losses between a run's first steps and their repetition in one process. With
    16 bits a rounding that falls the other way moves a weight by 0.4 %, and steps multiply that; mistakes are found in
    fp64 (prove/verify.py)."""
    scales_loss: bool = False
    """Whether gradients do not fit its range as they are, so that the loss is multiplied while they are computed."""
    alone: str | None = None
    """The precision whose weights are kept in the format that this one computes in; None: it is that itself."""

    deepspeed: str = ""
    """The section of DeepSpeed's JSON that turns it on."""
    torchtitan: str = "float32"
    """torchtitan's word for what is computed in."""

    @property
    def is_mixed(self) -> bool:
        """Whether weights are kept in a wider format than is computed in: they are the master weights."""
        return self.kept != self.computed

    @property
    def is_sixteen_bit(self) -> bool:
        """Whether activations have 16 bits."""
        return FORMAT_BYTES[self.computed] == 2

    @property
    def is_fp8(self) -> bool:
        """Whether large matmuls are quantized to 8 bits."""
        return self.matmul == "fp8"


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        record.name: record
        for record in (
            Precision("fp64", "fp64", "fp64", "fp64", "fp64", 1e-9),
            Precision("fp32", "fp32", "fp32", "fp32", "fp32", 1e-5),
            Precision(
                "bf16", "fp32", "bf16", "fp32", "bf16", 5e-3, alone="bf16-true", deepspeed="bf16", torchtitan="bfloat16"
            ),
            Precision(
                "fp16",
                "fp32",
                "fp16",
                "fp32",
                "fp16",
                5e-3,
                scales_loss=True,
                alone="fp16-true",
                deepspeed="fp16",
                torchtitan="float16",
            ),
            Precision("bf16-true", "bf16", "bf16", "bf16", "bf16", 5e-3, deepspeed="bf16", torchtitan="bfloat16"),
            # Adam's second moment would vanish in fp16, so its states are kept in fp32.
            Precision(
                "fp16-true",
                "fp16",
                "fp16",
                "fp32",
                "fp16",
                5e-3,
                scales_loss=True,
                deepspeed="fp16",
                torchtitan="float16",
            ),
            Precision(
                "fp8", "fp32", "bf16", "fp32", "fp8", 5e-3, alone="bf16-true", deepspeed="bf16", torchtitan="bfloat16"
            ),
        )
    }
)
"""The precisions by name, in the order in which they are offered."""
