"""The seam to FSDP2: the installed torch has every private name, they mean what they are used for, and nobody else
knows them.

Needs torch and pytest only, so that it runs wherever another torch is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.errors import UserError
from shardwise.parallel import fsdp2
from shardwise.parallel.fsdp2 import PRIVATE_NAMES
from shardwise.parallel.mesh import build_mesh
from shardwise.private_names import BOTH, PrivateName, has_name
from shardwise.spec.plan import Plan

PACKAGE = Path(shardwise.__file__).parent
SEAM = Path(fsdp2.__file__)


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=str)
def test_torch_has_the_private_name(row: PrivateName) -> None:
    assert row.is_there(), f"torch {torch.__version__} lacks {row.owner}.{row.name} (seen in {row.seen}): {row.why}"


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=str)
def test_a_row_says_where_the_name_was_seen_and_what_for(row: PrivateName) -> None:
    assert row.why and set(row.seen) <= set(BOTH) and (row.older or row.seen == BOTH)


def test_no_name_is_listed_twice() -> None:
    assert len({(row.owner, row.name) for row in PRIVATE_NAMES}) == len(PRIVATE_NAMES)


# What a future torch meets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gone",
    [
        PrivateName("_no_such_name", "torch.distributed.fsdp.FSDPModule", "a method that went"),
        PrivateName("all_gather", "torch.distributed.fsdp._no_such_module", "a module that went"),
        PrivateName("field", "torch.distributed.fsdp.NoSuchClass", "a class that went"),
    ],
    ids=str,
)
def test_a_torch_that_lacks_a_name_is_refused_in_three_lines(
    gone: PrivateName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp2, "PRIVATE_NAMES", (*PRIVATE_NAMES, gone))
    with pytest.raises(UserError) as caught:
        fsdp2.check_torch.__wrapped__()
    what, why, fix = str(caught.value).splitlines()
    assert torch.__version__ in what and str(gone) in why and gone.why in why
    assert all(version in fix for version in BOTH)


def test_it_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("_no_such_name", "torch.distributed.fsdp.FSDPModule", "a method that went")
    plan = Plan.from_layout("dp=1", world=1, precision="fp32", device="cpu")
    monkeypatch.setattr(fsdp2, "PRIVATE_NAMES", (gone,))
    fsdp2.check_torch.cache_clear()
    with pytest.raises(UserError, match="_no_such_name"):
        build_mesh(plan, None, 0, torch.device("cpu"), fsdp=False)
    monkeypatch.undo()
    assert build_mesh(plan, None, 0, torch.device("cpu"), fsdp=False).is_alone


def test_an_attribute_that_only_a_constructor_sets_is_found() -> None:
    class Owner:
        def __init__(self) -> None:
            self._set_here = 1

    assert has_name(Owner, "_set_here") and not has_name(Owner, "_not_set")


# What the names are used for -----------------------------------------------------------------------------------------


class Sharded:
    """Two linear layers, each a group of its own, and a root without parameters."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self.root = fully_shard(self.model, mesh=mesh)
        self.mesh = mesh


@pytest.fixture
def sharded() -> Iterator[Sharded]:
    """In a process group of its own, unless this process is in one already."""
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharded()
    if is_ours:
        dist.destroy_process_group()


def test_every_module_and_group_is_found(sharded: Sharded) -> None:
    assert all(isinstance(module, FSDPModule) for module in fsdp2.sharded_modules(sharded.model))
    groups = fsdp2.parameter_groups(sharded.model)
    found = [(parameter.module, parameter.name) for group in groups for parameter in group.parameters]
    assert found == [(layer, name) for layer in sharded.model for name in ("weight", "bias")]
    assert [group.num_ranks for group in groups] == [1, 1] and not any(group.has_replicas for group in groups)


def test_parameters_share_memory_with_what_is_gathered_from(sharded: Sharded) -> None:
    fsdp2.fix_memory(sharded.root)
    parameter = fsdp2.parameter_groups(sharded.model)[0].parameters[0]
    assert isinstance(parameter.parameter, DTensor)
    rows = fsdp2.local_rows(parameter.parameter)
    assert rows.data_ptr() == parameter.rows.data_ptr() and parameter.rows.shape == (12,)
    parameter.rows = replaced = torch.zeros(12)
    assert parameter.rows is replaced


def test_a_group_says_what_is_gathered_and_what_is_not_reduced(sharded: Sharded) -> None:
    fsdp2.gather_ahead(sharded.root)
    first, second = fsdp2.parameter_groups(sharded.model)
    assert first.will_gather and first.gather_buffer is None and not first.in_backward
    sharded.model.set_requires_gradient_sync(False)
    sharded.model(torch.ones(2, 4)).sum().backward()
    parameter = second.parameters[0]
    assert [tuple(gradient.shape) for gradient in parameter.unreduced_gradients()] == [(2, 3)]
    assert sum(output.numel() for output in parameter.gathered) == 6
    assert parameter.parameter.grad is None
    sharded.model.set_requires_gradient_sync(True)
    for group in (first, second):
        group.reduce_gradients()
        group.end_pass()
    fsdp2.end_backward(sharded.root)
    assert not list(parameter.unreduced_gradients()) and parameter.parameter.grad is not None


def test_what_a_group_does_can_be_replaced(sharded: Sharded) -> None:
    calls: list[str] = []
    group, _ = fsdp2.parameter_groups(sharded.model)

    def noting(name: str):
        def wrap(original):
            def run(*args):
                if name == "wait":
                    assert group.gather_buffer is not None
                    group.wait_for_gather()
                if name == "unshard" and group.will_gather:
                    calls.append("will gather")
                calls.append(name)
                original(*args)

            return run

        return wrap

    group.replace_unshard(noting("unshard"))
    group.replace_wait(noting("wait"))
    group.replace_last_wait(noting("last wait"))
    group.call_after_all_reduce(lambda output: None)
    sharded.model(torch.ones(2, 4)).sum().backward()
    assert calls[:3] == ["will gather", "unshard", "wait"] and calls[-1] == "last wait"


def test_a_group_knows_that_it_is_in_its_backward_pass(sharded: Sharded) -> None:
    seen: list[bool] = []
    group, _ = fsdp2.parameter_groups(sharded.model)
    group.replace_unshard(lambda unshard: lambda *args: (seen.append(group.in_backward), unshard(*args))[1])
    sharded.model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen[0] is False and seen[-1] is True


def test_a_grid_of_ranks_is_one_group(sharded: Sharded) -> None:
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    assert fsdp2.as_one_group(grid["replicate", "shard"], "both").size() == 1


def test_ddp_leaves_out_what_it_is_told(sharded: Sharded) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fsdp2.leave_out(model, ["1.weight", "1.bias"])
    ddp = nn.parallel.DistributedDataParallel(model)
    assert ddp.parameters_to_ignore == {"1.weight", "1.bias"}


# Nobody else ---------------------------------------------------------------------------------------------------------

UNDERSCORED = {row.name for row in PRIVATE_NAMES if row.name.startswith("_")} | {row.older for row in PRIVATE_NAMES}


def private_uses(source: str) -> set[str]:
    """Names of the table that a file uses, and modules of FSDP2's that it imports from."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in UNDERSCORED:
            found.add(node.attr)
        if isinstance(node, ast.Constant) and node.value in UNDERSCORED - {""}:
            found.add(str(node.value))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.fsdp._"):
            found.add(str(node.module))
    return found


def test_no_other_file_knows_a_private_name() -> None:
    others = {path: private_uses(path.read_text()) for path in PACKAGE.rglob("*.py") if path != SEAM}
    assert not {str(path.relative_to(PACKAGE)): uses for path, uses in others.items() if uses}


def test_the_seam_uses_every_name_of_its_table_and_no_other() -> None:
    tree = ast.parse(SEAM.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
    listed = {row.name for row in PRIVATE_NAMES} | {row.older for row in PRIVATE_NAMES} - {""}
    assert listed <= attributes | imported | {"_unsharded_param"} & strings
    ours = {"_group", "_inner", "_gather", "__version__", "__wrapped__", "__annotations__"}
    assert {name for name in attributes if name.startswith("_")} - ours <= listed
