"""Private names of torch outside of FSDP2: the installed torch has each, and no file uses one that is not listed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from import_graph import FILES, PACKAGE

from shardwise import private_names
from shardwise.errors import UserError
from shardwise.private_names import BOTH, FOR_REHEARSAL, PRIVATE_NAMES, PrivateName, check_private_names

WITH_A_TABLE = ("private_names.py", "parallel/fsdp2.py")
NOT_TORCHS = {
    "_replace", "_asdict",  # of named tuples
    "_exit",  # os
    "_actions",  # argparse
    "_attn_implementation", "_experts_implementation", "_from_config",  # transformers
    "_flash_attn_fwd", "_flash_attn_bwd",  # flash-attention
    "_allgather_base_",  # a collective of c10d, by the name it is counted under
}  # fmt: skip
"""Names with an underscore that belong to Python or to other libraries."""


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=str)
def test_torch_has_the_private_name(row: PrivateName) -> None:
    assert row.is_there(), f"torch {torch.__version__} lacks {row.owner}.{row.name} (seen in {row.seen}): {row.why}"
    assert row.why and set(row.seen) <= set(BOTH) and (row.older or row.seen == BOTH)


def test_a_torch_that_lacks_a_name_is_refused_in_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(UserError) as caught:
        check_private_names()
    what, why, fix = str(caught.value).splitlines()
    assert torch.__version__ in what and "torch._foreach_norm" in why and all(version in fix for version in BOTH)


def test_it_is_refused_before_a_run_starts(run_here, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_norm")
    Path("text.txt").write_text("one two three four five six\n" * 200)
    code = run_here("train", "--nproc", 1, "data.source=text.txt", "train.seq_len=32", "train.steps=1")
    assert code == 2 and "error: models cannot be trained with torch" in capsys.readouterr().err


def test_a_rehearsal_is_refused_where_what_it_stands_in_with_is_gone(run_here, capsys, monkeypatch) -> None:
    row = FOR_REHEARSAL[0]._replace(name="NoSuchMode")
    monkeypatch.setattr(private_names, "FOR_REHEARSAL", (row,))
    assert run_here("rehearse", "model.num_layers=1", "train.seq_len=32") == 2
    what, why, fix = capsys.readouterr().err.strip().splitlines()[-3:]
    assert "plans cannot be rehearsed with torch" in what and str(row) in why and "pip install" in fix


def private_uses(tree: ast.AST) -> set[str]:
    """Returns the underscored names that a file takes from elsewhere, and what it imports from modules with one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
            found |= {f"_.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names}
    return {name.removeprefix("_.") for name in found if name.startswith("_") and not name.startswith("__")}


def names_defined(tree: ast.AST) -> set[str]:
    """Returns every name that a file gives to something of its own: these are private to the package, not to torch.
    An attribute that is set on anything but `self` may be another library's, so it does not count."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_private_name_is_listed_and_every_listed_one_is_used() -> None:
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in FILES
        if path.relative_to(PACKAGE).as_posix() not in WITH_A_TABLE
    }
    ours = set().union(*map(names_defined, trees.values())) | NOT_TORCHS
    listed = {row.name for row in PRIVATE_NAMES}
    uses = {file: private_uses(tree) - (ours - listed) for file, tree in trees.items()}
    known = listed | {part for row in PRIVATE_NAMES for part in row.owner.split(".")}
    assert {file: found - known for file, found in uses.items() if found - known} == {}
    texts = {node.value for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert listed - set().union(*uses.values()) - texts == set()


def test_a_use_is_found() -> None:
    source = (
        "from torch.utils._pytree import tree_map\nfrom torch.overrides import _stack\nimport torch._dynamo\nx._cdata"
    )
    assert private_uses(ast.parse(source)) == {"tree_map", "_stack", "_dynamo", "_cdata"}


def test_what_is_set_on_another_object_is_not_ours() -> None:
    source = "self._ours = 1\nconfig._theirs = 2\nself.inner._theirs = 3\n_local = 4\ndef _function(): pass"
    assert names_defined(ast.parse(source)) == {"_ours", "_local", "_function"}


def test_no_name_is_listed_twice() -> None:
    assert len({(row.owner, row.name) for row in private_names.PRIVATE_NAMES}) == len(PRIVATE_NAMES)
