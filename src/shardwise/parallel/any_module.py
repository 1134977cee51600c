"""Any `nn.Module` with a list of blocks, split for a hand-written loop: replicas, ZeRO 1, 2 and 3, hybrid, accumulation.

    split = parallelize(module, "dp=2 zero=3", blocks="model.layers")
    optimizer = torch.optim.AdamW(split.parameters())
    done = split.gradients(microbatches, loss, clip=1.0)      loss(model, microbatch) -> (sum, count)
    optimizer.step()

The sum rule holds here too: a loss is a *sum* over targets and comes with their number. Gradients are only ever added, over
micro-batches and ranks, and divided once by the number of the whole step. So how rows are cut into ranks and micro-batches cannot
change the result. What is inside the module is its own business: it is never cut, only held in rows. Read next: zero.py, data.py.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.config.layout import parse_layout
from shardwise.errors import UserError
from shardwise.model.precision import KEPT
from shardwise.parallel.collect import collect
from shardwise.parallel.data import BUCKET_BYTES, GradientSums, Replicated, Traffic
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.shards import shards_of, squared_norm
from shardwise.parallel.zero import Groups, Sharded
from shardwise.plan.plan import Plan

Loss = Callable[[Any, Any], tuple[Tensor, int]]
"""Of (model, micro-batch): the sum of the loss over its targets, and how many targets there are."""

CUT_AXES = ("tp", "pp", "cp", "ep")


class Step(NamedTuple):
    """One step over all ranks: the mean loss per target, the norm of its gradient before clipping, the number of targets."""

    loss: float
    norm: float
    targets: int


class Split:
    """A module as this rank holds it. Every method but `parameters` is called by all ranks together."""

    def __init__(self, module: nn.Module, mesh: Mesh, groups: Groups):
        self.module, self.mesh, self.plan, self.traffic = module, mesh, mesh.plan, Traffic()
        self.rank, self.world = mesh.rank, mesh.plan.world
        self.sums = split_in_place(module, groups, mesh, self.traffic, BUCKET_BYTES[mesh.plan.device])
        self.shards = shards_of(module, mesh, None)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's share as plain tensors, for any torch optimizer."""
        return (shard.local for shard in self.shards)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((shard.name, shard.local) for shard in self.shards)

    # One step -----------------------------------------------------------------------------------------------------

    def gradients(self, microbatches: Sequence[Any], loss: Loss, clip: float | None = None) -> Step:
        """Forward and backward of this rank's micro-batches. The gradients of `parameters()` are then those of the mean loss over
        all ranks, clipped to a global norm of `clip`. What they were before is gone: there is no need for `zero_grad`."""
        self._forget_gathered()
        for shard in self.shards:
            shard.local.grad = shard.parameter.grad = None
        sent = self.traffic.num_bytes
        total = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)  # squared norm, loss, targets
        turns = self._turns(microbatches)
        for turn, (micro, weight) in enumerate(turns, 1):
            last = turn == len(turns)
            self.sums.before_forward(last=last)
            value, count = _checked(loss(self.sums.forward, micro))
            self.sums.before_backward("B", last=last)
            (value * weight).backward()
            self.sums.after_backward("B", last=last)
            total[1:] += torch.stack([value.detach().double(), total.new_tensor(count)]) * weight
        self.sums.finish()
        self._check_replicas(self.traffic.num_bytes - sent)
        return self._finish(total, clip)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any], loss: Loss) -> float:
        """The mean loss per target over all ranks, without gradients. Dropout and the like are the module's `eval()`."""
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
                shard.local.grad = shard.gradient
        gradients = [gradient for shard in self.shards if (gradient := shard.gradient) is not None]
        total[0] = squared_norm(self.shards).to(total.device)
        squares, value, count = self._over_ranks(total)
        count = count.clamp(min=1)
        norm = squares.sqrt() / count
        factor = (1.0 if clip is None else torch.clamp(clip / (norm + 1e-6), max=1.0)) / count
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
        return Step(float(value / count), float(norm), int(count))

    def _turns(self, microbatches: Sequence[Any]) -> list[tuple[Any, float]]:
        """Everybody goes through the same number of micro-batches, or somebody would wait forever. Who has fewer repeats one
        with weight 0, which changes nothing."""
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

    def _over_ranks(self, numbers: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def _forget_gathered(self) -> None:
        """Parameters that an earlier forward pass has gathered may be older than the optimizer's last update."""
        if isinstance(self.sums, Sharded):
            self.sums.forget_gathered()

    def _check_replicas(self, num_bytes: int) -> None:
        """torch's DDP says nothing when a gradient stays at home, until the next step."""
        trained = {shard.name: shard.parameter for shard in self.shards if shard.parameter.requires_grad}
        if not isinstance(self.sums, Replicated) or num_bytes == sum(p.nbytes for p in trained.values()):
            return
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if not unused and not num_bytes:
            raise UserError(
                "the replicas' gradients were not summed",
                why="the loss was not computed by the model that the loss function is given",
                fix="`def loss(model, microbatch)` must call `model`, not the module itself",
            )
        raise UserError(
            "some parameters take no part in the loss",
            why=f"replicas sum all gradients or none; without one {'are ' + ', '.join(unused[:4]) if unused else 'is the last micro-batch'}",
            fix="`requires_grad_(False)` for parameters that are not trained, or a layout with zero=1",
        )

    # Whole tensors ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What the module's own `state_dict()` was before it was split, on the CPU of rank 0; others get an empty one."""
        whole = collect(self, lambda shard: {shard.name: shard.local})
        return {name: whole[own] if own else value.detach().cpu() for name, own, value in self._names() if whole}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Rank 0's full state into everybody's share, tensor by tensor. What other ranks give is not looked at."""
        names, table = list(self._names()), {shard.name: shard for shard in self.shards}
        self._check_state(state, [name for name, _, _ in names])
        for name, own, value in names:
            shape = table[own].parameter.shape if own else value.shape
            full = torch.empty(shape, dtype=value.dtype, device=self.mesh.device)
            if self.rank == 0:
                full.copy_(state[name])
            if self.world > 1:
                dist.broadcast(full, 0)
            if own:
                table[own].put(full)
            else:
                value.copy_(full)

    def _names(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """(name in the state dict, name in the table of shards or None for a buffer, tensor); a tied weight has several names."""
        own = {id(shard.parameter): shard.name for shard in self.shards}
        for name, value in self.module.state_dict(keep_vars=True).items():
            yield name, own.get(id(value)), value

    def _check_state(self, state: dict[str, Tensor], names: list[str]) -> None:
        wrong = sorted(state.keys() ^ set(names)) if self.rank == 0 else []
        if self.mesh.agree(len(wrong)):
            raise UserError(
                "this state is not the module's",
                why=f"missing or left over: {', '.join(wrong[:6]) or 'rank 0 has their names'}",
                fix="load a state_dict of the same module",
            )


def _checked(result: Any) -> tuple[Tensor, int]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].ndim == 0:
        return result[0], int(result[1])
    raise UserError(
        f"the loss function returned {type(result).__name__}, not (sum, count)",
        why="gradients are summed over ranks and divided once by the number of targets of the whole step",
        fix='for example `return F.cross_entropy(logits, targets, reduction="sum"), targets.numel()`',
    )


# Splitting ------------------------------------------------------------------------------------------------------------


def parallelize(
    module: nn.Module, plan: Plan | str, blocks: str = "model.layers", device: torch.device | str | None = None
) -> Split:
    """Split a module with weights over the processes of this job, in place. Every rank calls it; rank 0's weights count.

    plan      a `Plan`, or a layout such as "dp=2 zero=3"; without dp all processes share
    blocks    where its list of blocks is: each block is one unit that ZeRO gathers
    device    where it shall live; default: where it is
    """
    found = find_blocks(module, blocks)
    _refuse_cut_axes(plan)
    devices = {tensor.device.type for tensor in module.parameters()}
    if "meta" in devices or not devices:
        raise UserError(
            "the module has no weights" if devices else "the module has no parameters",
            why="it was built on the `meta` device; buffers that no checkpoint holds would be lost" if devices else "there is nothing to train",
            fix="build it without `torch.device('meta')`",
        )  # fmt: skip
    home = torch.device(device) if device is not None else next(module.parameters()).device
    rank, world = _join(home)
    if isinstance(plan, str):
        precision = next((name for name, kept in KEPT.items() if kept == next(module.parameters()).dtype), "fp32")
        plan = Plan.from_layout(plan, world=world, precision=precision, device=home.type)
    _check(module, plan, world, blocks)
    mesh = build_mesh(plan, None, rank, home, fsdp=plan.zero > 0 or plan.precision == "bf16")
    if world > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            _take_from_first(tensor, home)
    return Split(module, mesh, [[block] for block in found])


def split_in_place(module: nn.Module, groups: Groups, mesh: Mesh, traffic: Traffic, bucket_bytes: int) -> GradientSums:
    """Replicas or shards of a module that has its weights. The groups stand in the order of a forward pass."""
    if mesh.fsdp is None:
        module.to(mesh.device)
        return Replicated(module, mesh.dp, bucket_bytes, traffic) if mesh.dp is not None else GradientSums(module)
    sums = Sharded(module, groups, mesh, traffic, keeps_last=True)
    module.to(mesh.device)  # buffers
    sums.root._get_fsdp_state()._lazy_init()  # from here on the sharded tensors stay where they are
    return sums


def find_blocks(module: nn.Module, path: str) -> list[nn.Module]:
    """The blocks of a list (or dict) of modules, in order."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)}
    if path not in lists:
        there = ", ".join(f"{name!r} ({len(found)})" for name, found in lists.items())
        raise UserError(
            f"the module has no list of blocks at {path!r}",
            why=f"its lists are: {there}" if lists else "it has no nn.ModuleList and no nn.ModuleDict with modules in it",
            fix=f"blocks={max(lists, key=lambda name: len(lists[name]))!r}" if lists else "put its blocks into an nn.ModuleList",
        )  # fmt: skip
    return list(lists[path].children())


def _refuse_cut_axes(plan: Plan | str) -> None:
    if isinstance(plan, str):
        words = {key.split(".")[1]: value for key, value in parse_layout(plan).items()}
    else:
        words = {axis: str(getattr(plan, axis, 1)) for axis in CUT_AXES}
    cut = [f"{axis}={words[axis]}" for axis in CUT_AXES if words.get(axis, "1") not in ("1", "auto")]
    if cut:
        raise UserError(
            f"{cut[0]} is not possible for a module that is not ours",
            why="it cuts inside of layers, or between them, and nobody here knows what this module does there",
            fix="dp with zero=3 holds the least per rank; `shardwise train` has tp, pp, cp and ep for models of its own",
        )


def _join(device: torch.device) -> tuple[int, int]:
    """Rank and number of processes; under torchrun the process group is started if the script has not done it."""
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _check(module: nn.Module, plan: Plan, world: int, blocks: str) -> None:
    if plan.world != world:
        raise UserError(
            f"this job has {world} process{'es' if world > 1 else ''}, {plan.layout} needs {plan.world}",
            why="every rank of a layout is a process",
            fix=f"torchrun --nproc-per-node={plan.world} ..., or dp={world}",
        )
    kept = KEPT[plan.precision]
    others = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype != kept}
    if others:
        raise UserError(
            f"the module's weights are {' and '.join(sorted(others))}, {plan.precision} keeps {str(kept).removeprefix('torch.')}",
            why="all weights of a module are kept in one number format, which the plan says",
            fix=f"module.to({kept}), or another precision in the layout",
        )
    if not plan.zero and plan.precision != "bf16":
        return
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise UserError(
                f"{name} is a single number without a dimension",
                why="ZeRO and bf16 hold parameters by rows",
                fix="give it the shape (1,), or a layout with zero=0 in fp32",
            )
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inside = name.removeprefix(f"{blocks}.")
        owners.setdefault(id(parameter), set()).add(inside.split(".")[0] if inside != name else "")
        if len(owners[id(parameter)]) > 1:
            raise UserError(
                f"{name} is tied to a weight of another block, or outside of the blocks",
                why="a block's parameters are gathered and dropped together, so ties are possible within a block or outside of all",
                fix="a layout with zero=0, in fp32",
            )


def _take_from_first(tensor: Tensor, device: torch.device) -> None:
    """Rank 0's values, as torch's DDP would do it; ranks need not have drawn the same ones."""
    values = tensor.detach().to(device).contiguous()
    dist.broadcast(values, 0)
    tensor.detach().copy_(values)
