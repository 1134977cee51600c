"""Seconds of one layer and one micro-batch: computing, and the collectives inside of a layer. Cached, because a search
asks again and again.

Tensor, context and expert parallelism send while a layer runs. What of it is hidden behind computing follows from the
stack; only the rest is counted. Read next: step_time.py, which adds layers up to stages and stages to a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.collectives import Network
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.operations import embedding_work, head_work, layer_work, num_tensors
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.work import RankShape, Training
from shardwise.spec.job import Job
from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig

FSDP_LAUNCHES = measured("fsdp_launches")
CHECKPOINT_LAUNCHES = measured("checkpoint_launches")
COLLECTIVE_LAUNCHES = measured("collective_launches")


class LayerTime(NamedTuple):
    """The seconds of one layer, or of several, and one micro-batch."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0  # of forward, in backward
    host_forward: float = 0.0
    host_backward: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0

    @property
    def backward(self) -> float:
        """The seconds of all gradients."""
        return self.inputs + self.weights

    @property
    def device_forward(self) -> float:
        """The seconds that a forward pass takes where the device never waits for the host."""
        return self.forward + (self.tensor_forward + self.context_forward + self.expert_forward)

    @property
    def device_backward(self) -> float:
        """The seconds that a backward pass takes where the device never waits for the host."""
        return self.backward + self.again + (self.tensor_backward + self.context_backward + self.expert_backward)


def add(times: Iterable[LayerTime]) -> LayerTime:
    """Returns the seconds of all of these one after another."""
    return LayerTime(*map(sum, zip(*times, strict=True)))


class LayerTimes:
    """The seconds of one layout's layers, remembered by kind of layer."""

    def __init__(self, model: ModelSpec, network: Network, pricer: Pricer, job: Job, plan: Plan, stack: Stack):
        self.model, self.plan, self.stack, self.network, self.pricer = model, plan, stack, network, pricer
        self.adapter = adapter = job.adapter
        self.shape = RankShape(
            rows=plan.micro_batch,
            tokens=-(-plan.seq_len // plan.cp),
            seq_len=plan.seq_len,
            tp=plan.tp,
            sequence=plan.sequence,
            ep=plan.ep,
            ulysses=plan.cp if plan.cp_kind == "ulysses" else 1,
            size=self.pricer.size,
            eight_bit=self.pricer.eight_bit,
            trains="all" if adapter.kind == "none" else adapter.kind,
            adapters=() if adapter.kind == "none" else _adapted(adapter),
            rank=adapter.rank,
            drops=adapter.dropout > 0,
        )
        self._layers: dict[object, LayerTime] = {}
        self._once: dict[object, tuple[Training, LayerTime]] = {}  # of a kind of layer, whatever is computed again
        self.are_alike = len({layer.kind for layer in model.layers}) == 1
        self.stages: dict[tuple[tuple[int, ...], str], Any] = {}  # by split and recomputation: step_time.py's

    def layer(self, layer: LayerSpec, again: bool) -> LayerTime:
        """Returns the seconds of one layer and micro-batch. `again`: it is recomputed as a whole."""
        key = (layer.kind, again)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(layer, again)
        return found

    @cached_property
    def ends(self) -> tuple[LayerTime, LayerTime]:
        """The seconds of the embedding and of the head."""
        first = self._compute(embedding_work(self.model, self.shape, self.stack))
        head = self._compute(head_work(self.model, self.shape, self.stack))
        # The head's input is gathered or its gradient summed, and each token's largest logit and sums meet.
        tensor, meets = self._region() / 2, 3 * self.network.all_reduce(self.shape.here * 4, self.plan.tp)
        head = head._replace(tensor_forward=tensor + meets, tensor_backward=tensor)
        return first._replace(tensor_forward=tensor), head

    def stage(self, layers: Sequence[tuple[LayerSpec, bool]]) -> LayerTime:
        """Returns the seconds of several layers, each with whether it is recomputed as a whole."""
        counted = Counter((layer.kind, again) for layer, again in layers)
        one_of = {layer.kind: layer for layer, _ in layers}
        times = ((self.layer(one_of[kind], again), count) for (kind, again), count in counted.items())
        return add(LayerTime(*(count * seconds for seconds in time)) for time, count in times)

    # One layer ----------------------------------------------------------------------------------------------------

    def _layer(self, layer: LayerSpec, again: bool) -> LayerTime:
        """Returns the seconds of one layer, which `layer` remembers."""
        price = self.pricer
        if layer.kind not in self._once:
            work = layer_work(self.model, layer, self.shape, self.stack)
            self._once[layer.kind] = work, self._compute(work, num_tensors(self.model, layer))
        work, time = self._once[layer.kind]
        repeated = self.stack.repeated(work, again, self.plan.recomputes.is_selective)
        host = self._calls(layer) * price.launch
        more = price.host_seconds(repeated) + (2 * host + CHECKPOINT_LAUNCHES * price.launch if again else host)
        forward, backward = time.host_forward + host, time.host_backward + more
        time = time._replace(again=price.seconds(repeated), host_forward=forward, host_backward=backward)
        return time._replace(**self._collectives(layer, work, time.weights, again))

    def _calls(self, layer: LayerSpec) -> int:
        """Returns the number of operations around the collectives of a forward pass."""
        plan, gather = self.plan, COLLECTIVE_LAUNCHES["gather"]
        ring = 2 if plan.cp_kind == "ulysses" else plan.cp - 1
        tensor = 0 if plan.tp == 1 else 4 * gather if plan.sequence else 2 * COLLECTIVE_LAUNCHES["sum"]
        return tensor + gather * ((plan.cp > 1) * ring + 2 * (plan.ep > 1 and layer.is_moe))

    def _compute(self, work: Training, tensors: int = 1) -> LayerTime:
        """Returns the seconds without collectives and what is computed again. `tensors`: parameters, one by one."""
        price, is_gathered = self.pricer, self.plan.uses_fsdp and self.stack.casts_gathered
        hooks = (FSDP_LAUNCHES[0] + FSDP_LAUNCHES[1] * tensors) * price.launch if is_gathered else 0.0
        return LayerTime(
            forward=price.seconds(work.forward),
            inputs=price.seconds(work.inputs, backward=True),
            weights=price.seconds(work.weights),
            host_forward=price.host_seconds(work.forward) + hooks,
            host_backward=price.host_seconds(work.inputs) + price.host_seconds(work.weights) + hooks,
        )

    def _collectives(self, layer: LayerSpec, work: Training, weights: float, again: bool) -> dict[str, float]:
        """Returns the exposed seconds of the layer's collectives, by field of `LayerTime`. `weights`: seconds of the
        matmuls for weight gradients."""
        plan, stack = self.plan, self.stack
        found: dict[str, float] = {}
        if plan.tp > 1:
            regions = 1 if layer.is_moe and plan.ep > 1 else 2
            forward, repeated = regions * self._region(), 0.0
            if again:
                repeated = forward * (2 * regions - 1) / (2 * regions) if stack.stops_early else forward
            matmuls = sum(self.pricer.matmul(p) for p in work.forward.matmuls)
            both_ways = stack.tensor_seconds(forward, repeated, matmuls, weights, plan.sequence)
            found |= {"tensor_forward": both_ways[0], "tensor_backward": both_ways[1]}
        if plan.cp > 1:
            forward, backward = self._context(work)
            found |= {"context_forward": forward, "context_backward": backward + (forward if again else 0.0)}
        if plan.ep > 1 and layer.is_moe:
            routed_tokens = self.shape.outside * self.model.experts_per_token
            one = self.network.all_to_all(routed_tokens * self.model.hidden * self.shape.size, plan.ep)
            found |= {"expert_forward": 2 * one, "expert_backward": 2 * one * (2 if again else 1)}
        return found

    def _region(self) -> float:
        """Returns the seconds into and out of one tensor-parallel region, in one direction: an all-reduce, or an
        all-gather and a reduce-scatter."""
        if self.plan.tp == 1:
            return 0.0
        size = self.shape.here * self.model.hidden * self.shape.size
        if self.plan.sequence:
            both = self.network.all_gather(size, self.plan.tp) + self.network.reduce_scatter(size, self.plan.tp)
            return both + (2 * self.pricer.pass_(2.0 * size) if self.stack.batch_first and self.shape.rows > 1 else 0.0)
        return self.network.all_reduce(size, self.plan.tp)

    def _context(self, work: Training) -> tuple[float, float]:
        """Returns the exposed seconds of a layer's context-parallel exchanges, forward and backward."""
        plan, model, size = self.plan, self.model, self.shape.size
        elements = self.shape.here * -(-model.num_kv_heads // plan.tp) * (model.head_dim + model.value_dim)
        if plan.cp_kind == "ulysses":
            queries = self.shape.here * model.num_heads // plan.tp * model.head_dim
            one = self.network.all_to_all((queries + elements) * size, plan.cp, plan.tp)
            out = self.network.all_to_all(queries * size, plan.cp, plan.tp)
            return one + out, one + out
        # A ring: keys and values go round while attention works on the piece before; in backward their gradients too.
        span, steps, cores = self.network.tiers[0].span, plan.cp - 1, work.forward.attention
        distance = plan.tp if plan.cp * plan.tp <= span else span
        hop, back = (self.network.send(elements * size * times, distance) for times in (1, 3))
        attention, backward = (sum(self.pricer.attention(a, is_back) for a in cores) for is_back in (False, True))
        return steps * max(0.0, hop - attention / plan.cp), steps * max(0.0, back - backward / plan.cp)


def _adapted(adapter: AdapterConfig) -> tuple[int, ...]:
    """Returns the numbers of a plain layer's matmuls that have adapters."""
    names, targets = ("q", "k", "v", "o", "gate", "up", "down"), adapter.targets
    asked = names if "all-linear" in targets else {*targets, *(target.removesuffix("_proj") for target in targets)}
    return tuple(index for index, name in enumerate(names) if name in asked)
