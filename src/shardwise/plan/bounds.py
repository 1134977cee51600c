"""What a layout needs at least, in microseconds of thinking: floors of memory and of step time. No torch.

The search looks at millions of layouts and predicts hundreds. Floors say which of them can still win. Invariant, held by tests on random
layouts: no floor is above the prediction. Memory is counted on the pipeline's first rank, time is that of the work alone. Read next:
searching.py, which asks; memory.py and step_time.py, which predict.
"""

from __future__ import annotations

from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.activations import exchanged_activations, layer_activations
from shardwise.plan.memory import COMPUTE_BYTES, WEIGHT_BYTES, state_bytes
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import expert_parameters, tensor_slice
from shardwise.plan.schedules import stage_owners
from shardwise.plan.space import Grid, Pace, Saving, Space, States
from shardwise.plan.stack import Stack
from shardwise.plan.step_time import step_seconds

WORK = ("compute", "launch", "tensor-parallel", "context-parallel", "expert-parallel")
"""Parts of a step that every micro-batch pays, whatever the data-parallel ranks and the pipeline do."""


class Floors:
    def __init__(self, space: Space, stack: Stack):
        self.space, self.stack = space, stack
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self.weight, self.compute = WEIGHT_BYTES[space.precision], COMPUTE_BYTES[space.precision]
        self.state = state_bytes(space.job.optimizer, space.precision)
        self._slices: dict[int, ModelSpec] = {}
        self._held: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._kept: dict[tuple[object, ...], int] = {}
        self._layer: dict[tuple[object, ...], int] = {}
        self._work: dict[tuple[object, ...], float] = {}

    # Time ----------------------------------------------------------------------------------------------------------

    def of_gpus(self, gpus: int) -> float:
        """All products at the full rate of the device, on all ranks all the time."""
        space = self.space
        rate = max(space.cluster.device.flops.values()) * (space.cluster.world if space.device == "cpu" else gpus)
        share = 1.0 if space.job.adapter.kind == "none" else 1 / 3  # frozen weights have no gradients
        return self.batch * self.seq_len * space.model.flops_per_token(self.seq_len) * share / rate

    def of_plan(self, plan: Plan) -> float:
        return 0.0

    def of_pace(self, grid: Grid, pace: Pace) -> float:
        """Seconds. No rank of a pipeline has less than the mean of the work, and what comes before a rank's first forward and after its
        last backward is done by the ranks before it. Where each action is whole, stage r of p and M micro-batches take at least
        M x_r + x_0 + ... + x_(r-1), which is least when x_r shrinks by 1 - 1/M from stage to stage."""
        rows = -(-self.batch // grid.dp)
        work = self.of_microbatch(grid, pace.micro_batch)
        if grid.pp == 1:
            return work * rows / pace.micro_batch
        count = -(-rows // pace.micro_batch)
        if pace.schedule in ("1f1b", "gpipe"):
            return work / (1 - (1 - 1 / count) ** grid.pp)
        return work * count / grid.pp

    def of_microbatch(self, grid: Grid, size: int) -> float:
        """Seconds of one micro-batch through the whole model, forward and backward, on ranks that have all layers."""
        key = (grid.tp, grid.sequence, grid.cp, grid.cp_kind, grid.ep, size)
        if key not in self._work:
            self._work[key] = self._measure(grid, size)
        return self._work[key]

    def _measure(self, grid: Grid, size: int) -> float:
        dp = -(-grid.ep // (grid.cp * grid.tp))  # as few as hold all experts
        space = self.space
        plan = Plan(
            device=space.device,
            precision=space.precision,
            seq_len=self.seq_len,
            global_batch=size * dp,
            micro_batch=size,
            num_steps=1,
            threads_per_rank=max(1, space.cluster.world // grid.gpus) if space.device == "cpu" else 4,
            reason="one micro-batch",
            dp=dp,
            tp=grid.tp,
            sequence=grid.sequence,
            cp=grid.cp,
            cp_kind=grid.cp_kind,
            ep=grid.ep,
        )
        parts = step_seconds(space.model, space.cluster, space.job, plan, self.stack)
        return sum(parts.get(name, 0.0) for name in WORK)

    # Memory --------------------------------------------------------------------------------------------------------

    def memory(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> int:
        """Bytes of the first rank: what it holds of the model, and what its stages keep of the micro-batches in flight."""
        dense, spread, block = self._parameters(grid, pace)
        if self.space.job.adapter.kind != "none":
            return self._frozen(dense + spread, grid, states, saving) // 2
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        ranks = grid.dp * grid.cp * grid.tp
        own = dense / shards + spread / (ranks // grid.ep if states.zero else 1)
        kept = self._activations(grid, pace, saving)
        if saving.offload == "all":
            return int(kept)
        gathered = (dense + spread) * self.compute if self.compute != self.weight or states.zero else 0
        if states.zero == 3:
            gathered = block * self.compute
        rows = -(-self.batch // grid.dp)
        gradients = own * self.weight
        if saving.offload == "optimizer":
            return int(own * self.weight + gathered + kept)
        lasting = own * (self.weight + self.state)
        if rows <= pace.micro_batch:  # gradients come when activations go
            return int(lasting + max(gathered + kept, gradients))
        return int(lasting + gathered + kept + gradients)

    def least_memory(self, grid: Grid, pace: Pace, states: States | None = None) -> int:
        """Of all savings, and of all states if none is given."""
        savings = self.space.savings
        found = self._least_saving(savings)
        every = [states] if states else self._least_states(grid)
        return min(self.memory(grid, pace, one, saving) for one in every for saving in found)

    def _least_saving(self, savings: list[Saving]) -> list[Saving]:
        """Of each recomputation the one that moves the most out."""
        order = {"none": 0, "optimizer": 1, "all": 2}
        most = max((order[s.offload], s.activation_offload) for s in savings)
        return [s for s in savings if (order[s.offload], s.activation_offload) == most]

    def _least_states(self, grid: Grid) -> list[States]:
        """The most shards of each stage."""
        least: dict[int, States] = {}
        for states in self.space.states(grid):
            if states.zero not in least or states.replicate < least[states.zero].replicate:
                least[states.zero] = states
        return list(least.values())

    def _slice(self, tp: int) -> ModelSpec:
        if tp not in self._slices:
            self._slices[tp] = tensor_slice(self.space.model, tp)
        return self._slices[tp]

    def _chunks(self, grid: Grid, pace: Pace) -> list[tuple[LayerSpec, ...]]:
        """Layers of each stage of the first rank."""
        layers = self._slice(grid.tp).layers
        if grid.pp == 1:
            return [layers]
        split = self.space.split(grid.pp * pace.virtual_stages)
        assert split is not None, (grid, pace)
        owners = stage_owners(pace.schedule, grid.pp, pace.virtual_stages)
        ends = [sum(split[: stage + 1]) for stage, owner in enumerate(owners) if owner == 0]
        mine = [size for size, owner in zip(split, owners, strict=True) if owner == 0]
        return [layers[end - size : end] for end, size in zip(ends, mine, strict=True)]

    def _parameters(self, grid: Grid, pace: Pace) -> tuple[int, int, int]:
        """Of the first rank: all but spread experts, spread experts, one layer."""
        key = (grid.tp, grid.ep, grid.pp, pace.schedule == "zbv", pace.virtual_stages)
        if key not in self._held:
            spec, model = self._slice(grid.tp), self.space.model
            layers = [layer for chunk in self._chunks(grid, pace) for layer in chunk]
            outside = spec.num_attention_parameters + 2 * spec.num_norm_parameters
            routed = spec.num_experts * expert_parameters(spec)
            experts = model.num_experts // grid.ep * expert_parameters(model) if grid.ep > 1 else 0
            dense = spec.num_embedding_parameters
            sizes = []
            for layer in layers:
                away = routed if layer.is_moe and grid.ep > 1 else 0
                sizes.append(outside + spec.num_feedforward_parameters(layer) - away)
            dense += sum(sizes)
            spread = experts * sum(layer.is_moe for layer in layers)
            self._held[key] = dense, spread, min(sizes)
        return self._held[key]

    def _activations(self, grid: Grid, pace: Pace, saving: Saving) -> float:
        if saving.activation_offload:
            return 0.0
        rows = -(-self.batch // grid.dp)
        count, pp, v = -(-rows // pace.micro_batch), grid.pp, pace.virtual_stages
        flying = 1
        if pp > 1:
            group = -(-count // max(1, count // pp))
            most = {
                "gpipe": count,
                "1f1b": pp,
                "interleaved": (v - 1) * group + 2 * (pp - 1) + 1,
                "zero-bubble": (v - 1) * group + 1,
                "zbv": 2,
            }
            flying = min(count * v, most[pace.schedule])
        tokens = pace.micro_batch * self.seq_len // grid.cp
        return tokens * self._numbers(grid, pace, saving.recompute) * self.compute * flying

    def _numbers(self, grid: Grid, pace: Pace, mode: str) -> int:
        """Kept per token by the smallest stage of the first rank."""
        how = (grid.tp, grid.sequence, grid.cp > 1, grid.cp_kind, grid.ep > 1)
        key = (*how, grid.pp, pace.schedule == "zbv", pace.virtual_stages, mode)
        if key not in self._kept:
            self._kept[key] = min(sum(self._of_layer(grid, one, mode) for one in c) for c in self._chunks(grid, pace))
        return self._kept[key]

    def _of_layer(self, grid: Grid, layer: LayerSpec, mode: str) -> int:
        if mode == "sqrt":
            return 0
        if mode == "full" or (mode.startswith("every-") and layer.index % int(mode[6:]) == 0):
            return self._slice(grid.tp).hidden // (grid.tp if grid.sequence else 1)
        is_selective = mode == "selective"
        how = (grid.tp, grid.sequence, grid.cp > 1, grid.cp_kind, grid.ep > 1)
        key = (*how, layer.is_moe, layer.ffn, is_selective)
        if key not in self._layer:
            spec = self._slice(grid.tp)
            if self.space.device == "cuda":
                spec = spec.with_overrides({"norm": "layer"})
            keys = 0 if grid.cp > 1 and grid.cp_kind == "ring" else self.seq_len
            parts, routed = grid.tp if grid.sequence else 1, grid.tp if grid.ep > 1 else 1
            numbers = layer_activations(spec, [layer], keys, parts, routed, is_selective)
            if grid.cp > 1 and grid.cp_kind == "ulysses":
                numbers += exchanged_activations(spec, [layer])
            self._layer[key] = numbers
        return self._layer[key]

    def _frozen(self, parameters: int, grid: Grid, states: States, saving: Saving) -> int:
        """Beside adapters: weights alone, in four bits or in the format of the computation."""
        if saving.offload == "all":
            return 0
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        return int(parameters * (0.5 if self.space.job.adapter.kind == "qlora" else self.compute) / shards)
