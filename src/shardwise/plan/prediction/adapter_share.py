"""What of a rank's share of the model is trained, what is frozen, and what is kept in four bits. Counts only, no torch.

Invariant: without adapters everything is trained, and the counts are those of rank_share.py. Read next: memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.interop.peft.targets import find_targets, find_trained, linears_of, modules_of, their_modules
from shardwise.plan.prediction.rank_share import RankShare
from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.schema import AdapterConfig

PAIR, PAIR_BYTES, ROW_BYTES = 128, 66, 8
"""adapters/nf4.py: 128 weights take 64 bytes and two magnitudes of one; a row has two fp32 elements."""


@dataclass(frozen=True)
class HeldParameters:
    """The parameters that a rank holds of one block, or of one end of the model."""

    trained: int  # elements with a gradient and optimizer state
    frozen: int  # elements without
    packed_bytes: int = 0  # four-bit weights
    largest: int = 0  # elements of the largest four-bit weight: read into a temporary tensor when it is used

    def gathered_bytes(self, compute: int) -> int:
        """Returns the bytes of all in the format of the computation, which has `compute` bytes per element."""
        return compute * (self.trained + self.frozen) + self.packed_bytes

    def __add__(self, other: HeldParameters) -> HeldParameters:
        return HeldParameters(
            self.trained + other.trained,
            self.frozen + other.frozen,
            self.packed_bytes + other.packed_bytes,
            max(self.largest, other.largest),
        )


def held_by(share: RankShare, whole: ModelSpec, adapter: AdapterConfig) -> list[HeldParameters]:
    """Returns the parameters that a rank holds of the embedding, of every layer and of the head. `whole`: the model
    that the share is a slice of."""
    sizes = [share.embedding, *share.layer_parameters, share.head]
    if adapter.kind == "none":
        return [HeldParameters(size, 0) for size in sizes]
    if not whole.is_ours:  # whose layers are not known here: square matrices as wide as the model, in every block
        added = 2 * adapter.rank * whole.hidden * len(adapter.targets)
        packed = adapter.kind == "qlora"
        blocks = [HeldParameters(added, size * (not packed), packed * size * 66 // 128) for size in sizes[1:-1]]
        return [HeldParameters(0, sizes[0]), *blocks, HeldParameters(0, sizes[-1])]
    targets, trained = _chosen(whole, adapter)
    first, last = (
        HeldParameters(size, 0) if name in trained else HeldParameters(0, size)
        for name, size in (("embed", sizes[0]), ("head", sizes[-1]))
    )
    pairs = zip(share.layers, sizes[1:-1], strict=True)
    return [first, *(_layer(layer, size, targets, trained, share.spec, adapter) for layer, size in pairs), last]


def apart_by(whole: ModelSpec, adapter: AdapterConfig) -> tuple[str, ...]:
    """Returns the matmuls that cannot be fused: some of their layers have adapters, or all are in four bits."""
    parts = {"qkv": {"q", "k", "v"}, "gate up": {"gate", "up"}}
    if adapter.kind == "none" or not whole.is_ours:
        return ()
    names = {name.rpartition(".")[2] for name in _chosen(whole, adapter)[0]}
    return tuple(word for word, layers in parts.items() if adapter.kind == "qlora" or layers & names)


Names = frozenset[str]


@lru_cache(64)
def _chosen(whole: ModelSpec, adapter: AdapterConfig) -> tuple[Names, Names]:
    """Returns the names of modules that have adapters, and of those that are trained themselves."""
    theirs = their_modules(whole)
    targets = find_targets(adapter, linears_of(whole), theirs, whole.name)
    return frozenset(targets), frozenset(find_trained(adapter, modules_of(whole), theirs, whole.name))


def _layer(
    layer: LayerSpec, size: int, targets: Names, trained: Names, spec: ModelSpec, adapter: AdapterConfig
) -> HeldParameters:
    prefix = f"layers.{layer.index}."
    parts = {"attention": spec.attention_weights, "feedforward": spec.feedforward_weights(layer)}
    linears = ((part, one) for part, weights in parts.items() for one in weights if one.is_linear)
    mine = {f"{prefix}{part}.{one.name.removesuffix('.weight')}": one.shape for part, one in linears}
    also = sum(out * inputs for name, (out, inputs) in mine.items() if name in trained)
    also += spec.hidden * sum(name.startswith(prefix) and name not in mine for name in trained)  # norms
    added = adapter.rank * sum(out + inputs for name, (out, inputs) in mine.items() if name in targets)
    packed = [shape for name, shape in mine.items() if name not in trained] if adapter.kind == "qlora" else []
    elements = sum(out * inputs for out, inputs in packed)
    return HeldParameters(
        trained=added + also,
        frozen=size - also - elements,
        packed_bytes=sum(out * (-(-inputs // PAIR) * PAIR_BYTES + ROW_BYTES) for out, inputs in packed),
        largest=max((out * inputs for out, inputs in packed), default=0),
    )
