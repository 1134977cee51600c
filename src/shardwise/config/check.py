"""Checks the rules between keys before anything heavy is imported.

Each rule is one small function that raises a three-line error; `check_config` lists them. Invariant: no rule needs more
than the config itself. Read next: check_layout.py (the rules of [parallel]), plan/resolve/degrees.py (what the model
and the machine allow).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from shardwise.config.check_layout import check_layout
from shardwise.config.keys import DEFAULT, Origins, all_keys, where_written
from shardwise.config.units import parse_seconds, parse_steps
from shardwise.config.values import shown
from shardwise.errors import UserError
from shardwise.spec.addresses import check_address, is_address
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schema import MOST_SEQUENCES, Config
from shardwise.terminal import counted

LEAST_LIMIT = 2**20  # bytes; whoever writes less has forgotten the unit


def check_config(config: Config, origins: Origins) -> None:
    """Checks every rule that a config can break on its own, and raises for the first that it breaks."""
    _one_of(config, origins, "train", ("steps", "tokens", "epochs"), "how long to train")
    _one_of(config, origins, "train", ("global_batch", "global_batch_tokens"), "the batch of one optimizer step")
    _model_named_once(config, origins)
    _batch(config, origins)
    _optimizer(config, origins)
    _precision(config, origins)
    _data(config, origins)
    check_layout(config, origins)
    _offload(config, origins)
    _memory_limit(config, origins)
    _results(config, origins)
    _kernels(config, origins)
    _checkpoint(config, origins)
    _adapter(config, origins)
    _run(config, origins)
    _profile(config, origins)


def _one_of(config: Config, origins: Origins, section: str, names: tuple[str, ...], meaning: str) -> None:
    values = getattr(config, section)
    given = [name for name in names if getattr(values, name) is not None]
    if len(given) > 1:
        places = ", ".join(f"`{section}.{name}` ({origins.get(f'{section}.{name}', 'default')})" for name in given)
        raise UserError(
            f"`{section}.{given[0]}` and `{section}.{given[1]}` are both set",
            why=f"each says {meaning}: {places}",
            fix=f"keep one of {', '.join(names)}",
            where=where_written(origins, *(f"{section}.{name}" for name in given)),
        )


def _memory_limit(config: Config, origins: Origins) -> None:
    limit = config.memory.limit
    if isinstance(limit, int) and limit < LEAST_LIMIT:
        raise UserError(
            f"`memory.limit = {limit}` is {limit:,} bytes",
            why="a number without a unit is in bytes, and no rank runs in so few",
            fix=f"write the unit, for example `memory.limit={min(limit, 999)}GiB`",
            where=where_written(origins, "memory.limit"),
        )


def _model_named_once(config: Config, origins: Origins) -> None:
    if config.model.path is not None and origins.get("model.preset", "default") != "default":
        raise UserError(
            "`model.preset` and `model.path` are both set",
            why=f"each names the model: preset {config.model.preset}, path {config.model.path}",
            fix="keep one of the two",
            where=where_written(origins, "model.preset", "model.path"),
        )


def _batch(config: Config, origins: Origins) -> None:
    train = config.train
    batch = train.global_batch
    if train.global_batch_tokens is not None:
        batch, rest = divmod(train.global_batch_tokens, train.seq_len)
        if rest or batch == 0:
            nearest = max(1, round(train.global_batch_tokens / train.seq_len)) * train.seq_len
            raise UserError(
                f"`train.global_batch_tokens = {train.global_batch_tokens}` is not a whole number of sequences",
                why=f"a sequence has {train.seq_len} tokens (train.seq_len), {rest} would be left over",
                fix=f"set `train.global_batch_tokens = {nearest}` ({nearest // train.seq_len} sequences)",
                where=where_written(origins, "train.seq_len", "train.global_batch_tokens"),
            )
        if batch > MOST_SEQUENCES:
            raise UserError(
                f"`train.global_batch_tokens = {train.global_batch_tokens}` is out of range",
                why=f"it is {batch:,} sequences of {train.seq_len} tokens, and a step has at most {MOST_SEQUENCES:,}",
                fix=f"set `train.global_batch_tokens` to at most {MOST_SEQUENCES * train.seq_len}",
                where=where_written(origins, "train.seq_len", "train.global_batch_tokens"),
            )
    if batch is not None and train.micro_batch != "auto" and train.micro_batch > batch:
        raise UserError(
            f"`train.micro_batch = {train.micro_batch}` is larger than the global batch",
            why=f"one optimizer step has {batch} sequences over all ranks",
            fix=f'set `train.micro_batch` to at most {batch}, or to "auto"',
            where=where_written(origins, "train.global_batch", "train.global_batch_tokens", "train.micro_batch"),
        )


def _optimizer(config: Config, origins: Origins) -> None:
    optimizer = config.optimizer
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            raise UserError(
                f"`optimizer.betas` holds {beta}",
                why="each average needs a factor of at least 0 and below 1",
                fix="for example `optimizer.betas = [0.9, 0.95]`",
                where=where_written(origins, "optimizer.betas"),
            )
    if optimizer.warmup > 1 and optimizer.warmup != int(optimizer.warmup):
        raise UserError(
            f"`optimizer.warmup = {optimizer.warmup}` is neither steps nor a share",
            why="from 1 on it counts whole steps, below 1 it is a share of the run",
            fix=f"set it to {round(optimizer.warmup)}, or to a share such as 0.05",
            where=where_written(origins, "optimizer.warmup"),
        )
    if optimizer.lr_scaling != "none" and optimizer.reference_batch is None:
        raise UserError(
            f'`optimizer.lr_scaling = "{optimizer.lr_scaling}"` has nothing to scale from',
            why="it multiplies lr by a power of global_batch / reference_batch",
            fix="set `optimizer.reference_batch` to the batch that `lr` was tuned for",
            where=where_written(origins, "optimizer.lr_scaling"),
        )


def _precision(config: Config, origins: Origins) -> None:
    memory = config.memory
    if memory.loss_scale != "auto" and (memory.precision == "auto" or not PRECISIONS[memory.precision].scales_loss):
        raise UserError(
            f"`memory.loss_scale = {memory.loss_scale:g}` without fp16",
            why=f"it keeps small fp16 gradients from vanishing, and memory.precision is {memory.precision}",
            fix="memory.loss_scale=auto or memory.precision=fp16",
            where=where_written(origins, "memory.precision", "memory.loss_scale"),
        )
    if OPTIMIZERS[config.optimizer.name].is_low_bit and memory.precision == "fp64":
        raise UserError(
            f"`optimizer.name = {config.optimizer.name}` cannot train fp64 parameters",
            why="its update is computed in fp32, which would round them; 8-bit states are for fp32, bf16 and fp16",
            fix="optimizer.name=adamw or memory.precision=fp32",
            where=where_written(origins, "memory.precision", "optimizer.name"),
        )


def _data(config: Config, origins: Origins) -> None:
    data = config.data
    sources = (data.source,) if isinstance(data.source, str) else data.source
    if not sources or not all(source.strip() for source in sources):
        raise UserError(
            "`data.source` is empty",
            why="there is nothing to train on",
            fix='name a file or directory, or `data.source = "python"`',
            where=where_written(origins, "data.source"),
        )
    for source in filter(is_address, sources):
        check_address(source)
    _streaming(config, origins)
    if data.mix is None:
        return
    where = where_written(origins, "data.source", "data.mix")
    if len(data.mix) != len(sources):
        raise UserError(
            f"`data.mix` has {counted(len(data.mix), 'weight')} for {counted(len(sources), 'source')}",
            why="there is one weight per source, in the same order",
            fix=f"give {counted(len(sources), 'weight')}, or leave `data.mix` out to mix by size",
            where=where,
        )
    if min(data.mix) < 0 or sum(data.mix) <= 0:
        raise UserError(
            f"`data.mix = {list(data.mix)}` are not weights",
            why="weights are at least 0 and one of them is above 0",
            fix=f"for example `data.mix = {[1.0] * len(sources)}`",
            where=where,
        )


def _streaming(config: Config, origins: Origins) -> None:
    if config.data.streaming and config.train.epochs is not None:
        raise UserError(
            "`train.epochs` needs data that is counted",
            why="`data.streaming` starts before anybody knows how long a pass is",
            fix="train.steps or train.tokens; the stream begins again at its end",
            where=where_written(origins, "train.epochs", "data.streaming"),
        )
    if config.data.streaming:
        _idle(config, origins, ("data.validation_fraction",), "data.streaming is true", "data.held_out=N sequences")
    else:
        keys, fix = ("data.shuffle_buffer", "data.held_out"), "data.streaming=true, or leave it out"
        _idle(config, origins, keys, "data.streaming is false", fix)


def _idle(config: Config, origins: Origins, keys: Iterable[str], why: str, fix: str) -> None:
    """Refuses the first of these keys that somebody has set to another value than its default: it would do nothing."""
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if origins.get(key, DEFAULT) != DEFAULT and value != all_keys()[key].default:
            what = f"`{key} = {shown(value)}` does nothing"
            raise UserError(what, why=why, fix=fix, where=where_written(origins, key))


def _adapter(config: Config, origins: Origins) -> None:
    if config.adapter.kind == "none":
        keys = [key for key in all_keys() if key.startswith("adapter.")]
        _idle(config, origins, keys, "adapter.kind is none", "adapter.kind=lora, or leave it out")


def _offload(config: Config, origins: Origins) -> None:
    memory = config.memory
    where = where_written(origins, "memory.offload", "memory.offload_to")
    if memory.offload in ("auto", "none") and memory.offload_to == "nvme":
        raise UserError(
            "`memory.offload_to = nvme` has nothing to move",
            why=f"memory.offload is {memory.offload}",
            fix="memory.offload=nvme",
            where=where,
        )
    if memory.offload not in ("auto", "none") and OPTIMIZERS[config.optimizer.name].is_low_bit:
        raise UserError(
            f"`memory.offload = {memory.offload}` and `optimizer.name = {config.optimizer.name}` exclude each other",
            why="8-bit state is small so that it can stay on the device; its update is compiled for tensors that do",
            fix="optimizer.name=adamw, or memory.offload=none",
            where=where_written(origins, "memory.offload", "optimizer.name"),
        )


def _results(config: Config, origins: Origins) -> None:
    """Refuses late results where something must be known before the next step: it cannot be read after that was
    queued."""
    if config.speed.results != "late":
        return
    needed = {
        "run.on_nan": ("skip", "whether a step is passed over must be known before its update"),
        "memory.precision": ("fp16", "whether a step has overflowed must be known before its update"),
        "parallel.fill_bubbles": ("eval", "a step's times decide how the next one is filled"),
    }
    for key, (value, why) in needed.items():
        section, name = key.split(".")
        found = getattr(getattr(config, section), name)
        if found.removesuffix("-true") == value:
            raise UserError(
                f"`speed.results = late` does not go with `{key} = {found}`",
                why=why,
                fix="speed.results=auto",
                where=where_written(origins, "speed.results", key),
            )


def _kernels(config: Config, origins: Origins) -> None:
    speed = config.speed
    if speed.kernels == "liger" and (speed.compile not in ("auto", "none") or speed.fuse is True):
        key = "speed.fuse = true" if speed.compile in ("auto", "none") else f"speed.compile = {speed.compile}"
        raise UserError(
            f"`speed.kernels = liger` does not go with `{key}`",
            why="a compiler fuses norms and activations with what stands around them; kernels from elsewhere would "
            "cut that apart",
            fix="speed.kernels=torch, or speed.compile=none speed.fuse=false",
            where=where_written(origins, "speed.kernels", key.split(" ")[0]),
        )


def _checkpoint(config: Config, origins: Origins) -> None:
    every = config.checkpoint.every
    where = where_written(origins, "checkpoint.every")
    if isinstance(every, int):
        if every < 1:
            why = "it counts the steps between checkpoints"
            fix = 'set it to at least 1, to a time such as "5m", or to "auto"'
            raise UserError(f"`checkpoint.every = {every}` is out of range", why=why, fix=fix, where=where)
    elif every != "auto":
        try:
            positive = parse_seconds(every) > 0
        except ValueError:
            positive = False
        if not positive:
            why = 'it takes steps (100), a time ("5m") or "auto"'
            fix = 'for example `checkpoint.every = "5m"`'
            raise UserError(f'`checkpoint.every` cannot be read from "{every}"', why=why, fix=fix, where=where)


def _run(config: Config, origins: Origins) -> None:
    name = config.run.name
    if name is not None and (
        name in ("", ".", "..", "last") or PurePath(name).name != name or "\\" in name or name[0] == "-"
    ):
        raise UserError(
            f'`run.name = "{name}"` cannot name a directory',
            why="a run's name is the name of its directory inside `run.dir`; `last` means the newest run",
            fix="use letters, digits, `-` and `_`; set `run.dir` to put it elsewhere",
            where=where_written(origins, "run.name"),
        )


def _profile(config: Config, origins: Origins) -> None:
    if config.run.profile is None:
        return
    try:
        parse_steps(config.run.profile)
    except ValueError as problem:
        raise UserError(
            f'`run.profile` cannot be read from "{config.run.profile}"',
            why=str(problem),
            fix='for example `run.profile = "10:13"`',
            where=where_written(origins, "run.profile"),
        ) from None
