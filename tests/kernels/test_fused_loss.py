"""Linear and cross-entropy in one: the plain path's results, every matmul once, one chunk's logits at a time."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoders import make, some_tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import UserError
from shardwise.kernels.fused_head import FusedHead, apply_fused_head
from shardwise.kernels.fused_loss import FusedLossSettings, _cap, _with_passes, fused_cross_entropy, times
from shardwise.model import loss as loss_module
from shardwise.model.decoder import IGNORE
from shardwise.spec.presets import preset

N, D, V = 23, 12, 37
FACTOR = 0.37 / 19  # as a loss scale over the number of targets


def problem(dtype: torch.dtype = torch.float64, size: float = 1.0) -> tuple[Tensor, nn.Parameter, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x_ND = (size * torch.randn(N, D, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(V, D, generator=draw, dtype=torch.float64).to(dtype))
    targets_N = torch.randint(0, V, (N,), generator=draw)
    targets_N[[0, 7, 8, 22]] = IGNORE
    return x_ND, weight, targets_N


def fused(x_ND: Tensor, weight: Tensor, targets_N: Tensor, rows: int, softcap: float = 0.0, **more: Any) -> Tensor:
    is_target_N = targets_N != IGNORE
    rows_N = targets_N.masked_fill(~is_target_N, 0)
    settings = FusedLossSettings(rows, more.pop("block", rows), softcap, **more)
    return fused_cross_entropy(x_ND, weight, rows_N, is_target_N, is_target_N, settings)


def plain(x_ND: Tensor, weight: Tensor, targets_N: Tensor, softcap: float = 0.0) -> Tensor:
    logits_NV = x_ND @ weight.T
    logits_NV = softcap * torch.tanh(logits_NV / softcap) if softcap else logits_NV
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")


def learned(loss: Any, *arguments: Any, dtype: torch.dtype = torch.float64, **more: Any) -> list[Tensor]:
    x_ND, weight, targets_N = problem(dtype)
    value = loss(x_ND, weight, targets_N, *arguments, **more)
    (value * FACTOR).backward()
    assert x_ND.grad is not None and weight.grad is not None
    return [value.detach(), x_ND.grad, weight.grad]


@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("rows", [1, 5, 8, 22, 23, 100])
def test_any_number_of_rows_in_a_chunk_gives_the_plain_loss_and_gradients(rows: int, softcap: float) -> None:
    for block in {1, max(1, rows - 2), rows}:
        found = learned(fused, rows, softcap, block=block)
        for mine, true in zip(found, learned(plain, softcap), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_rows_without_a_target_have_no_gradient_and_a_batch_without_any_has_none_at_all() -> None:
    x_ND, weight, targets_N = problem()
    fused(x_ND, weight, targets_N, 6).backward()
    assert x_ND.grad is not None
    assert (x_ND.grad[targets_N == IGNORE] == 0).all() and (x_ND.grad[targets_N != IGNORE] != 0).any(1).all()
    x_ND, weight, _ = problem()
    loss = fused(x_ND, weight, torch.full((N,), IGNORE), 6)
    loss.backward()
    assert loss == 0 and (x_ND.grad == 0).all() and (weight.grad == 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("target", [-1, V])
def test_ids_outside_the_vocabulary_fail(target: int) -> None:
    x_ND, weight, targets_N = problem()
    targets_N[3] = target
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        fused(x_ND, weight, targets_N, 5)


class Seen(TorchDispatchMode):
    """Matmuls, the largest tensor that any operation returned, and how many chunks of logits were left when new
    ones were made."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls, self.largest, self.left = 0, 0, 0
        self.logits: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.left = max(self.left, sum(one() is not None for one in self.logits))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == V:
            self.logits.append(weakref.ref(result))
        self.matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self.largest = max(self.largest, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return result


@pytest.mark.parametrize(("wants_x", "wants_weight", "matmuls"), [(1, 1, 3), (1, 0, 2), (0, 1, 2), (0, 0, 1)])
def test_only_what_is_wanted_is_computed_and_no_matmul_twice(wants_x: int, wants_weight: int, matmuls: int) -> None:
    x_ND, weight, targets_N = problem()
    x_ND.requires_grad_(bool(wants_x))
    weight.requires_grad_(bool(wants_weight))
    with Seen() as seen:
        loss = fused(x_ND, weight, targets_N, 6)
        if loss.requires_grad:
            loss.backward()
    assert seen.matmuls == 4 * matmuls  # four chunks
    assert len(seen.logits) == 4 and seen.left == 0
    assert seen.largest == max(6 * V, N * D, V * D) < N * V
    assert (x_ND.grad is not None, weight.grad is not None) == (bool(wants_x), bool(wants_weight))


def test_without_gradients_there_is_only_the_loss() -> None:
    x_ND, weight, targets_N = problem()
    with torch.no_grad(), Seen() as seen:
        loss = fused(x_ND, weight, targets_N, 6)
    assert seen.matmuls == 4 and seen.left == 0 and not loss.requires_grad
    torch.testing.assert_close(loss, plain(x_ND, weight, targets_N).detach(), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_gradients_are_all_that_waits_for_backward(dtype: torch.dtype) -> None:
    x_ND, weight, targets_N = problem(dtype)
    saved: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def note(tensor: Tensor) -> Tensor:
        saved[(tuple(tensor.shape), tensor.dtype)] += 1
        return tensor

    with torch.backends.mkldnn.flags(enabled=False), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        fused(x_ND, weight, targets_N, 6).backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert saved == {((N, D), dtype): 1, ((V, D), wide): 1}
    assert x_ND.grad is not None and weight.grad is not None and x_ND.grad.dtype == weight.grad.dtype == dtype


def test_a_graph_that_is_kept_gives_the_same_again_and_a_second_derivative_is_refused() -> None:
    x_ND, weight, targets_N = problem()
    loss = fused(x_ND, weight, targets_N, 6)
    first = torch.autograd.grad(loss * 3, (x_ND, weight), retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss * 3, (x_ND, weight), retain_graph=True), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(UserError, match="no second derivative"):
        torch.autograd.grad(loss, x_ND, create_graph=True)


# Rounding
# ---------------------------------------------------------------------------------------------------------------


def distance(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("softcap", [0.0, 2.5])
def test_16_bits_are_as_near_to_fp64_as_computing_logits_again(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input's gradient is rounded once more, by the factor; the weight's is summed over chunks in fp32, no longer
    in bf16."""
    spec = preset("tiny").with_overrides({"vocab": 512, "hidden": 64, "logit_softcap": softcap})
    monkeypatch.setattr(loss_module, "MAX_LOGITS_BYTES", 4 * 512 * 32)
    draw = torch.Generator().manual_seed(0)
    x_BTD, start = torch.randn(2, 256, 64, generator=draw), torch.randn(512, 64, generator=draw) / 4
    targets_BT = torch.randint(0, 512, (2, 256), generator=draw)
    found: dict[str, list[Tensor]] = {}
    kinds = (("true", True, torch.float64), ("fused", True, torch.bfloat16), ("again", False, torch.bfloat16))
    for name, is_fused, dtype in kinds:
        head = FusedHead(spec).to(dtype)
        head.fused = is_fused
        assert head.weight is not None
        head.weight.data.copy_(start.bfloat16())
        x = x_BTD.bfloat16().to(dtype).requires_grad_()
        with torch.backends.mkldnn.flags(enabled=False):  # see test_decoder.py
            loss = head(x, targets_BT)
            (loss / 500).backward()
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        found[name] = [loss.detach(), x.grad, head.weight.grad]  # type: ignore[list-item]
    errors = {name: [distance(*pair) for pair in zip(found[name], found["true"], strict=True)] for name in found}
    assert errors["fused"][0] <= max(errors["again"][0], 1e-4), errors
    assert errors["fused"][1] <= 1.2 * errors["again"][1] and errors["fused"][1] < 4e-3, errors
    assert errors["fused"][2] <= 0.8 * errors["again"][2], errors


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_factor_is_not_rounded_to_16_bits() -> None:
    """1 / 3 in bf16 is 0.2 % off: so would be every gradient."""
    x_ND, weight, targets_N = problem(torch.bfloat16)
    third = torch.tensor(1 / 3)
    with torch.backends.mkldnn.flags(enabled=False):
        loss = fused(x_ND, weight, targets_N, 6)
    (whole,) = torch.autograd.grad(loss, x_ND, retain_graph=True)
    (found,) = torch.autograd.grad(loss * third, x_ND)
    assert torch.equal(found, (whole.float() * third).bfloat16())
    assert not torch.equal(found, (whole.float() * third.bfloat16()).bfloat16())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_certain_target_keeps_its_gradient_in_16_bits() -> None:
    """p = 0.9995 is 1 in bf16; p - 1 is not 0."""
    x_ND = torch.eye(2, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(torch.tensor([[7.625, 0.0], [0.0, 7.625]], dtype=torch.bfloat16))
    with torch.backends.mkldnn.flags(enabled=False):
        fused(x_ND, weight, torch.tensor([0, 1]), 1).backward()
    assert weight.grad is not None
    less_one = torch.sigmoid(torch.tensor(7.625)) - 1
    torch.testing.assert_close(weight.grad[0, 0].float(), less_one, rtol=4e-3, atol=0)


EPSILON = torch.finfo(torch.float32).eps
OTHERS = 1.5  # the log-sum-exp of the vocabulary's other part


def assert_rounded_once(
    run: Any, width: int, dtype: torch.dtype, softcap: float, meets: bool, device: str = "cpu", nearest: bool = True
) -> None:
    """`run` makes losses and gradients of a chunk's logits: what fp64 makes of the same logits, computed in fp32 and
    rounded to theirs.

    Errors of fp32: a logit and a log-sum-exp are off by their own rounding, a capped logit by the cap's, the cap's
    slope by that of one; an exponential is off by the share by which its exponent is off. `meets`: other ranks have
    more of the vocabulary, and the targets of two rows."""
    draw = torch.Generator().manual_seed(width)
    logits_NV = 3 * torch.randn(8, width, generator=draw)
    rows_N = torch.tensor([0, width - 1, 0, *torch.randint(0, width, (5,), generator=draw).tolist()])
    is_target_N = torch.tensor([True, True, False, True, True, True, True, False])
    is_here_N = is_target_N & torch.tensor([not meets, True, False, True, True, True, not meets, False])
    logits_NV[2] = -torch.inf  # no target
    logits_NV[3, rows_N[3]] = 20.0  # a certain one
    logits_NV[4] -= 60
    logits_NV[5, : width - 2], rows_N[5] = -torch.inf, width - 2
    logits_NV[6] += 90
    logits_NV = logits_NV.to(dtype)
    # What is true.
    x_NV, slope_NV = _cap(logits_NV.double(), softcap)
    sums_N = x_NV.logsumexp(1)
    targets_N = torch.where(is_here_N, x_NV.gather(1, rows_N[:, None])[:, 0], OTHERS - 0.5)
    if meets:
        sums_N = torch.logaddexp(sums_N, torch.tensor(OTHERS).double())
    losses_N = sums_N - targets_N
    p_NV = (x_NV - sums_N[:, None]).exp()
    gradient_NV = p_NV.clone()
    gradient_NV[is_here_N, rows_N[is_here_N]] = torch.expm1(-losses_N)[is_here_N]
    gradient_NV.masked_fill_(~is_target_N[:, None], 0)
    slope_error_NV = 2 * EPSILON * gradient_NV.abs() * (softcap != 0)
    gradient_NV *= slope_NV
    # How far from it fp32 may be.
    loss_error_N = EPSILON * (8 + 8 * softcap + 4 * (losses_N.abs() + sums_N.abs()))
    exponent_error_NV = EPSILON * (8 + 8 * softcap + 4 * (x_NV.abs() + sums_N.abs()[:, None]))
    exponent_error_NV[is_here_N, rows_N[is_here_N]] += loss_error_N[is_here_N]
    info = torch.finfo(dtype)
    rounding_NV = (0.5 if nearest else 1) * info.eps * gradient_NV.abs() + 8 * EPSILON * gradient_NV.abs()
    smallest = max(torch.finfo(torch.float32).smallest_normal, info.smallest_normal * info.eps)
    error_NV = (p_NV * slope_NV * exponent_error_NV).nan_to_num() + slope_error_NV + rounding_NV + smallest

    def meet(sums_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        assert (targets_N[~is_here_N.to(device)] == 0).all()
        theirs_N = torch.full_like(sums_N, OTHERS)
        return torch.logaddexp(sums_N, theirs_N), torch.where(is_here_N.to(device), targets_N, theirs_N - 0.5)

    for wants in (False, True):
        found_NV, loss_N = logits_NV.to(device, copy=True), torch.full((8,), 7.0, device=device)
        rows = [tensor.to(device) for tensor in (rows_N, is_target_N, is_here_N)]
        run(found_NV, *rows, loss_N, softcap, meet if meets else None, wants)
        off_N = (loss_N.cpu() - losses_N).masked_fill(~is_target_N, 0).abs()
        assert bool((off_N <= loss_error_N).masked_fill(~is_target_N, True).all()), (off_N, loss_error_N)
        assert bool((loss_N.cpu()[~is_target_N] == 0).all())
        if not wants:
            assert torch.equal(found_NV.cpu(), logits_NV)
            continue
        off_NV = (found_NV.cpu().double() - gradient_NV).abs()
        assert bool((off_NV <= error_NV).all()), (off_NV / error_NV).amax(1)
        assert bool((found_NV.cpu()[~is_target_N] == 0).all())


def passes(*arguments: Any) -> None:
    *tensors, softcap, meet, wants = arguments
    _with_passes(*tensors, FusedLossSettings(8, 3, softcap, combine=meet), wants)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_of_logits_are_rounded_once(dtype: torch.dtype, softcap: float, meets: bool) -> None:
    assert_rounded_once(passes, 301, dtype, softcap, meets)


# Whole models
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant", ["llama", "gpt2", "gemma2", "moe"]
)  # gpt2 and gemma2 are tied, gemma2 has a soft cap
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_model_learns_the_same_whether_its_logits_fit_or_not(
    variant: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_BT = some_tokens()
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[0, :5] = IGNORE
    gradients = []
    for limit in (loss_module.MAX_LOGITS_BYTES, 4 * 64 * 5):
        monkeypatch.setattr(loss_module, "MAX_LOGITS_BYTES", limit)
        model = make(variant)
        apply_fused_head(model, fused=is_fused)
        model(tokens_BT, targets_BT).cross_entropy.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-12, atol=1e-13 * largest, msg=name)


def test_logits_that_fit_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: what a small model learned before, it learns now."""

    def refuse(*arguments: Any) -> Tensor:
        raise AssertionError("not needed")

    monkeypatch.setattr("shardwise.kernels.fused_head.fused_cross_entropy", refuse)
    make("llama")(some_tokens(), some_tokens()).cross_entropy.backward()


def test_the_factor_of_a_gradient_is_not_rounded_before_it_multiplies() -> None:
    gradient, factor = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)), torch.tensor(1 / 3)
    exact = (gradient * factor).bfloat16()
    fast = torch.compile(times, backend="aot_eager", fullgraph=True)
    for run in (times, fast):
        assert torch.equal(run(gradient, factor, torch.bfloat16), exact)
        rounded = gradient.bfloat16()
        assert torch.equal(run(rounded, factor, torch.bfloat16), (rounded.float() * factor).bfloat16())
