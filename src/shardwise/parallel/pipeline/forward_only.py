"""Passes through a pipeline without backward: evaluation and generation.

Evaluation sends as training does (send_receive.py), one micro-batch after the other through all stages. Generation
hands one tensor from stage to stage and waits for each: one token has nothing to overlap with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Hidden
from shardwise.parallel.pipeline.execute import Pipeline, loss_sums
from shardwise.parallel.pipeline.send_receive import Table, needed_by, sent_by
from shardwise.spec.actions import Action


@torch.no_grad()
def evaluate(pipeline: Pipeline, microbatches: Sequence[Any]) -> Tensor:
    """Collective. Returns this rank's summed losses of all micro-batches, of shape (3,) in fp64: cross-entropy,
    auxiliary, z."""
    table = forward_table(pipeline.owners, pipeline.plan.pp, len(microbatches))
    p2p = pipeline.point_to_point(table, microbatches[0].tokens.shape)
    sums = torch.zeros(3, dtype=torch.float64, device=pipeline.mesh.device)
    for action in table[pipeline.mesh.at.pp]:
        micro, needed = microbatches[action.microbatch], needed_by(action, pipeline.num_stages)
        x_BTD = p2p.receive(needed) if needed else None
        output = pipeline.stages[action.stage].model(
            micro.tokens, micro.targets, documents_BT=micro.documents, x_BTD=x_BTD, rows_B=micro.row_numbers
        )
        sums += loss_sums(output)
        if sent := sent_by(action, pipeline.num_stages):
            p2p.send(sent, output.x_BTD)
    p2p.flush()
    return sums


@torch.no_grad()
def logits(pipeline: Pipeline, tokens_BT: Tensor, caches: dict[int, KeyValueCache]) -> Tensor:
    """Collective. Returns the logits (B, V) of the last token of every row, on every rank of the pipeline."""
    x_BTD: Any = None
    for index, owner in enumerate(pipeline.owners):
        if index and owner != pipeline.owners[index - 1]:
            x_BTD = _hand_over(pipeline, x_BTD, pipeline.owners[index - 1], owner, tokens_BT)
        if owner == pipeline.mesh.at.pp:
            output = pipeline.stages[index].model(tokens_BT, cache=caches[index], x_BTD=x_BTD)
            x_BTD = output.x_BTD if isinstance(output, Hidden) else output
    logits_BV = x_BTD[:, -1].float() if pipeline.owners[-1] == pipeline.mesh.at.pp else None
    if pipeline.mesh.pp is None:
        assert logits_BV is not None
        return logits_BV
    if logits_BV is None:
        logits_BV = torch.empty(tokens_BT.shape[0], pipeline.spec.vocab, device=pipeline.mesh.device)
    dist.broadcast(logits_BV, pipeline.mesh.stage_rank(pipeline.owners[-1]), group=pipeline.mesh.pp)
    return logits_BV


def new_caches(pipeline: Pipeline, max_len: int) -> dict[int, KeyValueCache]:
    """Returns empty key-value caches for `max_len` tokens, by stage of this rank."""
    return {index: KeyValueCache(max_len) for index in pipeline.stages}


def _hand_over(
    pipeline: Pipeline, x_BTD: Tensor | None, sender: int, receiver: int, tokens_BT: Tensor
) -> Tensor | None:
    if sender == pipeline.mesh.at.pp:
        assert x_BTD is not None
        dist.send(x_BTD.contiguous(), pipeline.mesh.stage_rank(receiver), group=pipeline.mesh.pp)
    elif receiver == pipeline.mesh.at.pp:
        x_BTD = torch.empty(*tokens_BT.shape, pipeline.spec.hidden, dtype=pipeline.dtype, device=pipeline.mesh.device)
        dist.recv(x_BTD, pipeline.mesh.stage_rank(sender), group=pipeline.mesh.pp)
    return x_BTD


def forward_table(owners: tuple[int, ...], pp: int, num_microbatches: int) -> Table:
    """Returns the actions of each rank in an evaluation: every micro-batch goes forward through all stages."""
    return tuple(
        tuple(
            Action("F", stage, micro)
            for micro in range(num_microbatches)
            for stage, owner in enumerate(owners)
            if owner == rank
        )
        for rank in range(pp)
    )
