"""The pipeline: runs a rank's list of actions (`spec/schedules.py`) over its stages of the model.

Every layout goes through here; without pipeline parallelism there is one stage and the list is F0 B0 F1 B1 … What is
drawn and simulated is this same list. torch's own pipeline runtime is not used: it forces its own idea of ZeRO on
every stage, learns shapes by hidden passes, carries no router losses, and its schedules refuse some numbers of
micro-batches (docs/axes/pipeline.md).

    F  forward          B  whole backward          I  backward towards the inputs          W  gradients of the weights
    E  forward of a held-out micro-batch, in a slot that would be idle: `side` of a step, see run/bubble_filling.py

    split    the layers, in stages; a rank has one or several
    held     its stages' parameters, and activations of as many micro-batches as the schedule has under way
    sent     activations up and gradients down at each border between stages (send_receive.py)

Read next: forward_only.py for passes without backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.model.decoder import Decoder, Hidden, Losses
from shardwise.parallel.data.replicas import DataParallelWrapper
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline.send_receive import PointToPoint, StageTensor, Table, needed_by, sent_by
from shardwise.parallel.pipeline.split_backward import Todo, deferring, finish
from shardwise.parallel.traffic import Traffic
from shardwise.spec.actions import NAMES, Action
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import schedule_actions, stage_owners


@dataclass
class Stage:
    """Consecutive layers that this rank has, and the wrapper that runs them."""

    index: int
    model: Decoder
    wrapper: DataParallelWrapper
    last_backward: Action | None = None  # of a step: the one after which gradients are complete
    in_last_backward: bool = False


@dataclass
class _Pass:
    """One micro-batch inside one stage, between its forward and its backward."""

    x_BTD: Tensor | None
    output: Losses | Hidden
    todo: Todo = field(default_factory=list)


Passes = dict[tuple[int, int], _Pass]
"""The passes that are under way, by stage and micro-batch."""


@dataclass
class Side:
    """Held-out micro-batches for the idle slots of one step. Nothing that training computes depends on them."""

    table: Table  # of the whole step: the schedule's own actions in their order, and E between them
    microbatches: Sequence[Any]
    losses: Tensor  # summed cross-entropy of each micro-batch, on the rank of the last stage


class Pipeline:
    """This rank's stages and its list of actions."""

    side: Side | None = None  # of the next step
    loss_scale = 1.0  # gradients come out as many times too large (optim/loss_scaling.py)

    def __init__(self, stages: list[Stage], mesh: Mesh, dtype: torch.dtype, traffic: Traffic):
        plan = mesh.plan
        self.stages = {stage.index: stage for stage in stages}
        self.mesh, self.dtype, self.traffic = mesh, dtype, traffic
        self.num_stages = plan.pp * plan.virtual_stages
        self.owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
        self.expect(plan.num_microbatches)

    @property
    def plan(self) -> Plan:
        """Returns the plan of the mesh."""
        return self.mesh.plan

    def expect(self, num_microbatches: int) -> None:
        """Makes the lists of actions for steps of this many micro-batches."""
        plan = self.plan
        self.last_microbatch = num_microbatches - 1
        self.table: Table = schedule_actions(plan.schedule, plan.pp, plan.virtual_stages, num_microbatches)
        self.actions = self.table[self.mesh.at.pp]
        # Whether a backward is split is a matter of each micro-batch: a schedule may have both kinds.
        self._split = {(action.stage, action.microbatch) for action in self.actions if action.kind == "I"}
        for action in self.actions:
            if action.kind in "BIW":
                self.stages[action.stage].last_backward = action

    def probe(self, micro: Any, clock: Any) -> None:
        """Collective. Runs forward and backward of one micro-batch through all stages. Its gradients are left for the
        caller to drop, and DDP does not see them: its buckets stay as they are."""
        self.expect(1)
        self.last_microbatch = -1  # none is the last, so nothing is summed before its time
        try:
            self.train([micro], 1, clock)
        finally:
            self.expect(self.plan.num_microbatches)

    def train(self, microbatches: Sequence[Any], num_targets: int, clock: Any) -> Tensor:
        """Runs forward and backward of all micro-batches and returns this rank's summed losses, of shape (3,):
        cross-entropy, auxiliary, z.

        Gradients are complete over data-parallel ranks when it returns."""
        self.traffic.clock = clock
        side, self.side = self.side, None
        table = side.table if side else self.table
        actions = table[self.mesh.at.pp]
        p2p = self.point_to_point(table, microbatches[0].tokens.shape)
        sums = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        passes: Passes = {}
        for number, action in enumerate(actions):
            stage = self.stages[action.stage]
            needed = needed_by(action, self.num_stages)
            for following in actions[number : number + 1 + AHEAD]:  # let tensors arrive while this action computes
                p2p.expect(needed_by(following, self.num_stages))
            received = self._receive(p2p, needed, clock, action) if needed else None
            kind = "bubble" if action.kind == "E" else "compute"  # for training, that time is idle
            with clock.span(kind, NAMES[action.kind], action.microbatch, action.stage):
                if action.kind == "E":
                    assert side is not None
                    handed_on = self._held_out(stage, action, side, received)
                else:
                    micro = microbatches[action.microbatch]
                    handed_on = self.perform(action, micro, received, passes, sums, num_targets)
            sent = sent_by(action, self.num_stages)
            if sent:
                assert handed_on is not None
                self._send(p2p, sent, handed_on, clock, action)
            if action == stage.last_backward:
                with clock.span("compute", "complete gradients", stage=action.stage):
                    stage.wrapper.finish()
        with clock.span("bubble", LAST_SENDS) if p2p.sending else nullcontext():
            p2p.flush()
        return sums

    def perform(
        self,
        action: Action,
        micro: Any,
        received: Tensor | None,
        passes: Passes,
        sums: Tensor,
        num_targets: int,
    ) -> Tensor | None:
        """Runs an action of training and returns what another stage needs of it. `passes` are those under way, and
        losses are added to `sums`."""
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        if action.kind == "F":
            done = passes[key] = self._forward(stage, action, micro, received)
            sums += loss_sums(done.output)
            return done.output.x_BTD.detach() if isinstance(done.output, Hidden) else None
        if action.kind == "W":
            finish(passes.pop(key).todo)
            stage.wrapper.after_backward("W", last=action == stage.last_backward)
            return None
        handed_on = self._backward(stage, action, passes[key], received, num_targets)
        if action.kind == "B":
            del passes[key]
        return handed_on

    def _forward(self, stage: Stage, action: Action, micro: Any, received: Tensor | None) -> _Pass:
        stage.wrapper.before_forward(last=action.microbatch == self.last_microbatch)
        x_BTD = None if received is None else received.requires_grad_()
        todo: Todo = []
        with deferring(todo) if (action.stage, action.microbatch) in self._split else nullcontext():
            output = stage.wrapper.forward(
                micro.tokens, micro.targets, documents_BT=micro.documents, x_BTD=x_BTD, rows_B=micro.row_numbers
            )
        return _Pass(x_BTD, output, todo)

    def _backward(
        self, stage: Stage, action: Action, done: _Pass, received: Tensor | None, num_targets: int
    ) -> Tensor | None:
        """Runs backward through one stage and returns the gradient for the stage before, of shape (B, T, D)."""
        last = action == stage.last_backward
        stage.wrapper.before_backward(action.kind, last=last)
        stage.in_last_backward = last
        targets = max(num_targets, 1)
        if isinstance(done.output, Losses):
            loss = torch.stack([part.to(done.output.cross_entropy) for part in done.output]).sum()
            (loss * self.loss_scale / targets).backward()
        else:
            roots, gradients = [done.output.x_BTD], [received]
            for loss in done.output[1:]:
                if loss.requires_grad:
                    roots.append(loss)
                    gradients.append(torch.full_like(loss, self.loss_scale) / targets)
            if roots[0].requires_grad:  # a first stage may be frozen as a whole
                torch.autograd.backward(roots, gradients)
        stage.in_last_backward = False
        stage.wrapper.after_backward(action.kind, last=last)
        done.output = None  # type: ignore[assignment]  # the graph is gone; with I only the noted pairs stay
        x_BTD, done.x_BTD = done.x_BTD, None
        return None if x_BTD is None else x_BTD.grad

    @torch.no_grad()
    def _held_out(self, stage: Stage, action: Action, side: Side, received: Tensor | None) -> Tensor | None:
        """Runs the forward pass of a held-out micro-batch and returns the activations (B, T, D) that the next stage
        needs; None from the last one."""
        micro = side.microbatches[action.microbatch]
        stage.model.training = False  # router counts are training's; no other module reads it, so it is set here only
        output = stage.wrapper.forward(micro.tokens, micro.targets, documents_BT=micro.documents, x_BTD=received)
        stage.model.training = True
        if isinstance(output, Hidden):
            return output.x_BTD
        side.losses[action.microbatch] = output.cross_entropy
        return None

    # Small parts -----------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """Returns the shape of the whole model."""
        return next(iter(self.stages.values())).model.spec

    def point_to_point(self, table: Table, shape_BT: Sequence[int]) -> PointToPoint:
        """Returns the sends and receives of one pass through a table of actions, with micro-batches of this shape."""
        batch, tokens = shape_BT
        tokens //= self.plan.cp * (self.plan.tp if self.plan.sequence else 1)
        shape = (batch, tokens, self.spec.hidden)
        return PointToPoint(self.mesh, table, self.owners, shape, self.dtype)

    def _receive(self, p2p: PointToPoint, needed: StageTensor, clock: Any, action: Action) -> Tensor:
        if not p2p.arrives(needed):
            return p2p.receive(needed)
        name = f"receive {WHAT[needed.kind]}"
        with clock.span("bubble", name, action.microbatch, action.stage, "pp", p2p.num_bytes):
            return p2p.receive(needed)

    def _send(self, p2p: PointToPoint, sent: StageTensor, tensor: Tensor, clock: Any, action: Action) -> None:
        if not p2p.leaves(sent):
            return p2p.send(sent, tensor)
        name = f"send {WHAT[sent.kind]}"
        with clock.span("other", name, action.microbatch, action.stage, "pp", p2p.num_bytes):
            p2p.send(sent, tensor)


AHEAD = 2
"""How many actions ahead a receive is posted, so that its tensor arrives while earlier actions compute."""

WHAT = {"x": "activations", "g": "gradients", "e": "held-out activations"}
LAST_SENDS = "last messages"  # the name of its span in event files


def loss_sums(output: Losses | Hidden) -> Tensor:
    """Returns the summed losses of one pass through a stage, of shape (3,) in fp64: cross-entropy (zero but on the last
    stage), auxiliary, z."""
    cross_entropy = output.cross_entropy if isinstance(output, Losses) else torch.zeros_like(output.aux)
    return torch.stack([part.detach().double() for part in (cross_entropy, output.aux, output.z)])
