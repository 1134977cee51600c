"""`shardwise.verify`: the proof that a layout computes what one process computes, as an object. No torch here: the
ranks that prove it load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.api.settings import Settings, check_nproc, for_programs, settings_of
from shardwise.errors import UserError


@dataclass(frozen=True)
class Proven:
    """The largest differences between a layout and one process, in fp64."""

    same: bool  # every difference is within `limit`
    layout: str  # that was asked for
    proven: str  # the same axes on as few processes as show them
    losses: float
    gradients: float
    parameters: float
    limit: float
    steps: int

    def __bool__(self) -> bool:
        return self.same


def verify(
    config: Settings = None,
    changes: Mapping[str, Any] | None = None,
    *,
    steps: int = 8,
    nproc: int | None = None,
) -> Proven:
    """Trains a small model of the config's kind in its layout and in one process, and returns how far they differ. It
    is true where they are the same."""
    from shardwise.launch.verify import plan_to_prove, verify_layout
    from shardwise.prove.shrink import shrink_plan
    from shardwise.run.build import model_spec

    with for_programs():
        check_nproc(nproc)
        if steps < 1:
            raise UserError(f"steps = {steps} compares nothing", why="a proof needs a step", fix="steps=8")
        loaded = settings_of(config, changes)
        spec = model_spec(loaded.config.model)
        resolved = plan_to_prove(loaded, spec, nproc)
        small = shrink_plan(resolved.plan)
        found = verify_layout(spec, small, resolved.config, steps)
    names = ("losses", "gradients", "parameters", "limit", "steps")
    return Proven(found["same"], resolved.plan.layout, small.layout, *(found[name] for name in names))
