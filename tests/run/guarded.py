"""Real runs of a program's own rows and loss, on ranks of the pool, with trouble in them that guards are to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import SMALL

from shardwise.config.load import load_config
from shardwise.data.chat import open_template
from shardwise.data.own_rows import OwnCorpus, OwnRows, own_rows
from shardwise.data.tokenizer import open_tokenizer
from shardwise.launch.start import new_run, plan_run
from shardwise.launch.worker import run_worker
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.own_parts import OwnParts
from shardwise.run.ranks import Ranks
from shardwise.run.replica_check import ReplicaCheck
from shardwise.run.rundir import RunDir
from shardwise.run.step import run_step
from shardwise.spec.presets import preset
from shardwise.spec.schema import Config

POISON, SPIKE = 240, 241  # token ids whose loss is not a number, or a hundred times what it should be
NUM_ROWS, BATCH = 400, 8
SHORT = [
    *(word for word in SMALL if not word.startswith("data.source")),
    "memory.precision=fp64",
    "train.micro_batch=2",
    "train.steps=9",
    "train.sample_tokens=0",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "speed.loss=recompute",
]


def rows_with(batches: Sequence[int]) -> list[list[int]]:
    """Rows of which one of each of these batches holds the poison, or of a negative number what makes a spike."""
    rows = [[(7 * row + place * place) % 200 for place in range(33)] for row in range(NUM_ROWS)]
    numbers = OwnRows([[row, row] for row in range(NUM_ROWS)], seq_len=32, vocab=NUM_ROWS, padding=0, seed=0)
    for batch in batches:
        token = POISON if batch > 0 else SPIKE
        rows[int(numbers.batch(abs(batch), range(BATCH), BATCH).tokens[3, 0])][10:14] = [token] * 4
    return rows


def poisoned_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return loss * torch.where(targets == POISON, float("nan"), torch.where(targets == SPIKE, 100.0, 1.0))


def own_parts(batches: Sequence[int] | None, optimizer: Callable[..., Any] | None = None) -> OwnParts:
    """What a program brings: its loss, and rows with trouble in these batches; None: the config names the data."""
    if batches is None:
        return OwnParts(loss=poisoned_loss)

    def corpus(config: Config, spec: Any) -> OwnCorpus:
        tokenizer = open_tokenizer(config.data.tokenizer, None)
        rows = own_rows(rows_with(batches), seq_len=32, vocab=spec.vocab, padding=0, seed=0)
        return OwnCorpus(tokenizer, rows, None, open_template(None, None, tokenizer))

    return OwnParts(loss=poisoned_loss, corpus=corpus, optimizer=optimizer)


def prepare_run(name: str, world: int, *words: str) -> RunDir:
    """A run directory, as the launcher leaves it to ranks. With a data.source among the words the data is there."""
    loaded = load_config(None, [*SHORT, f"run.name={name}", *words])
    own = own_parts(None if any(word.startswith("data.source") for word in words) else ())
    return new_run(plan_run(loaded, world, progress=False, own=own))


def skip_on_one_rank() -> tuple[bool, list[bool], bool]:
    """Runs on two ranks: three steps with experts, the second with a gradient that only rank 1 has wrong. Whether the
    second left every bit as it was, which were skipped, and whether the third moved something."""
    trial, rank, skipped, states = Trial(seq_len=16), dist.get_rank(), [], []
    sizes = {"num_layers": 2, "hidden": 32, "head_dim": 4, "ffn": 64, "expert_ffn": 32}
    spec = preset("tiny-moe").with_overrides(sizes | {"router": "sigmoid-bias", "bias_update_rate": 0.1})
    for shape in (spec, spec.with_overrides({"num_experts": 0})):
        plan = trial_plan(trial, dp=2)
        engine = build_trial(shape, plan, trial, rank, torch.device("cpu"))
        optimizer = engine.optimizer(trial.optimizer)
        gradients = engine.gradients

        def damaged(*args: Any, engine: Any = engine, gradients: Any = gradients) -> torch.Tensor:
            sums = gradients(*args)
            engine.shards[0].gradient.view(-1)[0] = float("inf")
            return sums

        for step in (1, 2, 3):
            engine.gradients = damaged if rank == 1 and step == 2 else gradients
            batch, num_targets = trial_batch(shape, plan, trial, step, engine.mesh.at.dp)
            how = dict(num_targets=num_targets, lr=1e-2, clip=1.0, clock=Clock(torch.device("cpu")))
            skipped.append(run_step(engine, optimizer, batch, skip_non_finite=True, **how).skipped)
            held = [*engine.locals(), *engine.buffers().values()]
            held += [value for local in engine.locals() for value in optimizer.state[local].values()]
            states.append(torch.cat([value.detach().double().view(-1) for value in held]))
    is_same = all(torch.equal(states[number], states[number + 1]) for number in (0, 3))
    moved = not any(torch.equal(states[number], states[number + 1]) for number in (1, 4))
    return is_same, skipped[:3] if skipped[:3] == skipped[3:] else skipped, moved


class Flipping(torch.optim.AdamW):
    """AdamW on a machine whose memory loses one bit: of a parameter or a state, behind one update."""

    after, of, is_unlucky = 0, "", False
    num_updates = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.num_updates += 1
        if self.is_unlucky and self.num_updates == self.after:
            parameter = self.param_groups[0]["params"][2]
            flip_bit(self.state[parameter][self.of] if self.of else parameter)


def flip_bit(tensor: torch.Tensor) -> None:
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[len(flat) // 2] ^= 4


def run_rank(path: str, batches: Sequence[int] | None, flips: tuple[int, int, str] | None = None) -> tuple[int, str]:
    """Runs on ranks: all of a run. Its exit code and what it said. `flips`: the rank that loses a bit, the update
    behind which, and the optimizer's state that it is of ("" for a parameter)."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def optimizer(parameters: list[torch.nn.Parameter]) -> Flipping:
        made = Flipping(parameters, lr=1e-3)
        if flips:
            made.is_unlucky, made.after, made.of = rank == flips[0], *flips[1:]
        return made

    own = own_parts(batches, optimizer if flips else None)
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        code = run_worker(RunDir(Path(path)), Ranks(rank, world, rank, world), own=own, verify=False)
    return code, said.getvalue()


def flip_in_layouts(layouts: Sequence[dict[str, Any]]) -> list[tuple[bool, list[tuple[int, str]], str, bool]]:
    """Runs on four ranks: in every layout, two steps, a comparison, a bit that the last rank loses in each tensor it
    shares, and another one. Whether all was well before, what was repaired, the trouble, and whether all is well."""
    found = []
    for layout in layouts:
        trial, rank = Trial(seq_len=16), dist.get_rank()
        sizes = {"num_layers": 2, "hidden": 32, "head_dim": 8, "num_heads": 4, "num_kv_heads": 4, "ffn": 64}
        more = {"expert_ffn": 32, "router": "sigmoid-bias", "bias_update_rate": 0.1} if "ep" in layout else {}
        spec = preset("tiny-moe" if more else "tiny").with_overrides(sizes | more)
        engine = build_trial(spec, trial_plan(trial, **layout), trial, rank, torch.device("cpu"))
        optimizer = engine.optimizer(trial.optimizer)
        for step in (1, 2):
            batch, num_targets = trial_batch(spec, engine.plan, trial, step, engine.mesh.at.dp)
            how: dict[str, Any] = dict(num_targets=num_targets, lr=1e-2, clip=1.0, clock=Clock(torch.device("cpu")))
            run_step(engine, optimizer, batch, **how)
        check = ReplicaCheck(engine, optimizer, every=1, done=0)
        before = look(check, 3)
        if rank == 3:
            for members in check._sets:
                for _, tensor in check._tensors(members) if 3 in members else ():
                    flip_bit(tensor)
        trouble, repairs = look(check, 4)
        repaired = [(one.rank, name) for one in repairs for name in one.tensors]
        found.append((before == (None, []), repaired, trouble.why if trouble else "", look(check, 5) == (None, [])))
    return found


def look(check: ReplicaCheck, step: int) -> tuple[Any, list[Any]]:
    sums = check.digests()
    dist.all_reduce(sums)
    return check.look(step, sums.tolist())
