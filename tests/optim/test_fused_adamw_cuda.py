"""One pass over gradient, master, moments and copy, against torch's fused AdamW and against the engine with FSDP2; on
a GPU."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim.build import build_optimizer
from shardwise.optim.fused_adamw import MANY, MasterAdamW, _scalars, plain_update
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import compare, prove
from shardwise.run.clock import Clock
from shardwise.run.step import update
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

pytestmark = pytest.mark.cuda

SHAPES = [(1000, 333), (2048, 2048), (7,), (4096,), (3, 16, 40)]
CONFIG = OptimizerConfig(lr=3e-3, weight_decay=0.1)
EPSILON = torch.finfo(torch.float32).eps
SMALL = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}


def pow_error(step: int) -> float:
    """Of a weight's change: torch's kernel raises betas in fp32, by CUDA's `powf`, which may be 4 ulps off, and takes
    that from 1."""
    beta1, beta2 = CONFIG.betas
    return EPSILON * (4 / (1 - beta1**step) + 2 / (1 - beta2**step) + 4)


def update_by_kernel(*arguments: Any) -> None:
    from shardwise.kernels.triton.adamw import update  # there is no Triton where there is no GPU

    update(*arguments)


def masters(scale: float = 1.0) -> list[nn.Parameter]:
    draw = torch.Generator("cuda").manual_seed(1)
    return [nn.Parameter(scale * torch.randn(shape, device="cuda", generator=draw)) for shape in SHAPES]


def copied(of: list[nn.Parameter], dtype: torch.dtype = torch.bfloat16) -> dict[nn.Parameter, nn.Parameter]:
    return {master: nn.Parameter(master.detach().to(dtype)) for master in of}


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator("cuda").manual_seed(100 + step)
    return [(0.1 * torch.randn(shape, device="cuda", generator=draw)).to(dtype) for shape in SHAPES]


def ulps(found: Tensor, truth: Tensor) -> int:
    """Steps of fp32 between two numbers, at the most."""
    assert bool(((found == 0) == (truth == 0)).all()) and bool((found * truth >= 0).all())
    return int((found.view(torch.int32).long() - truth.view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("many", [1, MANY])
def test_every_step_is_torchs_own_to_one_ulp(
    gradient_dtype: torch.dtype, clips: bool, copy_dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step begins with torch's numbers, so that nothing adds up: it shows the rounding of one. A first moment is
    a sum that may cancel, which is exact to the size of its terms and not to its own; in the first step there is one
    term."""
    monkeypatch.setattr("shardwise.optim.fused_adamw.MANY", many)
    theirs, ours = masters(), masters()
    low_precision_of = copied(ours, copy_dtype)
    truth, found = build_optimizer(CONFIG, theirs), build_optimizer(CONFIG, ours, low_precision_of)
    assert isinstance(found, MasterAdamW) and isinstance(truth, torch.optim.AdamW)
    for step in range(1, 6):
        factor = torch.tensor(0.37, dtype=torch.float64, device="cuda") if clips else None
        terms, before = {}, {}
        for their, our, gradient in zip(theirs, ours, gradients(step, gradient_dtype), strict=True):
            wide = gradient.float()
            their.grad = wide if factor is None else wide * factor.float()
            moment, beta1 = truth.state[their].get("exp_avg", torch.zeros_like(their)), CONFIG.betas[0]
            terms[our] = beta1 * moment.abs() + (1 - beta1) * their.grad.abs()
            before[our] = their.detach().clone()
            if gradient.dtype == copy_dtype:
                low_precision_of[our].grad = gradient
            else:  # as after several micro-batches
                our.grad = wide
        found.grad_factor = factor
        truth.step()
        found.step()
        for their, our in zip(theirs, ours, strict=True):
            for name, term in (("exp_avg", terms[our]), ("exp_avg_sq", None)):
                ours_now, theirs_now = found.state[our][name], truth.state[their][name]
                if term is None or step == 1:  # nothing cancels: exact to the result's own size
                    assert ulps(ours_now, theirs_now) <= 1, (name, step)
                else:
                    assert bool(((ours_now - theirs_now).abs() <= EPSILON * term).all()), step
                ours_now.copy_(theirs_now)
            assert float(found.state[our]["step"]) == float(truth.state[their]["step"]) == step
            change = (their - before[our]).abs()
            assert bool(((our - their).abs() <= EPSILON * their.abs() + pow_error(step) * change).all()), step
            assert torch.equal(low_precision_of[our], our.to(copy_dtype))
            assert our.grad is None and low_precision_of[our].grad is None
            with torch.no_grad():
                our.copy_(their)


@pytest.mark.parametrize("clips", [True, False])
def test_the_kernel_computes_what_its_plain_twin_does(clips: bool) -> None:
    """To the rounding of a product that is added: the kernel does both at once. Of a weight's change, which is large
    where a second moment is small, to CUDA's quick quotients and roots: 2 ulps for each of two quotients, 1 for the
    root, 1/2 for each of two products, in the kernel and here."""
    factor = torch.tensor(0.37, dtype=torch.float64, device="cuda") if clips else None
    group = {"betas": (0.9, 0.95), "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}
    for master, gradient in zip(masters(), gradients(1, torch.bfloat16), strict=True):
        draw = torch.Generator("cuda").manual_seed(7)
        first, second = (torch.rand(master.shape, device="cuda", generator=draw) for _ in range(2))
        ours = [tensor.detach().clone() for tensor in (master, master.bfloat16(), gradient, first, second)]
        theirs = [tensor.clone() for tensor in ours]
        scalars, before = _scalars(group, 3).cuda(), ours[0].clone()
        update_by_kernel(*ours, scalars, factor)
        plain_update(*theirs, scalars, factor)
        assert ulps(ours[3], theirs[3]) <= 1 and ulps(ours[4], theirs[4]) <= 1
        change = (theirs[0] - before).abs()
        assert bool(((ours[0] - theirs[0]).abs() <= EPSILON * (theirs[0].abs() + 2 * 6 * change)).all())
        assert torch.equal(ours[1], ours[0].bfloat16())


def hand_over(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """A copy of the state: torch's loading would have both update the same tensors."""
    state = deepcopy(one.state_dict()["state"])
    other.load_state_dict({"state": state, "param_groups": other.state_dict()["param_groups"]})


def test_states_continue_in_torchs_optimizer_and_back() -> None:
    ours = masters()
    low_precision_of = copied(ours)
    found = build_optimizer(CONFIG, ours, low_precision_of)
    for our, gradient in zip(ours, gradients(1, torch.bfloat16), strict=True):
        low_precision_of[our].grad = gradient
    found.step()
    theirs = [nn.Parameter(our.detach().clone()) for our in ours]
    truth = build_optimizer(CONFIG, theirs)
    hand_over(found, truth)
    again = build_optimizer(CONFIG, ours, low_precision_of)
    hand_over(truth, again)
    for their, our, gradient in zip(theirs, ours, gradients(2, torch.float32), strict=True):
        their.grad, our.grad = gradient, gradient.clone()
    truth.step()
    again.step()
    for their, our in zip(theirs, ours, strict=True):
        assert torch.allclose(our, their, rtol=1e-6, atol=1e-7)
        assert float(again.state[our]["step"]) == 2


def test_an_update_takes_no_memory_and_waits_for_nothing() -> None:
    ours = masters()
    low_precision_of = copied(ours)
    found = build_optimizer(CONFIG, ours, low_precision_of)
    factor = torch.tensor(0.5, dtype=torch.float64, device="cuda")
    for step in (1, 2):
        for our, gradient in zip(ours, gradients(step, torch.bfloat16), strict=True):
            low_precision_of[our].grad = gradient
        del gradient
        found.grad_factor = factor
        if step == 1:  # compiles the kernel, makes the moments
            found.step()
            continue
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before <= 4096  # the scalars of each group
        assert torch.cuda.memory_allocated() < before  # gradients are gone


@pytest.mark.usefixtures("repeatable_on_gpu")
@pytest.mark.parametrize("micro_batch", [8, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_engine_with_copies_trains_as_fsdp2_does(precision: str, micro_batch: int) -> None:
    """5e-4: an ulp of a weight may turn its copy over, which is 0.4 % of that weight in bf16."""
    spec = preset("tiny").with_overrides(SMALL)
    trial = Trial(num_steps=4, precision=precision, micro_batch=micro_batch, seq_len=32, attention="math")
    device = torch.device("cuda", 0)
    truth = train_in_layout(spec, trial_plan(trial), trial, 0, device)
    record = train_in_layout(spec, trial_plan(trial, copies=True), trial, 0, device)
    (losses, norms, gradients, _), worst = compare(record, truth)
    assert record.losses[0] == truth.losses[0]
    assert losses <= 5e-4 and norms <= 1e-2, (losses, norms)
    assert gradients == 0.0, worst  # of the first step


def test_a_step_of_an_engine_with_copies_waits_for_nothing() -> None:
    """But for reading the loss, which is not part of it. Micro-batches are on the device before."""
    trial = Trial(num_steps=3, precision="bf16", micro_batch=8, seq_len=32)
    plan, device = trial_plan(trial, copies=True), torch.device("cuda", 0)
    spec = preset("tiny").with_overrides(SMALL)
    engine = build_trial(spec, plan, trial, 0, device)
    optimizer, clock = engine.optimizer(trial.optimizer), Clock(device)
    for step in (1, 2, 3):
        batch, num_targets = trial_batch(spec, plan, trial, step, 0)
        micro = [part.to(device) for part in batch.microbatches]
        torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        try:
            norm, _ = engine.norm_and_sums(engine.gradients(micro, num_targets, clock))
            update(engine, optimizer, norm, lr=1e-3, clip=0.5, clock=clock)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(shard.gradient is None for shard in engine.shards) and bool(torch.isfinite(norm))


def test_the_way_of_copies_is_proven_in_fp64_on_a_gpu() -> None:
    plan = trial_plan(Trial(precision="bf16", micro_batch=3), copies=True)
    assert prove(preset("tiny").with_overrides(SMALL), plan, OptimizerConfig(), 0, torch.device("cuda", 0)).holds
