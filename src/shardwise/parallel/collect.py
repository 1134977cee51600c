"""Whole tensors from all ranks' shards, on rank 0, and back: what checkpoints and proofs need.

Stage by stage: the ranks of one replica's (shard, tp) plane put each tensor together, and its first rank sends it to
rank 0. Nothing is pickled: what is sent is a JSON list of names, shapes and formats, then the tensors as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.optim.low_bit import dequantized
from shardwise.optim.offload.nvme import on_disk_copy
from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.shards import Shard, gather

Values = Callable[[Shard], dict[str, Tensor]]
"""Returns the local tensors of one shard by the name they get in the result: shaped like the shard, or scalars."""


class Holder(Protocol):
    """An engine, or a module that was parallelized: whoever has a table of shards."""

    mesh: Mesh
    shards: list[Shard]


def collect(engine: Holder, values: Values, extra: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Collective. Returns full tensors by name, on the CPU of rank 0; other ranks get an empty dictionary.

    `extra` are tensors that every rank of a stage has whole (buffers)."""
    mesh = engine.mesh
    keep = partial(on_disk_copy, directory=mesh.plan.offload_dir) if mesh.plan.offload_to == "nvme" else _to_cpu
    found: dict[str, Tensor] = {}
    if mesh.at.replicate and mesh.expert is None:  # the first replica speaks for all; experts may lie across replicas
        return {}
    for pp in range(mesh.plan.pp):
        sender = mesh.plan.rank_at(mesh.plan.coordinates(0)) + pp * (mesh.plan.world // mesh.plan.pp)
        whole: dict[str, Tensor] = {}
        if mesh.at.pp == pp:
            for shard in engine.shards:
                for name, value in sorted(values(shard).items()):
                    is_shard = value.ndim > 0 and value.shape == shard.local.shape
                    full = gather(shard, value, mesh) if is_shard else value
                    if mesh.rank == sender:
                        whole[name] = keep(full)
            whole |= {name: value.detach().cpu() for name, value in (extra or {}).items()}
        if sender == 0:
            found |= whole if mesh.rank == 0 else {}
        elif mesh.rank == sender:
            _send(whole, mesh)
        elif mesh.rank == 0:
            found |= _receive(sender, mesh, keep)
    return found


def share(tensors: dict[str, Tensor], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields rank 0's tensors on every rank, one at a time; the argument of other ranks is ignored."""
    if mesh.is_alone:
        yield from tensors.items()
        return
    header = _header(tensors, mesh) if mesh.rank == 0 else None
    size = torch.tensor([0 if header is None else len(header)], device=mesh.device)
    dist.broadcast(size, 0)
    header = torch.empty(int(size), dtype=torch.uint8, device=mesh.device) if header is None else header
    dist.broadcast(header, 0)
    for name, shape, dtype in json.loads(bytes(header.tolist())):
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
        if mesh.rank == 0:
            value.copy_(tensors[name])
        dist.broadcast(value, 0)
        yield name, value


def optimizer_states(optimizer: torch.optim.Optimizer) -> Values:
    """Returns a function of a shard that gives the optimizer's states of it, as "exp_avg/NAME"; 8-bit states are
    dequantized to fp32."""

    def states(shard: Shard) -> dict[str, Tensor]:
        found = optimizer.state[shard.local].items() if shard.local in optimizer.state else ()
        return {f"{key}/{shard.name}": dequantized(value) for key, value in found if isinstance(value, Tensor)}

    return states


def put_optimizer_states(
    engine: Holder, optimizer: torch.optim.Optimizer, states: Iterable[tuple[str, Tensor]]
) -> None:
    """Loads full states by the names of `optimizer_states`, cut to this rank's share."""
    by_name = {shard.name: shard for shard in engine.shards}

    def cut() -> Iterator[tuple[str, Tensor]]:
        for key, value in states:
            shard = by_name.get(key.split("/", 1)[1])
            if shard is not None:
                yield key, shard.take(value).clone() if value.ndim else value

    put_own_states(engine, optimizer, cut())


def put_own_states(engine: Holder, optimizer: torch.optim.Optimizer, states: Iterable[tuple[str, Tensor]]) -> None:
    """Loads this rank's parts of states by the names of `optimizer_states`. torch's own loading knows where each
    optimizer wants its counters."""
    if isinstance(optimizer, OffloadedOptimizer):
        for key, value in states:
            state, name = key.split("/", 1)
            for shard in (shard for shard in engine.shards if shard.name == name and shard.local.requires_grad):
                optimizer.put_state(shard.local, state, value)
        return
    saved: dict[str, dict[str, Tensor]] = {}
    for key, value in states:
        state, name = key.split("/", 1)
        saved.setdefault(name, {})[state] = value
    names = {id(shard.local): shard.name for shard in engine.shards}
    ordered = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    found = {number: saved[name] for number, name in enumerate(ordered) if name is not None and name in saved}
    optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})


def state_shapes(optimizer: torch.optim.Optimizer, shard: Shard) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns shape and number format of each state that `one_state` would return, by name. Nothing is read or sent."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.state_shapes(shard.local) if shard.local in optimizer.pieces else {}
    found = optimizer.state[shard.local].items() if shard.local in optimizer.state else ()
    return {
        key: (value.shape, torch.float32 if hasattr(value, "codes") else value.dtype)
        for key, value in found
        if isinstance(value, Tensor)
    }


def one_state(optimizer: torch.optim.Optimizer, shard: Shard, name: str) -> Tensor:
    """Returns one state of this rank's part of a parameter, in fp32 where it is kept in 8 bits."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.one_state(shard.local, name)
    return dequantized(optimizer.state[shard.local][name])


def exchange(value: Any, mesh: Mesh) -> list[Any]:
    """Collective. Returns every rank's value, which JSON can hold, on every rank."""
    text = json.dumps(value).encode()
    if mesh.is_alone:
        return [json.loads(text)]
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(mesh.device)
    size = torch.tensor([len(text)], device=mesh.device)
    sizes = [torch.empty_like(size) for _ in range(mesh.plan.world)]
    dist.all_gather(sizes, size)
    longest = max(int(one) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=mesh.device)
    padded[: len(text)] = mine
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(one[: int(n)].cpu().numpy())) for one, n in zip(texts, sizes, strict=True)]


def _header(tensors: dict[str, Tensor], mesh: Mesh) -> Tensor:
    about = [[name, list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in tensors.items()]
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8).to(mesh.device)


def _send(tensors: dict[str, Tensor], mesh: Mesh) -> None:
    header = _header(tensors, mesh)
    dist.send(torch.tensor([len(header)], device=mesh.device), 0)
    dist.send(header, 0)
    for value in tensors.values():
        dist.send(value.contiguous().to(mesh.device), 0)


def _to_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu()


def _receive(sender: int, mesh: Mesh, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    size = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    dist.recv(size, sender)
    header = torch.empty(int(size), dtype=torch.uint8, device=mesh.device)
    dist.recv(header, sender)
    found = {}
    for name, shape, dtype in json.loads(bytes(header.tolist())):
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
        dist.recv(value, sender)
        found[name] = keep(value)
    return found
