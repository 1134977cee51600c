"""What pyproject.toml declares is what the package imports: at once in the core, on demand in the extras."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable

from import_graph import FILES, PACKAGE, ROOT, imports_of

from shardwise.cluster.describe.versions import CORE, OPTIONAL

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: listed for name, listed in PROJECT["optional-dependencies"].items() if name != "dev"}

MODULE = {"flash-attn-4": "flash_attn", "liger-kernel": "liger_kernel", "lm-eval": "lm_eval", "pyyaml": "yaml"}
"""Distribution -> the module that it provides, where that has another name."""

NOT_YET = {"studio"}
"""Extras of rooms that are still to come: nothing imports them."""

WITH_OTHERS = {"triton", "huggingface_hub"}
"""What torch for CUDA brings along, which nothing is chosen for where it is missing, and what `datasets` does."""

BY_NAME = {"flash_attn": "kernels/flash4.py"}
"""Module -> the file that imports it through importlib, which is not seen in a syntax tree."""

THROUGH_TORCH = {"torch.utils.tensorboard": "tensorboard"}
"""Modules of torch that are there but need another distribution."""


IMPORTED_LATE = {"optim/low_bit_optimizer.py"}
"""Files that import an extra when they are imported, which happens inside of a function."""


def modules_of(requirements: Iterable[str]) -> set[str]:
    names = (re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in requirements)
    return {MODULE.get(name, name) for name in names}


def imported() -> dict[str, set[bool]]:
    """Module of others -> whether it is imported when its importer is (True), inside of a function (False), or both."""
    found: dict[str, set[bool]] = {}
    for item in (item for file in FILES for item in imports_of(file)):
        top = THROUGH_TORCH.get(item.module, item.module.split(".")[0])
        if top != "shardwise" and top not in sys.stdlib_module_names:
            found.setdefault(top, set()).add(item.at_start and item.file not in IMPORTED_LATE)
    return found


def test_every_import_is_declared_and_every_declaration_is_imported():
    core = modules_of(PROJECT["dependencies"])
    extras = modules_of(one for name, listed in EXTRAS.items() if name not in NOT_YET for one in listed)
    assert core & extras == set()
    assert (imported().keys() | BY_NAME.keys()) - WITH_OTHERS == core | extras


def test_what_is_imported_by_name_is_named_there():
    for module, file in BY_NAME.items():
        assert f'"{module}.' in (PACKAGE / file).read_text(encoding="utf-8")


def test_extras_are_loaded_only_when_they_are_needed():
    extras = modules_of(one for listed in EXTRAS.values() for one in listed)
    assert {name for name, at_start in imported().items() if name in extras and True in at_start} == set()


def test_files_that_need_an_extra_are_imported_inside_of_functions():
    modules = {f"shardwise.{file.removesuffix('.py').replace('/', '.')}" for file in IMPORTED_LATE}
    early = [item.file for file in FILES for item in imports_of(file) if item.module in modules and item.at_start]
    assert early == []


def test_rooms_to_come_have_their_extras_and_nothing_imports_them():
    later = modules_of(one for name in NOT_YET for one in EXTRAS[name])
    assert later and not later & imported().keys()


def test_doctor_names_the_same_libraries():
    assert set(CORE) == modules_of(PROJECT["dependencies"])
    named = modules_of(names[-1] for names, _, _ in OPTIONAL)
    extras = modules_of(one for name, listed in EXTRAS.items() if name not in NOT_YET for one in listed)
    assert named == extras | {"peft"}, "peft is not imported here: it opens the adapters that a run writes"


def test_all_that_make_setup_installs_is_pinned():
    """Extras for GPUs, and those whose services are elsewhere, are nothing that tests install."""
    pinned = modules_of((ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n", 2)[2].split())
    needed = modules_of([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    assert needed <= pinned
