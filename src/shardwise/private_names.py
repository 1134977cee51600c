"""Names of torch that begin with an underscore: every one that the package uses outside of FSDP2, listed once.

torch does not promise to keep them, and what stands here has no public counterpart: what a saved tensor's storage is,
whether a backward pass is running, kernels that update many tensors at once. A row says where the name is, in which
versions of torch it was seen and what it is for. Invariants: each room uses no other (tests/package/
test_private_names.py); a torch that lacks one is refused in three lines before a rank starts, not in the middle of a
step. Read next: parallel/fsdp2.py, which has the table of FSDP2's own names.
"""

from __future__ import annotations

import dis
import importlib
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

from shardwise.errors import UserError

BOTH = ("2.11", "2.13")


class PrivateName(NamedTuple):
    """A name that torch may change without notice."""

    name: str
    owner: str  # the class or module that has it
    why: str
    seen: tuple[str, ...] = BOTH
    older: str = ""  # what it is called where it is not
    only_tested: bool = False  # runs go on without it, or its module takes a second to load: only the test looks for it

    def __str__(self) -> str:
        return f"{self.owner.rpartition('.')[2]}.{self.name}"

    def is_there(self) -> bool:
        """Returns whether the installed torch has the name, or what it was called before."""
        try:
            owner = _find(self.owner)
        except (ImportError, AttributeError):
            return False
        return has_name(owner, self.name) or (bool(self.older) and has_name(owner, self.older))


FOR_REHEARSAL = (
    PrivateName("FakeTensorMode", "torch._subclasses.fake_tensor", "tensors that are sizes only", only_tested=True),
    PrivateName("unset_fake_temporarily", "torch._subclasses.fake_tensor", "real numbers of buckets", only_tested=True),
    PrivateName("_local_scalar_dense", "torch.ops.aten", "what is read from a tensor without values"),
    PrivateName("_overloadpacket", "torch._ops.OpOverload", "an operation, to count its FLOPs", only_tested=True),
)

PRIVATE_NAMES = (
    # memory
    PrivateName("TorchDispatchMode", "torch.utils._python_dispatch", "sees every operation, to count its memory"),
    PrivateName("is_traceable_wrapper_subclass", "torch.utils._python_dispatch", "tensors that are made of others"),
    PrivateName("_cdata", "torch.UntypedStorage", "which storage a tensor lies in: views share one"),
    PrivateName("_current_graph_task_id", "torch._C", "whether a backward pass is running"),
    PrivateName("_get_current_function_mode_stack", "torch.overrides", "recomputation runs under the same modes"),
    PrivateName("tree_flatten", "torch.utils._pytree", "the tensors among a block's inputs"),
    PrivateName("tree_unflatten", "torch.utils._pytree", "and the inputs from these again"),
    PrivateName("tree_map", "torch.utils._pytree", "every tensor that an operation returned"),
    PrivateName("_version", "torch.Tensor", "whether a tensor was written to since it was saved"),
    # optim, parallel, run, prove
    PrivateName("_foreach_norm", "torch", "the norms of many gradients in one kernel"),
    PrivateName("_foreach_mul_", "torch", "clips many gradients in one kernel"),
    PrivateName("_foreach_copy_", "torch", "copies many tensors in one kernel"),
    PrivateName("_fused_adamw_", "torch", "AdamW of many tensors in one kernel"),
    # kernels, adapters
    PrivateName("_scaled_mm", "torch", "the fp8 matmul"),
    PrivateName("_fused_rms_norm", "torch.ops.aten", "RMSNorm that returns what its backward needs"),
    PrivateName("_unsafe_view", "torch.ops.aten", "views that a compiled graph has around matmuls"),
    PrivateName("_grouped_mm", "torch.ops.aten", "compiled blocks keep its results", only_tested=True),
    PrivateName("CustomGraphPass", "torch._inductor.custom_graph_pass", "changes a compiled graph", only_tested=True),
    PrivateName("_parameters", "torch.nn.Module", "a merged adapter's parameters leave their layer"),
    # attention by blocks of a context (parallel/context), and what compiled blocks keep of it
    PrivateName("_fused_sdp_choice", "torch", "which attention kernel torch takes for these shapes"),
    *(
        PrivateName(f"_scaled_dot_product_{kernel}{ending}", "torch.ops.aten", "attention with its log-sum-exp")
        for kernel in ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")
        for ending in ("", "_backward")
    ),
    *FOR_REHEARSAL,
    # cluster, demo
    PrivateName("_sleep", "torch.cuda", "keeps a stream busy while timed work is queued", only_tested=True),
    PrivateName("_dynamo", "torch", "is loaded once, before ranks are forked", only_tested=True),
    PrivateName("_schema", "torch._ops.OpOverload", "the name of a collective that is counted", only_tested=True),
)


def check_private_names(rows: Iterable[PrivateName] = PRIVATE_NAMES, what: str = "models cannot be trained") -> None:
    """Refuses a torch in which one of these names is gone. Loads torch; called before a rank starts."""
    import torch

    gone = [row for row in rows if not row.only_tested and not row.is_there()]
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise UserError(
            f"{what} with torch {torch.__version__}",
            why=f"it lacks {gone[0]}{more} ({gone[0].why}), a private name that was seen in {' and '.join(BOTH)}",
            fix=f"pip install 'torch=={BOTH[-1]}.*'; torch {BOTH[0]} to {BOTH[-1]} work",
        )


def check_rehearsal_names() -> None:
    """Refuses a torch in which a name is gone that rehearsals need. Called before they load them."""
    check_private_names()
    check_private_names([row._replace(only_tested=False) for row in FOR_REHEARSAL], "plans cannot be rehearsed")


def _find(path: str) -> Any:
    """Returns the module or class at a dotted path."""
    parent, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        if not parent:
            raise
        return getattr(_find(parent), name)


def has_name(owner: Any, name: str) -> bool:
    """Returns whether a module or class has a name: as an attribute, as a declared field, or set on `self` by one of
    its methods."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    methods = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for method in methods
        for step in dis.get_instructions(method)
    )
