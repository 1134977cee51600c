"""Any `nn.Module` with a list of blocks, split over the processes of a job: found, checked, handed to split_module.py.

    split = parallelize(module, "dp=2 zero=3", blocks="model.layers")
    optimizer = torch.optim.AdamW(split.parameters())
    done = split.gradients(microbatches, loss, clip=1.0)      loss(model, microbatch) -> (sum, count)
    optimizer.step()

Invariant: what cannot work is refused here, before anything is split or sent.
"""

from __future__ import annotations

import atexit
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.adapters.lora import adapt, module_adapters
from shardwise.errors import UserError
from shardwise.model.dtypes import KEPT
from shardwise.parallel.any_module.split_module import SplitModule
from shardwise.parallel.mesh import build_mesh
from shardwise.spec.fp8 import check_float8_base
from shardwise.spec.layout import parse_layout
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig

CUT_AXES = ("tp", "pp", "cp", "ep")
LEAVE_S = 0.3
"""Seconds that gloo's threads have to let go of what they hold when a script ends."""


def parallelize(
    module: nn.Module,
    plan: Plan | str,
    blocks: str = "model.layers",
    device: torch.device | str | None = None,
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008  (frozen)
    seed: int = 0,
) -> SplitModule:
    """Splits a module with weights over the processes of this job, in place, and returns it as this rank holds it.
    Every rank calls it; the weights are those of rank 0.

    plan      a `Plan`, or a layout such as "dp=2 zero=3"; without dp all processes share
    blocks    the path of the module's list of blocks: each block is one unit that ZeRO gathers
    device    where the module shall live; default: where it is
    adapter   trains LoRA or QLoRA beside its linear layers instead of all weights; `seed` draws their first values
    """
    found = find_blocks(module, blocks)
    _refuse_cut_axes(plan)
    devices = {tensor.device.type for tensor in module.parameters()}
    if "meta" in devices or not devices:
        raise UserError(
            "the module has no weights" if devices else "the module has no parameters",
            why="it was built on the `meta` device; buffers that no checkpoint holds would be lost"
            if devices
            else "there is nothing to train",
            fix="build it without `torch.device('meta')`",
        )  # fmt: skip
    home = torch.device(device) if device is not None else next(module.parameters()).device
    rank, world = _join(home)
    if isinstance(plan, str):
        precision = next((name for name, kept in KEPT.items() if kept == next(module.parameters()).dtype), "fp32")
        plan = Plan.from_layout(plan, world=world, precision=precision, device=home.type)
    _check(module, plan, world, blocks)
    check_float8_base(plan.precision, adapter.kind, plan.zero, plan.offload)
    mesh = build_mesh(plan, None, rank, home, fsdp=plan.uses_fsdp)
    if world > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            _take_from_first(tensor, home)
    adapt(module, module_adapters(module, blocks, adapter, seed, plan.precision))
    return SplitModule(module, mesh, [[block] for block in found])


def find_blocks(module: nn.Module, path: str) -> list[nn.Module]:
    """Returns the blocks of the list (or dict) of modules at a path, in order."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)}
    if path not in lists:
        there = ", ".join(f"{name!r} ({len(found)})" for name, found in lists.items())
        longest = max(lists, key=lambda name: len(lists[name]), default="")
        raise UserError(
            f"the module has no list of blocks at {path!r}",
            why=f"its lists are: {there}" if lists else "it has no nn.ModuleList or nn.ModuleDict with modules in it",
            fix=f"blocks={longest!r}" if lists else "put its blocks into an nn.ModuleList",
        )
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
            fix="dp with zero=3 holds the least per rank; `shardwise train` has tp, pp, cp, ep for models of its own",
        )


def _join(device: torch.device) -> tuple[int, int]:
    """Returns the rank and the number of processes. Under torchrun it starts the process group if the script has
    not."""
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _leave() -> None:
    """Leaves the process group before the interpreter ends. gloo's threads let go of the last collective a moment after
    it is done, for which they take the interpreter's lock; one that asks for it while the interpreter ends aborts the
    process ("terminate called without an active exception"; one in fifteen scripts on busy cores, torch 2.13)."""
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LEAVE_S)


def _check(module: nn.Module, plan: Plan, world: int, blocks: str) -> None:
    if plan.world != world:
        raise UserError(
            f"this job has {world} process{'es' if world > 1 else ''}, {plan.layout} needs {plan.world}",
            why="every rank of a layout is a process",
            fix=f"torchrun --nproc-per-node={plan.world} ..., or dp={world}",
        )
    if plan.precision == "fp16-true":
        raise UserError(
            "fp16-true is not for hand-written loops",
            why="torch's optimizers would keep their state in fp16, where Adam's second moment vanishes",
            fix="fp16 in the layout, which keeps fp32 weights, or bf16-true",
        )
    kept = KEPT[plan.precision]
    others = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dtype != kept}
    if others:
        name = str(kept).removeprefix("torch.")
        raise UserError(
            f"the module's weights are {' and '.join(sorted(others))}, {plan.precision} keeps {name}",
            why="all weights of a module are kept in one number format, which the plan says",
            fix=f"module.to({kept}), or another precision in the layout",
        )
    if not plan.uses_fsdp:
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
                why="a block's parameters are gathered and dropped together: ties are possible within a block or "
                "outside of all",
                fix="a layout with zero=0, in fp32",
            )


def _take_from_first(tensor: Tensor, device: torch.device) -> None:
    """Collective. Overwrites a tensor with rank 0's values, as torch's DDP does: ranks need not have drawn the same."""
    values = tensor.detach().to(device).contiguous()
    dist.broadcast(values, 0)
    tensor.detach().copy_(values)
