"""Lists the stages of ZeRO, as records: what each shards over the data-parallel ranks, and when ranks communicate. No
torch.

To add a variant, write a `ZeroStage` here; the runtime (`parallel/zero`) sets FSDP2's flags from it, the planner counts
and prices by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ZeroStage:
    """One value of `parallel.zero`."""

    stage: int
    shards_states: bool
    """Whether optimizer states and master weights are sharded."""
    reduces_every_microbatch: bool
    """Whether gradients are reduce-scattered after each micro-batch, so that no rank holds all of them. Else they add
    up on each rank until the last."""
    drops_parameters: bool
    """Whether gathered parameters are dropped after each use and gathered again. Else they stay from the first forward
    to the last backward."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether ranks hold all gradients while several micro-batches add up, beside their shard."""
        return self.shards_states and not self.reduces_every_microbatch


ZERO: Mapping[int, ZeroStage] = MappingProxyType(
    {
        record.stage: record
        for record in (
            ZeroStage(0, shards_states=False, reduces_every_microbatch=False, drops_parameters=False),
            ZeroStage(1, shards_states=True, reduces_every_microbatch=False, drops_parameters=False),
            ZeroStage(2, shards_states=True, reduces_every_microbatch=True, drops_parameters=False),
            ZeroStage(3, shards_states=True, reduces_every_microbatch=True, drops_parameters=True),
        )
    }
)
"""The records by stage."""
