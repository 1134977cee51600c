"""torchtitan 0.2.2: its Llama 3 model, or with experts its Qwen 3 without norms of queries and keys, which is the
function of the others; its parallelize function, its loss, clipping and optimizer, in the order of its train.py for one
GPU.

There it keeps fp32 parameters and computes under autocast, because it shards only over two or more devices. `fsdp=true`
has its FSDP function do mixed precision over a mesh of one device instead, which keeps the residual stream in bf16: not
what its train.py would do, but it may be faster. Compiled, as its documentation advises; attention is its own choice
(SDPA with its list of kernels). `recompute=selective` is its default; without it the model fits and is faster, so that
is what is compared. Unpack its wheel and tyro's, typeguard's, docstring_parser's, shtab's, einops's and torchdata's
into build/peers/torchtitan, or install it. Of what it imports, `datasets` and tensorboard have no part in a step: where
they are missing, names that cannot be called stand in for them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from gpu.contender import Contender, draw_weights, same_weights
from gpu.shapes import Case
from torch import Tensor

UNUSED = {
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "torch.utils.tensorboard": ("SummaryWriter",),
}


def stand_in() -> list[str]:
    """Names instead of packages that only reading data and logging need; those that were missing."""
    gone = {"datasets": importlib.util.find_spec("datasets"), "torch": importlib.util.find_spec("tensorboard")}
    missing = [name for name in UNUSED if gone[name.partition(".")[0]] is None]
    for name in missing:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for part in UNUSED[name]:
            setattr(module, part, None)
        sys.modules[name] = module
    return missing


def build(case: Case) -> Contender:
    missing = stand_in()
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    os.environ.setdefault("LOCAL_RANK", "0")
    job: Any = JobConfig()
    job.training.seq_len, job.training.local_batch_size = case.shape.seq_len, case.micro_batch
    job.training.max_norm = case.clip
    job.compile.enable = case.compiles
    job.compile.backend = "aot_eager" if case.rehearses else "inductor"
    job.activation_checkpoint.mode = case.options.get("recompute", "none")
    job.optimizer.lr, job.optimizer.beta2, job.optimizer.weight_decay = case.lr, 0.95, 0.1
    dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    arguments, make, parallelize, reader = _experts(case) if case.shape.spec.is_moe else _dense(case)
    arguments.update_from_config(job)
    with torch.device("meta"):
        model: Any = make(arguments)
    names = [name for name, _ in model.named_parameters()]
    loss_of = build_cross_entropy_loss(job)
    model = parallelize(model, dims, job)
    if case.options.get("fsdp"):
        shard(model, case)
    model.to_empty(device=case.device)
    with torch.no_grad():
        model.init_weights()
    if case.seed is not None:
        weights = same_weights(case, fused_experts=False)
        theirs = reader(arguments, None).from_hf({_qwen_name(name): weight for name, weight in weights.items()})
        with torch.no_grad():
            for name, parameter in zip(names, model.parameters(), strict=True):
                local_of(parameter).copy_(theirs[name])
    else:
        draw_weights(model)
    model.train()
    optimizers = build_optimizers([model], job.optimizer, dims)
    autocast: Any = nullcontext()
    if not case.options.get("fsdp"):
        autocast = dist_utils.maybe_enable_amp(dims, "bfloat16" if case.is_bf16 else "float32", case.device)
    parameters = list(model.parameters())

    def step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        optimizers.zero_grad()
        with autocast:
            logits = model(tokens_BT)
            loss = loss_of(logits, targets_BT) / targets_BT.numel()
        del logits
        loss.backward()
        dist_utils.clip_grad_norm_(parameters, job.training.max_norm, foreach=True)
        optimizers.step()
        return loss.detach()

    return Contender(step, sum(p.numel() for p in parameters), {"stood in for": missing})


def shard(model: Any, case: Case) -> None:
    """Its own function for FSDP2, over one rank that is its own group; what it gathered stays until backward."""
    if case.shape.spec.is_moe:
        from torchtitan.models.llama4.infra.parallelize import apply_fsdp
    else:
        from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    dist.init_process_group("nccl" if case.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(case.device, (1,))
    computed = torch.bfloat16 if case.is_bf16 else torch.float32
    apply_fsdp(model, mesh, computed, torch.float32, pp_enabled=False, reshard_after_forward_policy="never")


def local_of(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _dense(case: Case) -> tuple[Any, Any, Any, Any]:
    from torchtitan.models.llama3 import Transformer, parallelize_llama
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    return arguments_of(case), Transformer, parallelize_llama, Llama3StateDictAdapter


def _experts(case: Case) -> tuple[Any, Any, Any, Any]:
    """Its arguments, model, parallelize function and reader of weights. The grouped matmul pads with a kernel that a
    CPU has not."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    spec = case.shape.spec
    if spec.router != "softmax-topk" or spec.num_shared_experts or spec.first_dense_layers or spec.tied or spec.qk_norm:
        raise NotImplementedError("only experts in every layer, chosen by a softmax, are written down here")
    experts = MoEArgs(
        num_experts=spec.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=spec.norm_topk,
        score_before_experts=False,
        top_k=spec.experts_per_token,
        use_grouped_mm=case.device == "cuda",
        load_balance_coeff=None,
    )
    arguments = Qwen3ModelArgs(
        dim=spec.hidden,
        n_layers=spec.num_layers,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_kv_heads,
        vocab_size=spec.vocab,
        head_dim=spec.head_dim,
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        qk_norm=False,
        moe_enabled=True,
        moe_inter_dim=spec.expert_ffn,
        moe_args=experts,
    )
    return arguments, Qwen3Model, parallelize_qwen3, Qwen3StateDictAdapter


def _qwen_name(name: str) -> str:
    """Of a tensor that Mixtral's files call otherwise."""
    if ".block_sparse_moe." in name:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for theirs, qwens in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{theirs}.", f".{qwens}.")
    return name


def arguments_of(case: Case) -> Any:
    """Its arguments for our shape. It derives the feed-forward width as 2/3 of 4 h times a factor, up to a multiple."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    spec = case.shape.spec
    if spec.tied:
        raise NotImplementedError("only models whose head is not the embedding are written down here")
    derived = int(2 * 4 * spec.hidden / 3)
    return TransformerModelArgs(
        dim=spec.hidden,
        n_layers=spec.num_layers,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_kv_heads,
        vocab_size=spec.vocab,
        multiple_of=spec.ffn,
        ffn_dim_multiplier=min(1.0, (spec.ffn - 0.5) / derived),
        norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
