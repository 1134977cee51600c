"""Modules that are not ours, for `parallelize`: one written by hand, others from transformers; and the plain loop
they are measured against, which knows nothing of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH = 37, 9
IGNORE = -100
STEPS, LR, CLIP = 3, 1e-2, 0.7


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        past_BTD = x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1).view(-1, 1)
        return x_BTD + self.scale * torch.tanh(self.mix(self.norm(past_BTD)))


class Handmade(nn.Module):
    """Sizes that do not divide by two or four, a tied head, a buffer, a frozen parameter."""

    def __init__(self, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block(11) for _ in range(3))})
        self.head = nn.Linear(11, VOCAB)
        if tied:
            self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("offset", torch.linspace(-1, 1, VOCAB))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) * self.frozen.sum()
        for block in self.body["blocks"]:
            x_BTD = block(x_BTD)
        return self.head(x_BTD) + self.offset


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **sizes,
            intermediate_size=50,
            max_position_embeddings=32,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (Handmade, "body.blocks"),
    "untied": (lambda: Handmade(tied=False), "body.blocks"),
    "neox": (neox, "gpt_neox.layers"),
}


def build(name: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]().to(dtype)


def batch(step: int, rows: int = 8) -> Tensor:
    """Rows of tokens; some of them, and half of every third row, are no targets."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=draw)
    hidden = torch.rand(tokens.shape, generator=draw) < 0.2
    hidden[::3, : LENGTH // 2] = True
    return torch.stack([tokens, tokens.masked_fill(hidden, IGNORE)])


def loss_sum(model: Any, rows: Tensor) -> tuple[Tensor, int]:
    tokens_BT, targets_BT = rows[0, :, :-1], rows[1, :, 1:]
    output = model(tokens_BT)
    logits = output if isinstance(output, Tensor) else output.logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, int((targets_BT != IGNORE).sum())


def train_plain(name: str, dtype: torch.dtype, clip: float | None = CLIP, steps: int = STEPS) -> dict[str, Any]:
    """One process, the whole batch at once, the mean loss."""
    model = build(name, dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses, norms, first = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total, count = loss_sum(model, batch(step))
        (total / count).backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        losses.append(float(total.detach()) / count)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": first, "state": model.state_dict(), "eval": held_out(model)}


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    total, count = loss_sum(model, batch(99))
    return float(total / count)
