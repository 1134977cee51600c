"""Checks the nodes of a job against each other before anything is trained, and names the one that holds the others up.

A synchronous step takes as long as its slowest rank, so one node with a slow link or a throttled GPU costs all of them.
Nodes are compared with each other, not with a data sheet. Whoever looks slow is measured once more, alone, before it is
named: a moment of noise is no finding. Invariant: a check asks, it never changes what a job computes.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.units import format_bytes, format_seconds
from shardwise.launch.nodes.checks import Checks
from shardwise.launch.nodes.connection import NodeLink
from shardwise.launch.nodes.hello import named
from shardwise.launch.nodes.refusal import refused_by

ANSWER_S = 150.0
SLOW = 0.5
"""A link that reaches less than this share of what the others reach is slow."""
SLOW_GPU, SLOW_CPU = 0.75, 0.5
"""A device likewise: GPUs of one kind differ by a few per cent, processors are shared with whatever else runs."""
MORE_TURNS = 3  # in which a node that looks slow is measured alone
FEW = 4
MOST_SHIFTS = 4  # other nodes that each node sends to
CLOCK_S = 30.0  # seconds by which clocks may differ: beyond that schedulers' keys expire and files look too new
BUSY_SHARE = 0.05  # of a GPU's memory that somebody else may hold
LOW_SPACE = 2**30  # bytes of the runs directory below which it is as good as full
SHARED_MEMORY = 2**30  # bytes of /dev/shm below which NCCL and data loaders run out of it


@dataclass
class Finding:
    """Something that is wrong with a node, in three lines."""

    node: int
    what: str
    why: str
    fix: str
    excludes: bool = True  # whether leaving the node out is the cure


@dataclass
class Report:
    """What the checks have found."""

    hellos: Mapping[int, Mapping[str, Any]]
    findings: list[Finding] = field(default_factory=list)
    sends: dict[int, float] = field(default_factory=dict)  # bytes per second that arrived elsewhere
    flops: dict[int, float] = field(default_factory=dict)  # of each node's slowest device
    is_shared: bool = True
    seconds: float = 0.0

    @property
    def excluded(self) -> list[str]:
        """The hosts that the job is better off without."""
        return sorted({str(self.hellos[found.node]["host"]) for found in self.findings if found.excludes})

    def lines(self) -> list[str]:
        """Returns a row for each node, then what was found."""
        rows = []
        for index, said in sorted(self.hellos.items()):
            parts = [f"{index}  {said['host']}"]
            if index in self.flops:
                parts.append(f"{self.flops[index] / 1e12:,.3g} TFLOP/s")
            if index in self.sends:
                parts.append(f"sends {format_bytes(int(self.sends[index]))}/s")
            bad = [found for found in self.findings if found.node == index]
            rows.append(f"node     {', '.join(parts)}{'' if not bad else '   <- ' + bad[0].what}")
        shared = "the run directory is shared" if self.is_shared else "the run directory is not shared: it is mirrored"
        verdict = "" if self.findings else "; none of them stands out"
        rows.append(f"checked  {len(self.hellos)} nodes in {format_seconds(self.seconds)}{verdict}; {shared}")
        return rows

    def errors(self) -> list[str]:
        return [
            f"error: {named(found.node, self.hellos[found.node])}: {found.what}\n  why  {found.why}\n  fix  {found.fix}"
            for found in self.findings
        ]


class Preflight:
    """The head's questions to all nodes."""

    def __init__(self, hellos: Mapping[int, Mapping[str, Any]], links: Mapping[int, NodeLink], own: Checks):
        self.links, self.own = links, own
        self.report = Report(hellos)
        self._number = 0  # of the question
        self._silent: set[int] = set()  # nodes that did not answer: they are not asked again

    def run(self, *, devices: bool) -> Report:
        """Makes all checks; `devices`: a matmul on each, too, for which every node loads torch."""
        began = time.monotonic()
        self._clocks()
        self._directory()
        self._links()
        if devices:
            self._devices()
        self.report.seconds = time.monotonic() - began
        return self.report

    def _ask(self, nodes: Sequence[int], what: str, each: Mapping[int, Mapping[str, Any]] = {}) -> dict[int, Any]:
        """Asks nodes at the same time; returns what each has answered. One that does not answer is a finding."""
        self._number += 1
        nodes = [node for node in nodes if node not in self._silent]
        with ThreadPoolExecutor(1) as here:
            mine = here.submit(self.own.answer, {"what": what, **each.get(0, {})}) if 0 in nodes else None
            for node in nodes:
                if node:
                    self.links[node].send("check", what=what, number=self._number, **each.get(node, {}))
            found: dict[int, Any] = {}
            deadline = time.monotonic() + ANSWER_S
            for node in nodes:
                if node:
                    found[node] = self._answer_of(node, deadline)
            if mine is not None:
                found[0] = mine.result()
        for node, words in found.items():
            if words.get("problem"):
                problem = str(words["problem"]).splitlines()[0][:200]
                fix = "look at this node; until then leave it out"
                self.report.findings.append(Finding(node, f"the check of its {what} failed", problem, fix))
        return {node: words for node, words in found.items() if not words.get("problem")}

    def _answer_of(self, node: int, deadline: float) -> Mapping[str, Any]:
        """Returns a node's answer to this question; one that comes late, to a question of before, is none."""
        link = self.links[node]
        while frame := link.receive("checked", "refuse", timeout=max(0.1, deadline - time.monotonic())):
            if frame.words["kind"] == "refuse":
                raise refused_by(named(node, self.report.hellos[node]), frame)
            if frame.words.get("number") == self._number:
                return frame.words
        self._silent.add(node)
        return {"problem": link.lost or "it did not answer"}

    def _all(self) -> list[int]:
        return sorted(self.report.hellos)

    def _clocks(self) -> None:
        for node in self._all():
            asked = time.time()
            found = self._ask([node], "clock")
            if node not in found:
                continue
            off = found[node]["time"] - (asked + time.time()) / 2
            if abs(off) > CLOCK_S:
                self.report.findings.append(
                    Finding(
                        node,
                        f"its clock is {format_seconds(abs(off))} {'ahead' if off > 0 else 'behind'}",
                        f"more than {CLOCK_S:.0f} s from node 0's: keys of schedulers expire, files look too new",
                        "set its clock (chronyc makestep), or leave it out",
                    )
                )

    def _directory(self) -> None:
        """Has every node write a file by one rename, say how much room there is, and look for the files of others."""
        nodes, sign = self._all(), secrets.token_hex(8)
        written = self._ask(nodes, "write", {node: {"sign": sign} for node in nodes})
        seen = self._ask(sorted(written), "read", {node: {"sign": sign, "nodes": sorted(written)} for node in written})
        self.report.is_shared = all(set(words["seen"]) >= set(written) for words in seen.values())
        self._ask(sorted(written), "clean")
        full = [node for node in sorted(written) if written[node]["free"] < LOW_SPACE]
        for node in full[:1] if self.report.is_shared else full:
            self.report.findings.append(
                Finding(
                    node,
                    f"{self.own.runs} has {format_bytes(written[node]['free'])} free",
                    "checkpoints, logs and events go there; a node that does not share it mirrors the newest one",
                    "make room, or another run.dir",
                    excludes=not self.report.is_shared,
                )
            )

    def _links(self) -> None:
        """Has each node send to some others, and who is slow to all of them once more, alone."""
        nodes, count = self._all(), len(self.report.hellos)
        ports = self._ask(nodes, "port")
        shifts = sorted({1 << power for power in range(MOST_SHIFTS) if 1 << power < count})
        for shift in shifts:
            pairs = {
                node: (node + shift) % count for node in nodes if node in ports and (node + shift) % count in ports
            }
            # A few nodes take turns: nothing else then uses their links, or the cores of one machine that acts as all.
            for turn in [{node: other} for node, other in pairs.items()] if count <= FEW else [pairs]:
                self._send(turn, ports)
        for _ in range(MORE_TURNS):
            for node in self._slow(self.report.sends, SLOW):
                self._send({node: (node + 1) % count}, ports)
        slow, reference = self._slow(self.report.sends, SLOW), self._usual(self.report.sends)
        for node in slow:
            others = "; of two nodes the other one may be slow to receive" if count == 2 else ""
            self.report.findings.append(
                Finding(
                    node,
                    f"it sends {format_bytes(int(self.report.sends[node]))}/s, others {format_bytes(int(reference))}/s",
                    f"all ranks wait for the slowest link of a collective{others}",
                    "leave it out, or look at its cable, its switch port and what else uses the link",
                )
            )

    def _send(self, pairs: Mapping[int, int], ports: Mapping[int, Any]) -> None:
        words = {node: {key: ports[other][key] for key in ("address", "port")} for node, other in pairs.items()}
        for node, found in self._ask(sorted(pairs), "send", words).items():
            self.report.sends[node] = max(self.report.sends.get(node, 0.0), float(found["rate"]))

    def _devices(self) -> None:
        found = self._ask(self._all(), "devices")
        drivers = {node: words["gpus"][0]["driver"] for node, words in found.items() if words["gpus"]}
        usual = statistics.mode(drivers.values()) if drivers else ""
        for node, words in found.items():
            self.report.flops[node] = min((entry["flops_per_s"] for entry in words["devices"]), default=0.0)
            self._look_at(node, words, drivers.get(node, usual), usual)
        share = SLOW_GPU if any(words["gpus"] for words in found.values()) else SLOW_CPU
        for _ in range(MORE_TURNS):
            for node in self._slow(self.report.flops, share):
                if again := self._ask([node], "devices").get(node):
                    rate = min((entry["flops_per_s"] for entry in again["devices"]), default=0.0)
                    self.report.flops[node] = max(self.report.flops[node], rate)
        reference = self._usual(self.report.flops)
        for node in self._slow(self.report.flops, share):
            self.report.findings.append(
                Finding(
                    node,
                    f"a matmul reaches {self.report.flops[node] / 1e12:.3g} TFLOP/s, on others {reference / 1e12:.3g}",
                    "all ranks wait for the slowest device: it may be hot, throttled, or used by somebody else",
                    "leave it out; nvidia-smi -q -d PERFORMANCE says why a GPU is slow",
                )
            )

    def _look_at(self, node: int, words: Mapping[str, Any], driver: str, usual: str) -> None:
        """Notes what is wrong with one node's devices by itself."""
        if driver != usual:
            why, fix = f"most nodes have {usual}", "the same driver on every node, or leave it out"
            self.report.findings.append(Finding(node, f"its driver is {driver}", why, fix))
        for number, gpu in enumerate(words["gpus"]):
            if gpu["total"] and 1 - gpu["free"] / gpu["total"] > BUSY_SHARE:
                used = format_bytes((gpu["total"] - gpu["free"]) * 2**20)
                what = f"GPU {number} has {used} in use"
                self.report.findings.append(
                    Finding(
                        node, what, "another process holds it", "nvidia-smi names it; end it, or leave the node out"
                    )
                )
        if words["gpus"] and words["shared_memory"] < SHARED_MEMORY:
            what = f"/dev/shm has {format_bytes(words['shared_memory'])}"
            why, fix = "NCCL and data loaders keep buffers there", "--shm-size or an emptyDir of medium Memory"
            self.report.findings.append(Finding(node, what, why, fix, excludes=False))

    @staticmethod
    def _usual(rates: Mapping[int, float]) -> float:
        """Returns what nodes reach; of two the better one, as nobody knows which is odd."""
        if not rates:
            return 0.0
        return statistics.median(rates.values()) if len(rates) > 2 else max(rates.values())

    def _slow(self, rates: Mapping[int, float], share: float) -> list[int]:
        return [node for node, rate in sorted(rates.items()) if rate < share * self._usual(rates)]
