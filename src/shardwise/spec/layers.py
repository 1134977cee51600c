"""Lists kinds of layers, as records: all that the rest of the package asks about a kind of attention or of feed-forward
layer. No torch.

A record lists the weights of its kind (`Weight`: name, shape, how tensor parallelism cuts it). Counts of parameters and
FLOPs, the matmuls of a step, slices, and the layers that adapters may go to all follow from that list. Beside it stand
what backward keeps, which sizes are possible, and what the kind is called elsewhere. Invariant: the list is exactly the
parameters of the kind's module in `model/`, under the same names, and the last projection of attention is called `o`,
that of a feed-forward layer `down` (there a tensor-parallel region ends).

To add a kind: write its record here, its module in `model/`, and name the module in `model/decoder.py`. Sizes that it
alone has are fields of `ModelSpec`. Read next: `model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.spec.model import ModelSpec

Kind = TypeVar("Kind")


class TensorCut(NamedTuple):
    """How tensor parallelism cuts a tensor: along `dim`, between whole units (heads, channels) of `width` rows."""

    dim: int
    units: int
    width: int = 1


class Weight(NamedTuple):
    """One parameter of a layer's attention or feed-forward part, at full shape."""

    name: str  # within its part: `q.weight`
    shape: tuple[int, ...]
    cut: TensorCut | None = None  # None where it is whole on every rank
    is_inside: bool = True  # a whole one is within a tensor-parallel region: each rank's gradient is a part
    is_linear: bool = False  # the matrix of an nn.Linear: (outputs, inputs)

    @property
    def size(self) -> int:
        """Returns the number of its elements."""
        return math.prod(self.shape)

    def slice_shape(self, tp: int) -> tuple[int, ...]:
        """Returns the shape of the largest slice that one of `tp` ranks holds."""
        if self.cut is None:
            return self.shape
        dim, units, width = self.cut
        return (*self.shape[:dim], -(-units // tp) * width, *self.shape[dim + 1 :])


def linear(
    name: str, outputs: int, inputs: int, cut: TensorCut | None = None, bias: bool = False
) -> tuple[Weight, ...]:
    """Returns the weights of an nn.Linear. A bias goes with the outputs: where inputs are cut, it is added once,
    outside."""
    weight = Weight(f"{name}.weight", (outputs, inputs), cut, is_linear=True)
    ends = cut is not None and cut.dim == 1
    return (weight, Weight(f"{name}.bias", (outputs,), None if ends else cut, not ends)) if bias else (weight,)


def impossible(what: str, why: str, fix: str) -> UserError:
    return UserError(f"impossible model: {what}", why=why, fix=fix)


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionKind:
    """Attention with `num_heads` query heads over `num_kv_heads` of keys and values, each rotated as a whole: the
    grouped-query attention of most models, and the answers that other kinds begin from."""

    name: ClassVar[str] = "grouped-query"
    trait: ClassVar[str] = ""
    """What predictions call it, where not every model has it."""
    fused: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    """Its first projections, all of the layer's input, which `speed.fuse` computes as one matmul."""
    pads_values: ClassVar[bool] = False
    """Whether values are padded to the width of queries, and attention's result is cut."""
    yarn_scales_scores: ClassVar[bool] = False
    """Whether YaRN's temperature is on whole scores, as in DeepSeek's models, instead of rotated dimensions."""
    cut_sizes: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads")
    """Fields of `ModelSpec` of which a tensor-parallel rank has a part."""

    def derived(self, spec: ModelSpec) -> dict[str, int]:
        """Returns the sizes that follow from others, by the name of the field."""
        return {}

    def check(self, spec: ModelSpec) -> None:
        """Refuses sizes that cannot be built."""

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        """Returns the parameters of one layer."""
        heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        leaves = ("weight", "bias") if spec.norm == "layer" else ("weight",)
        norms = [f"{norm}.{leaf}" for norm in ("q_norm", "k_norm") for leaf in leaves] if spec.qk_norm else []
        return (
            *linear("q", heads * width, spec.hidden, TensorCut(0, heads, width), spec.qkv_bias),
            *linear("k", kv_heads * width, spec.hidden, TensorCut(0, kv_heads, width), spec.qkv_bias),
            *linear("v", kv_heads * width, spec.hidden, TensorCut(0, kv_heads, width), spec.qkv_bias),
            *linear("o", spec.hidden, heads * width, TensorCut(1, heads, width), spec.out_bias),
            *(Weight(name, (width,)) for name in norms),
        )

    def value_dim(self, spec: ModelSpec) -> int:
        """Returns the width of one head's values."""
        return spec.head_dim

    def rotary_dim(self, spec: ModelSpec) -> int:
        """Returns how many dimensions of a head positions rotate."""
        return spec.head_dim

    def kept(self, spec: ModelSpec) -> int:
        """Returns the elements per token that forward keeps for backward: what the norms of q and k keep, q, k and v,
        the result and one per head."""
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        normed = (2 if spec.norm == "rms" else 1) * (queries + keys) if spec.qk_norm else 0
        return queries + 2 * keys + normed + queries + spec.num_heads

    def selected(self, spec: ModelSpec, compiled: bool) -> int:
        """Returns the elements per token that selective recomputation keeps: results of projections and of fused
        attention; plain attention is cheap."""
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return queries + 2 * keys + (0 if spec.attention_softcap else queries + spec.num_heads)

    def tensor_problem(self, spec: ModelSpec, tp: int) -> str | None:
        """Returns why it cannot be cut over `tp` ranks; None where it can."""
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        if heads % tp:
            return f"each rank takes the same number of whole heads, and {heads} heads do not divide by {tp}"
        if kv_heads % tp and tp % kv_heads:
            return f"key-value heads stay whole: {kv_heads} of them neither divide by {tp} nor go into it evenly"
        return None

    def small_sizes(self, spec: ModelSpec) -> dict[str, int]:
        """Returns the sizes of the smallest model that still computes the same way, beside the number of heads."""
        return {"head_dim": 8}


@dataclass(frozen=True)
class LatentAttentionKind(AttentionKind):
    """DeepSeek's multi-head latent attention: keys and values of all heads come from one latent per token, and a part
    of each head is rotated."""

    name = "latent"
    trait = "latent attention"
    fused = ()
    pads_values = True
    yarn_scales_scores = True

    def derived(self, spec: ModelSpec) -> dict[str, int]:
        return {"head_dim": spec.qk_nope_head_dim + spec.qk_rope_head_dim}

    def check(self, spec: ModelSpec) -> None:
        if not (spec.kv_lora_rank and spec.qk_nope_head_dim and spec.qk_rope_head_dim and spec.v_head_dim):
            raise impossible(
                "latent attention with missing head sizes",
                "kv_lora_rank > 0 needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
                "set all three, for example 128, 64 and 128",
            )
        usual = {
            "num_kv_heads": spec.num_heads,
            "qkv_bias": False,
            "out_bias": False,
            "qk_norm": False,
            "positions": "rope",
        }
        for name, value in usual.items():
            if getattr(spec, name) != value:
                raise impossible(
                    f"latent attention with {name} = {getattr(spec, name)!r}",
                    "its keys and values come from one latent per token: no grouped heads, biases, q/k norms or "
                    "learned positions",
                    f"leave {name} at its default",
                )

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        heads, latent = spec.num_heads, spec.kv_lora_rank
        keys_and_values = spec.qk_nope_head_dim + spec.v_head_dim
        narrow: tuple[Weight, ...] = ()
        if spec.q_lora_rank:
            narrow = (
                *linear("q_down", spec.q_lora_rank, spec.hidden),
                Weight("q_norm.weight", (spec.q_lora_rank,)),
            )
        return (
            *narrow,
            *linear("q", heads * spec.head_dim, spec.q_lora_rank or spec.hidden, TensorCut(0, heads, spec.head_dim)),
            *linear("kv_down", latent + spec.qk_rope_head_dim, spec.hidden),
            Weight("kv_norm.weight", (latent,)),
            *linear("kv_up", heads * keys_and_values, latent, TensorCut(0, heads, keys_and_values)),
            *linear("o", spec.hidden, heads * spec.v_head_dim, TensorCut(1, heads, spec.v_head_dim)),
        )

    def value_dim(self, spec: ModelSpec) -> int:
        return spec.v_head_dim

    def rotary_dim(self, spec: ModelSpec) -> int:
        return spec.qk_rope_head_dim

    def kept(self, spec: ModelSpec) -> int:
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.v_head_dim
        per_norm = 3 if spec.norm == "rms" else 2
        latents = per_norm * (spec.q_lora_rank + spec.kv_lora_rank) + spec.qk_rope_head_dim
        return latents + 4 * queries + values + spec.num_heads  # q, k, values padded to q's width, padded result

    def selected(self, spec: ModelSpec, compiled: bool) -> int:
        """Returns the same; a compiled block puts keys and values together and pads them again."""
        queries = spec.num_heads * spec.head_dim
        whole = spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim) if compiled else 2 * queries
        latents = spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_head_dim
        return latents + 2 * queries + whole + spec.num_heads

    def small_sizes(self, spec: ModelSpec) -> dict[str, int]:
        sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 0}
        return sizes | ({"q_lora_rank": 24} if spec.q_lora_rank else {})


# Feed-forward layers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeedForwardKind:
    """A projection to `width` channels, an activation, with `ModelSpec.gated` times another projection, and the
    projection back: the dense layer of most models, and the answers that other kinds begin from."""

    name: ClassVar[str] = "dense"
    fused: ClassVar[tuple[str, ...]] = ("gate", "up")
    """Its first projections, all of the layer's input, which `speed.fuse` computes as one matmul."""
    has_experts: ClassVar[bool] = False
    """Whether a router sends tokens to experts, which can be spread over ranks (expert parallelism)."""
    cut_sizes: ClassVar[tuple[str, ...]] = ("ffn",)
    """Fields of `ModelSpec` of which a tensor-parallel rank has a part."""

    def check(self, spec: ModelSpec) -> None:
        """Refuses sizes that cannot be built."""

    def weights(self, spec: ModelSpec, width: int) -> tuple[Weight, ...]:
        """Returns the parameters of one layer of `width` channels."""
        gate = linear("gate", width, spec.hidden, TensorCut(0, width), spec.mlp_bias) if spec.gated else ()
        return (
            *gate,
            *linear("up", width, spec.hidden, TensorCut(0, width), spec.mlp_bias),
            *linear("down", spec.hidden, width, TensorCut(1, width), spec.mlp_bias),
        )

    def idle_parameters(self, spec: ModelSpec, width: int) -> int:
        """Returns how many parameters a token does not meet."""
        return 0

    def widths(self, spec: ModelSpec, width: int) -> dict[str, int]:
        """Returns the widths that tensor parallelism cuts, by what they are called."""
        return {"feed-forward width": width}

    def dense_width(self, spec: ModelSpec, width: int) -> int:
        """Returns how many channels of a layer every token goes through."""
        return width

    def active_width(self, spec: ModelSpec, width: int) -> int:
        """Returns how many channels one token goes through."""
        return width

    def kept(self, spec: ModelSpec, width: int, one_kernel: bool, routed_parts: int) -> int:
        """Returns the elements per token that forward keeps for backward: gate, up, activated gate and what is
        multiplied last; where activation and multiplication are one kernel, no activated gate. `routed_parts` are the
        ranks that share the tokens while they are routed."""
        return (4 - one_kernel if spec.gated else 2) * width

    def selected(self, spec: ModelSpec, width: int, compiled: bool, keeps_result: bool, routed_parts: int) -> int:
        """Returns the elements per token that selective recomputation keeps: results of projections and, with
        `keeps_result`, what is multiplied last, which nobody makes again."""
        return ((2 if spec.gated else 1) + keeps_result) * width


@dataclass(frozen=True)
class ExpertsKind(FeedForwardKind):
    """A router, `num_experts` experts as stacked weights of which a token meets some, and shared ones as one dense
    layer. `width` is that of an expert."""

    name = "experts"
    fused = ()
    has_experts = True
    cut_sizes = ("ffn", "expert_ffn")

    def check(self, spec: ModelSpec) -> None:
        num_experts, groups, kept = spec.num_experts, spec.num_expert_groups, spec.topk_groups
        if not 1 <= spec.experts_per_token <= num_experts:
            raise impossible(
                f"experts_per_token = {spec.experts_per_token} of num_experts = {num_experts}",
                "every token goes to at least one expert and at most all of them",
                f"set experts_per_token between 1 and {num_experts}, for example {min(2, num_experts)}",
            )
        if groups < 1 or num_experts % groups or not 1 <= kept <= groups:
            raise impossible(
                f"{num_experts} experts in {groups} groups, {kept} kept",
                "groups must divide the experts evenly and at least one group is kept",
                "choose num_expert_groups that divides num_experts and topk_groups up to it",
            )
        in_group = num_experts // groups
        if groups > 1 and (in_group < 2 or spec.experts_per_token > kept * in_group):
            raise impossible(
                f"{groups} expert groups of {in_group} with {kept} kept for {spec.experts_per_token} experts",
                "a group is scored by its best two experts, and the kept groups must hold experts_per_token experts",
                "use fewer groups or raise topk_groups",
            )
        if spec.mlp_bias:
            raise impossible(
                "experts with mlp_bias",
                "stacked experts have no biases here",
                "set mlp_bias = false or num_experts = 0",
            )

    def weights(self, spec: ModelSpec, width: int) -> tuple[Weight, ...]:
        shape = (spec.num_experts, width, spec.hidden)
        first = ("gate", "up") if spec.gated else ("up",)
        shared = width * spec.num_shared_experts
        return (
            Weight("router.weight", (spec.num_experts, spec.hidden)),
            *(Weight(f"experts.{name}", shape, TensorCut(1, width)) for name in first),
            Weight("experts.down", (spec.num_experts, spec.hidden, width), TensorCut(2, width)),
            *(w._replace(name=f"shared.{w.name}") for w in (super().weights(spec, shared) if shared else ())),
        )

    def idle_parameters(self, spec: ModelSpec, width: int) -> int:
        return (spec.num_experts - spec.experts_per_token) * (3 if spec.gated else 2) * spec.hidden * width

    def widths(self, spec: ModelSpec, width: int) -> dict[str, int]:
        shared = width * spec.num_shared_experts
        return {"expert width": width} | ({"shared expert width": shared} if shared else {})

    def dense_width(self, spec: ModelSpec, width: int) -> int:
        return width * spec.num_shared_experts

    def active_width(self, spec: ModelSpec, width: int) -> int:
        return width * (spec.experts_per_token + spec.num_shared_experts)

    def kept(self, spec: ModelSpec, width: int, one_kernel: bool, routed_parts: int) -> int:
        """Returns the same at even load: sorted tokens, their results and the router's scores besides. A rank with some
        experts has their whole width, but only its share of the routed tokens: as many elements as a slice."""
        routed_tokens = 2 * spec.hidden * spec.experts_per_token + 4 * spec.num_experts
        return routed_tokens // routed_parts + super().kept(spec, self.active_width(spec, width), one_kernel, 1)

    def selected(self, spec: ModelSpec, width: int, compiled: bool, keeps_result: bool, routed_parts: int) -> int:
        """Returns the same; a compiled block puts the tokens in the order of experts again."""
        sides = 1 if compiled and routed_parts == 1 else 2  # results; sorted
        routed_tokens = sides * spec.hidden * spec.experts_per_token + 2 * spec.num_experts  # and the router
        of_experts = super().selected(spec, width * spec.experts_per_token, compiled, False, 1)
        of_shared = super().selected(spec, self.dense_width(spec, width), compiled, keeps_result, 1)
        return routed_tokens // routed_parts + of_experts + of_shared


ATTENTION: dict[str, AttentionKind] = {kind.name: kind for kind in (AttentionKind(), LatentAttentionKind())}
"""The kinds by the name that `ModelSpec.attention_kind` has."""
FEEDFORWARD: dict[str, FeedForwardKind] = {kind.name: kind for kind in (FeedForwardKind(), ExpertsKind())}
"""The kinds by the name that `ModelSpec.feedforward_kind` has."""


def kind_named(kinds: Mapping[str, Kind], field: str, name: str) -> Kind:
    """Returns a kind by its name."""
    if name not in kinds:
        raise impossible(f"{field} = {name!r}", f"kinds are: {', '.join(kinds)}", f'{field} = "{next(iter(kinds))}"')
    return kinds[name]
