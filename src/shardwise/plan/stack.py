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

    # Memory: states. Ours are those of FSDP2: weights in fp32, cast as they are gathered.
    half_weights: bool = False  # weights lie there in the format of the computation, fp32 masters beside the moments
    gradient_bytes: int = 0  # per parameter, where gradients add up; 0: as wide as the weights that are kept
    bucket_bytes: int = 0  # per parameter of buckets beside the gradients, where replicas add them up
    ends_stay_gathered: bool = (
        False  # under ZeRO-3 embedding and head are one group that is dropped only after backward
    )

    # Memory: what the operations of a layer keep for backward.
    gathers_again: bool = (
        False  # sequence parallelism: of a region's input its slice is kept, and gathered for backward again
    )
    attention_keeps: str = (
        "qkv"  # each once; "qkv+kv": a second copy of keys and values; "qkv+qk": rotated copies of queries and keys
    )
    gated_keeps: int = (
        4  # tensors of a gated feed-forward's width: gate, up, activated gate, product; a fused kernel keeps 3
    )
    fused_attention: bool = True  # False: softmax, its dropout mask and what is left of it, for every pair of tokens
    dropout: bool = False  # masks of one byte where attention and feed-forward are added
    selective: str = "cheap"  # what `selective` runs again: all but products and attention; "attention": its scores; "per-op": torchtitan's list
    logit_bytes: float = 0.0  # per logit while the loss is computed; 0: in chunks, as ours
    cut_logit_bytes: float = 0.0  # the same where tensor parallelism cuts the vocabulary; 0: no other

    # Memory: which figure is published.
    published: str = (
        "allocated"  # by tensors; "reserved": by the allocator; "process": all that the device has given away
    )
    published_rank: str = "fullest"  # of the pipeline; or "first"


OURS = Stack()
