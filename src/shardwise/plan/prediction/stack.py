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

    # Kernels: how often memory is read and written, and how often the host starts something.
    # math (scores in memory) | flash1 | flash2 | flash3 | cudnn | sdpa (cuDNN's, as torch calls it) | flash4
    attention: str = "sdpa"
    windows: bool = False  # its kernel skips keys outside of a window and knows soft caps; else all pairs are computed
    joined: bool = False  # queries, keys and values are one product; gate and up another
    # Of `qkv`, `gate up`: joined, but their weights lie apart and are copied in every pass.
    side_by_side: tuple[str, ...] = ()
    compiled: bool = False  # elementwise chains are one kernel each
    fused_norm: bool = True  # a norm is one kernel; else a chain of passes in fp32
    fused_rope: bool = False
    complex_rope: bool = False  # positions are turned as complex numbers in fp32
    fused_activation: bool = False  # gate, activation and product in one kernel
    fused_softmax: bool = True  # of attention = math: scale, mask and softmax in one kernel
    sharded_loss: bool = False  # the loss goes the way of a cut vocabulary on one rank too
    fused_loss: bool = False  # softmax, loss and its gradient in one or two passes over the logits
    loss_passes: int = 2  # of a fused loss, each reads and writes the logits
    logits_again: bool = True  # large logits are computed in chunks, and again in backward (model/loss.py)
    pads_vocab: int = 1  # a rank's slice of the vocabulary is filled up to a multiple of this
    dropout: bool = False
    measured: bool = False  # our compiled blocks: products, casts and passes as profiles of them on an H200 say
    chosen: bool = False  # of the library's kernels for a product the fastest (kernels/choose_matmul.py)
    fp8_least: int = 0  # products with less of outputs * inputs / (outputs + inputs), and experts, stay in 16 bits
    fp8_rows: bool = False  # a scale per row; else one per tensor
    fp8_head: bool = False  # the head's products too
    fused_cast: bool = False  # fp8: finding the largest number, scaling and turning around are one kernel
    host_share: float = 1.0  # of the usual host time per operation; 0: replayed graphs

    # What selective recomputation runs again: cheap (everything but products and attention) | attention (scores to values) |
    # per-op (every second product too).
    selective: str = "cheap"
    stops_early: bool = True  # a layer that is computed again stops before its last product, whose result nobody needs

    # Gradients and the optimizer. Bytes per number.
    gradient_passes: int = (
        0  # read and written to add a micro-batch's weight gradient to the sum; 0: as autograd does it
    )
    reduce_bytes: int = 0  # of gradients on their way between data-parallel ranks; 0: from the plan
    gather_bytes: int = 0  # of parameters on their way; 0: from the plan
    fused_optimizer: bool = True  # one pass over all states; else one per operation
    copies_parameters: bool = True  # FSDP: parameters are rounded and copied when they are gathered
    reduces_each: bool = True  # ZeRO-2 and 3 reduce after every micro-batch

    # What is hidden behind computing.
    overlaps_reduce: bool = True  # gradients travel while the last backward runs
    overlaps_gather: bool = True  # parameters travel while the layer before computes
    overlaps_tensor: bool = False  # tensor-parallel messages are cut up and travel during the products
    overlaps_tensor_backward: bool = False  # in backward, while the weight gradients are computed
    batch_first: bool = (
        True  # tensors are [batch, tokens, width]: what sequence parallelism gathers must be put in order
    )
    gathers_again: bool = False  # a region's input is kept in parts and gathered once more for backward
    overlaps_experts: bool = False
    scatters_messages: bool = False  # tensor-parallel ranks share a message between stages and gather it after
    overlaps_pipeline: bool = True  # messages between stages travel while others compute; else both ranks wait

    # Memory: states. Ours are those of FSDP2: weights in fp32, cast as they are gathered.
    half_weights: bool = False  # weights lie there in the format of the computation, fp32 masters beside the moments
    gradient_bytes: int = 0  # per parameter, where gradients add up; 0: as wide as the weights that are kept
    bucket_bytes: int = 0  # per parameter of buckets beside the gradients, where replicas add them up
    stand_ins: bool = (
        False  # a 16-bit tensor in each shape of a weight, for gradients that were added inside the product
    )
    step_bytes: int = 0  # per parameter that a rank updates: copies of the gradients that the update makes
    ends_stay_gathered: bool = False  # ZeRO-3: embedding and head are one group, dropped only after backward

    # Memory: what is kept for backward.
    region_buffers: int = 0  # that stay, each as large as a region's whole input: what travels is gathered into them
    lingers: bool = False  # what was gathered is not reused until the GPU has passed it: reserved, not needed
    expert_load: float = (
        1.2  # copies of tokens at the fullest rank's experts, over the mean: assumed; 1: forced to be even
    )
    wide_router: bool = True  # scores of experts are computed in fp32, and so is what they are computed from
    keys_twice: bool = False  # keys and values are kept a second time, where there are as many as queries
    logit_bytes: float = 0.0  # per logit while the loss is computed; 0: in chunks, as ours
    cut_logit_bytes: float = 0.0  # the same where tensor parallelism cuts the vocabulary; 0: no other

    # Memory: which figure is published. allocated (by tensors) | reserved (by the allocator) | process (reserved, and what the device gave to others: context
    # and NCCL, which are not in a prediction)
    published: str = "allocated"
    published_rank: str = "fullest"  # of the pipeline; or first

    @property
    def holds_gathered(self) -> bool:
        """Whether a region's whole input counts until backward."""
        return not self.gathers_again or (self.lingers and self.published == "reserved")


OURS = Stack()
