"""The honest baseline: one careful page of PyTorch for one GPU and one kind of model, nothing else.

Blocks are compiled one by one; q, k, v and gate, up are single matmuls; attention is cuDNN's; the loss goes over the
tokens in chunks, each with its backward at once, so that all logits never exist; parameters and gradients are bf16,
AdamW's fused kernel updates fp32 masters. `masters=false`: bf16 everywhere. No other contender's code is used here,
ours neither.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from gpu.contender import Contender, adamw, clip, draw_weights, same_weights
from gpu.shapes import Case
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.spec.model import ModelSpec

LOSS_CHUNK = 4096  # tokens whose logits exist at once


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, -1)
    return torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), -1)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head, self.heads = spec.head_dim, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.norm1, self.norm2 = Norm(spec.hidden, spec.norm_eps), Norm(spec.hidden, spec.norm_eps)
        self.qkv = nn.Linear(spec.hidden, sum(self.heads) * self.head, bias=False)
        self.out = nn.Linear(spec.num_heads * self.head, spec.hidden, bias=False)
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        parts = self.qkv(self.norm1(x_BTD)).view(batch, tokens, -1, self.head).split(self.heads, 2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.norm2(x_BTD)).chunk(2, -1)
        return x_BTD + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = Norm(spec.hidden, spec.norm_eps)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Hidden states before the head."""
        x_BTD, width = self.embed(tokens_BT), self.spec.head_dim
        steps = torch.arange(0, width, 2, device=x_BTD.device, dtype=torch.float32) / width
        angles_TD = torch.arange(tokens_BT.shape[1], device=x_BTD.device)[:, None] * self.spec.rope_theta**-steps
        cos_TD, sin_TD = angles_TD.cos().to(x_BTD.dtype), angles_TD.sin().to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TD, sin_TD)
        return self.norm(x_BTD)


def chunk_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy((x_ND @ weight_VD.T).float(), targets_N, reduction="sum")


def build(case: Case) -> Contender:
    with torch.device(case.device):
        model = Model(case.shape.spec)
    load(model, case) if case.seed is not None else draw_weights(model)
    loss_of = chunk_loss
    if case.compiles:
        loss_of = torch.compile(chunk_loss)
        for block in model.blocks:
            block.compile()
    keeps_masters = case.is_bf16 and case.options.get("masters", True)
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in parameters] if keeps_masters else []  # before they are rounded
    if case.is_bf16:
        model.bfloat16()
    optimizer = adamw(case, masters or parameters)

    def attention() -> Any:
        if case.device != "cuda":
            return nullcontext()
        named = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        return sdpa_kernel(named[case.options.get("attention", "cudnn")])

    def step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with attention():
            x_BTD = model(tokens_BT)
        cut_BTD = x_BTD.detach().requires_grad_()
        total = torch.zeros((), device=case.device)
        pieces = cut_BTD.flatten(0, 1).split(LOSS_CHUNK), targets_BT.flatten().split(LOSS_CHUNK)
        for x_ND, targets_N in zip(*pieces, strict=True):
            loss = loss_of(x_ND, model.head.weight, targets_N) / targets_BT.numel()
            loss.backward()
            total += loss.detach()
        with attention():
            x_BTD.backward(cut_BTD.grad)
        clip(case, parameters)
        if masters:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            torch._foreach_copy_([p.data for p in parameters], [m.data for m in masters])
        else:
            optimizer.step()
        optimizer.zero_grad()
        return total

    return Contender(step, sum(p.numel() for p in parameters))


@torch.no_grad()
def load(model: Model, case: Case) -> None:
    named = same_weights(case)
    values = {"embed.weight": named["model.embed_tokens.weight"], "norm.weight": named["model.norm.weight"]}
    values["head.weight"] = named["lm_head.weight"]
    for index in range(len(model.blocks)):
        ours, theirs = f"blocks.{index}", f"model.layers.{index}"
        values[f"{ours}.norm1.weight"] = named[f"{theirs}.input_layernorm.weight"]
        values[f"{ours}.norm2.weight"] = named[f"{theirs}.post_attention_layernorm.weight"]
        values[f"{ours}.out.weight"] = named[f"{theirs}.self_attn.o_proj.weight"]
        values[f"{ours}.down.weight"] = named[f"{theirs}.mlp.down_proj.weight"]
        values[f"{ours}.qkv.weight"] = torch.cat([named[f"{theirs}.self_attn.{name}_proj.weight"] for name in "qkv"])
        values[f"{ours}.gate_up.weight"] = torch.cat([named[f"{theirs}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
    model.load_state_dict(values)
