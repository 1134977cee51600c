"""Sends and receives between stages: in the order of the sender, whatever the receiver asks for first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.pipeline.send_receive import PointToPoint, StageTensor, incoming, needed_by, sent_by
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.spec.actions import Action
from shardwise.spec.presets import preset
from shardwise.spec.schedules import SCHEDULES, schedule_actions, stage_owners

TABLES = [
    (schedule, pp, stages, micro)
    for schedule in SCHEDULES
    for pp in (2, 3)
    for stages in (SCHEDULES[schedule].usual_stages,)
    for micro in (1, 3, 5)
]


def test_what_actions_hand_on_and_wait_for() -> None:
    assert sent_by(Action("F", 0, 4), 3) == StageTensor("x", 1, 4) == needed_by(Action("F", 1, 4), 3)
    assert sent_by(Action("I", 2, 1), 3) == StageTensor("g", 1, 1) == needed_by(Action("B", 1, 1), 3)
    assert sent_by(Action("F", 2, 0), 3) is None and needed_by(Action("B", 2, 0), 3) is None
    assert sent_by(Action("B", 0, 0), 3) is None and needed_by(Action("F", 0, 0), 3) is None
    assert sent_by(Action("W", 1, 0), 3) is None and needed_by(Action("W", 1, 0), 3) is None


@pytest.mark.parametrize(("schedule", "pp", "stages", "micro"), TABLES)
def test_everything_that_is_sent_is_expected_in_the_same_order(schedule: str, pp: int, stages: int, micro: int) -> None:
    table, owners = schedule_actions(schedule, pp, stages, micro), stage_owners(schedule, pp, stages)
    for here in range(pp):
        expected = incoming(table, owners, here)
        waited_for = {needed_by(action, len(owners)) for action in table[here]} - {None}
        from_itself = {sent_by(action, len(owners)) for action in table[here]}
        assert set(expected) == {tensor for tensor in waited_for if tensor not in from_itself}
        for sender in range(pp):
            sent = [sent_by(action, len(owners)) for action in table[sender] if sender != here]
            sent = [tensor for tensor in sent if tensor and owners[tensor.stage] == here]
            assert [tensor for tensor, (who, _) in expected.items() if who == sender] == sent


def exchange() -> dict[str, float]:
    """Rank 1 asks for the last tensor first; rank 0 gets gradients while its activations are still under way."""
    spec = preset("tiny").with_overrides({"num_layers": 2})
    plan = trial_plan(Trial(), pp=2, split=(1, 1))
    mesh = build_mesh(plan, spec, dist.get_rank(), torch.device("cpu"), fsdp=False)
    table = (
        tuple(Action(kind, 0, micro) for kind in "FB" for micro in range(3)),
        tuple(Action(kind, 1, micro) for kind in "FB" for micro in range(3)),
    )
    p2p = PointToPoint(mesh, table, (0, 1), (2, 3), torch.float32)
    found = {}
    if mesh.rank == 0:
        for micro in range(3):
            p2p.send(StageTensor("x", 1, micro), torch.full((3, 2), 10.0 + micro).t())  # not contiguous
        for micro in (1, 2, 0):
            found[f"g{micro}"] = float(p2p.receive(StageTensor("g", 0, micro)).mean())
    else:
        for micro in range(3):
            p2p.send(StageTensor("g", 0, micro), torch.full((2, 3), 20.0 + micro))
        for micro in (2, 0, 1):
            found[f"x{micro}"] = float(p2p.receive(StageTensor("x", 1, micro)).mean())
    p2p.flush()
    return found


def test_asking_out_of_order_gets_the_right_tensor(ranks: Any) -> None:
    assert ranks.run(exchange, 2) == [
        {"g0": 20.0, "g1": 21.0, "g2": 22.0},
        {"x0": 10.0, "x1": 11.0, "x2": 12.0},
    ]


def leave_unused() -> None:
    spec = preset("tiny").with_overrides({"num_layers": 2})
    mesh = build_mesh(trial_plan(Trial(), pp=2, split=(1, 1)), spec, dist.get_rank(), torch.device("cpu"), fsdp=False)
    table = ((Action("F", 0, 0),), (Action("F", 1, 0),))
    p2p = PointToPoint(mesh, table, (0, 1), (1,), torch.float32)
    if mesh.rank == 0:
        p2p.send(StageTensor("x", 1, 0), torch.ones(1))
    else:
        p2p.expect(StageTensor("x", 1, 0))
    p2p.flush()


def test_a_tensor_that_nobody_used_is_a_bug(ranks: Any) -> None:
    from ranks import RankFailure

    with pytest.raises(RankFailure, match="tensors that nobody used"):
        ranks.run(leave_unused, 2)


def test_a_tensor_for_oneself_stays_here() -> None:
    """The V of zbv: the last stage of the way down and the first of the way up are on one rank."""
    plan = trial_plan(Trial(), pp=2, schedule="zbv", virtual_stages=2, split=(1, 1, 1, 1))
    from shardwise.parallel.mesh import Mesh

    table, owners = schedule_actions("zbv", 2, 2, 1), stage_owners("zbv", 2, 2)
    p2p = PointToPoint(Mesh(plan, 1, plan.coordinates(1), torch.device("cpu")), table, owners, (1,), torch.float32)
    sent = torch.ones(1)
    p2p.send(StageTensor("x", 2, 0), sent)
    assert p2p.receive(StageTensor("x", 2, 0)) is sent
    p2p.flush()
