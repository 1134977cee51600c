"""Lists the optimizers, as records: what each keeps per parameter and what it goes together with. No torch.

To add one, write an `OptimizerKind` here and its constructor in `optim/build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class OptimizerKind:
    """One value of `optimizer.name`."""

    name: str
    num_states: int
    """The number of tensors that it keeps per parameter, each as large as the parameter."""
    is_low_bit: bool = False
    """Whether its states take about one byte per element, and stay on the device."""
    full: str | None = None
    """The optimizer with the same rule and states in full precision; None: it is that itself."""
    low_bit: str | None = None
    """The optimizer with the same rule and 8-bit states, if there is one."""
    has_kernel: bool = False
    """Whether on a GPU one kernel updates master weights, states and low-precision weights in one pass over memory."""
    is_adam: bool = False
    """Whether it is Adam or AdamW as other frameworks have them."""


OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        record.name: record
        for record in (
            OptimizerKind("adamw", 2, low_bit="adamw8bit", has_kernel=True, is_adam=True),
            OptimizerKind("adam", 2, low_bit="adamw8bit", is_adam=True),
            OptimizerKind("sgd", 0),
            OptimizerKind("momentum", 1),
            OptimizerKind("adagrad", 1),
            OptimizerKind("rmsprop", 1),
            OptimizerKind("adamw8bit", 2, is_low_bit=True, full="adamw", has_kernel=True),
        )
    }
)
"""The optimizers by name, in the order in which they are offered."""
