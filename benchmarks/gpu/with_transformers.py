"""transformers as people use it on one GPU: fp32 weights, autocast to bf16, torch's fused AdamW; compiled, or with
liger-kernel, or peft's LoRA on it.

`compile=whole` compiles the model in one piece. While transformers 5 is traced, it writes out the causal mask, which
keeps attention from the fast kernels; `compile=layers` compiles block by block and the loss, so that attention stays
causal and grouped: what a careful user does. LoRA's frozen weights are bf16, as its users have them. peft keeps the
adapters in fp32; `adapters=bf16` has them in bf16 too, and needs no autocast. `masters=false`: bf16 weights and states.
Its experts want that: their grouped matmul does not know autocast.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from gpu.contender import Contender, adamw, clip, draw_weights, same_weights
from gpu.shapes import Case
from torch import Tensor, nn

from shardwise.interop.huggingface.load_save import config_from_spec


def config_of(case: Case) -> Any:
    return transformers.AutoConfig.for_model(**config_from_spec(case.shape.spec), use_cache=False)


def build(case: Case) -> Contender:
    if case.options.get("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    is_frozen = case.base == "peft"
    masters, autocasts = case.options.get("masters", True), case.options.get("adapters") != "bf16"
    dtype = torch.bfloat16 if case.is_bf16 and (is_frozen or not masters) else torch.float32
    with torch.device(case.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config_of(case), dtype=dtype, attn_implementation="sdpa"
        )
    if case.seed is not None:
        model.load_state_dict(same_weights(case))
    else:
        draw_weights(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if is_frozen:
        model = with_lora(model, case)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(case, trained)
    call: Any = compiled(model, case.options.get("compile")) if case.compiles else model
    casts = case.is_bf16 and masters and autocasts

    def step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with torch.autocast(case.device, torch.bfloat16) if casts else nullcontext():
            # `shift_labels`: targets are already one token ahead
            loss = call(input_ids=tokens_BT, labels=targets_BT, shift_labels=targets_BT).loss
        loss.backward()
        clip(case, trained)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step, num_parameters, {"transformers": transformers.__version__})


def compiled(model: Any, how: str | None) -> Any:
    if how == "whole":
        return torch.compile(model)
    if how == "layers":
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        for layer in inner.model.layers:
            layer.compile()
        inner.loss_function = torch.compile(inner.loss_function)
    return model


def with_lora(model: nn.Module, case: Case) -> nn.Module:
    import peft

    assert case.shape.adapter is not None
    config = peft.LoraConfig(r=case.shape.adapter["rank"], lora_alpha=2 * case.shape.adapter["rank"], lora_dropout=0.0,
                             target_modules="all-linear", task_type="CAUSAL_LM")  # fmt: skip
    return peft.get_peft_model(model, config, autocast_adapter_dtype=case.options.get("adapters") != "bf16")
