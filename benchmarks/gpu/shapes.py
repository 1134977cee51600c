"""What is measured: models, batches, contenders by name, and how FLOPs are counted. No torch.

A contender is `base` or `base:key=value,...`. For ours the keys are those of [speed], of the plan, and optimizer;
`micro_batch` is for all. `train` is ours from the command line to metrics.jsonl. Invariant: a shape and a seed decide
model, tokens and FLOPs, whoever computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

PEAK_FLOPS = 989e12  # bf16, dense, of an H100 or H200 by its data sheet
LORA = {"kind": "lora", "rank": 16, "targets": ("all-linear",)}


@dataclass(frozen=True)
class Shape:
    title: str
    model: str
    changes: dict[str, Any]
    micro_batch: int
    seq_len: int = 4096
    ours: dict[str, Any] = field(default_factory=dict)  # how ours trains it, where not as by default
    adapter: dict[str, Any] | None = None

    @property
    def spec(self) -> ModelSpec:
        plain = {"rope_scaling": "none", "max_seq_len": self.seq_len}  # no contender bends frequencies
        return preset(self.model).with_overrides({**plain, **self.changes})

    @property
    def flops_per_token(self) -> float:
        """6 (N - E) + 6 L h s: causal attention once, recomputation never, of experts those a token meets."""
        return self.spec.flops_per_token(self.seq_len)

    @property
    def frozen_flops_per_token(self) -> float:
        """4 (N - E) + 6 L h s: frozen weights have no gradient of their own."""
        spec = self.spec
        return self.flops_per_token - 2 * (spec.num_active_parameters - spec.num_embedding_parameters)


DENSE = {"num_layers": 16, "hidden": 2048, "ffn": 8192, "num_heads": 32, "num_kv_heads": 8, "tied": False}
OLMOE = {
    "num_layers": 16,
    "hidden": 2048,
    "num_heads": 16,
    "num_kv_heads": 16,
    "ffn": 1024,
    "vocab": 50304,
    "num_experts": 64,
    "experts_per_token": 8,
    "expert_ffn": 1024,
    "moe_every": 1,
    "tied": False,
}
EIGHT = {"num_layers": 8}
SHAPES = {
    "1.5b": Shape("1.5B, 8 x 4096", "llama3.2-1b", DENSE, 8),
    "1.5b-b4": Shape("1.5B, 4 x 4096", "llama3.2-1b", DENSE, 4),
    "8b-wide": Shape("8 layers of 8B, 8 x 4096", "llama3-8b", EIGHT, 8),
    "8b-wide-b4": Shape("8 layers of 8B, 4 x 4096", "llama3-8b", EIGHT, 4),
    "8b": Shape("8B, 4 x 4096", "llama3-8b", {}, 4, ours={"optimizer": "adamw8bit", "recompute": "selective"}),
    "moe": Shape("64 experts, 8 active, 4 x 4096", "tiny-moe", OLMOE, 4),
    "32k": Shape("8 layers of 8B, 1 x 32k", "llama3-8b", EIGHT, 1, 32768),
    "128k": Shape("8 layers of 8B, 1 x 128k", "llama3-8b", EIGHT, 1, 131072, ours={"recompute": "full"}),
    "lora-8b": Shape("LoRA on 8B, 4 x 2048", "llama3-8b", {}, 4, 2048, adapter=LORA),
}
TINY = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "ffn": 160, "vocab": 384, "tied": False}
TINY_MOE = {
    **OLMOE,
    "num_layers": 2,
    "hidden": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn": 48,
    "vocab": 384,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn": 48,
}
SMOKE = {
    "dense": Shape("tiny, 2 x 32", "llama3.2-1b", TINY, 2, 32),
    "experts": Shape("tiny experts, 2 x 32", "tiny-moe", TINY_MOE, 2, 32),
    "lora": Shape("LoRA on tiny, 2 x 32", "llama3.2-1b", TINY, 2, 32, adapter=LORA),
}
"""Seconds on a CPU, to see that the script works."""


def small(shape: str) -> str:
    """The one of those that stands for a shape in a rehearsal."""
    if shape in SMOKE:
        return shape
    return "lora" if SHAPES[shape].adapter else "experts" if SHAPES[shape].spec.is_moe else "dense"


VARIANTS = {
    "ours-eager": "ours:compile=none",
    "ours-fused": "ours:fuse=true",
    "ours-fsdp": "ours:copies=false",
    "ours-recompute-loss": "ours:loss=recompute",
    "ours-liger": "ours:kernels=liger",
    "ours-graphs": "ours:compile=graphs",
    "ours-library": "ours:products=library",
    "ours-torch-norms": "ours:kernels=torch",
    "ours-true": "ours:precision=bf16-true",
    "ours-fp8": "ours:precision=fp8,fp8_recipe=rowwise",
    "ours-fp8-tensorwise": "ours:precision=fp8,fp8_recipe=tensorwise",
    "ours-fp8-head": "ours:precision=fp8,fp8_recipe=tensorwise,fp8_head=true",
    "plain-bf16": "plain:masters=false",
    "plain-flash": "plain:attention=flash",
    "transformers-compiled": "transformers:compile=whole",
    "transformers-layers": "transformers:compile=layers",
    "transformers-bf16": "transformers:compile=layers,masters=false",
    "transformers-liger": "transformers:liger=true",
    "torchtitan-fsdp": "torchtitan:fsdp=true",
    "torchtitan-recompute": "torchtitan:recompute=selective",
    "peft-compiled": "peft:compile=layers",
    "peft-whole": "peft:compile=whole",
    "peft-bf16": "peft:compile=layers,adapters=bf16",
}
MAIN = (
    "ours",
    "train",
    "plain",
    "plain-bf16",
    "torchtitan",
    "transformers-layers",
    "transformers-compiled",
    "transformers",
)
TRICKS = tuple(name for name in VARIANTS if name.startswith("ours-"))
CONTENDERS = {
    "1.5b": (*MAIN, "torchtitan-fsdp", *TRICKS),
    "1.5b-b4": MAIN,
    "8b-wide": (*MAIN, "torchtitan-fsdp", "ours-fp8", "ours-fp8-tensorwise", "ours-fp8-head", "ours-true"),
    "8b-wide-b4": MAIN,
    "8b": ("ours", "train"),
    "moe": ("ours", "ours-true", "transformers-bf16", "torchtitan"),
    "32k": ("ours", "ours-fp8-head", "plain", "torchtitan", "torchtitan-fsdp"),
    "128k": ("ours",),
    "lora-8b": (
        *("ours", "ours-true", "ours-fp8", "ours-fp8-tensorwise", "ours-fp8-head"),
        *("peft-compiled", "peft-whole", "peft-bf16", "peft"),
    ),
    "dense": ("ours", "train", "plain", "transformers", "torchtitan"),
    "experts": ("ours", "transformers", "torchtitan"),
    "lora": ("ours", "peft"),
}


@dataclass(frozen=True)
class Case:
    """One contender at one shape, as a worker gets it."""

    shape: Shape
    base: str
    options: dict[str, Any]
    device: str = "cuda"
    lr: float = 1e-5
    clip: float = 1.0
    seed: int | None = None  # first weights that all contenders share; None: drawn where they lie, which is quicker
    rehearses: bool = False  # on a CPU what a GPU would do

    @property
    def is_bf16(self) -> bool:
        """A GPU computes in bf16; the smoke on a CPU is in fp32, so that losses can be compared closely."""
        return self.device == "cuda" or self.rehearses

    @property
    def compiles(self) -> bool:
        """Nothing is compiled in the smoke."""
        return self.device == "cuda" or self.rehearses

    @property
    def micro_batch(self) -> int:
        return int(self.options.get("micro_batch", self.shape.micro_batch))

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.shape.seq_len


def case_of(shape: str, contender: str, **more: Any) -> Case:
    base, _, text = VARIANTS.get(contender, contender).partition(":")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    is_smoke = shape in SMOKE
    defaults: dict[str, Any] = {"device": "cpu", "lr": 1e-3, "seed": 0} if is_smoke else {}
    options = {key: parsed(value) for key, _, value in pairs}
    return Case((SMOKE if is_smoke else SHAPES)[shape], base, options, **{**defaults, **more})


def parsed(value: str) -> Any:
    words = {"true": True, "false": False}
    if value in words:
        return words[value]
    return int(value) if value.isdigit() else value
