"""Breaks one thing on purpose, on the ranks, and sees whether the matrix notices. `python tests/parity/full.py
--mutations` tries all.

A mutation patches product code for one job; the row named beside it must then be over its limits, or the job must
raise. A mutation that nobody notices means that the matrix would not notice that mistake either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Matrix, in_layout
from layouts import Case
from ranks import RankFailure, RankHang

from shardwise.data.loader import TensorBatch
from shardwise.model.decoder import Hidden
from shardwise.parallel import apply, engine, shards
from shardwise.parallel.context import ring, ulysses, zigzag
from shardwise.parallel.context import sequence_split as context
from shardwise.parallel.data import replicas as data
from shardwise.parallel.expert import dispatch as expert
from shardwise.parallel.pipeline import execute as pipeline
from shardwise.parallel.pipeline import send_receive
from shardwise.parallel.tensor import collectives as regions
from shardwise.parallel.tensor import slices as tensor
from shardwise.parallel.zero import collectives as zero
from shardwise.prove.reference import Record, Trial
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    title: str
    row: Case
    apply: Callable[[Patch], None]


MUTATIONS: dict[str, Mutation] = {}


def mutation(title: str, row: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """`row`: layout | model | precision | batch."""

    def keep(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[apply.__name__] = Mutation(title, Case(*row.split(" | ")), apply)
        return apply

    return keep


def mutated(spec: ModelSpec, plan: Plan, trial: Trial, name: str) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name].apply(patch)
        return in_layout(spec, plan, trial)


def try_mutation(matrix: Matrix, name: str, row: Case | None = None) -> str | None:
    """How the row notices, or None if it does not."""
    row = row or MUTATIONS[name].row
    try:
        found = matrix.compare(row.spec, row.plan, row.trial, mutated, timeout=30, name=name)
    except (RankFailure, AssertionError) as error:
        headline = str(error).splitlines()[0]
        assert "TypeError" not in headline and "AttributeError" not in headline, f"{name} itself is broken: {headline}"
        return f"error: {headline.split(': ', 2)[-1][:60]}"
    except RankHang:
        return "hangs"
    over = found.over(row.limits)
    return ", ".join(f"{part} {value:.1e}" for part, value in over.items()) or None


# Sums over data-parallel ranks ---------------------------------------------------------------------------------------


@mutation("one gradient reduction is skipped", "dp=2 zero=2 | dense | fp64 | even")
def skip_a_reduction(patch: Patch) -> None:
    calls, reduce = [0], zero.ExactReduceScatter.__call__

    def call(self: Any, output_tensor: Any, input_tensor: Any, group: Any, **rest: Any) -> None:
        calls[0] += 1
        if calls[0] != 3:
            return reduce(self, output_tensor, input_tensor, group, **rest)
        output_tensor.copy_(input_tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)])

    patch.setattr(zero.ExactReduceScatter, "__call__", call)


@mutation("shards average instead of adding", "dp=2 zero=3 | window | fp64 | ragged")
def average_shards(patch: Patch) -> None:
    reduce = zero.ExactReduceScatter.__call__

    def call(self: Any, output_tensor: Any, input_tensor: Any, **rest: Any) -> None:
        reduce(self, output_tensor, input_tensor.div_(2), **rest)

    patch.setattr(zero.ExactReduceScatter, "__call__", call)


@mutation("replicas average instead of adding", "dp=2 | grouped-query | fp32 | even")
def average_replicas(patch: Patch) -> None:
    add = data.Replicated._sum
    patch.setattr(data.Replicated, "_sum", lambda self, state, bucket: add(self, state, bucket).then(_halved))


def _halved(future: Any) -> Any:
    return future.value() / 2


@mutation("replicas of shards do not meet", "dp=4 zero=3 replicate=2 | tied | fp64 | odd")
def forget_replicas(patch: Patch) -> None:
    class Quiet:
        """torch.distributed, but nobody answers an all-reduce."""

        all_reduce = staticmethod(lambda *args, **kwargs: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

    patch.setattr("torch.distributed.fsdp._fully_shard._fsdp_collectives.dist", Quiet())


@mutation("replicas inside a pipeline do not meet", "dp=2 pp=2 schedule=1f1b | dense | fp64 | even")
def forget_sum_at_end(patch: Patch) -> None:
    patch.setattr(data.SummedAtEnd, "finish", lambda self: None)


@mutation("gradients are rounded to bf16 before they are added", "dp=2 zero=1 | dense | bf16 | even")
def reduce_in_bf16(patch: Patch) -> None:
    reduce = zero.ExactReduceScatter.__call__

    def call(self: Any, output_tensor: Any, input_tensor: Any, **rest: Any) -> None:
        reduce(self, output_tensor, input_tensor.copy_(input_tensor.bfloat16()), **rest)

    patch.setattr(zero.ExactReduceScatter, "__call__", call)


@mutation("one gather brings zeros instead of a rank's rows", "dp=2 zero=3 | dense | fp64 | even")
def forget_an_unshard(patch: Patch) -> None:
    calls, gather = [0], zero.CountedAllGather.__call__

    def call(self: Any, output_tensor: Any, input_tensor: Any, group: Any, **rest: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9 and dist.get_rank(group) == 1:
            input_tensor = torch.zeros_like(input_tensor)
        return gather(self, output_tensor, input_tensor, group, **rest)

    patch.setattr(zero.CountedAllGather, "__call__", call)


@mutation("expert counts are not summed over ranks", "dp=2 | latent | fp64 | even")
def forget_expert_counts(patch: Patch) -> None:
    together = engine.Engine.norm_and_sums

    def apart(self: Any, sums: Any, **how: Any) -> Any:
        own = [layer.tokens_per_expert.clone() for layer in self._routed.values()]
        result = together(self, sums, **how)
        for layer, counts in zip(self._routed.values(), own, strict=True):
            layer.tokens_per_expert.copy_(counts)
        return result

    patch.setattr(engine.Engine, "norm_and_sums", apart)


@mutation("gradients of the last step stay", "dp=2 zero=1 | dense | fp64 | few")
def forget_zero_grad(patch: Patch) -> None:
    patch.setattr(engine.Engine, "zero_grad", lambda self: None)


# The sum rule and the batch ------------------------------------------------------------------------------------------


@mutation("the loss is divided by twice the targets", "dp=2 | dense | fp64 | even")
def drop_a_scale(patch: Patch) -> None:
    train = pipeline.Pipeline.train
    patch.setattr(
        pipeline.Pipeline, "train", lambda self, micro, targets, clock: train(self, micro, 2 * targets, clock)
    )


@mutation("padding has targets", "dp=2 zero=1 | dense | fp64 | odd")
def forget_ignore(patch: Patch) -> None:
    padding = TensorBatch.padding

    def with_targets(self: TensorBatch, rows: int) -> TensorBatch:
        made = padding(self, rows)
        return TensorBatch(made.tokens, torch.zeros_like(made.targets), made.documents)

    patch.setattr(TensorBatch, "padding", with_targets)


@mutation("every rank trains on the first rank's rows", "dp=2 zero=2 | gpt2 | fp64 | even")
def same_rows(patch: Patch) -> None:
    rows = Plan.rows
    patch.setattr(Plan, "rows", lambda self, index: rows(self, 0))


@mutation("documents are forgotten", "pp=2 schedule=1f1b | grouped-query | fp64 | ragged")
def forget_documents(patch: Patch) -> None:
    forward = pipeline.Pipeline._forward

    def without(self: Any, stage: Any, action: Any, micro: TensorBatch, received: Any) -> Any:
        return forward(self, stage, action, TensorBatch(micro.tokens, micro.targets, None), received)

    patch.setattr(pipeline.Pipeline, "_forward", without)


# Pipelines -----------------------------------------------------------------------------------------------------------


@mutation("a stage has a layer of its neighbour", "pp=2 schedule=gpipe | tied | fp64 | even")
def misplace_a_layer(patch: Patch) -> None:
    layers = apply.stage_layers

    def shifted(plan: Plan, num_layers: int) -> list[range]:
        first, *rest = layers(plan, num_layers)
        return [first, range(rest[0].start - 1, rest[0].stop), *rest[1:]]

    patch.setattr(apply, "stage_layers", shifted)


@mutation("the last W of a step is dropped", "pp=2 schedule=zero-bubble | dense | fp64 | even")
def drop_last_w(patch: Patch) -> None:
    finish, calls = pipeline.finish, [0]

    def sometimes(todo: Any) -> None:
        calls[0] += 1
        if calls[0] % 4:  # four micro-batches a step
            finish(todo)

    patch.setattr(pipeline, "finish", sometimes)


@mutation("gradients of two micro-batches are swapped", "pp=2 schedule=gpipe | dense | fp64 | even")
def swap_microbatches(patch: Patch) -> None:
    send, held = send_receive.PointToPoint.send, {}

    def swapped(self: Any, what: send_receive.StageTensor, value: Any) -> None:
        if what.kind == "g" and what.microbatch == 0:
            held[what.stage] = value
        elif what.kind == "g" and what.microbatch == 1:
            send(self, what._replace(microbatch=0), value)
            send(self, what, held.pop(what.stage))
        else:
            send(self, what, value)

    patch.setattr(send_receive.PointToPoint, "send", swapped)


@mutation("a tied weight's two gradients are not added", "pp=2 schedule=1f1b | tied | fp64 | odd")
def forget_tied_sum(patch: Patch) -> None:
    patch.setattr(engine.Engine, "_sum_tied", lambda self: None)


@mutation("a tied weight counts twice in the norm", "pp=2 schedule=zbv virtual_stages=2 | tied | fp64 | even")
def count_tied_twice(patch: Patch) -> None:
    make = shards.Shard

    def counted(*, name: str, replicas: int, **rest: Any) -> Any:
        return make(name=name, replicas=max(1, replicas // 2) if name == "embed.weight" else replicas, **rest)

    patch.setattr(shards, "Shard", counted)


@mutation("router losses of all stages but the last are ignored", "pp=2 schedule=1f1b | experts | fp64 | even")
def forget_router_losses(patch: Patch) -> None:
    forward = pipeline.Pipeline._forward

    def without(self: Any, *args: Any) -> Any:
        done = forward(self, *args)
        if isinstance(done.output, Hidden):
            done.output = done.output._replace(aux=done.output.aux.detach(), z=done.output.z.detach())
        return done

    patch.setattr(pipeline.Pipeline, "_forward", without)


@mutation(
    "after a split backward stage 3 drops what W computed",
    "dp=2 zero=3 pp=2 schedule=zero-bubble | dense | fp64 | even",
)
def lose_w_in_zero_3(patch: Patch) -> None:
    finish = pipeline.finish

    def into_nothing(todo: Any) -> None:
        todo[:] = [
            (torch.nn.Parameter(torch.zeros(weight.shape, dtype=weight.dtype)), x, gradient)
            for weight, x, gradient in todo
        ]
        finish(todo)

    patch.setattr(pipeline, "finish", into_nothing)


# Tensor parallelism --------------------------------------------------------------------------------------------------


@mutation("partial gradients are not summed", "tp=2 sp | dense | fp64 | even")
def forget_partial_sum(patch: Patch) -> None:
    patch.setattr(engine.Engine, "sum_partial", lambda self: None)


@mutation("ranks with the same key-value head do not meet", "tp=2 | window | fp64 | even")
def forget_shared_heads(patch: Patch) -> None:
    find = shards.placement

    def whole(*args: Any) -> Any:
        found = find(*args)
        return found._replace(partial=found.partial and found.slice is None)

    patch.setattr(shards, "placement", whole)


@mutation("replicated vectors count twice in the norm", "tp=2 | tied | fp64 | even")
def count_replicated_twice(patch: Patch) -> None:
    find = shards.placement
    patch.setattr(shards, "placement", lambda *args: find(*args)._replace(replicas=1))


@mutation("the gradient at the beginning of a region stays partial", "tp=2 | grouped-query | fp64 | odd")
def forget_region_sum(patch: Patch) -> None:
    patch.setattr(regions._SumGradient, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


@mutation("every rank counts the router's losses in full", "tp=2 | experts | fp64 | even")
def forget_router_share(patch: Patch) -> None:
    patch.setattr(tensor, "scale_gradient", lambda x, factor: x)


@mutation("every tensor-parallel rank reports the loss", "dp=2 tp=2 | dense | fp32 | even")
def count_losses_twice(patch: Patch) -> None:
    patch.setattr("shardwise.parallel.mesh.Mesh.counts_loss", True)


@mutation("learned positions of the wrong stretch of tokens", "tp=2 sp | gpt2 | fp64 | even")
def shift_positions(patch: Patch) -> None:
    patch.setattr(
        regions.TensorParallel,
        "split",
        lambda self, x: x.chunk(self.size, dim=1)[(self.index + 1) % self.size] if self.active else x,
    )


# Context parallelism -------------------------------------------------------------------------------------------------


@mutation("one step of the ring is not computed", "cp=4 cp_kind=ring | dense | fp64 | even")
def drop_a_ring_step(patch: Patch) -> None:
    blocks = zigzag.Zigzag.blocks

    def fewer(self: Any, source: int, window: int | None = None) -> Any:
        return [] if source == (self.index - 1) % self.size else blocks(self, source, window)

    patch.setattr(zigzag.Zigzag, "blocks", fewer)


@mutation("the pieces of the zigzag are kept in the wrong order", "cp=2 cp_kind=ring | grouped-query | fp64 | even")
def swap_the_pieces(patch: Patch) -> None:
    patch.setattr(zigzag.Zigzag, "pieces", lambda self, rank: (2 * self.size - 1 - rank, rank))


@mutation(
    "a rank takes its tokens without the zigzag, and computes as if with it", "cp=2 cp_kind=ring | dense | fp32 | even"
)
def take_a_stretch(patch: Patch) -> None:
    patch.setattr(context.ContextParallel, "take", lambda self, x: x.chunk(self.size, dim=1)[self.ring.index])


@mutation("every rank counts its positions from 0", "cp=2 cp_kind=ulysses | gpt2 | fp64 | even")
def restart_positions(patch: Patch) -> None:
    begin = context._begin_pass

    def from_zero(*args: Any) -> Any:
        _, given = begin(*args)
        given["positions_BT"] = torch.arange(given["tokens_BT"].shape[1])[None]
        return (), given

    patch.setattr(context, "_begin_pass", from_zero)


@mutation("gradients of keys and values go home to the wrong rank", "zero=1 cp=2 cp_kind=ring | tied | fp64 | odd")
def lose_the_way_home(patch: Patch) -> None:
    backward = ring.ring_backward

    def stay(*args: Any) -> Any:
        class Keeps:
            """Passes keys on, and keeps the gradients that it should pass on."""

            def __init__(self, line: Any):
                self.line, self.size, self.index, self.calls = line, line.size, line.index, 0

            def pass_on(self, x: Any) -> Any:
                self.calls += 1
                return self.line.pass_on(x) if self.calls < self.size else lambda: x

        return backward(*args[:6], Keeps(args[6]), *args[7:])

    patch.setattr(ring, "ring_backward", stay)


@mutation("rows that see nothing in a block weigh like a key", "cp=2 cp_kind=ring | window | fp64 | ragged")
def trust_the_kernels_lse(patch: Patch) -> None:
    attend = ring.attend_block

    def zero_for_nothing(*args: Any) -> Any:
        out, lse = attend(*args)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    patch.setattr(ring, "attend_block", zero_for_nothing)


@mutation("documents are forgotten between ranks", "cp=2 cp_kind=ring | dense | fp64 | ragged")
def forget_documents_of_others(patch: Patch) -> None:
    patch.setattr(zigzag.AttentionView, "_with_documents", lambda self, source: self.place.blocks(source, self.window))


@mutation("expert counts are those of a part of the sequence", "cp=2 cp_kind=ring | experts | fp64 | even")
def count_part_of_the_sequence(patch: Patch) -> None:
    patch.setattr(context, "all_reduce", lambda x, group, wait: x * 2)


@mutation("Ulysses gives heads to the wrong ranks", "cp=2 cp_kind=ulysses | grouped-query | fp64 | even")
def swap_heads(patch: Patch) -> None:
    exchange = ulysses.tokens_for_heads
    patch.setattr(ulysses, "tokens_for_heads", lambda x, *line: exchange(x.flip(2), *line))


# Expert parallelism --------------------------------------------------------------------------------------------------


@mutation("two experts are swapped", "dp=2 ep=2 | mixtral | fp64 | odd")
def swap_two_experts(patch: Patch) -> None:
    plan_trip = expert.plan_trip

    def swapped(counts_E: Any, *line: Any) -> Any:
        trip = plan_trip(counts_E, *line)
        return trip._replace(counts_L=trip.counts_L.flip(0))

    patch.setattr(expert, "plan_trip", swapped)


@mutation("ranks hold each other's experts", "dp=2 zero=3 ep=2 | qwen3-moe | fp64 | even")
def misplace_experts(patch: Patch) -> None:
    find = shards.placement

    def moved(spec: Any, name: str, tp: int, index: int, sequence: bool, ep: int, expert_index: int) -> Any:
        return find(spec, name, tp, index, sequence, ep, (expert_index + 1) % ep)

    patch.setattr(shards, "placement", moved)


@mutation("gradients of experts are averaged over their replicas", "dp=4 ep=2 | latent | fp64 | odd")
def average_experts(patch: Patch) -> None:
    add = data.sum_tensors

    def averaged(tensors: Any, group: Any, *rest: Any) -> int:
        sent = add(tensors, group, *rest)
        torch._foreach_div_(tensors, group.size())
        return sent

    patch.setattr(data, "sum_tensors", averaged)


@mutation("gradients of experts are summed over all data-parallel ranks", "dp=2 ep=2 | experts | fp64 | even")
def sum_experts_over_all(patch: Patch) -> None:
    replicate = apply._replicate

    def everywhere(model: Any, mesh: Any, size: int, traffic: Any) -> Any:
        sums = replicate(model, mesh, size, traffic)
        sums.at_end = [(mesh.dp, [p for name, p in model.named_parameters() if ".experts." in name])]
        return sums

    patch.setattr(apply, "_replicate", everywhere)


@mutation("rows come back in the order of experts", "dp=2 ep=2 | qwen3-moe | fp64 | ragged")
def forget_way_back(patch: Patch) -> None:
    plan_trip = expert.plan_trip

    def one_way(counts_E: Any, *line: Any) -> Any:
        trip = plan_trip(counts_E, *line)
        return trip._replace(by_rank_R=torch.arange(len(trip.by_rank_R)))

    patch.setattr(expert, "plan_trip", one_way)


@mutation("a sequence's counts are those of one rank's tokens", "tp=2 sp ep=2 | mixtral | fp64 | odd")
def forget_sequence_counts(patch: Patch) -> None:
    patch.setattr(expert, "sequence_sum", lambda mesh, tp, wait: lambda counts: counts)


@mutation("gradients go to experts but not back to tokens", "dp=2 zero=2 ep=2 | experts | fp64 | even")
def forget_exchange_gradient(patch: Patch) -> None:
    backward = expert._Exchange.backward
    patch.setattr(
        expert._Exchange, "backward", staticmethod(lambda ctx, grad: (backward(ctx, grad)[0] * 0, *[None] * 4))
    )
