"""Finds which layers an adapter is for: names and wildcards matched against a model's linear layers. No torch.

Owns the linear layers of a `ModelSpec` by name and shape, the patterns, and the errors of patterns that match nothing.
A layer is known by our name, by its Hugging Face name, and by the last part of either (`q`, `q_proj`, `attention.q`,
`layers.3.*`, `all-linear`). Invariant: `linears_of` lists exactly the nn.Linear modules inside the decoder's blocks.
Read next: adapters/lora.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Protocol

from shardwise.errors import UserError
from shardwise.interop.huggingface.names import tensor_table
from shardwise.spec.model import ModelSpec

ALL_LINEAR = "all-linear"
MAX_LISTED = 12


class Settings(Protocol):
    """The part of [adapter] that says where adapters go."""

    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def targets(self) -> Sequence[str]: ...
    @property
    def train_also(self) -> Sequence[str]: ...
    @property
    def path(self) -> str | None: ...


# The layers of our own decoder ----------------------------------------------------------------------------------------


@cache
def linears_of(spec: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """Returns (outputs, inputs) of every linear layer inside the blocks."""
    return {_module(name): weight.shape for name, weight in spec.weights.items() if weight.is_linear}  # type: ignore[misc]


@cache
def their_modules(spec: ModelSpec) -> Mapping[str, str]:
    """Returns Hugging Face's name of each of our modules, where one of ours is one of theirs."""
    whole = [tensor for tensor in tensor_table(spec) if len(tensor.parts) == 1 and tensor.parts[0].expert is None]
    return {_module(tensor.parts[0].ours): _module(tensor.name) for tensor in whole}


@cache
def modules_of(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of all modules with parameters."""
    return tuple(dict.fromkeys(map(_module, spec.weights)))


def _module(parameter: str) -> str:
    return parameter.rsplit(".", 1)[0]


# Patterns -------------------------------------------------------------------------------------------------------------


def find_targets(settings: Settings, linears: Iterable[str], theirs: Mapping[str, str], model: str) -> list[str]:
    """Returns the linear layers that get an adapter, in the model's order."""
    names = list(linears)
    return _find(settings.targets, names, theirs, "adapter.targets", f"no linear layer of {model}", _EXPERTS)


def find_trained(settings: Settings, modules: Iterable[str], theirs: Mapping[str, str], model: str) -> list[str]:
    """Returns the modules whose own parameters are trained beside the adapters."""
    return _find(settings.train_also, list(modules), theirs, "adapter.train_also", f"no parameter of {model}")


_EXPERTS = "; routed experts are stacked weights, which have no adapters here"


def _find(
    patterns: Sequence[str], names: list[str], theirs: Mapping[str, str], key: str, nothing: str, more: str = ""
) -> list[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if matches(pattern, name, theirs.get(name))]
        if not found:
            short = list(dict.fromkeys(_kind(name) for name in names))
            last = {name.rsplit(".", 1)[-1]: name for name in short}
            near = difflib.get_close_matches(pattern, [*last, *short], n=3, cutoff=0.4) or [*last][:3]
            is_expert = more if "expert" in pattern else ""
            listed = ", ".join(short[:MAX_LISTED]) + (", …" if len(short) > MAX_LISTED else "")
            raise UserError(
                f"{key}: `{pattern}` matches {nothing}",
                why=f"there are {listed}{is_expert}",
                fix=f"did you mean {' or '.join(f'`{name}`' for name in near)}?",
            )
        chosen |= set(found)
    return [name for name in names if name in chosen]


def matches(pattern: str, name: str, their_name: str | None = None) -> bool:
    if pattern == ALL_LINEAR:
        return True
    known = [name, their_name] if their_name else [name, name.removesuffix("_proj")]
    return any(fnmatchcase(one, pattern) or fnmatchcase(one, f"*.{pattern}") for one in known)


def _kind(name: str) -> str:
    """Returns a name without the number of the layer, for people to read."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else name


def same_kinds(spec: ModelSpec, settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns targets and trained modules as patterns without layer numbers: what a smaller model of the kind has as
    well."""
    theirs = their_modules(spec)
    targets = find_targets(settings, linears_of(spec), theirs, spec.name)
    trained = find_trained(settings, modules_of(spec), theirs, spec.name)
    return tuple(dict.fromkeys(map(_kind, targets))), tuple(dict.fromkeys(map(_kind, trained)))


def count_trained(spec: ModelSpec, settings: Settings) -> int:
    """Returns the number of parameters that are trained beside frozen weights: two matrices of `rank` columns per
    target, and all of each module in `train_also`."""
    theirs, linears = their_modules(spec), linears_of(spec)
    targets = find_targets(settings, linears, theirs, spec.name)
    trained = set(find_trained(settings, modules_of(spec), theirs, spec.name))
    whole = sum(weight.size for name, weight in spec.weights.items() if _module(name) in trained)
    return whole + settings.rank * sum(sum(linears[name]) for name in targets)
