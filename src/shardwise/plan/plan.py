"""`Plan`: exactly what the runtime executes, with every `auto` resolved. Written to plan.json, no torch needed to read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """One resolved job. Ranks are numbered 0 … world-1; a data-parallel rank owns a fixed range of each step's rows."""

    device: str  # cpu | cuda
    precision: str
    seq_len: int
    global_batch: int  # sequences per optimizer step, over all ranks
    micro_batch: int  # sequences per forward pass of one rank
    num_steps: int
    threads_per_rank: int
    reason: str
    dp: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        assert self.global_batch % self.dp == 0, (self.global_batch, self.dp)
        assert 1 <= self.micro_batch <= self.rows_per_rank, (self.micro_batch, self.rows_per_rank)

    @property
    def world(self) -> int:
        return self.dp

    @property
    def rows_per_rank(self) -> int:
        return self.global_batch // self.dp

    @property
    def num_microbatches(self) -> int:
        return -(-self.rows_per_rank // self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def layout(self) -> str:
        """The layout string that is used everywhere: plan table, logs, `parallel.layout`."""
        return f"dp={self.dp}" + (f" zero={self.zero}" if self.zero else "")

    def rows(self, rank: int) -> range:
        """The rows of every global batch that this rank trains on."""
        return range(rank * self.rows_per_rank, (rank + 1) * self.rows_per_rank)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "layout": self.layout, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})
