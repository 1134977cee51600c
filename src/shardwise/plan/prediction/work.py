"""What a rank computes, counted: `Matmul`, `AttentionCore`, passes over memory; and `RankShape`, what it has of a
micro-batch. No torch.

Counted by operations.py, priced by kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.spec.model import ModelSpec


class Matmul(NamedTuple):
    """A number of matmuls, `groups`, of (m x k) by (k x n). `adds`: the result is added to a sum in fp32."""

    m: int
    n: int
    k: int
    groups: int = 1
    adds: bool = False
    exact: bool = False  # not in eight bits, whatever the precision
    small: bool = False  # stays in 16 bits where others of its layer are in eight
    split: bool = False  # along k: a few tiles with a long k keep all of a device busy

    @property
    def in_eight(self) -> bool:
        """Whether fp8 computes it in eight bits."""
        return not (self.exact or self.small)

    @property
    def flops(self) -> float:
        """The FLOPs of all groups."""
        return 2.0 * self.m * self.n * self.k * self.groups


class AttentionCore(NamedTuple):
    """The causal attention of `queries` tokens per row, each over `context` keys on average of at most `keys`."""

    rows: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    context: float
    width: int  # of queries and keys
    value_width: int
    masked: bool = False  # all pairs are computed, and a mask says which count

    @property
    def flops(self) -> float:
        """The FLOPs of forward. Backward has five matmuls for these two."""
        return 2.0 * self.rows * self.heads * self.queries * self.context * (self.width + self.value_width)


@dataclass(frozen=True)
class RankWork:
    """The operations that a rank runs one after another."""

    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[AttentionCore, ...] = ()
    passes: tuple[float, ...] = ()  # bytes read and written by each kernel
    views: int = 0  # operations that only the host notices

    def __add__(self, other: RankWork) -> RankWork:
        return RankWork(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.passes + other.passes,
            self.views + other.views,
        )

    @property
    def launches(self) -> int:
        """The number of operations that the host starts."""
        return len(self.matmuls) + len(self.attention) + len(self.passes) + self.views


NO_WORK = RankWork()


@dataclass(frozen=True)
class Training:
    """The operations of a rank that train one layer or one end of the model."""

    forward: RankWork
    inputs: RankWork = NO_WORK  # backward: gradients of what came in, and of what has no weights
    weights: RankWork = NO_WORK
    cheap: RankWork = NO_WORK  # the part of forward that `cheap` selective recomputation repeats
    attention: RankWork = NO_WORK  # the part that `attention` repeats


class RankShape(NamedTuple):
    """The part of a micro-batch that a rank has."""

    rows: int  # sequences
    tokens: int  # of one sequence, on this rank: seq_len / cp
    seq_len: int
    tp: int = 1
    sequence: bool = False
    ep: int = 1
    ulysses: int = 1  # context-parallel ranks that exchange heads for tokens
    size: int = 2  # bytes per element
    eight_bit: bool = False  # large matmuls in fp8
    trains: str = "all"  # all | lora | qlora
    adapters: tuple[int, ...] = ()  # matmuls of a layer that have them
    rank: int = 0  # of the adapters
    drops: bool = False  # their inputs have dropout

    @property
    def here(self) -> int:
        """The number of tokens inside of tensor-parallel regions."""
        return self.rows * self.tokens

    @property
    def outside(self) -> int:
        """The number of tokens that norms and sums see: a share of them under sequence parallelism."""
        return max(1, self.here // self.tp) if self.sequence else self.here


def norms_have_kernel(spec: ModelSpec) -> bool:
    """Returns whether one kernel computes the backward of a block's norms: a program holds a row, and of shorter ones a
    compiler has several. With norms after a part as well, compiled graphs would keep one more tensor per layer."""
    return spec.norm == "rms" and not spec.post_norms and 512 <= spec.hidden <= 16384
