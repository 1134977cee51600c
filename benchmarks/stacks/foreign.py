"""`ForeignStack`: how another framework executes a layout, so that predictions can be tested on runs that others
published.

Which states are kept in which format, which kernels run and what is hidden behind computing: these facts are fields
here, and the price points of the planner's own `Stack` (plan/prediction/stack.py) are overridden by what follows from
them. A field says how a framework works. None of them is fitted to runs. `load_stack(name)` reads NAME.toml beside this
file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.plan.prediction.rank_share import RankShare
from shardwise.plan.prediction.stack import (
    CAST,
    EAGER_CAST,
    EXPERT_IMBALANCE,
    Passes,
    Stack,
    StateTraffic,
    sharded_loss,
)
from shardwise.plan.prediction.state_time import SLOWED
from shardwise.plan.prediction.states import COMPUTE_BYTES, Groups, RankStates, state_bytes
from shardwise.plan.prediction.work import AttentionCore, Matmul, RankShape, RankWork, Training
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

HERE = Path(__file__).resolve().parent

FOREACH = 2.7
"""Passes of an optimizer that runs operation by operation, over the fused one (H200, kernels_h200.json)."""

RESERVED_SHARE = 0.06
"""What torch's caching allocator holds beyond what is allocated at the peak: blocks that are free but of the wrong
size. The middle of what 245 published runs of two frameworks reserve beyond the bytes of their tensors."""

TENSOR_PIECES = 4
"""Pieces into which overlapped tensor-parallel collectives are cut: the first one is never hidden."""

COMPILED_CAST = 7.0
"""Bytes per element that compiled blocks of others move to quantize it to fp8: read twice and written."""

IN_MATMUL = 8
"""Bytes per element when the matmul itself adds to an fp32 sum: read and write."""

MASTER_BYTES = 4


@dataclass(frozen=True)
class ForeignStack(Stack):
    name: str = ""

    # Kernels: `attention` also knows math (scores in memory) | flash1 | flash2 | flash3 | cudnn.
    windows: bool = False  # its kernel skips keys outside of a window and knows soft caps; else all pairs are computed
    fused_norm: bool = True  # a norm is one kernel; else a chain of passes in fp32
    fused_rope: bool = False
    complex_rope: bool = False  # positions are rotated as complex elements in fp32
    split_loss: bool = False  # the loss goes the way of a cut vocabulary on one rank too
    pads_vocab: int = 1  # a rank's slice of the vocabulary is filled up to a multiple of this
    dropout: bool = False
    fused_cast: bool = False  # fp8: finding the largest element, scaling and transposing are one kernel
    selective: str = "cheap"
    """What selective recomputation runs again: cheap (everything but matmuls and attention) | attention (scores to
    values) | per-op (every second matmul too)."""
    measured: bool = False  # never as our compiled blocks

    # Gradients and the optimizer. Bytes per element.
    gradient_passes: int = (
        0  # read and written to add a micro-batch's weight gradient to the sum; 0: as autograd does it
    )
    reduce_bytes: int = 0  # of gradients on their way between data-parallel ranks; 0: from the plan
    gather_bytes: int = 0  # of parameters on their way; 0: from the plan
    fused_optimizer: bool = True  # one pass over all states; else one per operation
    casts_gathered: bool = True  # as FSDP: parameters are cast and copied when they are gathered

    # What is hidden behind computing.
    overlaps_reduce: bool = True  # gradients travel while the last backward runs
    overlaps_gather: bool = True  # parameters travel while the layer before computes
    overlaps_tensor: bool = False  # tensor-parallel collectives are cut up and travel during the matmuls
    overlaps_tensor_backward: bool = False  # in backward, while the weight gradients are computed
    batch_first: bool = True
    gathers_again: bool = False  # a region's input is kept in parts and gathered once more for backward
    scatters_sends: bool = False  # tensor-parallel ranks share what goes between stages and gather it after
    overlaps_pipeline: bool = True

    # Memory: states.
    half_weights: bool = False  # weights lie there in the format of the computation, fp32 masters beside the moments
    gradient_bytes: int = 0  # per parameter, where gradients add up; 0: as wide as the weights that are kept
    bucket_bytes: int = 0  # per parameter of buckets beside the gradients, where replicas add them up
    stand_ins: bool = (
        False  # a 16-bit tensor in each shape of a weight, for gradients that were added inside the matmul
    )
    step_bytes: int = 0  # per parameter that a rank updates: copies of the gradients that the update makes
    ends_stay_gathered: bool = False  # ZeRO-3: embedding and head are one group, dropped only after backward

    # Memory: what is kept for backward.
    region_buffers: int = 0  # that stay, each as large as a region's whole input: what travels is gathered into them
    lingers: bool = False  # what was gathered is not reused until the GPU has passed it: reserved, not needed
    expert_load: float = EXPERT_IMBALANCE  # 1: forced to be even
    wide_router: bool = True
    keys_twice: bool = False  # keys and values are kept a second time, where there are as many as queries
    logit_bytes: float = 0.0  # per logit while the loss is computed; 0: in chunks, as ours
    cut_logit_bytes: float = 0.0  # the same where tensor parallelism cuts the vocabulary; 0: no other

    # Memory: which figure is published. allocated (by tensors) | reserved (by the allocator) | process (reserved, and
    # what the device gave to
    # others: context and NCCL, which are not in a prediction).
    published: str = "allocated"
    published_rank: str = "fullest"  # of the pipeline; or first

    # Kernels --------------------------------------------------------------------------------------------------------

    @property
    def knows_masks(self) -> bool:
        return self.windows

    def score_passes(self, core: AttentionCore, size: int, capped: bool) -> tuple[Passes, Passes] | None:
        if capped or self.attention != "math":
            return super().score_passes(core, size, capped)
        elements = float(core.rows * core.heads * core.queries * core.keys)
        drop = (_drop_bytes(elements * size, size),) if self.dropout else ()
        return (2 * size * elements, *drop), (3 * size * elements, *drop)

    def block_passes(self, spec: ModelSpec, elements: float, size: int) -> tuple[Passes, Passes]:
        plus, drop = 3.0 * elements * size, ()
        if self.dropout and self.fused_activation:  # bias, dropout and sum in one kernel
            plus += elements
        elif self.dropout and not self.compiled:
            drop = (_drop_bytes(elements * size, size),) * 2
        if self.compiled:  # a sum and the norm after it are one kernel
            return (2 * (plus + elements * size),), (2 * (plus + 2.0 * elements * size),)
        norm, norms = self.norm_passes(spec, elements, size), 4 if spec.post_norms else 2
        return norm[0] * norms + (plus, plus) + drop, norm[1] * norms + (plus, plus) + drop

    def norm_passes(self, spec: ModelSpec, elements: float, size: int, width: int = 0) -> tuple[Passes, Passes]:
        """torch has LayerNorm as one kernel. In plain operations RMSNorm goes to fp32 and back: six passes."""
        if self.fused_norm or self.compiled or spec.norm == "layer":
            return super().norm_passes(spec, elements, size, width)
        forward = tuple(elements * b for b in (size + 4.0, 8.0, 4.0, 8.0, 4.0 + size, 2.0 * size))
        backward = tuple(elements * b for b in (3.0 * size, size + 4.0, 12.0, 8.0, 12.0, 12.0, 4.0 + size))
        return forward, backward

    def rope_passes(self, rotated: float, size: int) -> Passes:
        """As complex elements: to fp32, one product, and back."""
        if self.fused_rope or self.compiled:
            return (2.0 * rotated,)
        if not self.complex_rope:
            return super().rope_passes(rotated, size)
        passes = (CAST * (size + 4.0), 8.0, CAST * (4.0 + size))
        return tuple(part * rotated / size / 2 for part in passes for _ in range(2))

    def cast_passes(self, parts: tuple[tuple[Matmul, ...], ...], shape: RankShape) -> tuple[Passes, Passes, Passes]:
        """A fused kernel writes a tensor as it is and transposed, for both matmuls that it takes part in."""
        wide = [p for part in parts for p in part if p.in_eight]
        if shape.eight_bit and self.fused_cast:
            forward = tuple(4.0 * (float(p.groups * p.m * p.k) + float(p.groups * p.k * p.n)) for p in wide)
            return forward, tuple(4.0 * float(p.groups * p.m * p.n) for p in wide), ()
        found = super().cast_passes(parts, shape)
        if not self.compiled:
            return found
        forward, inputs, weights = (tuple(one / EAGER_CAST * COMPILED_CAST for one in passes) for passes in found)
        return forward, inputs, weights

    def weight_gradients(self, forward: tuple[Matmul, ...], shape: RankShape) -> RankWork:
        found = super().weight_gradients(forward, shape)
        if not found.matmuls or not self.gradient_passes:
            return found
        if self.gradient_passes == IN_MATMUL:
            return RankWork(tuple(p._replace(adds=True) for p in found.matmuls))
        return RankWork(found.matmuls, (), tuple(float(p.n * p.k * p.groups * self.gradient_passes) for p in forward))

    def embedding_passes(self, x: float, table: int) -> tuple[Passes, Passes]:
        return (_drop_bytes(x),) if self.dropout else (), (float(table * max(2, self.gradient_passes // 2)),)

    def padded_vocab(self, vocab: int, tp: int) -> int:
        return -(-vocab // (tp * self.pads_vocab)) * self.pads_vocab

    def loss_passes(self, logits: int, size: int, tp: int) -> tuple[Passes, Passes]:
        if self.fused_loss:
            return (logits * 2.0 * size,), (logits * 2.0 * size,)
        if self.split_loss and not self.compiled:
            return sharded_loss(logits, size)
        return super().loss_passes(logits, size, tp)

    # What is computed again, what travels, what waits -----------------------------------------------------------------

    def repeated(self, work: Training, again: bool, selective: bool) -> RankWork:
        if again or not selective or self.selective == "cheap":
            return super().repeated(work, again, selective)
        return work.attention if self.selective == "attention" else work.cheap + RankWork(work.forward.matmuls[::2])

    def tensor_seconds(
        self, forward: float, again: float, matmuls: float, weights: float, sequence: bool
    ) -> tuple[float, float]:
        backward = (forward + forward / 2 if sequence and self.gathers_again else forward) + again
        if self.overlaps_tensor:
            return _exposed(forward, matmuls, TENSOR_PIECES), _exposed(backward, 2 * matmuls, TENSOR_PIECES)
        return forward, _exposed(backward, weights, 1) if self.overlaps_tensor_backward else backward

    def traffic(self, plan: Plan, compute_bytes: int, weight_bytes: int) -> StateTraffic:
        ours = super().traffic(plan, compute_bytes, weight_bytes)
        return StateTraffic(
            self.reduce_bytes or ours.reduce_bytes,
            self.gather_bytes or ours.gather_bytes,
            ours.overlaps_reduce and self.overlaps_reduce,
            ours.overlaps_gather and self.overlaps_gather,
        )

    @property
    def tied_bytes(self) -> int:
        return self.reduce_bytes or Stack.tied_bytes

    def update_bytes(self, update: float, elements: float) -> float:
        update *= 1.0 if self.fused_optimizer else FOREACH
        return update if self.casts_gathered else update + elements * 6  # the 16-bit weights beside the masters

    def stage_bytes(self, size: float, tp: int, sequence: bool) -> float:
        return size / tp if self.scatters_sends and not sequence else size

    # Memory ---------------------------------------------------------------------------------------------------------

    def rank_states(self, share: RankShare, groups: Groups, plan: Plan, optimizer: str) -> RankStates | None:
        """Weights whole in 16 bits, a buffer for all gradients, fp32 masters with the moments. Stage 1 shares the last
        out, stage 2 the buffer too."""
        if not self.half_weights or plan.zero == 3:
            return None
        compute, whole = COMPUTE_BYTES[plan.precision], groups.whole.trained
        experts = share.spread_parameters
        sharded = (whole - experts) / plan.state_shards + experts / plan.expert_shards if plan.zero else whole
        stands_in = self.stand_ins and not share.spec.is_moe
        buffer = int((self.gradient_bytes or compute) * (sharded if plan.zero > 1 else whole))
        buffer += self.bucket_bytes * whole if plan.dp * plan.cp > 1 else 0
        return RankStates(
            weights=compute * whole,
            gathered=compute * (max(share.layer_parameters) + share.head) if stands_in else 0,
            gradients=buffer,
            accumulated=buffer,
            optimizer=int(sharded * (MASTER_BYTES + state_bytes(optimizer, "fp32"))),
            reduced=0,
            arriving=compute * whole if self.bucket_bytes else 0,
            stepping=int(self.step_bytes * sharded),
        )

    @property
    def holds_gathered(self) -> bool:
        return not self.gathers_again or (self.lingers and self.published == "reserved")

    def more_kept(self, spec: ModelSpec, seq_len: int, token_parts: int) -> int:
        found = spec.hidden // token_parts if self.dropout else 0  # two masks, of half an element each
        if self.attention == "math" and not spec.attention_softcap:
            found += _scores(spec, seq_len)
        if self.keys_twice and spec.attention.fused and spec.num_heads == spec.num_kv_heads:
            found += 2 * spec.num_kv_heads * spec.head_dim
        return found

    def selected(
        self, spec: ModelSpec, ffn: int, seq_len: int, token_parts: int, whole: Callable[[], int]
    ) -> int | None:
        if self.selective == "attention":  # of the scores nothing, of the rest everything
            return whole() - (_scores(spec, seq_len) if self.attention == "math" else 0)
        if self.selective != "per-op":
            return None
        # torchtitan's list: every second matmul (queries, values, gate, and the end, which a compiler drops), attention
        # and the input.
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        end = 0 if self.compiled else spec.hidden
        return spec.hidden // token_parts + 2 * queries + keys + spec.num_heads + ffn + end

    def loss_bytes(self, num_tokens: int, vocab: int, is_cut: bool) -> int | None:
        if not self.logit_bytes:
            return None
        return int((self.cut_logit_bytes if is_cut and self.cut_logit_bytes else self.logit_bytes) * num_tokens * vocab)

    def reserved(self, parts: dict[str, int], spec: ModelSpec, plan: Plan, size: int) -> dict[str, int]:
        """With the buffers that are there at every moment (sequence parallelism cuts tokens, not these), and what the
        allocator keeps."""
        tokens = plan.micro_batch * plan.seq_len // plan.cp
        found = dict(parts)
        found["gathered"] += self.region_buffers * tokens * spec.hidden * size if plan.sequence else 0
        if self.published != "allocated":
            found["allocator"] += int(RESERVED_SHARE * (sum(found.values()) - found["process"]))
        return found


def _scores(spec: ModelSpec, seq_len: int) -> int:
    """The softmax, a byte of its dropout's mask, and what is left of it: 5 bytes per head and pair of tokens in 16
    bits."""
    return 5 * spec.num_heads * seq_len // 2


def _drop_bytes(size: float, element: int = 2) -> float:
    """Bytes of a dropout over a tensor of `size` bytes: read, write, and a mask of one byte per element."""
    return 2.0 * size + size / element


def _exposed(collectives: float, beside: float, pieces: int) -> float:
    """Seconds that collectives add to computing that runs beside them."""
    first = collectives / pieces if pieces > 1 else 0.0
    hidden = min(collectives - first, beside)
    return collectives - hidden + SLOWED * hidden


# Files ----------------------------------------------------------------------------------------------------------------


@cache
def load_stack(name: str) -> ForeignStack:
    """The framework that NAME.toml describes."""
    values: dict[str, Any] = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    check_fields(values, f"{name}.toml")
    return ForeignStack(**values)


def check_fields(values: Mapping[str, Any], where: str) -> None:
    """Refuses a key that a `ForeignStack` does not have."""
    names = [field.name for field in fields(ForeignStack)]
    for name in values:
        if name not in names:
            raise UserError(
                f"unknown key `{name}`",
                why=f"a ForeignStack has: {', '.join(names)}",
                fix="correct the key",
                where=where,
            )
