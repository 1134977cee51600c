"""The table of variants: how each is built, what it needs installed, and which baseline it is measured against; the
targets."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import Any

from peers.setting import Setting, Step

MIN_ROUNDS = 200  # fewer rounds, or an A/A that is off by more than this, judge nothing
MAX_AA = 0.01


@dataclass(frozen=True)
class Variant:
    """`builder` is "file:function" under `peers`, imported on the ranks only."""

    label: str
    builder: str
    baseline: str
    needs: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it cannot be built here, or empty."""
        absent = self.needs and importlib.util.find_spec(self.needs) is None
        return f"not installed: pip install {self.needs}" if absent else ""

    def build(self, setting: Setting) -> Step:
        module, function = self.builder.split(":")
        return getattr(importlib.import_module(f"peers.{module}"), function)(setting, **self.options)


def _zero(stage: int) -> Variant:
    baseline = "torch-fsdp2" if stage == 3 else "torch-fsdp2-keep"
    return Variant(
        f"DeepSpeed ZeRO-{stage}", "with_deepspeed:deepspeed_zero", baseline, "deepspeed", options={"stage": stage}
    )


VARIANTS = {
    "torch-ddp": Variant("torch DDP, by hand", "by_hand:torch_ddp", "torch-ddp"),
    "torch-ddp-again": Variant("torch DDP, by hand, again (A/A)", "by_hand:torch_ddp", "torch-ddp"),
    "accelerate-ddp": Variant("Accelerate DDP", "with_accelerate:accelerate_ddp", "torch-ddp", "accelerate"),
    "ours-ddp": Variant("ours, ddp", "ours:ours", "torch-ddp", options={"zero": 0}),
    "ours-ddp-25mib": Variant(
        "ours, ddp, buckets of 25 MiB", "ours:ours", "torch-ddp", options={"zero": 0, "bucket": 25 * 2**20}
    ),
    "torch-fsdp2": Variant(
        "torch FSDP2, by hand, resharded (ZeRO-3)", "by_hand:torch_fsdp2", "torch-fsdp2", options={"reshard": True}
    ),
    "torch-fsdp2-again": Variant(
        "torch FSDP2, by hand, again (A/A)", "by_hand:torch_fsdp2", "torch-fsdp2", options={"reshard": True}
    ),
    "accelerate-fsdp2": Variant(
        "Accelerate FSDP2 (set by hand)", "with_accelerate:accelerate_fsdp2", "torch-fsdp2", "accelerate"
    ),
    "deepspeed-zero3": _zero(3),
    "ours-zero3": Variant("ours, zero 3", "ours:ours", "torch-fsdp2", options={"zero": 3}),
    "parallelize-zero3": Variant("ours, parallelize, zero 3", "ours:parallelized", "torch-fsdp2", options={"zero": 3}),
    "torch-fsdp2-keep": Variant(
        "torch FSDP2, by hand, kept (as ZeRO-2)", "by_hand:torch_fsdp2", "torch-fsdp2-keep", options={"reshard": False}
    ),
    "torch-fsdp2-keep-again": Variant(
        "torch FSDP2, by hand, kept, again (A/A)",
        "by_hand:torch_fsdp2",
        "torch-fsdp2-keep",
        options={"reshard": False},
    ),
    "deepspeed-zero1": _zero(1),
    "deepspeed-zero2": _zero(2),
    "ours-zero1": Variant("ours, zero 1", "ours:ours", "torch-fsdp2-keep", options={"zero": 1}),
    "ours-zero2": Variant("ours, zero 2", "ours:ours", "torch-fsdp2-keep", options={"zero": 2}),
}

BASELINES = ("torch-ddp", "torch-fsdp2", "torch-fsdp2-keep")  # each stands twice, as NAME and NAME-again


@dataclass(frozen=True)
class Target:
    """What the median of ours / peer may be at most, or must stay below (`strict`). `ranks` 0: at any number of
    them."""

    ours: str
    peer: str
    limit: float
    ranks: int = 0
    strict: bool = False


TARGETS = (
    Target("ours-ddp", "torch-ddp", 1.02, ranks=2),
    Target("ours-ddp", "accelerate-ddp", 1.0, strict=True),
    Target("ours-zero3", "torch-fsdp2", 0.85, ranks=4),
    Target("ours-zero3", "accelerate-fsdp2", 1.0, strict=True),
    Target("parallelize-zero3", "accelerate-fsdp2", 1.0),
    Target("ours-zero3", "deepspeed-zero3", 1.0, strict=True),
    Target("ours-zero2", "deepspeed-zero2", 1.0, strict=True),
    Target("ours-zero1", "deepspeed-zero1", 1.0, strict=True),
)
