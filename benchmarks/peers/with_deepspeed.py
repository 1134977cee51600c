"""DeepSpeed ZeRO-1, 2 and 3 on CPU ranks over gloo, with torch's fused AdamW, which ZeRO accepts as it is.

Everything not named in `configuration` is DeepSpeed's default. Two of its defaults matter for a small model: ZeRO-3
keeps parameters below 100k elements whole on every rank, and does not release a parameter after forward when it is
needed again within 1e9 elements. So its ZeRO-3 gathers less here than FSDP2 with resharding does.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read while deepspeed is imported

import deepspeed
import torch

from peers.setting import Batch, Done, Setting, Step, mean_loss


def configuration(setting: Setting, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": setting.clip,
        "zero_optimization": {"stage": stage},
    }


def deepspeed_zero(setting: Setting, *, stage: int) -> Step:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It compiles an extension when it first starts, with the `ninja` that pip put beside this python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # joins the process group that exists
    model = setting.new_model()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=setting.new_optimizer(model), config=configuration(setting, stage)
    )
    kind = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}[stage]
    assert type(optimizer).__name__ == kind and engine.zero_optimization_stage() == stage, type(optimizer)

    def step(batch: list[Batch]) -> Done:
        total = 0.0
        for micro in batch:
            loss = mean_loss(engine, micro, 1)  # the engine divides by the number of micro-batches
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch only
            total += loss.item() / len(batch)
        return Done(total, torch.as_tensor(engine.get_global_grad_norm()))

    return step
