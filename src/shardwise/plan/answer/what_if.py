"""`--what-if nic=50GB/s`: the same question with one thing changed, for a look beside the base. No torch.

    nic=50GB/s  link=900GB/s  memory=141GB  nodes=8  gpus=1024  seq=16k  batch=8M  tokens=2T  price=1.90
    section.key=value

What is known of hardware is read and checked by cluster/describe/changes.py, config keys by the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster.describe.changes import SETTINGS, changed, read_setting, unknown
from shardwise.config.units import parse_binary, parse_decimal
from shardwise.config.values import read_amount
from shardwise.errors import UserError
from shardwise.plan.answer.answer import Row, row_of
from shardwise.plan.answer.question import Question, check_batch
from shardwise.plan.layouts.search import fastest

ALSO = {"nvlink": "link", "gpu_memory": "memory", "seq_len": "seq"}
ORIGIN = "what if"


@dataclass(frozen=True)
class WhatIf:
    """The best row after one change of hardware or job."""

    change: str
    question: Question
    row: Row | None  # None: nothing fits

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, **(self.row.to_dict() if self.row else {"fits": False})}


def what_if(question: Question, text: str) -> WhatIf:
    other = change(question, text)
    found = fastest(other.spec, other.cluster, other.job)
    return WhatIf(text, other, row_of(other, found) if found else None)


def change(question: Question, text: str) -> Question:
    name, equals, value = (part.strip() for part in text.partition("="))
    name = ALSO.get(name, name)
    if not equals or not value:
        raise UserError(f"`--what-if {text}` changes nothing", why="it is `name=value`", fix="--what-if nic=50GB/s")
    if "." in name:
        return question.constrained([f"{name}={value}"])
    if name == "price":
        return question.with_job(price=read_setting(name, value.lstrip("$€"), SETTINGS[name], None))
    if name in SETTINGS:
        given = {name: read_setting(name, value, SETTINGS[name], None)}
        return replace(question, cluster=changed(question.cluster, given, ORIGIN))
    if name not in AMOUNTS:
        raise unknown("what-if", name, [*SETTINGS, *AMOUNTS], None)
    parse, example, changed_to = AMOUNTS[name]
    return changed_to(question, read_amount(f"--what-if {name}=", value, parse, example))


def _with_gpus(question: Question, count: int) -> Question:
    per_node = question.cluster.per_node
    if count > per_node and count % per_node:
        near = [n for n in (count // per_node * per_node, -(-count // per_node) * per_node) if n]
        raise UserError(
            f"`--what-if gpus={count}` is not a whole number of nodes",
            why=f"a node of {question.cluster.name} has {per_node} cards",
            fix=" or ".join(f"--what-if gpus={n}" for n in near),
        )
    size = {"nodes": 1, "per_node": count} if count < per_node else {"nodes": count // per_node}
    return replace(question, cluster=changed(question.cluster, size, ORIGIN))


def _with_seq(question: Question, seq_len: int) -> Question:
    """Returns the question with another length of sequences and as many tokens per step."""
    tokens = question.job.tokens_per_step
    check_batch(tokens, seq_len)
    return question.with_job(seq_len=seq_len, global_batch=tokens // seq_len)


def _with_batch(question: Question, tokens: int) -> Question:
    check_batch(tokens, question.job.seq_len)
    return question.with_job(global_batch=tokens // question.job.seq_len)


AMOUNTS: dict[str, tuple[Callable[[str], int], str, Callable[[Question, int], Question]]] = {
    "gpus": (parse_decimal, "64", _with_gpus),
    "seq": (parse_binary, "16k", _with_seq),
    "batch": (parse_binary, "8M", _with_batch),
    "tokens": (parse_decimal, "2T", lambda question, tokens: question.with_job(tokens=tokens)),
}
"""Sizes of the job and of the cluster: how they are read, an example, and the question that they make."""
