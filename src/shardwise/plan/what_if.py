"""`--what-if nic=50GB/s`: the same question with one thing changed, for a look beside the base. No torch.

nic=50GB/s  nvlink=900GB/s  memory=141GB  gpus=1024  nodes=8  seq=16k  batch=8M  tokens=2T  price=1.90  section.key=value
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster.spec import ClusterSpec, known_cluster, known_devices
from shardwise.config.units import parse_binary, parse_bytes, parse_decimal, parse_rate
from shardwise.errors import UserError
from shardwise.plan.answering import Row, row_of
from shardwise.plan.question import Question
from shardwise.plan.searching import explore

SLOWEST, FASTEST = 1e5, 1e14  # bytes per second of any link that is not a slip of the keyboard


@dataclass(frozen=True)
class WhatIf:
    change: str
    question: Question
    row: Row | None  # None: nothing fits

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, **(self.row.to_dict() if self.row else {"fits": False})}


def what_if(question: Question, text: str) -> WhatIf:
    changed = change(question, text)
    found = explore(changed.spec, changed.cluster, changed.job, 1).candidates
    return WhatIf(text, changed, row_of(changed, found[0]) if found else None)


def change(question: Question, text: str) -> Question:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise UserError(f"`--what-if {text}` changes nothing", why="it is `name=value`", fix="--what-if nic=50GB/s")
    if "." in name:
        return question.constrained([f"{name}={value}"])
    links = {link.name for link in question.cluster.tiers} | {"nic", "nvlink"}
    if name in links:
        return _with_link(question, name, _read(text, value, parse_rate))
    known: dict[str, Callable[[], Question]] = {
        "memory": lambda: _with_memory(question, _read(text, value, parse_bytes)),
        "gpus": lambda: _with_gpus(question, _read(text, value, parse_decimal), text),
        "nodes": lambda: replace(question, cluster=resized(question.cluster, _read(text, value, parse_decimal))),
        "seq": lambda: _with_seq(question, _read(text, value, parse_binary), text),
        "batch": lambda: _with_batch(question, _read(text, value, parse_binary), text),
        "tokens": lambda: question.with_job(tokens=_read(text, value, parse_decimal)),
        "price": lambda: question.with_job(price=float(_read(text, value.lstrip("$"), float))),
    }
    if name not in known:
        names = [*sorted(links), *known]
        close = difflib.get_close_matches(name, names, n=1)
        raise UserError(
            f"`--what-if {text}`: unknown name `{name}`",
            why=f"what can change: {', '.join(names)}, and any section.key",
            fix=f"--what-if {close[0]}={value}" if close else "--what-if nic=50GB/s",
        )
    return known[name]()


def _read(text: str, value: str, parse: Callable[[str], Any]) -> Any:
    try:
        number = parse(value)
    except ValueError as problem:
        raise UserError(f"`--what-if {text}` cannot be read", why=str(problem), fix="--what-if nic=50GB/s") from None
    if not number > 0:
        raise UserError(f"`--what-if {text}` leaves nothing", why="it must be above 0", fix="--what-if nic=50GB/s")
    return number


def _with_link(question: Question, name: str, rate: float) -> Question:
    if not SLOWEST <= rate <= FASTEST:
        raise UserError(
            f"{rate / 1e9:g} GB/s is no speed of a link",
            why="links between cards have between 0.1 MB/s and 100 TB/s",
            fix=f"--what-if {name}=50GB/s",
        )
    tiers = question.cluster.tiers
    if name not in {link.name for link in tiers}:
        raise UserError(
            f"{question.cluster.name} has no {name}",
            why=f"its links are: {', '.join(link.name for link in tiers)}",
            fix=f"--what-if {tiers[-1].name}={rate / 1e9:g}GB/s",
        )
    changed = tuple(replace(link, bandwidth=rate) if link.name == name else link for link in tiers)
    return replace(question, cluster=replace(question.cluster, tiers=changed))


def _with_memory(question: Question, size: int) -> Question:
    device = replace(question.cluster.device, memory=size)
    return replace(question, cluster=replace(question.cluster, device=device))


def _with_gpus(question: Question, count: int, text: str) -> Question:
    per_node = question.cluster.per_node
    if count <= per_node:
        smaller = replace(question.cluster, nodes=1, per_node=count, name=f"1x{count}x{question.cluster.device.name}")
        return replace(question, cluster=smaller)
    if count % per_node:
        near = [n for n in (count // per_node * per_node, -(-count // per_node) * per_node) if n]
        raise UserError(
            f"`--what-if {text}` is not a whole number of nodes",
            why=f"a node of {question.cluster.name} has {per_node} cards",
            fix=" or ".join(f"--what-if gpus={n}" for n in near),
        )
    return replace(question, cluster=resized(question.cluster, count // per_node))


def resized(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The same nodes, more or fewer. A second node needs a network, which a single one may not have: the data sheet's."""
    name, world = f"{nodes}x{cluster.per_node}x{cluster.device.name}", nodes * cluster.per_node
    tiers = cluster.tiers
    if world > tiers[-1].span:
        if cluster.nodes == 1 and cluster.device.name in known_devices():
            usual = known_cluster(cluster.device.name, nodes, cluster.per_node).tiers
            tiers = (*tiers, *(link for link in usual if link.span > tiers[-1].span))
        tiers = (*tiers[:-1], replace(tiers[-1], span=max(world, tiers[-1].span)))
    return replace(cluster, name=name, nodes=nodes, tiers=tiers)


def _with_seq(question: Question, seq_len: int, text: str) -> Question:
    tokens = question.job.tokens_per_step
    if tokens < seq_len:
        raise UserError(
            f"`--what-if {text}` is longer than the batch", why=f"a step has {tokens:,} tokens", fix="a larger --batch"
        )
    return question.with_job(seq_len=seq_len, global_batch=tokens // seq_len)


def _with_batch(question: Question, tokens: int, text: str) -> Question:
    seq_len = question.job.seq_len
    if tokens % seq_len:
        near = max(1, round(tokens / seq_len)) * seq_len
        raise UserError(
            f"`--what-if {text}` is not a whole number of sequences",
            why=f"a sequence has {seq_len:,} tokens",
            fix=f"--what-if batch={near}",
        )
    return question.with_job(global_batch=tokens // seq_len)
