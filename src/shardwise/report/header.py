"""Writes the first lines of a run: machine, corpus, model, plan, batch, bytes per parameter, and which kernels were
chosen."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cluster.describe.machine import this_machine
from shardwise.config.job import rate_line, warmup_lines
from shardwise.config.reopen import written_origins
from shardwise.config.units import format_bytes, format_count, format_seconds
from shardwise.interop.peft.targets import count_trained, same_kinds
from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.optim.fused_adamw import has_kernel
from shardwise.optim.low_bit import kept_in_fp32
from shardwise.optim.schedule import batch_scale
from shardwise.parallel.engine import Engine
from shardwise.run.setup import Setup
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig, Config, OptimizerConfig
from shardwise.terminal import counted

LARGE = 10**9  # parameters from which on reading or drawing them takes so long that it is announced


def weights_line(config: Config, spec: ModelSpec) -> str | None:
    """Returns a line to print before weights are read or drawn, or None: many take minutes, in silence otherwise; and
    adapters beside random weights are seldom meant."""
    is_large, path = spec.num_parameters >= LARGE, config.model.path
    doing = f"{'reading' if path else 'drawing'} {format_count(spec.num_parameters)} parameters"
    if path and is_large:
        return f"weights  {doing} from {path} ..."
    if not path and (is_large or config.adapter.kind != "none"):
        return f"weights  {doing} at random ...; model.path starts from trained ones"
    return None


def header_lines(setup: Setup) -> list[str]:
    session, engine, prediction = setup.session, setup.engine, setup.forecast.prediction
    config, plan, spec, corpus, machine = session.config, session.plan, session.spec, session.corpus, this_machine()
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    nodes = f"{session.ranks.nodes} nodes, each " if session.ranks.nodes > 1 else ""
    backend = "one process" if plan.world == 1 else ("nccl" if plan.device == "cuda" else "gloo")
    active = f" ({format_count(spec.num_active_parameters)} active)" if spec.num_experts else ""
    times = session.memory_limit / max(prediction.memory_bytes, 1)
    fits = f"fits {times:.0f} times over" if times >= 2 else f"{100 / times:.0f} % of memory"
    expected = f"{format_seconds(prediction.step_s)} per step, {format_bytes(prediction.memory_bytes)} per rank"
    lines = [
        f"machine  {nodes}{machine.cores} cores, {format_bytes(machine.memory_bytes)}, {gpus} -> {backend}",
        f"corpus   {corpus.description}; tokenizer {corpus.tokenizer.name}",
        *corpus.about(plan.num_steps * plan.global_batch),
        f"model    {spec.name}, {format_count(spec.num_parameters)} parameters{active}, "
        f"{counted(spec.num_layers, 'layer')}",
        *builder_lines(spec),
        *_adapter_lines(config.adapter, spec, engine),
        f"plan     {plan.layout} {plan.precision}: {plan.reason}; {fits}",
        f"batch    {plan.batch_in_words}; predicted {expected}",
        f"states   {_states(engine, config, setup.forecast.bytes_per_parameter)}",
    ]
    if engine.float8:
        lines.append(f"fp8      {engine.float8}")
    if engine.models[0].kernel_reason:
        lines.append(f"kernel   {engine.models[0].kernel_reason}")
    written = session.inputs.known_origins
    if written is None:
        written = written_origins(session.run.config.read_text(encoding="utf-8"))
    chosen = rate_line(config.optimizer.peak_lr, written)
    lines += [chosen] if chosen else []
    lines += warmup_lines(config.optimizer.warmup, plan.num_steps)
    return [*lines, *_learning_rate_lines(config.optimizer, plan.global_batch)]


def builder_lines(spec: ModelSpec) -> list[str]:
    """Returns lines on what computes the model: where transformers' code runs an architecture that our decoder knows,
    and where a step needs one more forward pass."""
    why = spec.why_not_ours if isinstance(spec, TransformersSpec) else ""
    says = f"note     {why} by our decoder: transformers' own code runs this model, without tp, pp and cp"
    counts = (
        "note     model.aux_loss_rule=transformers: a step's tokens are counted by expert in a forward pass before it, "
        "about a third more time than predicted"
    )
    return [says] * bool(why) + [counts] * spec.needs_counts_first


def _adapter_lines(adapter: AdapterConfig, spec: ModelSpec, engine: Engine) -> list[str]:
    """Returns where the adapters are, and how much of the model is trained."""
    if adapter.kind == "none":
        return []
    kinds, more = same_kinds(spec, adapter) if spec.is_ours else (adapter.targets, adapter.train_also)
    # A model that transformers builds is never cut between ranks but by FSDP2, whose parameters know their full shape.
    whole = (shard.parameter.numel() for shard in engine.shards if shard.parameter.requires_grad)
    count = count_trained(spec, adapter) if spec.is_ours else sum(whole)
    beside = f"; trained whole: {', '.join(more)}" if more else ""
    return [
        f"adapter  {adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g} on {', '.join(kinds)}{beside}; "
        f"{format_count(count)} parameters are trained, {count / spec.num_parameters:.2%} of the model's"
    ]


def _states(engine: Engine, config: Config, held: Mapping[str, float]) -> str:
    """Returns how many bytes a trained parameter takes, in words; `held` are these bytes by what they are for."""
    plan, optimizer = engine.plan, config.optimizer.name
    which = "parameter" if config.adapter.kind == "none" else "trained parameter"
    low_precision = f" and low-precision weights {held['low_precision']}" if held["low_precision"] else ""
    kept = f"weights {held['weights']}{low_precision}"
    parts = f"{kept}, gradients {held['gradients']}, {optimizer} {held['optimizer']:.3g}"
    text = f"{sum(held.values()):.3g} bytes per {which}: {parts}"
    if plan.copies and plan.device == "cuda" and not (OPTIMIZERS[optimizer].has_kernel and has_kernel()):
        text += "; updated a bucket at a time (one pass over all of it is for adamw and adamw8bit, "
        text += "with Triton and a C compiler)"
    if OPTIMIZERS[optimizer].is_low_bit:
        count, elements = kept_in_fp32(engine.locals())
        share = elements / max(sum(p.numel() for p in engine.locals()), 1)
        text += f"; {count} small or odd tensors ({100 * share:.2g} % of this rank's elements) keep 8"
    return text


def _learning_rate_lines(optimizer: OptimizerConfig, global_batch: int) -> list[str]:
    """Returns a line where the learning rate is scaled by the size of the batch, or might be meant to be."""
    scale, reference = batch_scale(optimizer, global_batch), optimizer.reference_batch
    if scale != 1.0:
        scaled = f"{optimizer.peak_lr:g} x {scale:.3g} = {optimizer.peak_lr * scale:.3g}"
        return [f"lr       {scaled}: {optimizer.lr_scaling} scaling from a batch of {reference} to {global_batch}"]
    if reference not in (None, global_batch):
        tuned = f"{optimizer.peak_lr:g} was tuned for a batch of {reference}, this run has {global_batch}"
        return [f"lr       {tuned}; optimizer.lr_scaling=linear would scale it"]
    return []


def matmul_lines(plan: Plan) -> list[str]:
    """Returns which matmul kernels were chosen; to be called after the first step, which measures them."""
    if plan.products != "measured":
        return []
    from shardwise.kernels.choose_matmul import summary  # loaded by now

    found = summary()
    return [f"kernel   {found}"] if found else []
