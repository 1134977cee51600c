"""`Stack`: how a framework executes a layout. Ours is the default; the planner knows no other.

Physics is the same for everybody: bytes, FLOPs, links. What differs is which states are kept in which format, which kernels run and what is
hidden behind computing. These facts are fields here, so that predictions can be tested on runs of others (benchmarks/stacks). A field says
how a framework works. None of them is fitted to runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    name: str = "shardwise"


OURS = Stack()
