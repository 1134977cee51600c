"""Prices for the clock of a rehearsal: the planner's own, put on what a rank really does.

A call costs what the planner's network takes for that collective, group and size. What an action computes costs
what the planner says of its stage, spread over the action's matmuls, so that a call in its middle is sent in its
middle. What the planner prices and the program of a step does not show (the update, launches, stragglers) is added at
the end. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.plan.prediction.collectives import network_of, odd_world
from shardwise.plan.prediction.step_time import layer_times, stage_times
from shardwise.plan.resolve.speed import stack_of
from shardwise.rehearse.program import Call, Event, Program
from shardwise.rehearse.simulate import Prices
from shardwise.spec.actions import NAMES
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

ACTION = re.compile(r"(?P<name>[a-z ]+), micro-batch \d+, stage (?P<stage>\d+)")
NOT_SIMULATED = ("optimizer", "launch", "straggler", "offload")
"""Parts of a predicted step that are no calls and no matmuls."""


def planner_prices(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan) -> Prices:
    """Returns the planner's prices for a plan on a cluster."""
    network = network_of(cluster, odd_world(cluster, plan.world))
    actions = _action_seconds(model, cluster, job, plan)
    flops: dict[int, dict[str, float]] = {}

    def of_call(call: Call, ranks: int) -> float:
        size, stride = float(call.num_bytes), call.channel.line.stride
        if call.is_p2p:
            return network.send(size, stride)
        if call.op in ("all-reduce", "broadcast", "barrier"):
            return network.all_reduce(size, ranks, stride)
        if call.op == "all-to-all" and plan.ep > 1:
            return network.all_to_all(size, ranks, stride)
        return network.all_gather(size, ranks, stride)  # gloo's exchange stands for a reduce-scatter

    def of_event(program: Program, event: Event) -> float:
        if id(program) not in flops:
            found = flops[id(program)] = {}
            for one in program.events:
                if one.kind == "compute":
                    found[one.during] = found.get(one.during, 0.0) + one.flops
        match = ACTION.fullmatch(event.during)
        seconds = actions.get((match["name"], int(match["stage"])), 0.0) if match else 0.0
        return seconds * event.flops / flops[id(program)][event.during]

    return Prices(of_call, of_event)


def not_simulated(step: Mapping[str, float]) -> float:
    """Returns the seconds of a predicted step that a simulation does not see."""
    return sum(step.get(part, 0.0) for part in NOT_SIMULATED)


def _action_seconds(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan) -> dict[tuple[str, int], float]:
    """Returns the seconds that each kind of action computes, by its name and stage."""
    times = layer_times(model, cluster, job, plan, stack_of(plan))
    found: dict[tuple[str, int], float] = {}
    for number, stage in enumerate(stage_times(model, plan, times)):
        layers = stage.layers
        backward = layers.backward + layers.again
        found[NAMES["F"], number] = layers.forward
        found[NAMES["B"], number] = backward
        found[NAMES["I"], number] = backward - layers.weights
        found[NAMES["W"], number] = layers.weights
    return found
