"""Writes what the parsers of other frameworks accept, read from the frameworks themselves, to foreign_tables.json.

    PYTHONPATH=tests:MEGATRON-LM:TORCHTITAN:DEEPSPEED python tests/interop/foreign_tables.py

Read on 2026-11-18 from Megatron-LM core_v0.16.1, torchtitan 0.2.2 and DeepSpeed 0.19.8. The tests check exports against
the file where the frameworks are not installed, and with the frameworks themselves where they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("foreign_tables.json")


def megatron() -> dict[str, Any]:
    """Returns its flags: the type of the value, how many values, and the choices; a switch has no type."""
    from megatron.training.arguments import add_megatron_arguments

    found = {}
    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        for flag in action.option_strings:
            if action.nargs == 0:
                found[flag] = {}
                continue
            kind = getattr(action.type, "__name__", "str")
            facts = {
                "type": kind,
                "nargs": action.nargs,
                "choices": action.choices and [str(c) for c in action.choices],
            }
            found[flag] = {name: value for name, value in facts.items() if value is not None}
    return found


def torchtitan() -> dict[str, Any]:
    """Returns the sections of its config, and the type and the choices of each key."""
    from torchtitan.config import JobConfig

    return _dataclass(JobConfig)


def _dataclass(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            found[name] = {"section": _dataclass(kind)}
        elif typing.get_origin(kind) is typing.Literal:
            found[name] = {"choices": list(typing.get_args(kind))}
        else:
            found[name] = {"type": getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)}
    return found


def deepspeed() -> dict[str, Any]:
    """Returns the keys of its ZeRO and precision sections; it refuses others there."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    return {
        name: sorted(key for field, info in kind.model_fields.items() for key in {field, info.alias or field})
        for name, kind in sections.items()
    }


if __name__ == "__main__":
    tables = {"megatron": megatron(), "torchtitan": torchtitan(), "deepspeed": deepspeed()}
    FILE.write_text(json.dumps(tables, indent=0, sort_keys=True) + "\n")
