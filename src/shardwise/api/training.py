"""`shardwise.train` is a run from a Python program, with its own loss, data, optimizer, evaluation and callbacks, in
every layout. No torch.

One process trains in this one. Several are started behind: anew where all they need is in the run directory, as copies
of this process (fork) where they need its functions and data. Under torchrun every rank runs the program.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.api.callbacks import Callbacks, Hearing
from shardwise.api.functions import Evaluate, MakeOptimizer, own_evaluate, own_loss, own_optimizer
from shardwise.api.settings import Settings, check_nproc, for_programs, is_set, settings_of, words_of
from shardwise.api.trained import Run, Trained, load_trained
from shardwise.cluster.describe.machine import Machine
from shardwise.config.load import Loaded
from shardwise.data.corpus import Corpus
from shardwise.data.own_rows import OwnCorpus, held_rows, own_rows
from shardwise.errors import Exit, UserError
from shardwise.launch.join import as_rank, join
from shardwise.launch.start import PlannedRun, continue_run, new_run, plan_run, start
from shardwise.run.own_parts import Loss, OwnParts
from shardwise.run.rundir import RunDir, find_run
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import Config
from shardwise.terminal import is_live, prepared, type_of

ORDERLY = (Exit.DONE, Exit.STOPPED)


class RunFailed(Exception):
    """A run that did not end well. `run` is what there is of it, `code` the exit code of `shardwise train`."""

    def __init__(self, run: Run, code: Exit):
        event = run.directory.last_event() or {}
        why = " ".join(event.get("why", code.name.lower().replace("_", " ")).removeprefix("error: ").split())
        super().__init__(f"{run.name}: {why} (exit {int(code)})")
        self.run, self.code = run, code

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows: the run has said the rest above."""
        return [f"{type(self).__name__}: {self}"]


def train(
    config: Settings = None,
    changes: Mapping[str, Any] | None = None,
    *,
    model: ModelSpec | str | None = None,
    data: Any = None,
    eval_data: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    evaluate: Evaluate | None = None,
    callbacks: Callbacks = (),
    nproc: int | None = None,
    verify: bool = True,
) -> Run:
    """Trains and returns the run. `config` is a TOML file, a dict of keys or a Config, `changes` are keys that win over
    it; the rest is what a config cannot say:

    model      a preset's name, a Hugging Face directory, or a ModelSpec
    data       rows of token ids, by index or one after the other; eval_data: rows by index that are held out
    loss       from logits (N, V) and targets (N,) to one loss per token (N,)
    optimizer  from the list of parameters that this rank trains to a torch optimizer
    evaluate   from a function that scores rows to numbers by name; every rank calls it when the held-out loss is due
    callbacks  a function of a step, a Callback object, or several of them, called in this process
    nproc      processes on this machine; verify: whether a layout that was never proven here is proven first

    Raises `UserError` for what can be mended, `RunFailed` for a run that broke off.
    """
    with memory_given_back(), for_programs(), prepared(), closing(Hearing(callbacks)) as hearing:
        check_nproc(nproc)
        loaded = settings_of(config, changes, model)
        own = _own_parts(loaded, data, eval_data, loss, optimizer, evaluate)
        loaded = _with_parts(loaded, own)
        own = replace(own, hear=hearing.hear) if hearing.callbacks else own

        def prepare(count: int | None, machine: Machine | None = None) -> tuple[RunDir, PlannedRun]:
            planned = plan_run(loaded, count, is_live(), own=own, machine=machine)
            hearing.run = new_run(planned)
            return hearing.run, planned

        if as_rank():
            code = join(prepare, loaded, verify=verify, own=own)
            found = hearing.run or find_run("last", loaded.config.run.dir)
        else:
            found, planned = prepare(nproc)
            code = start(found, planned, verify=verify, attend=hearing.attend)
    return _ended(Run(found), Exit(code), hearing)


def resume(
    run: Run,
    changes: Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    eval_data: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    evaluate: Evaluate | None = None,
    callbacks: Callbacks = (),
    nproc: int | None = None,
    from_step: int | None = None,
    allow: Iterable[str] = (),
) -> Run:
    """Goes on with a run from its newest checkpoint, or from that of `from_step`, in the same or another layout, and
    returns it. What the program brought to the run is given again. `allow` names keys that may change though they
    change what is computed."""
    with memory_given_back(), for_programs(), prepared(), closing(Hearing(callbacks)) as hearing:
        check_nproc(nproc)
        before = settings_of(run.directory.config)
        own = _own_parts(before, data, eval_data, loss, optimizer, evaluate)
        hearing.run = run.directory
        own = replace(own, hear=hearing.hear) if hearing.callbacks else own
        planned = continue_run(
            run.directory, words_of(changes or {}), [allow] if isinstance(allow, str) else list(allow), nproc, own
        )
        code = start(run.directory, planned, from_step, attend=hearing.attend)
    return _ended(Run(run.directory), Exit(code), hearing)


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Frees at the end what a run in this process held: a model and its optimizer are in cycles, and the next run of a
    sweep needs their memory before Python would look for them."""
    try:
        yield
    finally:
        gc.collect()
        if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.empty_cache()


def _ended(run: Run, code: Exit, hearing: Hearing) -> Run:
    if hearing.error is not None:
        raise hearing.error
    if code == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in ORDERLY:
        raise RunFailed(run, code)
    return run


def _own_parts(
    loaded: Loaded,
    data: Any,
    eval_data: Any,
    loss: Loss | None,
    optimizer: MakeOptimizer | None,
    evaluate: Evaluate | None,
) -> OwnParts:
    for name, part in (("loss", loss), ("optimizer", optimizer), ("evaluate", evaluate)):
        if part is not None and not callable(part):
            raise UserError(f"{name} is {type_of(part)}", why="it is a function", fix=f"{name}=my_function")
    parts = OwnParts(
        loss and own_loss(loss), optimizer and own_optimizer(optimizer), evaluate and own_evaluate(evaluate)
    )
    if data is None:
        if eval_data is not None:
            raise UserError(
                "eval_data has no data beside it",
                why="held-out rows are compared with rows that are trained on",
                fix="data=..., or data.source and data.validation_fraction for text",
            )
        return parts
    if is_set(loaded, "train.epochs") and not hasattr(data, "__len__"):
        raise UserError("train.epochs needs rows that can be counted", why="data has no len()", fix="train.steps")

    def corpus(config: Config, spec: ModelSpec) -> Corpus:
        from shardwise.data.chat import open_template
        from shardwise.data.tokenizer import open_tokenizer
        from shardwise.run.build import model_dir

        directory = model_dir(config.model)
        tokenizer = open_tokenizer(config.data.tokenizer, directory)
        common: dict[str, Any] = {"seq_len": config.train.seq_len, "vocab": spec.vocab, "padding": 0}
        rows = own_rows(data, seed=config.train.seed, **common)
        rows.check()
        held = None if eval_data is None else held_rows(eval_data, **common)
        return OwnCorpus(tokenizer, rows, held, open_template(config.data.chat_template, directory, tokenizer))

    return replace(parts, corpus=corpus)


def _with_parts(loaded: Loaded, own: OwnParts) -> Loaded:
    """Returns the config as it goes with the program's parts, and refuses what cannot."""
    config = loaded.config
    if own.corpus is not None and is_set(loaded, "data.source"):
        raise UserError(
            "data and data.source are both given", why="a run is trained on one of them", fix="leave one of them out"
        )
    if own.loss is not None:
        if config.speed.loss == "fused":
            raise UserError(
                "speed.loss = fused goes with cross-entropy alone",
                why="the fused loss computes its gradients itself",
                fix="leave speed.loss out",
            )
        config = replace(config, speed=replace(config.speed, loss="recompute"))
    if own.optimizer is not None:
        if config.memory.offload not in ("auto", "none"):
            raise UserError(
                f"memory.offload = {config.memory.offload} goes with the optimizers of optimizer.name",
                why="their updates run on the CPU by kernels of their own",
                fix="memory.offload=none, or leave `optimizer` out",
            )
        memory, speed = replace(config.memory, offload="none"), replace(config.speed, copies=False)
        config = replace(config, memory=memory, speed=speed)
    return replace(loaded, config=config)


def load(name: str | Path, runs: str = "runs") -> Run | Trained:
    """Returns trained weights by a run's directory or name, `last`, a checkpoint's or a Hugging Face directory: a `Run`
    where it is one, else `Trained`."""
    with for_programs():
        return load_trained(str(name), runs)
