"""What a run says about itself: header, evaluations, samples, and the closing lines with predicted beside measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.cluster.describe.machine import this_machine
from shardwise.config.units import format_bytes, format_count, format_seconds
from shardwise.data.corpus import Corpus
from shardwise.errors import Exit
from shardwise.files import write_atomically
from shardwise.interop.peft.targets import same_kinds
from shardwise.launch.ranks import Ranks
from shardwise.optim.fused_adamw import has_kernel
from shardwise.optim.low_bit import kept_in_fp32
from shardwise.optim.schedule import batch_scale
from shardwise.parallel.engine import Engine
from shardwise.plan.prediction.memory import COMPUTE_BYTES, WEIGHT_BYTES, gradient_bytes, state_bytes
from shardwise.plan.prediction.predict import Prediction
from shardwise.prove.repeat import NUM_STEPS, single_process_losses
from shardwise.report.memory import memory_report, off
from shardwise.report.predicted_and_measured import CHECK_AFTER, compare, comparison_lines, typical
from shardwise.report.terminal import View, format_rate
from shardwise.run.agreement import from_all
from shardwise.run.bubble_filling import Filled
from shardwise.run.clock import KINDS, verdict
from shardwise.run.evaluate import perplexity
from shardwise.run.generate import Sampling, generate, generate_together
from shardwise.run.guards import StopRequests
from shardwise.run.memory_watch import MemoryWatch
from shardwise.run.metrics import Metrics
from shardwise.run.rundir import RunDir
from shardwise.run.start import longer
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

if TYPE_CHECKING:
    from shardwise.run.loop import Session

GPU_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}  # bf16, dense
PROMPT_TOKENS = 12
PROOF_LIMITS = {"fp64": 1e-9, "fp32": 1e-5} | dict.fromkeys(("bf16", "bf16-true", "fp16", "fp16-true", "fp8"), 5e-3)
"""How far the losses of the first steps may be from one process, relative to the loss. With 8 bits a rounding that falls the other way
moves a weight by 0.4 %, and steps multiply that; mistakes are found in fp64 (verify.py)."""
LARGE = 10**9  # parameters that take their time
PROOF_LIMIT_S = 60.0  # a proof that would take longer than this is left to the user


class History:
    """Sums over the steps of this process, for the closing lines. The first step warms up and does not count."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys([*(f"{kind}_s" for kind in (*KINDS, "other")), "step_s"], 0.0)
        self.losses: dict[int, float] = {}
        self.step_seconds: list[float] = []
        self.first: list[dict[str, float]] = []  # the parts of the steps that are compared with the prediction
        self.tokens = 0

    def add(self, line: dict[str, Any], timed: bool = True) -> None:
        self.losses[line["step"]] = line["loss"]
        if len(self.losses) == 1 or not timed:
            return
        self.step_seconds.append(line["step_s"])
        self.tokens += line["tokens"]
        if len(self.first) < CHECK_AFTER:
            self.first.append({key: line[key] for key in self.parts})
        for key in self.parts:
            self.parts[key] += line[key]

    def median_step_s(self) -> float | None:
        """None for a run of a single step, or one that was complete when it was resumed."""
        return sorted(self.step_seconds)[len(self.step_seconds) // 2] if self.step_seconds else None

    def compared(self, prediction: Prediction, memory: MemoryWatch, plan: Plan, device: torch.device) -> dict[str, Any]:
        """Collective. What the first steps took, beside what was predicted."""
        held = None
        if memory.steps:
            held = memory_report(prediction.memory, from_all(memory.measured(), device, plan))
        ranks = []
        if self.first:  # the same on all ranks
            mine = typical(self.first)
            found = from_all([round(1e9 * seconds) for seconds in mine.values()], device, plan)
            ranks = [dict(zip(mine, (value / 1e9 for value in values), strict=True)) for values in found]
        return compare(prediction, ranks, held, len(self.first))


def peak_flops(plan: Plan, device: torch.device, cluster: ClusterSpec) -> float:
    """The hardware's peak for MFU: the published bf16 figure of a known GPU, else the matmul rate measured at the start."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in GPU_PEAK_FLOPS.items():
            if known in name:
                return peak * plan.world
    return max(cluster.device.flops.values()) * plan.world


def before_weights(view: View, config: Config, spec: ModelSpec) -> None:
    """Many weights take minutes, in silence otherwise; and adapters beside random ones are seldom meant."""
    is_large, path = spec.num_parameters >= LARGE, config.model.path
    doing = f"{'reading' if path else 'drawing'} {format_count(spec.num_parameters)} parameters"
    if path and is_large:
        view.say(f"weights  {doing} from {path} ...")
    elif not path and (is_large or config.adapter.kind != "none"):
        view.say(f"weights  {doing} at random ...; model.path starts from trained ones")


def write_plan(run: RunDir, plan: Plan, prediction: Prediction, measured: dict[str, Any] | None = None) -> None:
    """`measured`: the comparison after the first steps, when there is one."""
    values = {**plan.to_dict(), "prediction": prediction.to_dict(), **({"measured": measured} if measured else {})}
    write_atomically(run.plan, json.dumps(values, indent=1) + "\n")


def compared(view: View, run: RunDir, plan: Plan, prediction: Prediction, measured: dict[str, Any]) -> None:
    write_plan(run, plan, prediction, measured)
    for line in comparison_lines(measured):
        view.say(line)


def header(view: View, session: Session, plan: Plan, engine: Engine, corpus: Corpus, prediction: Prediction) -> None:
    config, spec, machine = session.config, session.spec, this_machine()
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    backend = "one process" if plan.world == 1 else ("nccl" if plan.device == "cuda" else "gloo")
    active = f" ({format_count(spec.num_active_parameters)} active)" if spec.num_experts else ""
    limit = session.memory_limit
    times = limit / max(prediction.memory_bytes, 1)
    fits = f"fits {times:.0f} times over" if times >= 2 else f"{100 / times:.0f} % of memory"
    word = "rank" if plan.world == plan.dp else "replica"
    batch = (
        f"{plan.global_batch} sequences x {plan.seq_len} tokens = "
        f"{plan.micro_batch} micro x {plan.num_microbatches} accumulated x {plan.dp} {word}{'s' if plan.dp > 1 else ''}"
    )
    view.say(f"machine  {machine.cores} cores, {format_bytes(machine.memory_bytes)}, {gpus} -> {backend}")
    view.say(f"corpus   {corpus.description}; tokenizer {corpus.tokenizer.name}")
    view.say(f"model    {spec.name}, {format_count(spec.num_parameters)} parameters{active}, {spec.num_layers} layers")
    if config.adapter.kind != "none":
        adapter = config.adapter
        kinds, more = same_kinds(spec, adapter) if spec.is_ours else (adapter.targets, adapter.train_also)
        beside = f"; trained whole: {', '.join(more)}" if more else ""
        view.say(f"adapter  {adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g} on {', '.join(kinds)}{beside}")
    view.say(f"plan     {plan.layout} {plan.precision}: {plan.reason}; {fits}")
    view.say(
        f"batch    {batch}; predicted {format_seconds(prediction.step_s)} per step, "
        f"{format_bytes(prediction.memory_bytes)} per rank"
    )
    which = "parameter" if config.adapter.kind == "none" else "trained parameter"
    view.say(f"states   {_states(engine, plan, config.optimizer.name, which)}")
    if engine.float8:
        view.say(f"fp8      {engine.float8}")
    if engine.models[0].kernel_reason:
        view.say(f"kernel   {engine.models[0].kernel_reason}")
    scale = batch_scale(config.optimizer, plan.global_batch)
    if scale != 1.0:
        view.say(
            f"lr       {config.optimizer.lr:g} x {scale:.3g} = {config.optimizer.lr * scale:.3g}: {config.optimizer.lr_scaling} "
            f"scaling from a batch of {config.optimizer.reference_batch} to {plan.global_batch}"
        )
    elif config.optimizer.reference_batch not in (None, plan.global_batch):
        view.say(
            f"lr       {config.optimizer.lr:g} was tuned for a batch of {config.optimizer.reference_batch}, this run has "
            f"{plan.global_batch}; optimizer.lr_scaling=linear would scale it"
        )


def _states(engine: Engine, plan: Plan, optimizer: str, which: str) -> str:
    weight, gradient, state = WEIGHT_BYTES[plan.precision], gradient_bytes(plan), state_bytes(optimizer, plan.precision)
    copy = COMPUTE_BYTES[plan.precision] if plan.copies else 0
    kept = f"weights {weight}" + (f" and their copies {copy}" if copy else "")
    total = weight + copy + gradient + state
    text = f"{total:.3g} bytes per {which}: {kept}, gradients {gradient}, {optimizer} {state:.3g}"
    if plan.copies and plan.device == "cuda" and not (optimizer in ("adamw", "adamw8bit") and has_kernel()):
        text += "; updated a bucket at a time (one pass over all of it is for adamw and adamw8bit, with Triton and a C compiler)"
    if optimizer == "adamw8bit":
        count, numbers = kept_in_fp32(engine.locals())
        share = numbers / max(sum(p.numel() for p in engine.locals()), 1)
        text += f"; {count} small or odd tensors ({100 * share:.2g} % of this rank's numbers) keep 8"
    return text


def products(view: View, plan: Plan) -> None:
    """After the first step, which measures them."""
    if plan.products == "measured":
        from shardwise.kernels.choose_matmul import summary  # loaded by now

        found = summary()
        if found:
            view.say(f"kernel   {found}")


def evaluation(view: View, metrics: Metrics | None, step: int, loss: float | None) -> None:
    if loss is None:
        view.say("eval     nothing is held out, so there is no evaluation loss (data.validation_fraction)")
        return
    if metrics:
        metrics.write({"step": step, "eval_loss": loss, "wall_time": time.time()})
    view.say(f"eval     step {step}: held-out loss {loss:.3f}, perplexity {perplexity(loss):.2f}")


def filled(view: View, metrics: Metrics | None, step: int, found: Filled | None) -> None:
    """How much of its idle time a run with `parallel.fill_bubbles` has used."""
    if found is None:
        view.say("fill     nothing is held out, so idle slots stayed empty (data.validation_fraction)")
        return
    if metrics:
        values = {"share": found.share, "batches": found.batches}
        metrics.write({"event": "bubble_filled", "step": step, **values, "wall_time": time.time()})
    if not found.batches:
        view.say(
            "fill     0 % of the bubble: no held-out micro-batch gets through all stages in the idle slots of one step"
        )
        return
    text = f"filled {100 * found.share:.0f} % of the bubble with {found.batches:.3g} held-out batches"
    if found.newest and found.newest["eval_loss"] is not None:
        text += f"; held-out loss {found.newest['eval_loss']:.3f} over steps {found.newest['first_step']}-{found.newest['step']}"
    view.say(f"fill     {text}")


def sample(view: View, engine: Engine, corpus: Corpus, config: Config, ranks: Ranks) -> None:
    """A short continuation, shown escaped on one line. Ranks that hold only a part of the model all take part."""
    length = config.train.sample_tokens
    if length == 0 or (engine.is_whole and not ranks.is_first):
        return
    text = config.train.sample_prompt or ("def " if config.data.source == "python" else None)
    prompt: Sequence[int] = corpus.tokenizer.encode(text) if text else corpus.held_out_start(PROMPT_TOKENS)
    sampling, stop = Sampling(seed=config.train.seed), frozenset({corpus.tokenizer.separator})
    if engine.is_whole:
        new = list(generate(engine.models[0], prompt, length, sampling, stop))
    else:
        new = generate_together(engine, prompt, length, sampling, stop)
    view.say("sample   " + json.dumps(corpus.tokenizer.decode([*prompt, *new]), ensure_ascii=False))


def finished(
    view: View,
    metrics: Metrics,
    session: Session,
    plan: Plan,
    corpus: Corpus,
    prediction: Prediction,
    history: History,
    measured: dict[str, Any] | None,
    peak: int,
    stops: StopRequests,
) -> bool:
    """The closing lines. False if the run's proof found that it computed something else than one process would."""
    proof = None if stops.check() else _proof(view, session, plan, corpus, history, peak)
    step_s = history.median_step_s()
    last = history.losses[max(history.losses)] if history.losses else None
    unigram = corpus.unigram_entropy()
    if last is not None:
        view.say(f"loss     {last:.3f} at the last step; a unigram model of the same text has {unigram:.3f}")
    held = f"{format_bytes(peak)} per rank ({off(peak, prediction.memory_bytes)})"
    if step_s is None:
        view.say(f"measured {held}; too few steps to time them")
    else:
        rate = format_rate(history.tokens / history.parts["step_s"])
        view.say(f"speed    {rate} tok/s; {verdict(history.parts)}")
        view.say(
            f"measured {format_seconds(step_s)} per step ({off(step_s, prediction.step_s)} against predicted), {held}"
        )
    metrics.write(
        {
            "event": "finished",
            "step": plan.num_steps,
            "exit": int(Exit.DONE if proof is None or proof["same"] else Exit.FOUND_WRONG),
            "loss": last,
            "unigram_loss": unigram,
            "predicted": {"step_s": prediction.step_s, "memory_bytes": prediction.memory_bytes},
            "measured": {"step_s": step_s, "memory_bytes": peak},
            "memory": measured and measured["memory"],
            "parts": measured and measured["step"],
            "where": history.parts,
            "proof": proof,
            "wall_time": time.time(),
        }
    )
    return proof is None or proof["same"]


def farewell(view: View, session: Session, plan: Plan) -> None:
    """What to do with the run now."""
    name = session.run.path
    view.say(f"run      {name}")
    view.say(f'next     shardwise generate {name} --prompt "class "')
    view.say(f"         shardwise eval {name}")
    view.say(f"         {longer(name, session.config.train, plan.num_steps)}")


def stopped(
    view: View,
    metrics: Metrics,
    run: RunDir,
    step: int,
    code: Exit,
    why: str,
    memory: dict[str, Any] | None = None,
    overflow: str = "",
) -> None:
    """`overflow`: what does not fit into fp16, where that is the reason."""
    view.close()  # what follows is the last word, below the live block
    event, why = ("failed", "the loss is not a number") if code == Exit.DIVERGED else ("stopped", why)
    why = f"fp16 overflows at every loss scale: {overflow}" if overflow else why
    metrics.write(
        {"event": event, "step": step, "exit": int(code), "why": why, "memory": memory, "wall_time": time.time()}
    )
    if overflow:
        view.say(
            f"STOPPED  step {step}: fp16 overflows at every loss scale; committed                exit {int(code)}, diverged"
        )
        view.say(f"  why    not finite first: {overflow}")
        view.say(f"  do     shardwise resume {run.path} memory.precision=bf16 memory.loss_scale=auto")
        return
    if code == Exit.DIVERGED:
        view.say(
            f"STOPPED  step {step}: the loss is not a number any more                    exit {int(code)}, diverged"
        )
        view.say("  why    usually the learning rate is too high, or the data holds something extreme")
        view.say(f"  do     shardwise resume {run.path} --allow optimizer.lr optimizer.lr=…   (half of it, say)")
        view.say("         or run.on_nan=skip, which passes over such steps")
        return
    committed = "committed" if step else "nothing to commit yet"
    view.say(f"STOPPED  step {step}, by {why}; {committed}                              exit {int(code)}, resumable")
    view.say(f"  do     shardwise resume {run.path}")


def _proof(
    view: View, session: Session, plan: Plan, corpus: Corpus, history: History, peak: int
) -> dict[str, Any] | None:
    """Repeat the first steps without parallelism. Needs a run from its start, and more than one rank to prove anything."""
    steps = [step for step in range(1, NUM_STEPS + 1) if step in history.losses]
    if plan.world == 1 or not steps or steps[0] != 1:
        return None
    alone_s = (history.median_step_s() or 0.0) * plan.world * len(steps)
    if alone_s > PROOF_LIMIT_S:
        view.say(f"proof    left out: {len(steps)} steps in one process would take {format_seconds(alone_s)}")
        return None
    if 2 * peak > session.memory_limit:
        view.say(
            f"proof    left out: a second model needs {format_bytes(2 * peak)} of {format_bytes(session.memory_limit)}"
        )
        return None
    losses = single_process_losses(session.config, plan, session.spec, corpus, session.device, len(steps))
    difference = max(abs(a - history.losses[step]) for step, a in zip(steps, losses, strict=True))
    limit = PROOF_LIMITS[plan.precision] * max(1.0, *losses)
    good = difference <= limit
    text = f"steps 1-{steps[-1]} repeated in one process: largest difference {difference:.1g}"
    if good and difference > 1e-5:
        text += f" ({plan.precision} rounds differently in another order; in fp64 this layout is exact)"
    view.say(f"proof    {text}" + ("" if good else "  -> NOT THE SAME; please report this"))
    return {"steps": len(steps), "largest_difference": difference, "same": good}
