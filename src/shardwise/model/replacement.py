"""The one way in which other rooms change what a plain module computes: it becomes an instance of a subclass of its
class.

    become(block.attention, FusedAttention)           kernels/fused_projections.py
    become(layer, AdaptedLinear, scale=..., ...)      adapters/lora.py

The module stays the same object with the same name, parameters, buffers and hooks, so whatever looks for those
(checkpoints, optimizers, sharding) sees what it saw before. The subclass overrides one small method (`project`,
`hidden`, `logits`, `prepare_masks`, ...), and what it needs besides is set on the instance. Classes in `model/` are
never touched.

Which replacements there are, when each applies, and in which order: `parallel/transforms.py`.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def become(module: nn.Module, kind: type[Module], **fields: Any) -> Module:
    """Turns the module into an instance of `kind`, a subclass of its class, sets the given fields and returns the
    module itself. One that is a `kind` already only gets the fields."""
    if not isinstance(module, kind):
        assert issubclass(kind, type(module)), f"a {type(module).__name__} cannot become a {kind.__name__}"
        module.__class__ = kind
    for name, value in fields.items():
        setattr(module, name, value)
    return cast(Module, module)
