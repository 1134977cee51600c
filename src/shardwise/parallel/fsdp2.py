"""The one seam to FSDP2: every private name of torch that splitting a model rests on, each written here once.

FSDP2's public calls say what is sharded. When it gathers, waits and reduces is decided inside of it, and what this
package adds there (ZeRO 1 and 2 inside pipelines, spans around waits, parameters on a disk, the account of memory)
needs names that torch does not promise to keep. `PRIVATE_NAMES` lists them: where each one is, in which versions of
torch it was seen, what it is for. Invariants: no other file of the package knows such a name; `check_torch` has
looked for all of them before a model is split, so a torch that lacks one is refused in three lines and not in the
middle of a step. Read next: zero/sharding.py, which is the main user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.private_names import PrivateName, check_private_names

# The table -----------------------------------------------------------------------------------------------------------

_INSIDE = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_INSIDE}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_INSIDE}._fsdp_param.FSDPParam"
_STATE = f"{_INSIDE}._fsdp_state.FSDPState"
_GATHER = f"{_INSIDE}._fsdp_collectives.AllGatherResult"


PRIVATE_NAMES = (
    PrivateName("_get_fsdp_state", "torch.distributed.fsdp.FSDPModule", "the state behind a sharded module"),
    PrivateName("_set_unshard_async_op", "torch.distributed.fsdp.FSDPModule", "gloo gathers ahead of its use"),
    PrivateName("_lazy_init", _STATE, "sharded tensors get their final memory before weights are written"),
    PrivateName("_root_post_backward_final_callback", _STATE, "a step ends where no backward pass ran last"),
    PrivateName("_fsdp_param_groups", _STATE, "what is gathered together", ("2.13",), older="_fsdp_param_group"),
    PrivateName("TrainingState", f"{_INSIDE}._fsdp_common", "whether a group is in its backward pass"),
    PrivateName("IDLE", f"{_INSIDE}._fsdp_common.TrainingState", "a group after gradients that came without a pass"),
    PrivateName("PRE_BACKWARD", f"{_INSIDE}._fsdp_common.TrainingState", "what is read ahead differs by direction"),
    PrivateName("fsdp_params", _GROUP, "the parameters of a group"),
    PrivateName("unshard", _GROUP, "parameters on a disk are read before it"),
    PrivateName("wait_for_unshard", _GROUP, "the wait for an all-gather becomes a span"),
    PrivateName("post_backward", _GROUP, "reduces gradients that a split backward has left for later"),
    PrivateName("finalize_backward", _GROUP, "the wait for a reduce-scatter becomes a span"),
    PrivateName("is_unsharded", _GROUP, "whether parameters on a disk must be read"),
    PrivateName("unshard_in_backward", _GROUP, "the same, for a lookup's table"),
    PrivateName("device_handle", _GROUP, "the stream that waits for an all-gather"),
    PrivateName("_training_state", _GROUP, "forward or backward"),
    PrivateName("_all_gather_result", _GROUP, "the all-gather that is under way"),
    PrivateName("_all_gather_process_group", _GROUP, "how many ranks a group is spread over"),
    PrivateName("_is_hsdp", _GROUP, "whether a hybrid's replicas meet after the reduce-scatter"),
    PrivateName("_all_reduce_hook", _GROUP, "the moment at which they have met"),
    PrivateName("all_gather_output", _GATHER, "the buffer of an all-gather: its bytes, and who owns it"),
    PrivateName("all_gather_work", _GATHER, "what to wait for on a CPU"),
    PrivateName("all_gather_event", _GATHER, "what to wait for on a GPU"),
    PrivateName("sharded_param", _PARAM, "the DTensor that the module has between uses"),
    PrivateName("all_gather_outputs", _PARAM, "gathered parameters, for the account of memory"),
    PrivateName("unsharded_accumulated_grad", _PARAM, "gradients that are not reduced yet, for the account of memory"),
    PrivateName("_unsharded_param", _PARAM, "the same"),
    PrivateName("_sharded_param_data", _PARAM, "what an all-gather reads, for parameters on a disk"),
    PrivateName("_module_info", _PARAM, "which module has a parameter"),
    PrivateName("module", f"{_INSIDE}._fsdp_param.ParamModuleInfo", "the same"),
    PrivateName("param_name", f"{_INSIDE}._fsdp_param.ParamModuleInfo", "and by which name"),
    PrivateName("_local_tensor", "torch.distributed.tensor.DTensor", "this rank's rows, without autograd's notes"),
    PrivateName("_flatten", "torch.distributed.device_mesh.DeviceMesh", "replicas and shards as one group of ranks"),
    PrivateName(
        "_set_params_and_buffers_to_ignore_for_model",
        "torch.nn.parallel.DistributedDataParallel",
        "experts have fewer replicas than the rest, so they are summed apart",
    ),
)


@cache
def check_torch() -> None:
    """Refuses a torch that lacks one of these names. Called before anything is built."""
    check_private_names(PRIVATE_NAMES)


# Public names that 2.11 does not have yet ----------------------------------------------------------------------------

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Sharded modules -----------------------------------------------------------------------------------------------------


def fix_memory(root: FSDPModule) -> None:
    """Makes FSDP2 allocate the final memory of its sharded tensors. From here on they stay where they are: whoever
    holds one holds what FSDP2 gathers from."""
    _state(root)._lazy_init()


def end_backward(root: FSDPModule) -> None:
    """Runs what FSDP2 does after the last backward pass of a step: reduces what is left, reshards and waits."""
    _state(root)._root_post_backward_final_callback()


def gather_ahead(root: FSDPModule) -> None:
    """Lets all-gathers of gloo run beside computation. On CUDA streams of their own do that."""
    root._set_unshard_async_op(True)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """Returns the modules that FSDP2 has wrapped, among `root` and all modules below it."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Returns the groups of parameters that FSDP2 gathers and reduces together, the root's own group too. A group may
    serve several modules."""
    found: dict[int, Any] = {}
    for module in sharded_modules(model):
        state = _state(module)
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found |= {id(group): group for group in groups if group is not None}
    return [ParameterGroup(group) for group in found.values()]


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


@cache
def _training_state() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # after `check_torch` has spoken

    return TrainingState


class ParameterGroup:
    """Parameters that FSDP2 gathers, and whose gradients it reduces, in one collective."""

    def __init__(self, group: Any):
        self._group = group
        self.parameters = [ShardedParameter(parameter) for parameter in group.fsdp_params]

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks over which each parameter is sharded."""
        return self._group._all_gather_process_group.size()

    @property
    def has_replicas(self) -> bool:
        """Returns whether the reduce-scatter is followed by an all-reduce over other ranks with the same rows
        (hybrid)."""
        return self._group._is_hsdp

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward pass is inside this group."""
        return self._group._training_state == _training_state().PRE_BACKWARD

    @property
    def _gather(self) -> Any:
        return self._group._all_gather_result

    @property
    def gather_buffer(self) -> Tensor | None:
        """Returns the buffer that the all-gather under way writes; None where none is under way."""
        return None if self._gather is None else self._gather.all_gather_output

    @property
    def will_gather(self) -> bool:
        """Returns whether an unshard would begin an all-gather now."""
        if self.gather_buffer is not None or self._group.is_unsharded:
            return False
        return not self.in_backward or self._group.unshard_in_backward

    def wait_for_gather(self) -> None:
        """Waits for the all-gather that is under way: the host on a CPU, the current stream on a GPU."""
        if isinstance(self._gather.all_gather_work, dist.Work):
            self._gather.all_gather_work.wait()
        elif self._gather.all_gather_event is not None:
            self._group.device_handle.current_stream().wait_event(self._gather.all_gather_event)

    def reduce_gradients(self) -> None:
        """Reduces gradients that were computed outside of a backward pass, as FSDP2 does after a block's own."""
        self._group.post_backward()

    def end_pass(self) -> None:
        """Sets the group's state to idle: no forward or backward pass is inside it any more."""
        self._group._training_state = _training_state().IDLE

    # Replacing what FSDP2 does: `wrap` takes FSDP2's own function and returns the one to call instead -----------------

    def replace_unshard(self, wrap: Callable[[Callable[[bool], None]], Callable[..., None]]) -> None:
        """Replaces the function that starts the all-gather of the parameters."""
        self._group.unshard = wrap(self._group.unshard)

    def replace_wait(self, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Replaces the function that waits for the all-gather, after which the full parameters are there."""
        self._group.wait_for_unshard = wrap(self._group.wait_for_unshard)

    def replace_last_wait(self, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Replaces the function that waits, at the end of a step, for the gradients to be reduced."""
        self._group.finalize_backward = wrap(self._group.finalize_backward)

    def call_after_all_reduce(self, hook: Callable[[Tensor], None]) -> None:
        """Calls `hook` with the gradients summed over a hybrid's replicas, right after their all-reduce."""
        self._group._all_reduce_hook = hook


class ShardedParameter:
    """One parameter of a group, as FSDP2 holds it."""

    def __init__(self, inner: Any):
        self._inner = inner

    @property
    def parameter(self) -> nn.Parameter:
        """Returns the DTensor of this rank's rows."""
        return self._inner.sharded_param

    @property
    def module(self) -> nn.Module:
        """Returns the module that has the parameter."""
        return self._inner._module_info.module

    @property
    def name(self) -> str:
        """Returns the parameter's name in that module."""
        return self._inner._module_info.param_name

    @property
    def rows(self) -> Tensor:
        """Returns this rank's elements, padded and flat, which an all-gather reads."""
        return self._inner._sharded_param_data

    @rows.setter
    def rows(self, value: Tensor) -> None:
        self._inner._sharded_param_data = value

    @property
    def gathered(self) -> list[Tensor]:
        """Returns the full parameter, as the tensors that all-gathers write. Between uses they have no memory."""
        return self._inner.all_gather_outputs

    def unreduced_gradients(self) -> Iterator[Tensor]:
        """Yields the full gradients that no reduce-scatter has taken yet."""
        full = getattr(self._inner, "_unsharded_param", None)
        for gradient in (self._inner.unsharded_accumulated_grad, None if full is None else full.grad):
            if gradient is not None:
                yield gradient


# DTensor, DeviceMesh and DDP -----------------------------------------------------------------------------------------


def local_rows(tensor: DTensor) -> Tensor:
    """Returns this rank's part of a DTensor, sharing its memory. `to_local` would record it for autograd."""
    return tensor._local_tensor


def as_one_group(grid: DeviceMesh, name: str) -> dist.ProcessGroup:
    """Returns all ranks of a mesh of several dimensions as one process group."""
    return grid._flatten(name).get_group()


def leave_out(model: nn.Module, names: list[str]) -> None:
    """Excludes parameters from those whose gradients DDP sums. Called before DDP wraps the model."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
