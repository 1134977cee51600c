"""Constraints that exclude each other, or the model, the batch or the cluster: which two, and what to say instead. No
torch.

The config loader has looked at pairs of config keys already (config/check_layout.py); here it is what only a question
knows.
"""

from __future__ import annotations

from math import prod
from typing import Any

from shardwise.errors import UserError
from shardwise.plan.resolve.degrees import tensor_degrees
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec


def check_pairs(spec: ModelSpec, cluster: ClusterSpec, asked: dict[str, Any], global_batch: int) -> None:
    """Two things that were said and cannot both be. The loader has looked at pairs of config keys already."""
    degrees = {axis: int(asked[f"parallel.{axis}"]) for axis in ("dp", "cp", "tp", "pp") if f"parallel.{axis}" in asked}
    needed = prod(degrees.values())
    said = " x ".join(f"{axis}={value}" for axis, value in degrees.items())
    if needed > cluster.world:
        raise UserError(
            f"{said} needs {needed} GPUs, --cluster {cluster.name} has {cluster.world}",
            why="dp x cp x tp x pp is the number of GPUs of a layout",
            fix=_smaller(degrees, cluster.world),
        )
    if degrees.get("dp", 1) > global_batch:
        raise UserError(
            f"parallel.dp={degrees['dp']} and a batch of {global_batch} sequences exclude each other",
            why="every data-parallel rank needs at least one sequence per step",
            fix=f"parallel.dp={global_batch} or a larger --batch",
        )
    micro = asked.get("train.micro_batch")
    if micro is not None and micro * degrees.get("dp", 1) > global_batch:
        raise UserError(
            f"train.micro_batch={micro} and a batch of {global_batch} sequences exclude each other",
            why=f"{micro} sequences on each of dp={degrees.get('dp', 1)} ranks are more than the batch has",
            fix=f"train.micro_batch={max(1, global_batch // degrees.get('dp', 1))}",
        )
    _check_model(spec, asked, degrees)


def _check_model(spec: ModelSpec, asked: dict[str, Any], degrees: dict[str, int]) -> None:
    tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
    if not spec.is_ours and (cut := [axis for axis in ("tp", "pp", "cp") if degrees.get(axis, 1) > 1]):
        raise UserError(
            f"{spec.name} cannot be cut over {cut[0]}={degrees[cut[0]]}",
            why="transformers builds this model; only dp, zero and replicate work",
            fix=f"leave out parallel.{cut[0]}",
        )
    if tp > 1 and tp not in (fitting := tensor_degrees(spec)):
        near = sorted(fitting, key=lambda n: abs(n - tp))[:2]
        raise UserError(
            f"parallel.tp={tp} and {spec.name} exclude each other",
            why=f"each rank takes whole heads: {spec.num_heads} heads, {spec.num_kv_heads} of keys and values",
            fix=" or ".join(f"parallel.tp={n}" for n in sorted(near)),
        )
    if pp > spec.num_layers:
        raise UserError(
            f"parallel.pp={pp} and {spec.name} exclude each other",
            why=f"a stage has at least one layer, and there are {spec.num_layers}",
            fix=f"parallel.pp={spec.num_layers} or less",
        )
    ep = int(asked.get("parallel.ep", 1))
    if ep > 1 and (not spec.num_experts or spec.num_experts % ep):
        has = f"{spec.num_experts} experts do not divide by {ep}" if spec.num_experts else "it has no experts"
        fitting = [n for n in range(min(ep, spec.num_experts), 0, -1) if spec.num_experts % n == 0] or [1]
        raise UserError(
            f"parallel.ep={ep} and {spec.name} exclude each other", why=has, fix=f"parallel.ep={fitting[0]}"
        )


def _smaller(degrees: dict[str, int], world: int) -> str:
    """Returns fixes that lower one degree until the layout fits the cluster."""
    fixes = []
    needed = prod(degrees.values())
    for axis, value in degrees.items():
        room = world // (needed // value)
        if room >= 1:
            fixes.append(f"parallel.{axis}={1 << (room.bit_length() - 1)}")
    return " or ".join(fixes) or f"a cluster of at least {needed} GPUs"
