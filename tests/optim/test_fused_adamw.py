"""AdamW over masters and copies: its plain twin here, against torch's own AdamW. The kernel is in
test_fused_adamw_cuda.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim.build import build_optimizer, set_learning_rate
from shardwise.optim.fused_adamw import MANY, MasterAdamW, _scalars, plain_update, update_together
from shardwise.spec.schema import OptimizerConfig

CONFIG = OptimizerConfig(lr=3e-3, weight_decay=0.1)
SHAPES = [(50, 33), (7,), (3, 4, 5)]
ROUNDED = torch.finfo(torch.float32).eps
"""Of a weight, in one step: it is rounded after its decay and after its change, by half of this each time. Two ways
of computing it are at most twice as far apart; of the change itself, four roundings are allowed, at about the
learning rate each."""


def masters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [(0.1 * torch.randn(shape, generator=draw)).to(dtype) for shape in SHAPES]


def within(found: Tensor, truth: Tensor, times: float) -> bool:
    limit = times * ROUNDED * (truth.abs() + 4 * CONFIG.lr)
    return bool(((found.double() - truth.double()).abs() <= limit).all())


def optimizer_of(ours: list[nn.Parameter]) -> MasterAdamW:
    low_precision_of = {master: nn.Parameter(master.detach().bfloat16()) for master in ours}
    groups = build_optimizer(CONFIG, ours).param_groups  # who is decayed is said in one place
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
    return MasterAdamW(groups, CONFIG.lr, CONFIG.betas, CONFIG.eps, low_precision_of)


def one_step(optimizer: MasterAdamW, ours: list[nn.Parameter], step: int, factor: Tensor | None, summed: bool) -> None:
    for our, gradient in zip(ours, gradients(step), strict=True):
        if summed:  # over micro-batches, in fp32
            our.grad = gradient.float()
        else:
            optimizer.low_precision_of[our].grad = gradient
    optimizer.grad_factor = factor
    optimizer.step()


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_steps_are_torchs(clips: bool, summed: bool) -> None:
    theirs, ours = masters(), masters()
    truth, found = build_optimizer(CONFIG, theirs), optimizer_of(ours)
    factor = torch.tensor(0.37, dtype=torch.float64) if clips else None
    for step in range(1, 6):
        for optimizer in (truth, found):
            set_learning_rate(optimizer, CONFIG.lr / step)
        for their, gradient in zip(theirs, gradients(step, torch.float32), strict=True):
            wide = gradient.bfloat16().float()
            their.grad = wide if factor is None else wide * factor.float()
        truth.step()
        one_step(found, ours, step, factor, summed)
        assert found.grad_factor is None
        for their, our in zip(theirs, ours, strict=True):
            assert within(our, their, 2 * step), step  # steps add up
            assert torch.equal(found.low_precision_of[our], our.bfloat16())
            assert our.grad is None and found.low_precision_of[our].grad is None
            assert float(found.state[our]["step"]) == step


@pytest.mark.parametrize("bucket", [1, 100, 2**24])
@pytest.mark.parametrize("clips", [True, False])
def test_small_ones_together_are_updated_as_one_by_one(
    clips: bool, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.optim.fused_adamw.BUCKET_ELEMENTS", bucket)
    factor = torch.tensor(0.37, dtype=torch.float64) if clips else None
    group = {"betas": CONFIG.betas, "lr": CONFIG.lr, "weight_decay": 0.1, "eps": CONFIG.eps}
    draw = torch.Generator().manual_seed(3)
    tasks = [
        (m.detach(), m.detach().bfloat16(), g, *(torch.rand(m.shape, generator=draw) for _ in range(2)))
        for m, g in zip(masters(), gradients(1), strict=True)
    ]
    truth = [tuple(tensor.clone() for tensor in task) for task in tasks]
    update_together(tasks, group, 3, factor)
    for found, one in zip(tasks, truth, strict=True):
        plain_update(*one, _scalars(group, 3), factor)
        for ours, theirs in zip((found[0], *found[3:]), (one[0], *one[3:]), strict=True):
            assert within(ours, theirs, 4)
        assert torch.equal(found[1], found[0].bfloat16())


def test_small_and_large_ones_of_a_group_with_different_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with many small parameters. One of them missed a step, so its moments are corrected by another
    count."""
    found, small = {}, []
    together = update_together
    monkeypatch.setattr("shardwise.optim.fused_adamw.SMALL", 100)
    monkeypatch.setattr(
        "shardwise.optim.fused_adamw.update_together",
        lambda tasks, group, count, factor: (small.append((count, len(tasks))), together(tasks, group, count, factor)),
    )
    for many in (False, True):
        monkeypatch.setattr("shardwise.optim.fused_adamw._num_small", lambda _, many=many: MANY if many else MANY - 1)
        ours = masters()
        optimizer = optimizer_of(ours)
        for step in (1, 2, 3):
            for number, (our, gradient) in enumerate(zip(ours, gradients(step), strict=True)):
                optimizer.low_precision_of[our].grad = None if (number, step) == (1, 2) else gradient
            optimizer.step()
        found[many] = ours
        assert all(torch.equal(optimizer.low_precision_of[our], our.bfloat16()) for our in ours)
        assert [float(optimizer.state[our]["step"]) for our in ours] == [3, 2, 3]
    assert sorted(small) == [(1, 1), (1, 1), (2, 1), (2, 1), (3, 1)]
    assert all(within(one, other, 12) for one, other in zip(found[True], found[False], strict=True))


def test_states_have_torchs_names_and_go_on_after_torch() -> None:
    """Two steps by torch, the third by this one, is three steps by torch."""
    theirs = masters()
    truth = build_optimizer(CONFIG, theirs)
    for step in (1, 2, 3):
        if step == 3:
            ours = [nn.Parameter(their.detach().clone()) for their in theirs]
            found = optimizer_of(ours)
            state = {number: dict(entry) for number, entry in truth.state_dict()["state"].items()}
            state = {n: {key: value.clone() for key, value in entry.items()} for n, entry in state.items()}
            found.load_state_dict({"state": state, "param_groups": found.state_dict()["param_groups"]})
        for their, gradient in zip(theirs, gradients(step), strict=True):
            their.grad = gradient.float()
        truth.step()
    one_step(found, ours, 3, None, summed=False)
    for their, our in zip(theirs, ours, strict=True):
        assert found.state[our].keys() == truth.state[their].keys()
        assert within(our, their, 2)


def test_a_step_is_the_formula_in_fp64_rounded() -> None:
    ours = masters()
    found, lr = optimizer_of(ours), CONFIG.lr
    beta1, beta2 = torch.tensor(CONFIG.betas, dtype=torch.float32).tolist()  # a kernel's constants are fp32
    for step in (1, 2, 3):
        exact = []
        for our, gradient in zip(ours, gradients(step), strict=True):
            w, g, state = our.detach().double(), gradient.double(), found.state[our] or {}
            m, v = (state.get(name, torch.zeros_like(our)).double() for name in ("exp_avg", "exp_avg_sq"))
            terms = beta1 * m.abs() + (1 - beta1) * g.abs()  # a sum that cancels is not exact to its own size
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w * (1 - lr * (CONFIG.weight_decay if our.ndim > 1 else 0.0))
            mean, spread = m / (1 - beta1**step), v / (1 - beta2**step)
            exact.append((w - lr * mean / (spread.sqrt() + CONFIG.eps), m, v, terms))
        one_step(found, ours, step, None, summed=False)
        for our, (w, m, v, terms) in zip(ours, exact, strict=True):
            assert within(our, w, 1), step
            assert bool(((found.state[our]["exp_avg"] - m).abs() <= ROUNDED * terms).all())  # rounded twice
            assert bool(((found.state[our]["exp_avg_sq"] - v).abs() <= 1.5 * ROUNDED * v).all())  # three times


def test_a_master_without_a_gradient_stays() -> None:
    ours = masters()
    found, before = optimizer_of(ours), [our.detach().clone() for our in ours]
    found.low_precision_of[ours[0]].grad = torch.ones_like(found.low_precision_of[ours[0]])
    found.step()
    assert not torch.equal(ours[0], before[0]) and ours[1] not in found.state
    assert all(torch.equal(our, old) for our, old in zip(ours[1:], before[1:], strict=True))
