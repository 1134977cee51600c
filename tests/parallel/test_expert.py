"""Experts spread over ranks: the exchange alone, against all experts in one place; what a rank holds and sends;
moving between layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from observe import observe
from torch import Tensor

from shardwise.data.loader import TensorBatch
from shardwise.model.decoder import Decoder
from shardwise.model.experts import Experts, moe_layers
from shardwise.model.initialize import initialize
from shardwise.optim.build import build_optimizer
from shardwise.parallel.collect import collect, optimizer_states, put_optimizer_states, share
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.evaluate import plain_sums
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SMALL = {"num_layers": 2, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
ROUTED = {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 15, "moe_every": 1, "aux_loss_coef": 0.1}
SPEC = preset("tiny-moe").with_overrides(SMALL | ROUTED)
PLAIN = preset("tiny-moe").with_overrides(SMALL | ROUTED | {"gated": False, "activation": "gelu"})

# Rows for each expert, rank by rank.
LOADS = {
    "even": [[3, 3, 3, 3], [3, 3, 3, 3]],
    "uneven": [[7, 1, 2, 30], [0, 5, 11, 1]],
    "an expert nobody chose": [[4, 0, 3, 1], [2, 0, 5, 5]],
    "a rank whose experts nobody chose": [[4, 6, 0, 0], [2, 1, 0, 0]],
    "a rank without rows": [[4, 2, 3, 1], [0, 0, 0, 0]],
    "one row": [[0, 0, 0, 0], [0, 0, 1, 0]],
    "four ranks": [[2, 0, 9, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 3, 0, 8]],
}


# The exchange --------------------------------------------------------------------------------------------------------


def all_experts(spec: ModelSpec) -> Experts:
    torch.manual_seed(3)
    experts = Experts(spec).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def rows_of(spec: ModelSpec, counts: list[int], rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    shape = (sum(counts), spec.hidden)
    x_MD, grad_MD = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return x_MD.requires_grad_(), grad_MD


def through_ranks(spec: ModelSpec, loads: list[list[int]]) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
    rank = dist.get_rank()
    spread = SpreadExperts(all_experts(spec), dist.group.WORLD)
    x_MD, grad_MD = rows_of(spec, loads[rank], rank)
    out_MD = spread(x_MD, torch.tensor(loads[rank]))
    out_MD.backward(grad_MD)
    assert x_MD.grad is not None
    gradients = {name: p.grad for name, p in spread.named_parameters() if p.grad is not None}
    return out_MD.detach(), x_MD.grad, gradients, sum(p.nbytes for p in spread.parameters())


@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("load", LOADS)
def test_spread_experts_compute_what_all_experts_in_one_place_compute(load: str, spec: ModelSpec, ranks: Any) -> None:
    loads = LOADS[load]
    experts = all_experts(spec)
    found = ranks.run(through_ranks, len(loads), spec, loads)
    for rank, (out_MD, grad_MD, *_) in enumerate(found):
        x_MD, given_MD = rows_of(spec, loads[rank], rank)
        true_MD = experts(x_MD, torch.tensor(loads[rank]))
        true_MD.backward(given_MD)
        assert torch.allclose(out_MD, true_MD, rtol=1e-13, atol=1e-13)
        assert x_MD.grad is not None and torch.allclose(grad_MD, x_MD.grad, rtol=1e-13, atol=1e-13)
    for name, parameter in experts.named_parameters():
        whole = torch.cat([gradients[name] for *_, gradients, _ in found])
        assert torch.allclose(whole, parameter.grad, rtol=1e-12, atol=1e-12), name
    assert {held for *_, held in found} == {sum(p.nbytes for p in experts.parameters()) // len(loads)}


# What a rank holds and sends -----------------------------------------------------------------------------------------

TRIAL = Trial(num_steps=3, global_batch=5, micro_batch=1, seq_len=12, clip=0.3)


def make_plan(layout: dict[str, Any], trial: Trial = TRIAL) -> Plan:
    return trial_plan(trial, **layout)


def exchanged(spec: ModelSpec, plan: Plan) -> tuple[list[tuple[int, int]], int, int]:
    """(numbers given, bytes given) of every exchange of one step, micro-batches, bytes of experts held."""
    engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    seen: list[tuple[int, int]] = []
    exchange = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, group: Any, **rest: Any) -> Any:
        if engine.mesh.expert is not None and group is engine.mesh.expert.group:
            seen.append((given.numel(), given.nbytes))
        return exchange(output, given, *args, group=group, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        accumulate(engine, batch, num_targets, Clock(CPU))
    return seen, plan.num_microbatches, sum(s.local.nbytes for s in engine.shards if ".experts." in s.name)


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "zero": 3}, {"tp": 2, "sequence": True, "ep": 2}], ids=str
)
def test_five_messages_per_layer_and_each_copy_of_a_token_travels_twice(layout: dict[str, Any], ranks: Any) -> None:
    """Counts, rows there and back, gradients there and back. Nothing is padded and nothing dropped."""
    plan = make_plan(layout)
    found = ranks.run(exchanged, plan.world, SPEC, plan)
    experts = sum(p.nbytes for name, p in Decoder(SPEC).double().named_parameters() if ".experts." in name)
    tokens = TRIAL.seq_len // plan.tp * SPEC.experts_per_token * SPEC.hidden  # numbers, per micro-batch of one row
    for seen, microbatches, held in found:
        assert len(seen) == 5 * SPEC.num_layers * microbatches
        assert [numbers for numbers, _ in seen].count(SPEC.num_experts) == SPEC.num_layers * microbatches
        states = plan.expert_copies if plan.zero else 1
        assert held == experts // plan.ep // states
    counts = SPEC.num_experts * 8 * SPEC.num_layers * sum(microbatches for _, microbatches, _ in found)
    moved = 4 * tokens * 8 * SPEC.num_layers * sum(microbatches for _, microbatches, _ in found)
    assert sum(num_bytes for seen, *_ in found for _, num_bytes in seen) == counts + moved


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(1, 6, 6), (2, 6, 12), (3, 16, 12)])
def test_zero_gathers_and_reduces_experts_with_their_block(
    zero: int, gathers: int, reductions: int, ranks: Any
) -> None:
    """Four groups of the rest (two ends, two blocks) and two of experts. Stage 3 gathers for both passes, but for the
    embedding, the last block, its experts and the head."""
    trial = Trial(global_batch=8, micro_batch=1, seq_len=12)
    for found in ranks.run(observe, 4, SPEC, make_plan({"dp": 4, "zero": zero, "ep": 2}, trial), trial):
        assert found.num_groups == {0: 6}
        assert (found.gathers, found.reductions) == (gathers, reductions)
        if zero == 3:
            experts = [{name for name in look.gathered if ".experts." in name} for look in found.looks]
            assert max(map(len, experts)) == 2 and experts[-1] == set()


# Passes that do not split the tokens ---------------------------------------------------------------------------------


def evaluated(spec: ModelSpec, plan: Plan, tokens: Tensor) -> list[float]:
    engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
    engine.train(False)
    sums = engine.evaluate([TensorBatch(tokens, tokens.roll(-1, 1), None)])
    dist.all_reduce(sums)
    return sums.tolist()


def test_a_length_that_tensor_parallel_ranks_cannot_share(ranks: Any) -> None:
    """Every rank then has all tokens and asks the experts for all of them; losses still count once."""
    tokens = torch.randint(0, SPEC.vocab, (2, 11))
    model = Decoder(SPEC).double()
    initialize(model, TRIAL.seed)
    with torch.no_grad():
        truth = plain_sums(model.eval())([TensorBatch(tokens, tokens.roll(-1, 1), None)]).tolist()
    for sums in ranks.run(evaluated, 2, SPEC, make_plan({"tp": 2, "sequence": True, "ep": 2}), tokens):
        assert sums == pytest.approx(truth, rel=1e-11)


# From one layout to another ------------------------------------------------------------------------------------------


def moved(spec: ModelSpec, before: Plan, after: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Steps 1 and 2 in one layout, step 3 in another, by way of whole tensors under global names."""
    losses: list[float] = []
    state: dict[str, Tensor] = {}
    for plan, steps in ((before, (1, 2)), (after, (3,))):
        engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
        optimizer = build_optimizer(TRIAL.optimizer, engine.locals())
        if state or plan is after:
            weights = {name: value for name, value in state.items() if "/" not in name}
            table = {shard.name: shard for shard in engine.shards} | engine.buffers()
            for name, value in share(weights, engine.mesh):
                target = table[name]
                target.copy_(value) if isinstance(target, Tensor) else target.put(value)
            states = {name: value for name, value in state.items() if "/" in name}
            put_optimizer_states(engine, optimizer, share(states, engine.mesh))
        for step in steps:
            batch, num_targets = trial_batch(spec, plan, TRIAL, step, engine.mesh.at.dp)
            norm, finish = accumulate(engine, batch, num_targets, Clock(CPU))
            losses.append(float(finish()[0]) / num_targets)
            update(engine, optimizer, norm, lr=TRIAL.optimizer.lr, clip=TRIAL.clip, clock=Clock(CPU))
        state = collect(engine, lambda shard: {shard.name: shard.local.detach().clone()}, engine.buffers())
        state |= collect(engine, optimizer_states(optimizer))
    return losses, {name: value for name, value in state.items() if "/" not in name}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 2, "ep": 2}, {"dp": 2, "zero": 3}),
        ({"dp": 2, "zero": 3}, {"tp": 2, "sequence": True, "ep": 2}),
        ({"dp": 2, "zero": 2, "ep": 2}, {"tp": 2}),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(before: dict[str, Any], after: dict[str, Any], ranks: Any) -> None:
    spec = SPEC.with_overrides({"router": "sigmoid-bias", "bias_update_rate": 0.05})
    truth = train_plain(spec, TRIAL)
    found = ranks.run(moved, 2, spec, make_plan(before), make_plan(after))
    losses, parameters = found[0]
    assert losses == pytest.approx(truth.losses, rel=1e-11)
    for name, value in truth.parameters.items():
        assert torch.allclose(parameters[name], value, rtol=1e-9, atol=1e-12), name


# transformers' balancing loss ----------------------------------------------------------------------------------------


def trained(spec: ModelSpec, plan: Plan) -> Record:
    return train_in_layout(spec, plan, TRIAL, dist.get_rank(), CPU)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 2, "ep": 2},
        {"tp": 2},
        {"tp": 2, "sequence": True, "ep": 2},
        {"cp": 2},
        {"pp": 2, "split": (1, 1), "recompute": "full"},
    ],
    ids=str,
)
def test_the_balancing_loss_over_a_whole_step_is_the_same_in_every_layout(layout: dict[str, Any], ranks: Any) -> None:
    """Its first factor counts the tokens of all layers, micro-batches and ranks, before any of them is computed."""
    spec = SPEC.with_overrides({"aux_loss_rule": "transformers", "aux_loss_coef": 2.0})
    truth, plan = train_plain(spec, TRIAL), make_plan(layout)
    per_sequence = train_plain(SPEC.with_overrides({"aux_loss_coef": 2.0}), TRIAL)
    found = ranks.run(trained, plan.world, spec, plan)[0]
    assert found.losses == pytest.approx(truth.losses, rel=1e-11)
    assert found.norms == pytest.approx(truth.norms, rel=1e-9)
    assert per_sequence.norms != pytest.approx(truth.norms, rel=1e-3)


# Load ----------------------------------------------------------------------------------------------------------------


def loads(spec: ModelSpec, plan: Plan) -> Tensor:
    engine = build_trial(spec, plan, TRIAL, dist.get_rank(), CPU)
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    accumulate(engine, batch, num_targets, Clock(CPU))
    return engine.expert_counts


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2},
        {"pp": 2, "split": (1, 1)},
        {"dp": 2, "zero": 1, "ep": 2},
        {"dp": 2, "tp": 2, "sequence": True, "ep": 4},
    ],
    ids=str,
)
def test_every_rank_knows_the_load_of_every_expert(layout: dict[str, Any], ranks: Any) -> None:
    model, batch = Decoder(SPEC).double(), TRIAL.batch(SPEC, 1)
    initialize(model, TRIAL.seed)
    model(batch.tokens, batch.targets)
    truth = torch.stack([layer.tokens_per_expert for layer in moe_layers(model)]).double()
    assert truth.sum() == SPEC.num_layers * TRIAL.global_batch * TRIAL.seq_len * SPEC.experts_per_token
    plan = make_plan(layout)
    for counts in ranks.run(loads, plan.world, SPEC, plan):
        assert torch.equal(counts, truth)
