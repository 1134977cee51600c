"""The decoder: every model of this package is this one class, described by a `ModelSpec`.

Plain single-device PyTorch and nothing else. Invariant: parameter names are global (layers are
keyed by their index in the whole model), so a part of the model keeps the names of the whole, and parts one after
another compute what the whole computes. Read from top to bottom: the decoder, its head, then one block. Read next:
`attention.py`, `feedforward.py`, `experts.py`.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.model.attention import Attention, AttentionInputs
from shardwise.model.attention_kernels import AttentionKernel, check_kernel_device, choose_kernel
from shardwise.model.cache import KeyValueCache
from shardwise.model.experts import MixtureOfExperts, Routing
from shardwise.model.feedforward import FeedForward
from shardwise.model.latent_attention import LatentAttention
from shardwise.model.loss import IGNORE, TokenLosses, cross_entropy_sum
from shardwise.model.masking import MaskBuilder
from shardwise.model.norm import make_norm
from shardwise.model.rope import Rotation, make_rotation
from shardwise.spec.model import LayerSpec, ModelSpec


class Losses(NamedTuple):
    """Losses summed over the batch's target tokens. `aux` and `z` are the router's, already multiplied by their
    coefficients, and zero for dense models."""

    cross_entropy: Tensor
    aux: Tensor
    z: Tensor


class Hidden(NamedTuple):
    """The result of a part that is not the last: its hidden states, and the router losses of its own layers."""

    x_BTD: Tensor
    aux: Tensor
    z: Tensor


class Decoder(nn.Module):
    """The whole model, or the part of it with the given layers: the first part embeds, the last one predicts.

    `attention` is the name of one of torch's kernels, or a kernel. `kernel_reason` is a line to print when attention
    cannot use the usual kernel, else empty.
    """

    def __init__(self, spec: ModelSpec, attention: str | AttentionKernel = "auto", layers: range | None = None):
        super().__init__()
        layers = range(spec.num_layers) if layers is None else layers
        self.spec = spec
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        self.kernel, self.kernel_reason = choose_kernel(spec, attention)
        # A tied head uses the embedding's weight: both ends of a model in parts have it.
        has_embed = self.is_first or (self.is_last and spec.tied)
        has_positions = self.is_first and spec.positions == "learned"
        self.embed = nn.Embedding(spec.vocab, spec.hidden) if has_embed else None
        self.position_embed = nn.Embedding(spec.max_seq_len, spec.hidden) if has_positions else None
        self.layers = nn.ModuleDict({str(index): Block(spec, spec.layers[index], self.kernel) for index in layers})
        self.norm = make_norm(spec, spec.hidden) if self.is_last else None
        self.head = Head(spec) if self.is_last else None

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
        x_BTD: Tensor | None = None,
        rows_B: Tensor | None = None,
    ) -> Tensor | Losses | Hidden:
        """Returns logits of shape (B, T, V), or with targets the summed losses; a part that is not the last returns
        what the next part needs.

        targets_BT    the token that follows each token, IGNORE where there is nothing to learn
        positions_BT  where each token stands; default 0, 1, 2 ... (after what the cache holds)
        documents_BT  integer ids: a token sees only tokens with its own id. Positions are not restarted by it
        x_BTD         what the part before this one returned; the first part has none
        rows_B        identifies each row among those of all steps, for layers that draw random values; here none does
        """
        positions_BT = self.default_positions(tokens_BT, cache) if positions_BT is None else positions_BT
        target_counts_B = None if targets_BT is None else self.count_targets(targets_BT)
        if x_BTD is None:
            x_BTD = self.embed_tokens(tokens_BT, positions_BT)
        inputs = self.prepare_attention(x_BTD.dtype, positions_BT, documents_BT, cache)
        inputs = {index: replace(one, rows_B=rows_B, positions_BT=positions_BT) for index, one in inputs.items()}
        x_BTD, routings = self.run_layers(x_BTD, inputs, target_counts_B)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        zero = x_BTD.new_zeros(())
        aux = torch.stack([routing.aux for routing in routings]).sum() if routings else zero
        z = torch.stack([routing.z for routing in routings]).sum() if routings else zero
        if self.norm is None or self.head is None:
            return Hidden(x_BTD, aux, z)
        tied = self.embed.weight if self.spec.tied and self.embed is not None else None
        result = self.head(self.norm(x_BTD), targets_BT, tied)
        return result if targets_BT is None else Losses(result, aux, z)

    # The parts of a forward pass, in order -------------------------------------------------------------------------

    def default_positions(self, tokens_BT: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Returns the positions 0, 1, 2 ... of a batch's tokens, after what the cache holds, of shape (1, T)."""
        start = 0 if cache is None else cache.length
        end = start + tokens_BT.shape[1]
        if self.spec.positions == "learned" and end > self.spec.max_seq_len:
            raise UserError(
                f"a sequence of {end} tokens is too long for {self.spec.name}",
                why=f"it has learned {self.spec.max_seq_len} positions and cannot stand at others",
                fix=f"use sequences of at most {self.spec.max_seq_len} tokens, or set model.max_seq_len and train anew",
            )
        return torch.arange(start, end, device=tokens_BT.device)[None]

    def embed_tokens(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Returns the hidden states that enter the first layer, of shape (B, T, D)."""
        assert self.embed is not None, "only the first part of a model embeds tokens"
        x_BTD = self.embed(tokens_BT)
        if self.spec.scale_embedding:
            # Gemma rounds sqrt(D) to the model's dtype before multiplying; so do we, to match its bf16 results.
            x_BTD = x_BTD * torch.tensor(self.spec.hidden**0.5, dtype=x_BTD.dtype, device="cpu").item()
        if self.position_embed is not None:
            x_BTD = x_BTD + self.position_embed(positions_BT)
        return x_BTD

    def count_targets(self, targets_BT: Tensor) -> Tensor:
        """Returns the number of targets of each sequence, of shape (B,)."""
        return (targets_BT != IGNORE).sum(1)

    def prepare_attention(
        self, dtype: torch.dtype, positions_BT: Tensor, documents_BT: Tensor | None, cache: KeyValueCache | None
    ) -> dict[int, AttentionInputs]:
        """Returns masks and rotations by layer index, each built once and shared by the layers that need the same."""
        inputs = self.prepare_masks(positions_BT, documents_BT, cache)
        if self.spec.positions != "rope":
            return inputs
        rotations: dict[tuple[float, bool], Rotation] = {}
        for index in inputs:
            layer = self.spec.layers[index]
            kind = (layer.rope_theta, layer.rope_scaled)
            if kind not in rotations:
                rotations[kind] = make_rotation(self.spec, layer, positions_BT, dtype)
            inputs[index] = replace(inputs[index], rotation=rotations[kind])
        return inputs

    def prepare_masks(
        self, positions_BT: Tensor, documents_BT: Tensor | None, cache: KeyValueCache | None
    ) -> dict[int, AttentionInputs]:
        """Returns the mask of each layer by layer index, without rotations yet."""
        check_kernel_device(self.kernel, positions_BT.device.type)
        assert documents_BT is None or cache is None, "generation with a cache works on one document per row"
        num_past = 0 if cache is None else cache.length
        builder = MaskBuilder(positions_BT.shape[1], num_past, positions_BT.device, documents_BT)
        layers = tuple(self.spec.layers[int(index)] for index in self.layers)
        # Flex skips blocks of long sequences; a cache grows by one token, which has none and would compile at each
        # step.
        flex = {index for index, kernel in self.kernels.items() if kernel.name == "flex" and cache is None}
        inputs: dict[int, AttentionInputs] = {}
        for is_flex in (False, True):
            some = tuple(layer for layer in layers if (layer.index in flex) == is_flex)
            masks = builder.build(some, flex=is_flex)
            inputs |= {layer.index: AttentionInputs(masks[builder.key(layer)], None, cache) for layer in some}
        return inputs

    @property
    def kernels(self) -> dict[int, AttentionKernel]:
        """Returns the attention kernel of each layer, by layer index."""
        return {int(index): cast(Attention, block.attention).kernel for index, block in self.layers.items()}

    def use_kernels(self, kernels: Mapping[int, AttentionKernel]) -> None:
        """Sets the attention kernel of each layer, by layer index."""
        for index, block in self.layers.items():
            cast(Attention, block.attention).kernel = kernels[int(index)]

    def run_layers(
        self, x_BTD: Tensor, inputs: dict[int, AttentionInputs], target_counts_B: Tensor | None
    ) -> tuple[Tensor, list[Routing]]:
        """Returns the last layer's hidden states (B, T, D), and what the router of each layer with experts reports."""
        routings = []
        for index, block in self.layers.items():
            x_BTD, routing = block(x_BTD, inputs[int(index)], target_counts_B)
            if routing is not None:
                routings.append(routing)
                if self.training:
                    # Counted here and not inside the block: a recomputed block runs twice, this line once.
                    counts_E = block.get_buffer("feedforward.tokens_per_expert")
                    counts_E += routing.tokens_per_expert_E
        return x_BTD, routings


class Head(nn.Module):
    """Computes scores over the vocabulary, or with targets their summed cross-entropy. A tied head has no weight of
    its own."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.vocab, self.softcap = spec.vocab, spec.logit_softcap
        self.losses: TokenLosses | None = None  # in the place of cross-entropy
        self.weight = None if spec.tied else nn.Parameter(torch.empty(spec.vocab, spec.hidden))

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is given the embedding's weight"
        if targets_BT is None:
            return self.logits(x_BTD, weight)
        logits_of = partial(self.logits, weight=weight)
        return cross_entropy_sum(logits_of, x_BTD.flatten(0, 1), targets_BT.flatten(), self.vocab, self.losses)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the scores (..., V) of normalised hidden states (..., D)."""
        return self.cap(F.linear(x, weight))

    def cap(self, logits: Tensor) -> Tensor:
        """Returns the scores softly capped, as Gemma 2 does it: large ones approach the cap and never reach it."""
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


ATTENTION: dict[str, Callable[[ModelSpec, LayerSpec, AttentionKernel], nn.Module]] = {
    "grouped-query": Attention,
    "latent": LatentAttention,
}
FEEDFORWARD: dict[str, Callable[[ModelSpec, int], nn.Module]] = {
    "dense": FeedForward,
    "experts": lambda spec, _: MixtureOfExperts(spec),
}
"""The modules of each kind of layer, by the name of its record (spec/layers.py)."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x)); Gemma normalises the results as well."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, kernel: AttentionKernel):
        super().__init__()
        self.attention_norm = make_norm(spec, spec.hidden)
        self.attention = ATTENTION[spec.attention.name](spec, layer, kernel)
        self.attention_post_norm = make_norm(spec, spec.hidden) if spec.post_norms else nn.Identity()
        self.feedforward_norm = make_norm(spec, spec.hidden)
        self.feedforward = FEEDFORWARD[layer.feedforward.name](spec, layer.ffn)
        self.feedforward_post_norm = make_norm(spec, spec.hidden) if spec.post_norms else nn.Identity()

    def forward(
        self, x_BTD: Tensor, inputs: AttentionInputs, target_counts_B: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), inputs))
        normed_BTD, routing = self.feedforward_norm(x_BTD), None
        if isinstance(self.feedforward, MixtureOfExperts):
            out_BTD, routing = self.feedforward(normed_BTD, target_counts_B)
        else:
            out_BTD = self.feedforward(normed_BTD)
        return x_BTD + self.feedforward_post_norm(out_BTD), routing
