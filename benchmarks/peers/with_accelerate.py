"""Hugging Face Accelerate on CPU ranks, as its documentation writes a loop: `accumulate`, `backward`,
`clip_grad_norm_`.

DDP works as it is. FSDP2 does not: on CPU ranks Accelerate 1.15 takes a `FullyShardedDataParallelPlugin`, says nothing,
and trains with DDP, because it looks at the plugin only where `distributed_type` is one of the accelerator kinds. So
`accelerate_fsdp2` first shows that, then sets the two fields that Accelerate itself would have set on a GPU. From there
on it is Accelerate's own code that wraps, clips and steps, and it works; but it is not a mode that Accelerate supports.
"""

from __future__ import annotations

from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from peers.setting import Batch, Done, Setting, Step, mean_loss


def accelerate_ddp(setting: Setting) -> Step:
    _own_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=setting.micro_batches,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # as in the script by hand
    )
    return _loop(accelerator, setting)


def accelerate_fsdp2(setting: Setting) -> Step:
    _own_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[setting.block_class],
        cpu_ram_efficient_loading=False,  # every rank has the weights already
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=setting.micro_batches)
    if not accelerator.is_fsdp2:
        print(f"Accelerate ignored its FSDP2 plugin: distributed_type is {accelerator.distributed_type}; set by hand")
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return _loop(accelerator, setting, sharded=True)


def _loop(accelerator: Accelerator, setting: Setting, *, sharded: bool = False) -> Step:
    plain = setting.new_model()
    model, optimizer = accelerator.prepare(plain, setting.new_optimizer(plain))
    kind = FSDPModule if sharded else DistributedDataParallel
    assert issubclass(type(model), kind), f"Accelerate made a {type(model).__name__}, not a {kind.__name__}"

    def step(batch: list[Batch]) -> Done:
        total, norm = 0.0, None
        for micro in batch:
            with accelerator.accumulate(model):
                loss = mean_loss(model, micro, 1)  # `backward` divides by the number of micro-batches
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), setting.clip)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / len(batch)
        assert norm is not None
        return Done(total, norm)

    return step


def _own_state() -> None:
    """Accelerators of one process share their state through class attributes; a new dict parts this one from the
    last."""
    for shared in (PartialState, AcceleratorState, GradientState):
        shared._shared_state = type(shared._shared_state)()
