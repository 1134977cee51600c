"""What a model is, in numbers: `ModelSpec`, one flat description that every decoder in this package is built from.

Owns the shapes, the parameter and FLOP counts that follow from them, and the checks that make a spec buildable.
Invariant: a `ModelSpec` that exists is valid, and nothing here imports torch, because the planner lives on these
numbers. Zero means "none" for optional sizes, so that every field can be written in TOML. What a kind of layer has and
does is its record's to say (`layers.py`). Read next: `layers.py`, `presets.py`, `decoder.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.errors import UserError
from shardwise.spec.layers import (
    ATTENTION,
    FEEDFORWARD,
    AttentionKind,
    FeedForwardKind,
    TensorCut,
    Weight,
    impossible,
    kind_named,
)

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Positions = Literal["rope", "learned"]
RopeScaling = Literal["none", "linear", "llama3", "yarn"]
Router = Literal["softmax-topk", "topk-softmax", "sigmoid-bias"]
AuxLossRule = Literal["per-sequence", "transformers"]


@dataclass(frozen=True)
class LayerSpec:
    """One layer, as it follows from the model's fields. `window` is None where it attends to everything before it."""

    index: int
    window: int | None
    feedforward: FeedForwardKind
    ffn: int
    rope_theta: float
    rope_scaled: bool

    @property
    def is_moe(self) -> bool:
        """Returns whether the layer has experts."""
        return self.feedforward.has_experts

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Returns a key that is equal for layers that compute the same number of FLOPs and keep the same number of
        bytes."""
        return self.window, self.feedforward.name, self.ffn


@dataclass(frozen=True)
class ModelSpec:
    """The shape of one model. Sizes are counts of elements, heads, layers or tokens."""

    name: str = "custom"

    # Sizes. head_dim 0: hidden / num_heads. num_kv_heads 0: num_heads.
    num_layers: int = 1
    hidden: int = 64
    num_heads: int = 1
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 256
    vocab: int = 256
    tied: bool = False
    max_seq_len: int = 2048

    # Norms and feed-forward. norm_plus_one: the scale is 1 + weight. post_norms: a second norm after each sub-layer.
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False

    # Positions. rope_local_theta 0: the same base on windowed layers; else their own base, without scaling.
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    rope_local_theta: float = 0.0
    rope_interleaved: bool = False
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_original_max_seq_len: int = 0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_mscale: float = 0.0
    rope_mscale_all_dim: float = 0.0
    rope_attention_factor: float = 0.0

    # Attention. The window counts the token itself. Layers before window_from, and every global_every-th, see
    # everything.
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    window_from: int = 0
    global_every: int = 0
    query_scale_dim: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    scale_embedding: bool = False

    # Kinds of layers by name (layers.py). Empty: latent attention or grouped-query, as kv_lora_rank says; dense layers.
    attention_kind: str = ""
    feedforward_kind: str = ""

    # Latent attention (DeepSeek's MLA): on when kv_lora_rank > 0; head_dim is then qk_nope_head_dim + qk_rope_head_dim.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    # Mixture of experts: on when num_experts > 0. Layer i has experts if i >= first_dense_layers and (i + 1) %
    # moe_every == 0. aux_loss_rule transformers: its router loss over all layers and tokens of a step, not per layer
    # and sequence.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    moe_every: int = 1
    router: Router = "softmax-topk"
    norm_topk: bool = True
    routed_scaling: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    aux_loss_coef: float = 0.0
    aux_loss_rule: AuxLossRule = "per-sequence"
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        derived = {
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_dim or (self.hidden // self.num_heads if self.num_heads > 0 else 0),
            "expert_ffn": self.expert_ffn or (self.ffn if self.num_experts else 0),
        }
        for key, value in (derived | self.attention.derived(self)).items():
            object.__setattr__(self, key, value)
        check_sizes(self)

    # What follows from the fields ---------------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Returns whether our own decoder computes the model, so that it can be cut anywhere. If not, the transformers
        library builds it (interop/transformers/spec.py)."""
        return True

    @property
    def is_moe(self) -> bool:
        """Returns whether some layers have experts."""
        return self.num_experts > 0

    @property
    def needs_counts_first(self) -> bool:
        """Returns whether a step's balancing loss needs the tokens of every expert before the step's first gradient."""
        return self.is_moe and self.aux_loss_rule == "transformers" and self.aux_loss_coef > 0

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """Returns a model by its preset's name, such as `llama3-8b`."""
        from shardwise.spec.presets import preset

        return preset(str(name))

    @cached_property
    def attention(self) -> AttentionKind:
        """Returns the kind of attention that all layers have."""
        usual = "latent" if self.kv_lora_rank > 0 else "grouped-query"
        return kind_named(ATTENTION, "attention_kind", self.attention_kind or usual)

    @property
    def value_dim(self) -> int:
        """Returns the number of channels of one head's values."""
        return self.attention.value_dim(self)

    @property
    def rotary_dim(self) -> int:
        """Returns how many dimensions of a head are rotated by positions."""
        return self.attention.rotary_dim(self)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Returns the layers, first to last."""
        return tuple(self._layer(index) for index in range(self.num_layers))

    def _layer(self, index: int) -> LayerSpec:
        is_global = index < self.window_from or (self.global_every > 0 and (index + 1) % self.global_every == 0)
        window = self.sliding_window if self.sliding_window and not is_global else None
        is_moe = self.is_moe and index >= self.first_dense_layers and (index + 1) % self.moe_every == 0
        feedforward = "experts" if is_moe else self.feedforward_kind or "dense"
        is_local = window is not None and self.rope_local_theta > 0
        return LayerSpec(
            index=index,
            window=window,
            feedforward=kind_named(FEEDFORWARD, "feedforward_kind", feedforward),
            ffn=self.expert_ffn if is_moe else self.ffn,
            rope_theta=self.rope_local_theta if is_local else self.rope_theta,
            rope_scaled=self.rope_scaling != "none" and not is_local,
        )

    # Counting -----------------------------------------------------------------------------------------------------

    @property
    def num_embedding_parameters(self) -> int:
        """Returns the number of parameters of tables that are looked up, not multiplied: tokens and learned
        positions."""
        return (self.vocab + (self.max_seq_len if self.positions == "learned" else 0)) * self.hidden

    @cached_property
    def attention_weights(self) -> tuple[Weight, ...]:
        """Returns the weights of one layer's attention, its q/k norms included."""
        return self.attention.weights(self)

    def feedforward_weights(self, layer: LayerSpec) -> tuple[Weight, ...]:
        """Returns the weights of one layer's feed-forward part: the dense one, or router, routed and shared experts."""
        return self._feedforward[layer.kind[1:]][0]

    @cached_property
    def _feedforward(self) -> dict[tuple[object, ...], tuple[tuple[Weight, ...], int, int]]:
        """Returns for each kind of layer the weights of its feed-forward part, the number of their elements, and of how
        many of these one token meets."""
        found = {}
        for layer in {layer.kind[1:]: layer for layer in self.layers}.values():
            weights = layer.feedforward.weights(self, layer.ffn)
            count = sum(weight.size for weight in weights)
            found[layer.kind[1:]] = weights, count, count - layer.feedforward.idle_parameters(self, layer.ffn)
        return found

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Returns every parameter of the model by its name."""
        norm = ("weight", "bias") if self.norm == "layer" else ("weight",)
        vocab, width = (self.vocab, self.hidden), (self.hidden,)
        rows = Weight("weight", vocab, TensorCut(0, self.vocab))
        found = {"embed.weight": rows}
        if self.positions == "learned":
            found["position_embed.weight"] = Weight("weight", (self.max_seq_len, self.hidden), is_inside=False)
        posts = ("", "_post") if self.post_norms else ("",)
        for layer in self.layers:
            parts = {"attention": self.attention_weights, "feedforward": self.feedforward_weights(layer)}
            for part, weights in parts.items():
                for post, leaf in product(posts, norm):
                    found[f"layers.{layer.index}.{part}{post}_norm.{leaf}"] = Weight(leaf, width, is_inside=False)
                found |= {f"layers.{layer.index}.{part}.{weight.name}": weight for weight in weights}
        found |= {f"norm.{leaf}": Weight(leaf, width, is_inside=False) for leaf in norm}
        return found if self.tied else found | {"head.weight": rows}

    @cached_property
    def num_attention_parameters(self) -> int:
        """Returns the number of parameters of one layer's attention."""
        return sum(weight.size for weight in self.attention_weights)

    def num_feedforward_parameters(self, layer: LayerSpec, active_only: bool = False) -> int:
        """Returns the number of parameters of one layer's feed-forward part; with `active_only` those that one token
        meets."""
        _, every, active = self._feedforward[layer.kind[1:]]
        return active if active_only else every

    @property
    def num_norm_parameters(self) -> int:
        """Returns the number of parameters of one norm: its scale, and its shift for LayerNorm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def _count(self, active_only: bool) -> int:
        norms = 4 if self.post_norms else 2
        per_layer = self.num_attention_parameters + norms * self.num_norm_parameters
        layers = sum(per_layer + self.num_feedforward_parameters(layer, active_only) for layer in self.layers)
        head = 0 if self.tied else self.vocab * self.hidden
        return self.num_embedding_parameters + layers + self.num_norm_parameters + head

    @property
    def num_parameters(self) -> int:
        """Returns the number of all parameters; a tied weight counts once."""
        return self._count(active_only=False)

    @property
    def num_active_parameters(self) -> int:
        """Returns the number of parameters that one token meets: of the routed experts, only those chosen for it."""
        return self._count(active_only=True)

    def attention_context(self, layer: LayerSpec, seq_len: int) -> float:
        """Returns how many keys a query meets on average under the causal mask: s/2, or w - w^2/2s with a window of w <
        s tokens."""
        reach = min(layer.window or seq_len, seq_len)
        return reach - reach * reach / (2 * seq_len)

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the training FLOPs per token: forward and backward, causal attention counted once (not twice as some
        tables do)."""
        lookups = self.num_embedding_parameters - (self.vocab * self.hidden if self.tied else 0)
        matmul = 6 * (self.num_active_parameters - lookups)
        # Per key: one multiply-add over the query's width and one over the value's; times 3 for forward and backward.
        per_key = 6 * self.num_heads * (self.head_dim + self.value_dim)
        return float(matmul + sum(per_key * self.attention_context(layer, seq_len) for layer in self.layers))

    # Changing and storing -----------------------------------------------------------------------------------------

    def with_overrides(self, overrides: Mapping[str, Any]) -> ModelSpec:
        """Returns a copy with these fields changed. Sizes that were derived (head_dim, num_kv_heads, expert_ffn) are
        derived again unless given."""
        changes = dict(overrides)
        for name in changes:
            check_field_name(name)
        if self.head_dim * self.num_heads == self.hidden and {"hidden", "num_heads"} & set(changes):
            changes.setdefault("head_dim", 0)
        if self.num_kv_heads == self.num_heads and "num_heads" in changes:
            changes.setdefault("num_kv_heads", 0)
        if self.expert_ffn == self.ffn and "ffn" in changes:
            changes.setdefault("expert_ffn", 0)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name. Kinds of layers that follow from the sizes are left out, as in files written
        before kinds had names."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value or name not in ("attention_kind", "feedforward_kind")
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelSpec:
        """Returns the model with these fields; refuses names that no field has."""
        for name in values:
            check_field_name(name)
        return cls(**values)


FIELD_NAMES = tuple(field.name for field in fields(ModelSpec))


def check_field_name(name: str) -> None:
    """Refuses a name that no field has, and suggests the closest one."""
    if name in FIELD_NAMES:
        return
    close = difflib.get_close_matches(name, FIELD_NAMES, n=1)
    fix = f"did you mean `{close[0]}`?" if close else "use one of the fields above"
    raise UserError(f"unknown model field `{name}`", why=f"a model has: {', '.join(FIELD_NAMES)}", fix=fix)


def check_types(spec: ModelSpec) -> None:
    """Refuses values that do not have their field's type; an int where a float is expected becomes one (TOML writes 1
    for 1.0)."""
    for name, kind in _field_types().items():
        value = getattr(spec, name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(spec, name, float(value))
        elif get_origin(kind) is Literal:
            if value not in get_args(kind):
                choices = get_args(kind)
                close = difflib.get_close_matches(str(value), choices, n=1)
                fix = f"did you mean `{close[0]}`?" if close else f"for example {name} = {choices[0]!r}"
                raise UserError(f"model.{name} cannot be {value!r}", why=f"it is one of: {', '.join(choices)}", fix=fix)
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(
                f"model.{name} cannot be {value!r}",
                why=f"it must be of type {kind.__name__}, not {type(value).__name__}",
                fix=f"for example {name} = {next(f.default for f in fields(spec) if f.name == name)!r}",
            )


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(ModelSpec)


MOST_LAYERS = 10_000  # what is said about a plan goes through them one by one
MOST = 2**40
POSITIVE = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_seq_len", "moe_every")


def check_sizes(spec: ModelSpec) -> None:
    """Refuses sizes that no model can have, and shows the arithmetic."""
    spec.attention.check(spec)
    for name in FIELD_NAMES:
        value = getattr(spec, name)
        low = 1 if name in POSITIVE else 0
        if isinstance(value, int | float) and not isinstance(value, bool) and value < low:
            raise impossible(f"model.{name} = {value}", f"it must be at least {low}", f"{name} = {low} or more")
        most = MOST_LAYERS if name == "num_layers" else MOST
        if isinstance(value, int) and value > most:
            raise impossible(f"model.{name} = {value}", f"it must be at most {most:,}", f"{name} = {most} or less")
    if spec.num_heads % spec.num_kv_heads:
        raise impossible(
            f"{spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads",
            f"{spec.num_heads} / {spec.num_kv_heads} is not whole: each key-value head serves the same number of heads",
            "choose num_kv_heads that divides num_heads",
        )
    if spec.positions == "rope" and spec.rotary_dim % 2:
        raise impossible(
            f"rotary positions over {spec.rotary_dim} dimensions",
            "RoPE turns pairs of dimensions, so the head dimension must be even",
            "choose hidden, num_heads or head_dim so that head_dim is even",
        )
    for name, used in (("rope_theta", spec.positions == "rope"), ("rope_factor", spec.rope_scaling != "none")):
        if used and not getattr(spec, name):
            raise impossible(
                f"model.{name} = 0", "RoPE divides by powers of it", f"leave {name} out, or set it above 0"
            )
    for name in (*(["experts"] if spec.is_moe else []), spec.feedforward_kind or "dense"):
        kind_named(FEEDFORWARD, "feedforward_kind", name).check(spec)
    if spec.rope_scaling in ("llama3", "yarn") and not spec.rope_original_max_seq_len:
        raise impossible(
            f"rope_scaling = {spec.rope_scaling!r} without rope_original_max_seq_len",
            "the scaling bends frequencies around the length the model was first trained with",
            "set rope_original_max_seq_len, for example 8192",
        )
