"""Which tokens were sent to other experts than in one process, and how close the decision was.

A router chooses by comparing; two logits that are equal up to rounding may be taken in either order, and from there
on losses part. Such a row prints the first token that took another way and the gap between the last logit that was
chosen and the first that was not: a gap of 1e-16 is a tie, a gap of 1e-3 is a mistake.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shardwise.model.decoder import Decoder
from shardwise.model.experts import Choice, MixtureOfExperts, Router
from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import train_in_layout
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


class Route(NamedTuple):
    """One token of one layer; sorts in the order in which a model computes."""

    step: int
    layer: int
    row: int  # of the global batch
    token: int
    chosen: tuple[int, ...]
    gap: float  # between the logits of the last that was chosen and the first that was not

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self[:4]


class Share(NamedTuple):
    """What of every batch a process routes."""

    first_row: int
    num_rows: int
    micro_batch: int
    first_token: int
    num_tokens: int


def first_flip(truth: list[Route], found: list[Route]) -> str:
    wanted = {route.place: route for route in truth}
    assert wanted.keys() == {route.place for route in found}, "not the same tokens were routed"
    flips = sorted(route for route in found if route.chosen != wanted[route.place].chosen)
    if not flips:
        return "\nno token was sent to other experts"
    first, there = flips[0], wanted[flips[0].place]
    return (
        f"\n{len({flip.place for flip in flips})} tokens were sent to other experts. First: step {first.step}, layer "
        f"{first.layer}, row {first.row}, token {first.token}: {there.chosen} became {first.chosen}, "
        f"logit gap {there.gap:.1e} and {first.gap:.1e}"
    )


def plain_routes(spec: ModelSpec, trial: Trial) -> list[Route]:
    with pytest.MonkeyPatch.context() as patch:
        routes = _note_routes(patch, Share(0, trial.global_batch, trial.micro_batch, 0, trial.seq_len))
        train_plain(spec, trial)
        return routes


def routes_in_layout(spec: ModelSpec, plan: Plan, trial: Trial, nudge: tuple[int, ...] = ()) -> list[Route]:
    at = plan.coordinates(dist.get_rank())
    rows, parts = plan.rows(at.dp), plan.tp if plan.ep > 1 else 1
    length = trial.seq_len // parts
    share = Share(rows.start, len(rows), plan.micro_batch, at.tp % parts * length, length)
    with pytest.MonkeyPatch.context() as patch:
        routes = _note_routes(patch, share, nudge)
        train_in_layout(spec, plan, trial, dist.get_rank(), torch.device("cpu"))
        return routes


def nudged(spec: ModelSpec, plan: Plan, trial: Trial) -> list[Route]:
    """One token of the second step is sent elsewhere, on purpose."""
    return routes_in_layout(spec, plan, trial, nudge=(2, 1, 3, 9))


def _note_routes(patch: pytest.MonkeyPatch, share: Share, nudge: tuple[int, ...] = ()) -> list[Route]:
    """From here on every router writes down what it chooses. Micro-batches pass a layer in their order, whatever the
    schedule."""
    routes: list[Route] = []
    now: dict[str, Any] = {"step": 0, "calls": {}}
    batch, run_layers, forward = Trial.batch, Decoder.run_layers, Router.forward

    def next_batch(self: Trial, spec: ModelSpec, step: int) -> Any:
        now.update(step=step, calls={})
        return batch(self, spec, step)

    def named_layers(self: Decoder, *args: Any) -> Any:
        for index, block in self.layers.items():
            if isinstance(block.feedforward, MixtureOfExperts):
                block.feedforward.router.layer_index = int(index)
        return run_layers(self, *args)

    def noted(self: Any, x_ND: torch.Tensor) -> Choice:
        choice, layer = forward(self, x_ND), self.layer_index
        micro = now["calls"][layer] = now["calls"].get(layer, -1) + 1
        chosen_NK, logits_NE = choice.experts_NK.clone(), choice.logits_NE.detach().sort(-1, descending=True).values
        for n in range(chosen_NK.shape[0]):
            row, token = divmod(n, share.num_tokens)
            row += micro * share.micro_batch
            if row >= share.num_rows:  # padding
                break
            place = (now["step"], layer, share.first_row + row, share.first_token + token)
            if place == nudge:
                chosen_NK[n] = (chosen_NK[n] + 1) % logits_NE.shape[1]
            gap = float(logits_NE[n, self.num_chosen - 1] - logits_NE[n, self.num_chosen])
            routes.append(Route(*place, tuple(sorted(chosen_NK[n].tolist())), gap))
        return choice._replace(experts_NK=chosen_NK)

    patch.setattr(Trial, "batch", next_batch)
    patch.setattr(Decoder, "run_layers", named_layers)
    patch.setattr(Router, "forward", noted)
    return routes
