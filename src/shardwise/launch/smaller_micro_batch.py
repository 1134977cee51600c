"""Starts a run anew with a smaller micro-batch after memory ran out, where `run.on_out_of_memory` asks for it.

The global batch stays what it is, and so do the losses: they are sums over the step's tokens, however it is cut. Ranks
begin anew, from the newest checkpoint: one that ran out of memory in the middle of a step has left the others in a
collective that it will never join. Invariant: each start takes at most half of the sequences of the one before, so
there are few.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.plan.resolve.usual import micro_batch_sizes
from shardwise.run.rundir import RunDir
from shardwise.spec.plan import Plan
from shardwise.terminal import counted, say

if TYPE_CHECKING:
    from shardwise.launch.start import PlannedRun


def with_smaller_micro_batch(run: RunDir, planned: PlannedRun) -> PlannedRun | None:
    """Returns the run as it is to be started after its memory ran out; None where it is not, or there is nothing
    smaller."""
    if planned.config.run.on_out_of_memory != "smaller" or not planned.corpus.can_begin_anew:
        return None
    plan = Plan.from_dict(run.read_plan())  # which has the size that ranks have found
    size = next((size for size in micro_batch_sizes(plan) if 2 * size <= plan.micro_batch), None)
    if size is None:
        say("memory   micro-batches of one sequence cannot be smaller")
        return None
    say(f"memory   starting again with micro-batches of {counted(size, 'sequence')} in place of {plan.micro_batch}:")
    say("         slower, with the same losses (run.on_out_of_memory)")
    planned.corpus.begin_anew()
    gc.collect()  # what the run before held in this process
    origins = {**planned.origins, "train.micro_batch": "run.on_out_of_memory"}
    config = replace(planned.config, train=replace(planned.config.train, micro_batch=size))
    return replace(planned, config=config, plan=replace(plan, micro_batch=size), origins=origins, known_origins=origins)
