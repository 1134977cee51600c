"""Where a step went, on real ranks: parts that add up, waits that are as long as a known delay, events that miss no
collective."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.demo.wire import Wire
from shardwise.optim.build import build_optimizer
from shardwise.parallel.engine import Engine
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import KINDS, Clock
from shardwise.run.events import Events
from shardwise.run.step import run_step
from shardwise.spec.actions import NAMES
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import schedule_actions
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn": 24, "vocab": 40}
SPECS = {
    "plain": preset("tiny").with_overrides(SMALL),
    "tied": preset("tiny").with_overrides(SMALL | {"tied": True}),
    "experts": preset("tiny-moe").with_overrides(SMALL | {"num_experts": 4}),
}
TRIAL = Trial(global_batch=8, micro_batch=2, seq_len=8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"dp": 2},
    "dp=2 zero=1": {"dp": 2, "zero": 1},
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "dp=4 zero=2 replicate=2": {"dp": 4, "zero": 2, "replicate": 2},
    "tp=2": {"tp": 2},
    "tp=2 sp": {"tp": 2, "sequence": True},
    "pp=2 gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp=2 zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "dp=2 pp=2 1f1b": {"dp": 2, "pp": 2},
    "dp=2 zero=2 pp=2 interleaved": {"dp": 2, "zero": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp=2 zero=3 tp=2 sp": {"dp": 2, "zero": 3, "tp": 2, "sequence": True},
    "cp=2": {"cp": 2},
    "cp=2 ulysses": {"cp": 2, "cp_kind": "ulysses"},
    "cp=2 zero=3 pp=2": {"cp": 2, "zero": 3, "pp": 2},
    "tp=2 sp pp=2 zero-bubble": {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero-bubble"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp=2 ep=2": {"dp": 2, "ep": 2},
    "dp=2 zero=3 ep=2": {"dp": 2, "zero": 3, "ep": 2},
    "tp=2 sp ep=2": {"tp": 2, "sequence": True, "ep": 2},
}
OF_TORCH = {"reduce-scatter": "all-to-all", "pass on": "send"}  # what gloo is asked to do for it


def plan_of(layout: str, trial: Trial = TRIAL) -> Plan:
    fields = dict((LAYOUTS | EXPERTS)[layout])
    if fields.get("pp", 1) > 1:
        fields["split"] = even_split(SMALL["num_layers"], fields["pp"] * fields.get("virtual_stages", 1))
    return trial_plan(trial, **fields)


class Steps:
    """The engine of one rank, and steps of it that are timed."""

    def __init__(self, spec: ModelSpec, plan: Plan, trial: Trial = TRIAL):
        self.spec, self.plan, self.trial, self.clock = spec, plan, trial, Clock(CPU)
        self.engine: Engine = build_trial(spec, plan, trial, dist.get_rank(), CPU)
        self.optimizer = build_optimizer(trial.optimizer, self.engine.locals())
        self.done = 0

    def step(self) -> dict[str, float]:
        self.done += 1
        batch, targets = trial_batch(self.spec, self.plan, self.trial, self.done, self.engine.mesh.at.dp)
        dist.barrier()
        self.clock.begin()
        run_step(
            self.engine, self.optimizer, batch, num_targets=targets, lr=1e-3, clip=1.0, clock=self.clock
        )  # fmt: skip
        return self.clock.finish()


def observe(spec: ModelSpec, layout: str, trial: Trial = TRIAL) -> dict[str, Any]:
    """The third step (DDP agrees on its buckets in the second): its parts, what torch was asked to send, and its
    events."""
    steps = Steps(spec, plan_of(layout, trial), trial)
    steps.step()
    steps.step()
    wire = Wire()
    with wire:
        parts = steps.step()
    with tempfile.TemporaryDirectory() as folder:
        events = Events(Path(folder), 0, 1, [stage.index for stage in steps.engine.stages])
        events.record(3, steps.clock)
        events.close()
        lines = [json.loads(line) for line in Path(folder, "rank0.jsonl").read_text().splitlines()]
    before = [span for span in steps.clock.spans if span.kind == "comm_exposed"]
    steps.engine.evaluate(trial_batch(spec, steps.plan, trial, 4, steps.engine.mesh.at.dp)[0].microbatches)
    assert [span for span in steps.clock.spans if span.kind == "comm_exposed"] == before, "evaluation is not the step"
    sent = [(message.kind, message.num_bytes) for message in wire.transfers]
    return {"parts": parts, "sent": sent, "events": lines, "pp": steps.engine.mesh.at.pp}


@pytest.mark.parametrize(
    "model, layout",
    [*(("plain", layout) for layout in LAYOUTS), *(("experts", layout) for layout in EXPERTS), ("tied", "dp=2 zero=3"),
     ("tied", "pp=2 zbv"), ("tied", "dp=2 pp=2 1f1b")],
)  # fmt: skip
def test_parts_add_up_and_events_miss_no_message(layout: str, model: str, ranks: Any) -> None:
    plan = plan_of(layout)
    for found in ranks.run(observe, plan.world, SPECS[model], layout):
        parts, events = found["parts"], found["events"]
        assert sum(parts[f"{kind}_s"] for kind in (*KINDS, "other")) == pytest.approx(parts["step_s"], rel=1e-9)
        assert all(seconds >= 0 for seconds in parts.values()), parts
        assert parts["comm_exposed_s"] > 0  # at least for norm and losses
        assert (parts["bubble_s"] > 0) == (plan.pp > 1)

        messages = [event for event in events if "group" in event and not event["name"].startswith("receive")]
        told = Counter((_of_torch(event["name"]), event["bytes"]) for event in messages)
        assert told == Counter(found["sent"])
        assert all(event["kind"] == "p2p" for event in messages if event["name"].startswith("send"))
        waited = sum(event["dur_us"] for event in events if event["kind"] == "collective") / 1e6
        assert waited == pytest.approx(parts["comm_exposed_s"], abs=1e-6 * len(events))

        kinds = {name: kind for kind, name in NAMES.items()}
        ran = [(kinds[e["name"]], e["stage"], e["microbatch"]) for e in events if e["name"] in kinds]
        table = schedule_actions(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches)
        assert ran == [tuple(action) for action in table[found["pp"]]]
        assert all(("chunk" in event) == (plan.virtual_stages > 1) for event in events if event["name"] in kinds)


def _of_torch(name: str) -> str:
    return "send" if name.startswith("send") else OF_TORCH.get(name, name)


@pytest.mark.parametrize("model, precision", [("experts", "fp64"), ("plain", "bf16")])
def test_expert_counts_and_replicas_of_fsdp_are_waits_too(model: str, precision: str, ranks: Any) -> None:
    for found in ranks.run(observe, 2, SPECS[model], "dp=2", replace(TRIAL, precision=precision)):
        told = Counter((e["name"], e["bytes"]) for e in found["events"] if e["kind"] == "collective")
        assert told == Counter(found["sent"])
        assert len(told) > 1


# A known delay -------------------------------------------------------------------------------------------------------

DELAYS_S = (0.3, 3.0)  # the second where the machine kept the peer from its core for the first
SINGLE = Trial(global_batch=2, micro_batch=1, seq_len=8)


def delayed(spec: ModelSpec, layout: str, delay_s: float) -> dict[str, Any]:
    """Rank 0 sleeps in the forward passes of its second block. Processes of one machine share a clock, so moments can
    be compared."""
    steps = Steps(spec, plan_of(layout, SINGLE), SINGLE)
    steps.step()
    steps.step()
    slept: list[tuple[float, float]] = []

    def sleep(*_: Any) -> None:
        began = time.perf_counter()
        time.sleep(delay_s)
        slept.append((began, time.perf_counter()))

    if dist.get_rank() == 0:
        list(steps.engine.models[0].layers.values())[1].register_forward_pre_hook(sleep)
    parts = steps.step()
    clock = steps.clock
    waits = [(s.kind, clock.start + s.start_s, clock.start + s.start_s + s.duration_s) for s in clock.spans]
    return {"parts": parts, "slept": slept, "waits": [wait for wait in waits if wait[0] in ("comm_exposed", "bubble")]}


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "tp=2 sp", "cp=2", "pp=2 gpipe"])
def test_who_waits_for_a_late_rank_says_so(layout: str, ranks: Any) -> None:
    """The late rank computes; its peer waits from when it came to the exchange until the other did, and that is all it
    waits for."""
    plan = plan_of(layout, SINGLE)
    kind = "bubble" if plan.pp > 1 else "comm_exposed"
    for delay_s in DELAYS_S:
        late, peer = ranks.run(delayed, 2, SPECS["plain"], layout, delay_s)
        assert len(late["slept"]) == plan.num_microbatches
        asleep = sum(end - start for start, end in late["slept"])
        assert late["parts"]["compute_s"] >= asleep
        assert late["parts"][f"{kind}_s"] < late["parts"]["step_s"] - asleep
        covered = [waited_for(sleep, peer["waits"], kind) for sleep in late["slept"]]
        if min(covered) > delay_s / 2:  # before, the peer computes: milliseconds where cores are free
            break
    assert min(covered) > delay_s / 2, (covered, late["slept"], peer["waits"])
    assert peer["parts"][f"{kind}_s"] >= asleep / 2
    assert peer["parts"]["compute_s"] < peer["parts"]["step_s"] - asleep / 2


def waited_for(sleep: tuple[float, float], waits: list[tuple[str, float, float]], kind: str) -> float:
    """Seconds of the sleep that the peer waited."""
    began, ended = sleep
    inside = [(k, max(began, start), min(ended, end)) for k, start, end in waits if start < ended and end > began]
    assert max(end for _, _, end in inside) == ended, "it cannot go on before the late one has come"
    return sum(end - start for k, start, end in inside if k == kind)
