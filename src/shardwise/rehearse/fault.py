"""Defines what a rehearsal finds wrong: three lines that name the rank, the stage and the group. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Fault:
    """One fault. `kind` is what programs tell faults by."""

    kind: str  # group | call | deadlock | memory | disk | shard | data | resume | program
    what: str
    why: str
    fix: str
    ranks: tuple[int, ...] = ()  # some of those concerned

    def __str__(self) -> str:
        return f"WRONG    {self.what}\n  why    {self.why}\n  fix    {self.fix}"

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "ranks": list(self.ranks)}


REPORT = "please report this with the plan's file: the runtime and the plan disagree"
"""The fix of what no setting of a user's can have caused."""
