"""What a rank holds is counted against the real thing: decoders in parts, slices of their matrices, lists of
actions."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from shardwise.model.decoder import Decoder
from shardwise.parallel.tensor.slices import placement
from shardwise.plan.prediction.rank_share import most_held, rank_shares
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.split import even_split, tensor_slice
from shardwise.spec.timeline import fullest_moments, peak_in_flight

SMALL = {"num_layers": 4, "vocab": 1000}
MODELS = [
    ("tiny", {"num_layers": 4}),
    ("tiny-moe", {"num_layers": 4, "num_shared_experts": 2}),
    ("gpt2", SMALL),
    ("qwen3-0.6b", SMALL),
    ("gemma2-2b", SMALL | {"hidden": 256, "ffn": 512}),
    ("deepseek-v3", SMALL | {"hidden": 256, "num_heads": 4, "num_kv_heads": 4, "ffn": 512, "expert_ffn": 128,
                             "num_experts": 16}),
]  # fmt: skip
SPECS = {name: preset(name).with_overrides(changes) for name, changes in MODELS}


def plan(**changes) -> Plan:
    values = dict(device="cpu", precision="fp32", seq_len=128, global_batch=8, micro_batch=1, num_steps=1,
                  threads_per_rank=1, reason="")  # fmt: skip
    return Plan(**(values | changes))


def held_parameters(spec: ModelSpec, tp: int, layers: range | None = None) -> int:
    """The most that one of `tp` ranks has of a decoder, or of the part of it with these layers."""
    with torch.device("meta"):
        model = Decoder(spec, layers=layers)

    def held(name: str, shape: torch.Size, index: int) -> int:
        cut = placement(spec, name, tp, index, sequence=False).slice
        return shape.numel() if cut is None else shape.numel() // shape[cut.dim] * (cut.stop - cut.start)

    return max(sum(held(name, p.shape, index) for name, p in model.named_parameters()) for index in range(tp))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_slice_has_the_parameters_of_the_fullest_tensor_parallel_rank(name, tp):
    assert tensor_slice(SPECS[name], tp).num_parameters == held_parameters(SPECS[name], tp)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule, stages", [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_rank_of_a_pipeline_has_the_parameters_of_its_stages(name, tp, schedule, stages):
    spec = SPECS[name]
    here = plan(tp=tp, pp=2, schedule=schedule, virtual_stages=stages, split=even_split(4, 2 * stages))
    owners = stage_owners(schedule, 2, stages)
    for rank, share in enumerate(rank_shares(spec, here)):
        mine = [here.layers_of(stage) for stage, owner in enumerate(owners) if owner == rank]
        assert share.num_parameters == sum(held_parameters(spec, tp, layers) for layers in mine)


@pytest.mark.parametrize("name", ["tiny-moe", "deepseek-v3"])
@pytest.mark.parametrize("tp, ep", [(1, 2), (2, 2), (2, 4)])
def test_a_rank_has_its_part_of_the_experts(name, tp, ep):
    spec = SPECS[name]
    here = plan(dp=4, tp=tp, sequence=tp > 1, ep=ep)
    with torch.device("meta"):
        model = Decoder(spec)
    held = 0
    for parameter_name, parameter in model.named_parameters():
        cut = placement(spec, parameter_name, tp, 0, tp > 1, ep, 0).slice
        held += (
            parameter.numel() if cut is None else parameter.numel() // parameter.shape[cut.dim] * (cut.stop - cut.start)
        )
    (share,) = rank_shares(spec, here)
    assert share.num_parameters == held
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert share.spread_parameters * ep == experts


def test_one_rank_alone_has_the_whole_model():
    for spec in SPECS.values():
        (share,) = rank_shares(spec, plan())
        assert share.num_parameters == spec.num_parameters
        assert share.in_flight(plan()) == 1


@pytest.mark.parametrize("schedule, stages", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3),
                                              ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)])  # fmt: skip
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 8, 9, 24])
def test_stages_in_flight_are_what_the_schedule_holds(schedule, stages, pp, microbatches):
    spec = preset("llama3-8b")
    here = plan(pp=pp, schedule=schedule, virtual_stages=stages, split=even_split(32, pp * stages),
                global_batch=microbatches)  # fmt: skip
    assert here.num_microbatches == microbatches
    counted = peak_in_flight(schedule_actions(schedule, pp, stages, microbatches))
    predicted = [share.in_flight(here) for share in rank_shares(spec, here)]
    assert max(predicted) == max(counted)
    assert all(mine >= theirs for mine, theirs in zip(predicted, counted, strict=True))
    moments = [fullest_moments(schedule, pp, stages, microbatches, rank) for rank in range(pp)]
    assert [max(map(sum, mine)) for mine in moments] == list(counted)


@pytest.mark.parametrize("schedule, stages", [("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2)])
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_weights_that_wait_are_those_of_the_schedule(schedule, stages, pp):
    """Most of them are counted with fewer micro-batches than there are."""
    for microbatches in [*range(1, 5 * pp + 1), 7 * pp, 7 * pp + 1, 8 * pp - 1]:
        counted = []
        for actions in schedule_actions(schedule, pp, stages, microbatches):
            kinds = [{"F": 0, "I": 1, "W": -1}[action.kind] for action in actions]
            counted.append(max(accumulate(kinds)))
        assert most_held(schedule, pp, stages, microbatches)[1] == tuple(counted), microbatches
