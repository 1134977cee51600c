"""A module as one rank holds it, for a hand-written loop: replicas, ZeRO 1, 2 and 3, hybrid, accumulation.

The sum rule holds here too: a loss is a *sum* over targets and comes with their count. Gradients are only ever added,
over micro-batches and ranks, and divided once by the count of the whole step. So how rows are cut into ranks and
micro-batches cannot change the result. What is inside the module is its own business: it is never cut, only held
in rows. Read next: zero/sharding.py, data/replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.optim.loss_scaling import clip_factor, scaler_of
from shardwise.optim.offload.choose import offloaded_optimizer
from shardwise.optim.offload.nvme_model import NvmeModel
from shardwise.optim.offload.optimizer import Build, OffloadedOptimizer
from shardwise.parallel.any_module.in_place import float8_in_place, split_in_place
from shardwise.parallel.collect import collect, optimizer_states, put_optimizer_states, share
from shardwise.parallel.data.replicas import BUCKET_BYTES, Replicated
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.shards import shards_of, squared_norm
from shardwise.parallel.traffic import Traffic
from shardwise.parallel.zero.sharding import Groups, Sharded, serve_parameters

Loss = Callable[[Any, Any], tuple[Tensor, int]]
"""Called with (model, micro-batch), returns the sum of the loss over its targets, and how many targets there are."""


class Step(NamedTuple):
    """One step over all ranks: the mean loss per target, the gradient norm before clipping, the number of targets."""

    loss: float
    norm: float
    targets: int
    skipped: bool = False  # fp16 overflowed: there are no gradients, and torch's optimizers pass over such parameters


class SplitModule:
    """A module as this rank holds it. Every method but `parameters` is called by all ranks together."""

    def __init__(self, module: nn.Module, mesh: Mesh, groups: Groups):
        self.module, self.mesh, self.plan, self.traffic = module, mesh, mesh.plan, Traffic()
        self.rank, self.world = mesh.rank, mesh.plan.world
        self.scaler, self.float8 = scaler_of(mesh.plan), float8_in_place(module, groups, mesh)
        self.wrapper = split_in_place(module, groups, mesh, self.traffic, BUCKET_BYTES[mesh.plan.device])
        self.shards = shards_of(module, mesh, None)
        self._offloaded: OffloadedOptimizer | None = None
        self._in_last_backward = False

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns this rank's share of the parameters as plain tensors, for any torch optimizer."""
        return (shard.local for shard in self.shards)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns the same parameters with their names in the module."""
        return ((shard.name, shard.local) for shard in self.shards)

    def optimizer(self, build: Build) -> torch.optim.Optimizer:
        """Returns the optimizer that `build(parameters)` makes, a torch optimizer. With `offload` in the layout its
        state and update are in CPU memory or on a disk; it must then treat every element alike, which all of torch's do
        but Adafactor, LBFGS and Muon."""
        if self.plan.offload == "none":
            return build(self.parameters())
        optimizer = self._offloaded = offloaded_optimizer(self.shards, build, self.plan, self.mesh.device)
        if self.wrapper.completes_in_backward:
            optimizer.stream_gradients(self.shards, lambda: self._in_last_backward)
        if isinstance(optimizer, NvmeModel):
            serve_parameters(optimizer, self.module, self.shards)
        return optimizer

    # One step --------------------------------------------------------------------------------------------------------

    def gradients(self, microbatches: Sequence[Any], loss: Loss, clip: float | None = None) -> Step:
        """Runs forward and backward of this rank's micro-batches and returns the step's loss and gradient norm. The
        gradients of `parameters()` are then those of the mean loss over all ranks, clipped to a global norm of `clip`.
        Earlier gradients are dropped: there is no need for `zero_grad`. With fp16 the loss is scaled inside; `scaler`
        holds the scale, for whoever saves it."""
        self._forget_gathered()
        for shard in self.shards:
            shard.forget_gradient()
        sent = self.traffic.num_bytes
        total = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)  # squared norm, loss, targets
        turns = self._turns(microbatches)
        for turn, (micro, weight) in enumerate(turns, 1):
            last = turn == len(turns)
            self.wrapper.before_forward(last=last)
            value, count = _checked(loss(self.wrapper.forward, micro))
            self.wrapper.before_backward("B", last=last)
            self._in_last_backward = last
            (value * weight * self.scaler.scale).backward()
            self.wrapper.after_backward("B", last=last)
            total[1:] += torch.stack([value.detach().double(), total.new_tensor(count)]) * weight
        self.wrapper.finish()
        self._check_replicas(self.traffic.num_bytes - sent)
        return self._finish(total, clip)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any], loss: Loss) -> float:
        """Returns the mean loss per target over all ranks, without gradients. Dropout and the like are switched off by
        the module's own `eval()`."""
        self._forget_gathered()
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for micro, weight in self._turns(microbatches):
            value, count = _checked(loss(self.module, micro))
            total += torch.stack([value.double(), total.new_tensor(count)]) * weight
        value, count = self._over_ranks(total).tolist()
        return value / max(count, 1)

    @torch.no_grad()
    def _finish(self, total: Tensor, clip: float | None) -> Step:
        for shard in self.shards:
            if shard.local is not shard.parameter:
                shard.local.grad = shard.gradient_here
        gradients = [gradient for shard in self.shards if (gradient := shard.gradient_here) is not None]
        total[0] = squared_norm(self.shards).to(total.device)
        squared, value, count = self._over_ranks(total)
        count = count.clamp(min=1)
        norm = squared.sqrt() / count / self.scaler.scale
        skipped = self.scaler.overflowed(norm)
        factor = clip_factor(norm, clip, self.scaler.scale) / count
        if skipped:
            for shard in self.shards:
                shard.forget_gradient()
        elif self._offloaded is not None:
            self._offloaded.grad_factor = factor
        else:
            for dtype in {gradient.dtype for gradient in gradients}:
                torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
        self.scaler.update(overflowed=skipped)
        return Step(float(value / count), float(norm), int(count), skipped)

    def _turns(self, microbatches: Sequence[Any]) -> list[tuple[Any, float]]:
        """Returns the micro-batches of this rank with their weights, equally many on every rank: else one would wait
        forever for the others' collectives. A rank with fewer repeats its last one with weight 0, which adds nothing.
        """
        found = torch.tensor([len(microbatches), -len(microbatches)], device=self.mesh.device)
        if self.world > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        most, least = int(found[0]), -int(found[1])
        if least < 1:
            raise UserError(
                "a rank has no micro-batch in this step",
                why="every rank computes at least one, because they meet in every forward and backward pass",
                fix="a batch with at least one row per rank",
            )
        repeated = [(microbatches[-1], 0.0)] * (most - len(microbatches))
        return [*((micro, 1.0) for micro in microbatches), *repeated]

    def _over_ranks(self, sums: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(sums)
        return sums

    def _forget_gathered(self) -> None:
        """Drops the parameters that an earlier forward pass has gathered: they may be older than the optimizer's last
        update."""
        if isinstance(self.wrapper, Sharded):
            self.wrapper.forget_gathered()

    def _check_replicas(self, num_bytes: int) -> None:
        """Refuses a step in which DDP has not summed the gradients of all parameters; DDP itself would only complain in
        the next step. `num_bytes` are those of the gradients that were summed."""
        trained = {shard.name: shard.parameter for shard in self.shards if shard.parameter.requires_grad}
        if not isinstance(self.wrapper, Replicated) or num_bytes == sum(p.nbytes for p in trained.values()):
            return
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if not unused and not num_bytes:
            raise UserError(
                "the replicas' gradients were not summed",
                why="the loss was not computed by the model that the loss function is given",
                fix="`def loss(model, microbatch)` must call `model`, not the module itself",
            )
        without = "are " + ", ".join(unused[:4]) if unused else "is the last micro-batch"
        raise UserError(
            "some parameters take no part in the loss",
            why=f"replicas sum all gradients or none; without one {without}",
            fix="`requires_grad_(False)` for parameters that are not trained, or a layout with zero=1",
        )

    # Whole tensors ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the module's own `state_dict()` would be if it was not split, on the CPU of rank 0; other ranks
        get an empty dictionary."""
        whole = collect(self, lambda shard: {shard.name: shard.value})
        return {name: whole[own] if own else value.detach().cpu() for name, own, value in self._names() if whole}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads rank 0's full state into every rank's share, tensor by tensor. The argument of other ranks is
        ignored."""
        table = {shard.name: shard for shard in self.shards}
        places = {name: (own, value) for name, own, value in self._names()}
        self._check_names(state, set(places))
        for name, full in share(state, self.mesh):
            own, value = places[name]
            if own:
                table[own].put(full)
            else:
                value.copy_(full)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns the state of an optimizer over `parameters()` as one process would have it: full tensors by
        "exp_avg/NAME", on the CPU of rank 0; other ranks get an empty dictionary."""
        return collect(self, optimizer_states(optimizer))

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """Loads rank 0's full optimizer state, also one saved in another layout, into every rank's optimizer."""
        table = {shard.name: shard for shard in self.shards}
        self._check_names({key.split("/", 1)[-1]: value for key, value in state.items()}, set(table), complete=False)
        put_optimizer_states(self, optimizer, share(state, self.mesh))

    def _names(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yields (name in the state dict, name in the table of shards or None for a buffer, tensor) of each tensor; a
        tied weight has several names."""
        own = {id(shard.parameter): shard.name for shard in self.shards}
        for name, value in self.module.state_dict(keep_vars=True).items():
            yield name, own.get(id(value)), value

    def _check_names(self, state: dict[str, Tensor], names: set[str], *, complete: bool = True) -> None:
        wrong = sorted(state.keys() ^ names if complete else state.keys() - names) if self.rank == 0 else []
        if self.mesh.agree(len(wrong)):
            raise UserError(
                "this state is not the module's",
                why=f"missing or left over: {', '.join(wrong[:6]) or 'rank 0 has their names'}",
                fix="load the state of the same module",
            )


def _checked(result: Any) -> tuple[Tensor, int]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].ndim == 0:
        return result[0], int(result[1])
    raise UserError(
        f"the loss function returned {type(result).__name__}, not (sum, count)",
        why="gradients are summed over ranks and divided once by the number of targets of the whole step",
        fix='for example `return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()`',
    )
