"""`Question`: what `shardwise plan` is asked, read from words and complete. No torch.

    ask("llama3-70b", "64x8xh100", seq="8k", batch="4M", words=["parallel.tp=4"])

Every word goes through the config loader, so a constraint is checked like any setting. What nobody said is assumed, and
every assumption has its origin. Invariant: whatever `ask` returns can be searched; mistakes are answered here. Read
next: search.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from shardwise.cluster.describe.capabilities import FLASH4_CAPABILITY, too_old_for_flash4
from shardwise.cluster.describe.read import read_cluster
from shardwise.config.keys import COMMAND_LINE, all_keys
from shardwise.config.load import Loaded, load_config
from shardwise.config.units import parse_binary, parse_decimal
from shardwise.config.values import read_amount
from shardwise.config.write import with_unit
from shardwise.errors import UserError
from shardwise.plan.answer.assumptions import ASSUMED, TYPED, Assumption, hardware_assumptions
from shardwise.plan.answer.named_model import read_model
from shardwise.plan.resolve.degrees import check_constraints
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.fp8 import check_float8_base
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.precisions import PRECISIONS

MAX_ASSUMED_SEQ = 8192
ASSUMED_BATCH = ((2e7, 2**14), (1e9, 2**19), (1e10, 2**20), (1e11, 2**21), (float("inf"), 2**22))
"""Parameters below -> tokens per step. Powers of two near the batches of GPT-3's family (Brown et al. 2020, arXiv
2005.14165, table 2.1)."""

CONSTRAINED = ("parallel", "memory", "speed", "comm")
"""Sections whose typed keys bind the search; so does train.micro_batch."""


@dataclass(frozen=True)
class Question:
    """A model, a cluster and a job, complete, with the words that made them."""

    spec: ModelSpec
    cluster: ClusterSpec
    job: Job
    loaded: Loaded  # the config as far as it was typed; a row of the answer fills the rest
    assumptions: tuple[Assumption, ...] = ()

    @property
    def name(self) -> str:
        """Returns the name of the answer's directory."""
        text = f"{self.spec.name}-{self.cluster.name}".lower()
        return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text).strip("-.")

    @property
    def price(self) -> float | None:
        """Returns the price of a device in money per hour; None where nobody said."""
        return self.job.price if self.job.price is not None else self.cluster.price

    @property
    def fixed(self) -> str:
        """Returns the constraints as they are typed."""
        known = all_keys()
        return " ".join(
            f"{key}={with_unit(known[key], value)}".replace('"', "") for key, value in self.job.constraints.items()
        )

    def with_job(self, **changes: Any) -> Question:
        return replace(self, job=replace(self.job, **changes))

    def constrained(self, words: Sequence[str]) -> Question:
        """Returns the question with more `section.key=value` words, which win over those that were there."""
        more = load_typed([f"train.seq_len={self.job.seq_len}", *words])
        asked = dict(self.job.constraints) | constraints_of(more)
        check_constraints(self.spec, self.cluster, asked, self.job.global_batch, self.job.seq_len)
        typed = {key for key, origin in more.origins.items() if origin == COMMAND_LINE}
        changes: dict[str, Any] = {"constraints": MappingProxyType(asked)}
        if "memory.precision" in typed:
            changes["precision"] = _precision(more.config.memory.precision, self.cluster)[0]
        if "optimizer.name" in typed:
            changes["optimizer"] = more.config.optimizer.name
        if "model.attention" in typed:
            changes["attention"] = _attention(more, self.cluster)
        if any(key.startswith("adapter.") for key in typed):
            changes["adapter"] = more.config.adapter
        changed = self.with_job(**changes)
        _check_adapter(changed.job)
        return changed


def ask(
    model: str,
    cluster: str | ClusterSpec,
    *,
    seq: str | None = None,
    batch: str | None = None,
    tokens: str | None = None,
    price: str | None = None,
    words: Sequence[str] = (),
) -> Question:
    """Returns a question that can be searched, from the words of a command line. Raises where they are mistaken."""
    model_words, spec = read_model(model)
    hardware = cluster if isinstance(cluster, ClusterSpec) else read_cluster(cluster)
    assumptions: dict[str, Assumption] = {}

    seq_len, assumptions["train.seq_len"] = _seq_len(seq, words, spec)
    length = [f"train.seq_len={seq_len}"]
    if tokens:
        length.append(f"train.tokens={read_amount('--tokens', tokens, parse_decimal, '1T')}")
    if batch:
        batch_tokens = read_amount("--batch", batch, parse_binary, "4M")
        check_batch(batch_tokens, seq_len)
        length.append(f"train.global_batch_tokens={batch_tokens}")
    typed = load_typed([*model_words, *length, *words])
    if typed.config.model.overrides:
        spec = spec.with_overrides(dict(typed.config.model.overrides))
    _check_length(spec, seq_len)
    batch_tokens, assumptions["train.global_batch_tokens"] = _batch(typed, spec, seq_len)
    precision, assumptions["memory.precision"] = _precision(typed.config.memory.precision, hardware)
    optimizer, adapter, train = typed.config.optimizer.name, typed.config.adapter, typed.config.train
    by_person = typed.origins["optimizer.name"] == COMMAND_LINE
    assumptions["optimizer.name"] = Assumption("optimizer", optimizer, TYPED if by_person else ASSUMED)
    if adapter.kind != "none":
        assumptions["adapter.kind"] = Assumption("adapter", f"{adapter.kind} of rank {adapter.rank}", TYPED)
    per_hour = _price(price) if price else None
    if (costs := hardware.price if per_hour is None else per_hour) is not None:
        origin = TYPED if per_hour is not None else hardware.origins.get("price", "cluster")
        assumptions["price"] = Assumption("price per GPU-hour", f"{costs:.2f}", origin)
    fixed, global_batch, attention = constraints_of(typed), batch_tokens // seq_len, _attention(typed, hardware)
    check_constraints(spec, hardware, fixed, global_batch, seq_len)
    total = train.tokens or (train.steps * batch_tokens if train.steps else None)
    asked = MappingProxyType(fixed)
    job = Job(seq_len, global_batch, total, precision, optimizer, adapter, asked, per_hour, attention)
    if attention != "sdpa":
        assumptions["model.attention"] = Assumption("attention", "FlashAttention 4", TYPED)
    _check_adapter(job)
    origins = {key: one.origin for key, one in assumptions.items() if key in typed.origins and one.origin != TYPED}
    loaded = replace(typed, origins=typed.origins | origins)
    every = (*hardware_assumptions(hardware, precision), *assumptions.values())
    return Question(spec, hardware, job, loaded, every)


def _check_adapter(job: Job) -> None:
    zero, offload = (job.constraints.get(key) for key in ("parallel.zero", "memory.offload"))
    check_float8_base(job.precision, job.adapter.kind, int(zero or 0), str(offload))


# Words and numbers ---------------------------------------------------------------------------------------------------


def load_typed(words: Sequence[str]) -> Loaded:
    """Returns the config that the loader reads from the words. A key that needs an axis is a constraint on layouts that
    have it: the axis is the search's to choose."""
    names = {word.partition("=")[0].strip().lstrip("-") for word in words}
    layout = " ".join(word for word in words if "layout=" in word)
    helpers = []
    if names & {"parallel.schedule", "parallel.virtual_stages", "parallel.fill_bubbles"} and "parallel.pp" not in names:
        helpers += [] if "pp=" in layout else ["parallel.pp=2"]
    if names & {"parallel.sequence", "parallel.sp"} and "parallel.tp" not in names and "tp=" not in layout:
        helpers += ["parallel.tp=2"] if not any(word.endswith("=false") for word in words) else []
    loaded = load_config(None, [*helpers, *words])
    origins = loaded.origins | {word.partition("=")[0]: "default" for word in helpers}
    return replace(loaded, origins=origins)


def constraints_of(loaded: Loaded) -> dict[str, Any]:
    """Returns the keys that were typed about the layout, with their values."""
    found = {}
    for name, origin in loaded.origins.items():
        section, _, key = name.partition(".")
        binds = section in CONSTRAINED or name == "train.micro_batch"
        if origin == COMMAND_LINE and binds and key != "layout":
            value = getattr(getattr(loaded.config, section), key)
            if value != "auto":
                found[name] = value
    return found


def _seq_len(option: str | None, words: Sequence[str], spec: ModelSpec) -> tuple[int, Assumption]:
    """Returns the tokens of a sequence: the option, the config's own key, or what the model can read."""
    what = "tokens per sequence"
    if option:
        value = read_amount("--seq", option, parse_binary, "8k")
        return value, Assumption(what, f"{value:,}", TYPED)
    if typed := [word for word in words if word.partition("=")[0] == "train.seq_len"]:
        value = load_config(None, typed).config.train.seq_len
        return value, Assumption(what, f"{value:,}", TYPED)
    value = min(spec.max_seq_len, MAX_ASSUMED_SEQ)
    return value, Assumption(what, f"{value:,}", f"{ASSUMED}: the model's own, at most {MAX_ASSUMED_SEQ:,}")


def _check_length(spec: ModelSpec, seq_len: int) -> None:
    if spec.positions == "learned" and seq_len > spec.max_seq_len:
        raise UserError(
            f"--seq {seq_len} is longer than {spec.name} can read",
            why=f"its learned positions end at {spec.max_seq_len}",
            fix=f"--seq {spec.max_seq_len}",
        )


def _batch(typed: Loaded, spec: ModelSpec, seq_len: int) -> tuple[int, Assumption]:
    """Returns the tokens of a step: what was typed, or what is usual for a model of this size."""
    train = typed.config.train
    value = train.global_batch_tokens or (train.global_batch * seq_len if train.global_batch else None)
    if value:
        return value, Assumption("tokens per step", f"{value:,}", TYPED)
    usual = next(size for limit, size in ASSUMED_BATCH if spec.num_parameters < limit)
    value = max(1, usual // seq_len) * seq_len
    return value, Assumption("tokens per step", f"{value:,}", f"{ASSUMED}: usual for a model of this size")


def _price(text: str) -> float:
    try:
        value = float(text.strip().lstrip("$€").removesuffix("/h"))
        if not 0 <= value < 1e6:
            raise ValueError
    except ValueError:
        raise UserError(
            f"`--price {text}` is no price", why="it is money per GPU and hour, as a plain number", fix="--price 2.50"
        ) from None
    return value


def check_batch(batch_tokens: int, seq_len: int) -> None:
    rest = batch_tokens % seq_len
    if not rest:
        return
    near = sorted({max(1, batch_tokens // seq_len) * seq_len, -(-batch_tokens // seq_len) * seq_len})
    raise UserError(
        f"--batch {batch_tokens} is not a whole number of sequences",
        why=f"a sequence has {seq_len:,} tokens; {batch_tokens:,} / {seq_len:,} leaves {rest:,} over",
        fix=" or ".join(f"--batch {size}" for size in near),
    )


def _precision(asked: str, cluster: ClusterSpec) -> tuple[str, Assumption]:
    rates, what = cluster.device.flops, "number format"
    if asked == "auto":
        halves = ("bf16", "fp16") if cluster.device.kind == "cuda" else ()
        best = next((name for name in halves if name in rates), "fp32")
        return best, Assumption(what, best, f"{ASSUMED}: the fastest that {cluster.device.name} trains in without fp8")
    kind = PRECISIONS[asked].matmul
    if kind not in rates and cluster.device.kind == "cuda":
        raise UserError(
            f"{cluster.device.name} does not compute in {asked}",
            why=f"memory.precision = {asked} and --cluster {cluster.name} exclude each other; "
            f"it has {', '.join(rates)}",
            fix=" or ".join(f"memory.precision={name}" for name in ("bf16", "fp16", "fp32") if name in rates),
        )
    return asked, Assumption(what, asked, TYPED)


def _attention(typed: Loaded, cluster: ClusterSpec) -> str:
    """Returns the attention of a `Job`. What is installed here says nothing about machines that are described:
    FlashAttention 4 counts where it is typed."""
    if typed.config.model.attention != "flash4":
        return "sdpa"
    if cluster.device.kind != "cuda" or cluster.device.capability < FLASH4_CAPABILITY:
        raise too_old_for_flash4(cluster.device.name, cluster.device.capability, typed.origins)
    return "flash4"
