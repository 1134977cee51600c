"""Reads exported plans as other frameworks do: with their own parsers where they are installed, and with tables of what
those accept (foreign_tables.json) where they are not.

Each raises where the framework would refuse. What the tables cannot say (which flags exclude each other, what must
divide what) is asserted here once more, in the frameworks' terms.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TABLES = Path(__file__).with_name("foreign_tables.json")


@cache
def tables() -> dict[str, Any]:
    return json.loads(TABLES.read_text())


# By tables -----------------------------------------------------------------------------------------------------------


def megatron_by_table(text: str, world: int) -> argparse.Namespace:
    """Returns the flags as a parser of the same flags, types and choices reads them."""

    class Strict(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    kinds = {"int": int, "float": float, "moe_freq_type": _pattern, "tuple_type": _pair}
    parser = Strict(allow_abbrev=False)
    for flag, facts in tables()["megatron"].items():
        if flag in ("-h", "--help"):
            continue
        if not facts:
            parser.add_argument(flag, action="store_true")
            continue
        options = {"nargs": facts.get("nargs")} | ({"choices": facts.get("choices")} if facts["type"] == "str" else {})
        parser.add_argument(flag, type=kinds.get(facts["type"], str), **options)
    args = parser.parse_args(shlex.split(text.replace("\\\n", " ")))
    model_ranks = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * (args.context_parallel_size or 1)
    )
    assert world % model_ranks == 0
    assert args.global_batch_size % (args.micro_batch_size * (world // model_ranks)) == 0
    layout, virtual = args.pipeline_model_parallel_layout, args.num_virtual_stages_per_pipeline_rank
    assert not (layout and virtual), "they exclude each other"
    pp = args.pipeline_model_parallel_size
    if layout:
        assert layout.count("t") == args.num_layers and (layout.count("|") + 1) % pp == 0
    else:
        assert args.num_layers % (pp * (virtual or 1)) == 0
    if args.use_megatron_fsdp:
        assert args.ckpt_format == "fsdp_dtensor" and pp == 1
    assert not (args.multi_latent_attention and args.group_query_attention)
    assert args.max_position_embeddings >= args.seq_length
    return args


def _pattern(text: str) -> list[int]:
    """Returns the layers that a sum of repeated lists stands for."""
    found: list[int] = []
    for part in text.split("+"):
        marks, _, times = part.partition("*")
        found += ast.literal_eval(marks) * int(times or 1)
    return found


def _pair(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def torchtitan_by_table(text: str, world: int) -> dict[str, Any]:
    """Returns the TOML whose sections and keys torchtitan has."""
    made = tomllib.loads(text)

    def check(values: dict[str, Any], known: dict[str, Any]) -> None:
        for key, value in values.items():
            facts = known[key]
            if "section" in facts:
                check(value, facts["section"])
            elif "choices" in facts:
                assert value in facts["choices"], (key, value)
            elif facts["type"] in ("int", "bool", "str"):
                assert type(value).__name__ == facts["type"], (key, value)

    check(made, tables()["torchtitan"])
    axes = made["parallelism"]
    _degrees_and_batch(made, world)
    for stage in axes.get("module_fqns_per_model_part", []):
        assert stage
    assert len(axes.get("module_fqns_per_model_part", [])) % axes["pipeline_parallel_degree"] == 0
    return made


def _degrees_and_batch(made: dict[str, Any], world: int) -> None:
    axes, training = made["parallelism"], made["training"]
    data = axes["data_parallel_replicate_degree"] * axes["data_parallel_shard_degree"]
    rest = axes["tensor_parallel_degree"] * axes["context_parallel_degree"] * axes["pipeline_parallel_degree"]
    assert data * rest == world
    assert training["global_batch_size"] % (training["local_batch_size"] * data) == 0
    assert training["local_batch_size"] % axes.get("pipeline_parallel_microbatch_size", 1) == 0


def deepspeed_by_table(text: str, world: int) -> dict[str, Any]:
    """Returns the JSON whose sections have keys that DeepSpeed knows."""
    made, known = json.loads(text), tables()["deepspeed"]
    zero = made["zero_optimization"]
    for name, section in (made | zero).items():
        if name in known:
            assert not section.keys() - set(known[name]), (name, section)
    ranks = world // made.get("tensor_parallel", {}).get("autotp_size", 1)
    steps = made["gradient_accumulation_steps"]
    assert made["train_batch_size"] == made["train_micro_batch_size_per_gpu"] * steps * ranks
    return made


# By the frameworks themselves ----------------------------------------------------------------------------------------


def megatron_itself(text: str, world: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the model's config as Megatron-LM makes it of its checked arguments."""
    arguments = pytest.importorskip("megatron.training.arguments")
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    for module in (arguments, sys.modules["megatron.core.transformer.transformer_config"]):  # as in its own container
        monkeypatch.setattr(module, "is_te_min_version", lambda *version, **options: True)
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb", rope.fused_apply_rotary_pos_emb or print)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8" if "--use-megatron-fsdp" in text else "1")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *shlex.split(text.replace("\\\n", " "))])
    args = arguments.validate_args(arguments.parse_args())
    config = arguments.core_transformer_config_from_args(args)
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    ConstantNumMicroBatchesCalculator(args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 0)
    return args, config


def torchtitan_itself(text: str, world: int, path: Path) -> Any:
    """Returns the config as torchtitan reads the file, with its model's arguments and its pipeline's stages."""
    config = pytest.importorskip("torchtitan.config")
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    path.write_text(text)
    made = config.ConfigManager().parse_args(["--job.config_file", str(path)])
    axes = made.parallelism
    ParallelDims(
        dp_replicate=axes.data_parallel_replicate_degree,
        dp_shard=axes.data_parallel_shard_degree,
        cp=axes.context_parallel_degree,
        tp=axes.tensor_parallel_degree,
        pp=axes.pipeline_parallel_degree,
        ep=axes.expert_parallel_degree,
        etp=axes.expert_tensor_parallel_degree,
        world_size=world,
    )
    model = get_train_spec(made.model.name)
    arguments = model.model_args[made.model.flavor]
    arguments.update_from_config(made)
    if axes.pipeline_parallel_degree > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        assert model.pipelining_fn is not None
        get_schedule_class(axes.pipeline_parallel_schedule)
    _degrees_and_batch(tomllib.loads(text), world)
    return made, arguments


def deepspeed_itself(text: str, world: int) -> Any:
    """Returns DeepSpeed's config; its data-parallel ranks are all that tensor parallelism leaves."""
    config = pytest.importorskip("deepspeed.runtime.config")
    made = json.loads(text)

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return world // made.get("tensor_parallel", {}).get("autotp_size", 1)

    import deepspeed.comm

    found = deepspeed.comm.get_rank
    deepspeed.comm.get_rank = lambda group=None: 0
    try:
        return config.DeepSpeedConfig(made, mpu=Ranks())
    finally:
        deepspeed.comm.get_rank = found


def accelerate_itself(text: str, world: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the arguments of `accelerate launch`, and the parallelism config that a script would get from them."""
    pytest.importorskip("accelerate")
    from types import SimpleNamespace

    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import DistributedType
    from accelerate.utils.launch import prepare_extend_env_parallelism_config

    path.write_text(text)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "script.py"]))
    assert args.num_processes == world
    if not args.use_parallelism_config:
        return args, None
    environment: dict[str, str] = {}
    prepare_extend_env_parallelism_config(args, environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = ParallelismConfig()
    several = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_GPU
    here = SimpleNamespace(
        multi_device=world > 1,
        num_processes=world,
        is_fsdp2=args.use_fsdp and str(args.fsdp_version) == "2",
        distributed_type=several,
        is_main_process=True,
    )
    made._validate_accelerator(here)
    return args, made
