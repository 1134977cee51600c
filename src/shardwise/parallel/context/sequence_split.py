"""Context parallelism: the ranks of a line share every sequence, each with 1/P of its tokens.

Owns which tokens a rank keeps and how a plain decoder gets them: the rank's tokens, targets and positions go in, and
attention, the only place where tokens meet, is computed by ring.py or ulysses.py. Invariants: every rank is handed
the same whole rows, and what it computes of the loss is the sum over its own tokens, so sums over ranks are those of
one process. Generation, one token at a time, is not split: every rank computes all of it.

    split    the tokens of every sequence, also for ZeRO, whose states are spread over these ranks too
    held     activations of 1/P of the tokens; all parameters, unless ZeRO shards them
    sent     ring: keys and values to the next rank, in every layer; ulysses: two all-to-alls per layer
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.attention import AttentionInputs
from shardwise.model.attention_kernels import check_kernel_device
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Decoder
from shardwise.model.experts import moe_layers
from shardwise.model.masking import Mask
from shardwise.model.replacement import become
from shardwise.parallel.context.ring import Ring, ring_attention
from shardwise.parallel.context.ulysses import ulysses_attention
from shardwise.parallel.context.zigzag import AttentionView, Zigzag
from shardwise.parallel.expert.dispatch import SplitMixture
from shardwise.parallel.tensor.collectives import all_gather, all_reduce
from shardwise.parallel.traffic import Wait, unseen

FORWARD = signature(Decoder.forward)


@dataclass(eq=False)
class ContextParallel:
    """The ranks that share the sequences."""

    group: dist.ProcessGroup
    kind: str  # ring | ulysses
    wait: Wait = unseen  # around each of their collectives
    ring: Ring = field(init=False)
    row: WholeRow | None = field(init=False, default=None)
    """The whole sequences of the pass that runs now; None where it is not split."""
    is_checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.ring = Ring(self.group, self.wait)

    @property
    def size(self) -> int:
        """Returns the number of ranks that share each sequence."""
        return self.ring.size

    def take(self, x_BT: Tensor) -> Tensor:
        """Returns this rank's tokens, of shape (B, T / size)."""
        if self.kind == "ulysses":
            return x_BT.chunk(self.size, dim=1)[self.ring.index]
        return Zigzag(self.size, self.ring.index, x_BT.shape[1]).take(x_BT)


@dataclass(frozen=True)
class WholeRow:
    """What every rank knows of the whole sequences of a pass."""

    positions_BT: Tensor
    documents_BT: Tensor | None
    targets_BT: Tensor


def apply_context_parallel(model: Decoder, cp: ContextParallel) -> None:
    """Makes a decoder compute this rank's tokens of every sequence, in place, before tensor parallelism; no parameter
    is cut. The model may be a part, or on `meta`."""
    model.register_forward_pre_hook(partial(_begin_pass, cp), with_kwargs=True)
    become(model, ContextDecoder, cp=cp)
    for layer in moe_layers(model):
        become(layer, SplitMixture, sum_counts=partial(all_reduce, group=cp.group, wait=cp.wait))


class ContextDecoder(Decoder):
    """A decoder on a rank that has a part of the tokens of every sequence."""

    cp: ContextParallel

    def prepare_masks(
        self, positions_BT: Tensor, documents_BT: Tensor | None, cache: KeyValueCache | None
    ) -> dict[int, AttentionInputs]:
        cp = self.cp
        if cp.row is None:
            return super().prepare_masks(positions_BT, documents_BT, cache)
        if cp.kind == "ring":
            return _ring_inputs(self, cp, cp.row)
        inputs = super().prepare_masks(cp.row.positions_BT, cp.row.documents_BT, None)
        return {
            index: replace(one, attend=partial(ulysses_attention, cp.group, wait=cp.wait))
            for index, one in inputs.items()
        }

    def count_targets(self, targets_BT: Tensor) -> Tensor:
        return super().count_targets(targets_BT if self.cp.row is None else self.cp.row.targets_BT)


def _ring_inputs(model: Decoder, cp: ContextParallel, row: WholeRow) -> dict[int, AttentionInputs]:
    """Returns the attention inputs of each layer for ring attention, without masks: each block makes its own when it is
    computed."""
    num_tokens, device = row.targets_BT.shape[1], row.targets_BT.device
    check_kernel_device(model.kernel, device.type)
    place, nothing = Zigzag(cp.size, cp.ring.index, num_tokens), Mask(is_causal=False)
    views: dict[int | None, AttentionInputs] = {}
    inputs = {}
    for index in map(int, model.layers):
        window = model.spec.layers[index].window
        window = window if window is not None and window < num_tokens else None
        if window not in views:
            view = AttentionView(place, window, row.documents_BT, device)
            views[window] = AttentionInputs(nothing, None, attend=partial(ring_attention, cp.ring, view))
        inputs[index] = views[window]
    return inputs


def _begin_pass(
    cp: ContextParallel, model: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the decoder's arguments by this rank's tokens, if the pass computes a loss. Other passes are not split,
    because every rank needs their results for every token."""
    given = FORWARD.bind(model, *args, **kwargs).arguments
    del given["self"]
    cp.row = None
    if given.get("cache") is not None or given.get("targets_BT") is None:
        return (), given
    tokens_BT, positions_BT = given["tokens_BT"], given.get("positions_BT")
    _check_rows(cp, tokens_BT)
    if positions_BT is None:
        positions_BT = model.default_positions(tokens_BT, None)
    cp.row = WholeRow(positions_BT, given.get("documents_BT"), given["targets_BT"])
    given["positions_BT"] = positions_BT
    for name in ("tokens_BT", "targets_BT", "positions_BT", "documents_BT"):
        if given.get(name) is not None:
            given[name] = cp.take(given[name])
    return (), given


def _check_rows(cp: ContextParallel, tokens_BT: Tensor) -> None:
    num_tokens, parts = tokens_BT.shape[1], cp.size * (2 if cp.kind == "ring" else 1)
    if num_tokens % parts:
        raise UserError(
            f"{num_tokens} tokens cannot be shared by cp={cp.size} ranks ({cp.kind})",
            why=f"{num_tokens} / {parts} is not whole: every rank takes equal pieces of every sequence",
            fix=f"choose train.seq_len divisible by {parts}",
        )
    if cp.is_checked:
        return
    cp.is_checked = True  # once: the same loader makes all later rows
    mine = torch.tensor([*tokens_BT.shape, int(tokens_BT.sum())], device=tokens_BT.device)
    rows = [row.tolist() for row in all_gather(mine, cp.group, cp.wait)]
    if any(row != rows[0] for row in rows):
        shapes = ", ".join(f"{batch} x {length}" for batch, length, _ in rows)
        raise UserError(
            f"the cp={cp.size} ranks that share a sequence were given different rows",
            why=f"rows x tokens by rank: {shapes}; each must have the same whole rows, of which it takes its part",
            fix="give every context-parallel rank the batch of its data-parallel index, in one sequence length",
        )
