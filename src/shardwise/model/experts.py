"""Mixture of experts: a router sends each token to a few of many feed-forward networks; nothing is ever dropped.

Owns routing, the experts' stacked weights, the balancing losses and DeepSeek's balancing bias. Invariants: losses and
counts are per sequence and weighted by its target tokens, so they do not depend on how sequences are grouped into
batches, and padding sequences (no target tokens) add nothing. transformers' rule for the balancing loss is not per
sequence: it needs the counts of a whole step before the step (`balancing_weights`). Read next: `decoder.py`, which sums
them up.

Shapes: B batch, T tokens, N = B*T, D model width, F expert width, E experts, K experts per token, M = N*K routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.feedforward import ACTIVATIONS, FeedForward
from shardwise.spec.model import ModelSpec


class Routing(NamedTuple):
    """What a layer's router reports besides its output: losses summed over the batch's target tokens, coefficients
    included, and how many tokens each expert got."""

    aux: Tensor
    z: Tensor
    tokens_per_expert_E: Tensor


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of which each token goes through the few experts that its router chooses, and through the
    shared ones, if there are any."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.num_experts, self.experts_per_token = spec.num_experts, spec.experts_per_token
        self.aux_coef, self.z_coef = spec.aux_loss_coef, spec.z_loss_coef
        self.bias_update_rate = spec.bias_update_rate
        self.is_balanced_by_step = spec.aux_loss_rule == "transformers"
        self.step_weights_E: Tensor | None = None  # then: what the probabilities of this step's tokens cost
        self.router = Router(spec)
        self.experts = Experts(spec)
        self.shared = FeedForward(spec, spec.expert_ffn * spec.num_shared_experts) if spec.num_shared_experts else None
        # Tokens each expert got since the last optimizer step, over sequences that have targets.
        self.tokens_per_expert: Tensor
        self.register_buffer("tokens_per_expert", torch.zeros(spec.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_BTD: Tensor, target_counts_B: Tensor | None) -> tuple[Tensor, Routing | None]:
        x_ND = x_BTD.flatten(0, 1)
        choice = self.router(x_ND)
        # 1. Bring each expert's tokens together: row m is token m // K for its choice m % K.
        order_M = sorting(choice.experts_NK.flatten(), self.num_experts)
        back_M = inverse(order_M)
        counts_BE = count_experts(choice.experts_NK.view(x_BTD.shape[0], -1), self.num_experts)
        counts_E = counts_BE.sum(0)
        sorted_MD = arrange(x_ND, order_M, back_M, num_repeats=self.experts_per_token)
        # 2. Every expert works on its own rows.
        out_MD = self.experts(sorted_MD, counts_E)
        # 3. Back to token order, weighted sum of each token's K results (fixed order: the same bits every time).
        out_NKD = arrange(out_MD, back_M, order_M).unflatten(0, (-1, self.experts_per_token))
        out_ND = (out_NKD * choice.weights_NK.to(out_NKD.dtype).unsqueeze(-1)).sum(1)
        out_BTD = out_ND.view_as(x_BTD)
        if self.shared is not None:
            out_BTD = out_BTD + self.shared(x_BTD)
        return out_BTD, None if target_counts_B is None else self._report(choice, counts_BE, target_counts_B)

    def count_whole_sequences(self, counts_BE: Tensor) -> Tensor:
        """Returns how often each expert was chosen in each whole sequence, given how often in the tokens of this batch,
        both of shape (B, E). They are the same here; whoever splits sequences into parts replaces this."""
        return counts_BE

    def _report(self, choice: Choice, counts_BE: Tensor, target_counts_B: Tensor) -> Routing:
        """Returns the losses of the router. `target_counts_B` counts the targets of whole sequences; where the batch
        has only a part of them, the losses are what its tokens contribute."""
        batch = target_counts_B.shape[0]
        counts_whole_BE = self.count_whole_sequences(counts_BE)
        probabilities_BTE = choice.probabilities_NE.unflatten(0, (batch, -1))
        logits_BTE = choice.logits_NE.unflatten(0, (batch, -1))
        weight_B = target_counts_B.to(probabilities_BTE.dtype)
        # Switch Transformer, section 2.2, per sequence as in DeepSeek-V3 (17)-(20): 1 when perfectly balanced.
        # A sum over the batch's tokens, divided by the length of the whole sequence. If a sequence is computed in
        # parts, the losses of its parts add up to its own.
        length_B = counts_whole_BE.sum(1).to(weight_B.dtype) / self.experts_per_token
        if self.is_balanced_by_step:
            aux = self._aux_by_step(probabilities_BTE, target_counts_B)
        else:
            share = self.num_experts / self.experts_per_token
            share_BE = counts_whole_BE.to(weight_B.dtype) * (share / length_B)[:, None]
            aux_B = (share_BE * probabilities_BTE.sum(1)).sum(-1) / length_B
            aux = self.aux_coef * (aux_B * weight_B).sum()
        # ST-MoE, equation 5: keeps the router's logits small.
        z_B = logits_BTE.logsumexp(-1).square().sum(1) / length_B
        counted_E = (counts_BE * (target_counts_B > 0)[:, None]).sum(0)
        return Routing(aux, self.z_coef * (z_B * weight_B).sum(), counted_E)

    def _aux_by_step(self, probabilities_BTE: Tensor, target_counts_B: Tensor) -> Tensor:
        """Returns what these tokens add to transformers' balancing loss; 0 outside of steps, where nothing was
        counted."""
        if self.step_weights_E is None:
            return probabilities_BTE.new_zeros(())
        in_rows_BTE = probabilities_BTE * (target_counts_B > 0)[:, None, None]
        return (in_rows_BTE.sum((0, 1)) * self.step_weights_E.to(in_rows_BTE.dtype)).sum()


class Choice(NamedTuple):
    """The experts that a router chooses for each token, and how much each of them weighs."""

    experts_NK: Tensor
    weights_NK: Tensor
    probabilities_NE: Tensor  # over all experts, for the balancing loss
    logits_NE: Tensor


class Router(nn.Module):
    """Scores every expert for every token, in at least fp32, and picks K."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.kind, self.num_chosen, self.norm_topk = spec.router, spec.experts_per_token, spec.norm_topk
        self.scaling, self.num_groups, self.kept_groups = spec.routed_scaling, spec.num_expert_groups, spec.topk_groups
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(spec.num_experts) if self.kind == "sigmoid-bias" else None)

    def forward(self, x_ND: Tensor) -> Choice:
        work = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
        logits_NE = F.linear(x_ND.to(work), self.weight.to(work))
        if self.kind == "sigmoid-bias":
            return self._sigmoid(logits_NE)
        probabilities_NE = logits_NE.softmax(-1)
        if self.kind == "topk-softmax":
            top_NK, experts_NK = logits_NE.topk(self.num_chosen, dim=-1)
            weights_NK = top_NK.softmax(-1)
        else:
            weights_NK, experts_NK = probabilities_NE.topk(self.num_chosen, dim=-1)
            if self.norm_topk:
                weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return Choice(experts_NK, weights_NK * self.scaling, probabilities_NE, logits_NE)

    def _sigmoid(self, logits_NE: Tensor) -> Choice:
        """Returns DeepSeek-V3's choice (section 2.1.2): the bias decides which experts are chosen, never how much they
        weigh."""
        assert self.bias is not None, "a sigmoid router has a bias"
        scores_NE = logits_NE.sigmoid()
        ranking_NE = scores_NE.detach() + self.bias
        if self.num_groups > 1:
            # A token stays within the best groups, each judged by its two best experts.
            ranking_NGX = ranking_NE.unflatten(-1, (self.num_groups, -1))
            best_groups = ranking_NGX.topk(2, dim=-1).values.sum(-1).topk(self.kept_groups, dim=-1).indices
            is_kept_NG = torch.zeros_like(ranking_NGX[..., 0], dtype=torch.bool).scatter(1, best_groups, True)
            ranking_NE = ranking_NGX.masked_fill(~is_kept_NG[..., None], float("-inf")).flatten(-2)
        experts_NK = ranking_NE.topk(self.num_chosen, dim=-1).indices
        weights_NK = scores_NE.gather(-1, experts_NK)
        if self.norm_topk:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        return Choice(experts_NK, weights_NK * self.scaling, probabilities_NE, logits_NE)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Leaves the bias in fp32 when the model is cast: it moves in steps of 0.001, which bf16 would lose."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != before.dtype:
            self.bias = before.to(self.bias.device)
        return self


class Experts(nn.Module):
    """E feed-forward networks as stacked weights. Rows come sorted by expert; `counts_E` has the number of each one's
    rows."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        shape = (spec.num_experts, spec.expert_ffn, spec.hidden)
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Parameter(torch.empty(shape)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(spec.num_experts, spec.hidden, spec.expert_ffn))

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        # The kernel reads rows of 16 bytes, and wants some.
        if self.groups(x_MD) and x_MD.shape[1] % 8 == self.up.shape[1] % 8 == 0 and x_MD.shape[0]:
            return self._grouped(x_MD, counts_E)
        sizes = self.sizes(x_MD, counts_E)
        # unbind, not indexing: its backward stacks the experts' gradients once instead of adding E stacks of zeros.
        gates = [None] * len(sizes) if self.gate is None else self.gate.unbind()
        experts = zip(x_MD.split(sizes), gates, self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([self._one(*expert) for expert in experts])

    def groups(self, x_MD: Tensor) -> bool:
        """Returns whether these rows go through grouped matmuls."""
        return can_group(x_MD)

    def sizes(self, x_MD: Tensor, counts_E: Tensor) -> list[int]:
        """Returns the number of each expert's rows, read from `counts_E`."""
        return even_sizes(x_MD.shape[0], counts_E.shape[0]) if x_MD.is_meta else counts_E.tolist()

    def _one(self, x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        if gate is None:
            return F.linear(self.activation(F.linear(x, up)), down)
        return F.linear(self.activation(F.linear(x, gate)) * F.linear(x, up), down)

    def _grouped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Computes all experts by grouped matmuls: no loop, and no wait for the counts to reach the CPU. Rows need no
        padding: in bf16 an expert's rows may begin anywhere, because only the rows themselves are read in pieces of 16
        bytes."""
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(self.grouped_hidden(x_MD, ends_E), self.down.transpose(1, 2), offs=ends_E)

    def grouped_hidden(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Returns the hidden channels of every row, of shape (M, F). `ends_E` is the row after each expert's last."""
        up_MF = F.grouped_mm(x_MD, self.up.transpose(1, 2), offs=ends_E)
        if self.gate is None:
            return self.activation(up_MF)
        return self.activation(F.grouped_mm(x_MD, self.gate.transpose(1, 2), offs=ends_E)) * up_MF


def sorting(experts_M: Tensor, num_experts: int) -> Tensor:
    """Returns the stable order of rows by expert, of shape (M,). Indices of one byte are sorted in one pass; for those
    of eight bytes a GPU makes eight passes."""
    return experts_M.to(torch.uint8 if num_experts <= 256 else torch.int16).argsort(stable=True)


def inverse(order_M: Tensor) -> Tensor:
    """Returns the inverse of a permutation, of shape (M,). Sorting it would give the same and take longer."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def arrange(x_ND: Tensor, order_M: Tensor, back_M: Tensor, num_repeats: int = 1) -> Tensor:
    """Returns every row `num_repeats` times, in another order: output m is row order_M[m] // num_repeats. `back_M` is
    the inverse of `order_M`."""
    return _Arrange.apply(x_ND, order_M, back_M, num_repeats)


class _Arrange(torch.autograd.Function):
    """Copies rows into another order. Backward adds the gradients of a row's repeats in a fixed order; the backward of
    plain indexing would add them one by one, on a GPU in the order in which threads arrive."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, back_M: Tensor, num_repeats: int) -> Tensor:
        ctx.save_for_backward(back_M)
        ctx.num_repeats = num_repeats
        return x_ND.index_select(0, order_M if num_repeats == 1 else order_M // num_repeats)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (back_M,) = ctx.saved_tensors
        rows_MD = grad_MD.index_select(0, back_M)
        return rows_MD if ctx.num_repeats == 1 else rows_MD.unflatten(0, (-1, ctx.num_repeats)).sum(1), None, None, None


def can_group(x: Tensor) -> bool:
    """Returns whether torch's grouped matmul can be used: in bf16 on CUDA. Elsewhere (and in fp64) the loop over
    experts is exact and plain. A compiler needs the grouped matmul on a CPU too, because it cannot see through the
    loop: the lengths of its slices are values in memory."""
    return x.dtype == torch.bfloat16 and (x.is_cuda or torch.compiler.is_compiling()) and hasattr(F, "grouped_mm")


def even_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Returns sizes of parts that differ by one row at most: they stand in for the counts on `meta`, where there are no
    values to count."""
    return [num_rows // num_parts + (part < num_rows % num_parts) for part in range(num_parts)]


def count_experts(experts_BM: Tensor, num_experts: int) -> Tensor:
    """Returns how often each expert occurs in each row, of shape (B, E)."""
    zeros_BE = torch.zeros(experts_BM.shape[0], num_experts, dtype=torch.int64, device=experts_BM.device)
    return zeros_BE.scatter_add(1, experts_BM, torch.ones_like(experts_BM))


def moe_layers(model: nn.Module) -> list[MixtureOfExperts]:
    """Returns the mixture-of-experts layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def balancing_weights(spec: ModelSpec, counts_LE: Tensor, num_targets: int) -> Tensor:
    """Returns what a unit of each expert's probability costs under transformers' rule, of shape (E,), given how many
    tokens of the whole step each expert of each layer got.

    transformers (`load_balancing_loss_func`, after Switch Transformer, equations 4 to 6) puts the rows of all layers
    one below the other: coefficient * E * sum over experts of (tokens per row) * (mean probability over rows). The
    first factor has no gradient. So with the counts known the loss is a sum over tokens, which any layout may split;
    times the targets here, because a step divides its losses by them.
    """
    counts_E = counts_LE.double().sum(0)
    num_rows = (counts_E.sum() / spec.experts_per_token).clamp(min=1.0)
    return counts_E / num_rows * (spec.aux_loss_coef * spec.num_experts * num_targets / num_rows)


@contextmanager
def counting_first(layers: Iterable[MixtureOfExperts]) -> Iterator[Callable[[Tensor], None]]:
    """Counts, within it, the tokens of a step that follows, and yields what gives the layers that step's weights. The
    step itself counts anew."""
    layers = list(layers)

    def weigh(weights_E: Tensor) -> None:
        for layer in layers:
            layer.step_weights_E = weights_E

    for layer in layers:
        layer.tokens_per_expert.zero_()
    with torch.no_grad():
        yield weigh
    for layer in layers:
        layer.tokens_per_expert.zero_()


@torch.no_grad()
def update_router_bias(model: nn.Module, *, moves: bool = True) -> None:
    """Makes overloaded experts a little less likely (DeepSeek-V3, 2.1.2), after the optimizer step; counts start anew.
    Biases stay where they are (`moves` false) after a step whose update was left out.

    `tokens_per_expert` must count the tokens of the whole step: whoever splits the batch first sums it over the parts.
    """
    for layer in moe_layers(model):
        if moves and layer.router.bias is not None and layer.bias_update_rate:
            counts_E = layer.tokens_per_expert.to(layer.router.bias.dtype)
            layer.router.bias += layer.bias_update_rate * (counts_E.mean() - counts_E).sign()
        layer.tokens_per_expert.zero_()
