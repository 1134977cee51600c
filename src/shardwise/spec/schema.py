"""Declares every config key, in one place: type, default, allowed values, unit and help.

Sections are frozen dataclasses and each part of the program receives its own section, never the whole `Config`.
`setting()` attaches what the loader, `shardwise init` and the reference docs need. A key or value that is described but
not built yet carries `later=` / `available=` and is refused as "not available yet", never ignored.
"""

# ruff: noqa: RUF009  (setting() returns a dataclass field, which is what the rule asks for)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.recompute import EVERY_K, RECOMPUTE
from shardwise.spec.schedules import SCHEDULES
from shardwise.spec.zero import ZERO

Auto = Literal["auto"]

SMALL_MODEL_LR = 1.5e-3
"""A peak learning rate for models of up to 100 M parameters from scratch."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    available: tuple[Any, ...] | None = None,
    unit: Literal["binary", "decimal", "bytes", "time", "rate"] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    later: bool = False,
    example: str | None = None,
) -> Any:
    """Returns a dataclass field with its documentation.

    choices    every value the key will ever take        available  the values that work today (default: all)
    unit       how strings like "8k" or "5m" are read    low, high  inclusive bounds     above  exclusive lower bound
    later      the whole key is refused unless left at its default
    example    a value that makes sense, where the default is not one
    """
    about = dict(
        help=help,
        choices=choices,
        available=available,
        unit=unit,
        low=low,
        high=high,
        above=above,
        later=later,
        example=example,
    )
    return field(default=default, metadata=about)


MOST_SEQUENCES = 2**24
"""That a step may have: the planner looks at every way to share them out."""


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    preset: str = setting("tiny", "a named model; `shardwise explain presets` lists them")
    path: str | None = setting(
        None, "a Hugging Face directory or hub id in the local cache, of any causal language model; replaces `preset`"
    )
    attention: str = setting(
        "auto",
        "attention kernel; cudnn, flash, flash4 and flex are for CUDA; auto: the fastest there, by measurement, sdpa "
        "on CPUs",
        choices=("auto", "sdpa", "math", "flex", "cudnn", "flash", "flash4"),
    )
    overrides: tuple[tuple[str, Any], ...] = setting(
        (), "ModelSpec fields given in [model], for example num_layers = 4"
    )


@dataclass(frozen=True)
class DataConfig:
    """What it is trained on."""

    source: str | tuple[str, ...] = setting(
        "python",
        "file(s), directories, patterns, addresses (s3://, hf://), datasets, prepared directories, or `python` (the "
        "standard library's sources)",
    )
    tokenizer: str = setting(
        "auto", "`bytes`, a tokenizer.json, or `auto` (the model directory's own, bytes from scratch)"
    )
    mix: tuple[float, ...] | None = setting(None, "one weight per source; default: by size")
    validation_fraction: float = setting(0.01, "share of documents held out for evaluation", low=0.0, high=0.5)
    packing: str = setting(
        "auto",
        "`stream` cuts the token stream into sequences, `whole` keeps documents whole and pads, `single` has one "
        "document per sequence; auto: whole for chat, or single where a model cannot keep documents apart",
        choices=("auto", "stream", "whole", "single"),
    )
    document_mask: bool | Auto = setting(
        "auto", "documents packed into one sequence do not attend to each other; auto: on for chat"
    )
    chat_template: str | None = setting(None, "a Jinja chat template file; default: the model directory's own")
    text_field: str = setting("text", "the field of rows that holds plain text")
    bad_rows: str = setting(
        "refuse",
        "what a row does that cannot be used (no JSON, no text, no answer): `quarantine` leaves it out and lists it in "
        "quarantine.jsonl, up to a tenth of all rows; all others keep their order",
        choices=("refuse", "quarantine"),
    )
    streaming: bool = setting(False, "tokenise rows while training, in their order, instead of all before the start")
    shuffle_buffer: int = setting(
        1000, "streaming: sequences of each source that are held and shuffled together; 0: their own order", low=0
    )
    held_out: int = setting(
        128, "streaming: sequences at the beginning that are held out for evaluation, in the place of a share", low=0
    )


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much per step."""

    steps: int | None = setting(None, "optimizer steps; set one of steps, tokens, epochs", low=1)
    tokens: int | None = setting(None, "training length in tokens", unit="decimal", low=1)
    epochs: float | None = setting(None, "training length in passes over the data", above=0)
    global_batch: int | None = setting(None, "sequences per optimizer step over all ranks", low=1, high=MOST_SEQUENCES)
    global_batch_tokens: int | None = setting(None, "the same in tokens, instead of global_batch", unit="binary", low=1)
    micro_batch: int | Auto = setting("auto", "sequences per forward pass; `auto` finds the largest that fits", low=1)
    seq_len: int = setting(128, "tokens per sequence", unit="binary", low=2, high=2**27)
    seed: int = setting(0, "draws weights and the order of the data", low=0, high=2**63 - 1)
    clip: float | None = setting(1.0, "largest global gradient norm; 0 turns clipping off", low=0.0)
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", low=0)
    eval_batches: int = setting(8, "times 16 held-out sequences per evaluation, whatever global_batch is", low=1)
    sample_every: int = setting(0, "steps between text samples; 0: only at the end", low=0)
    sample_prompt: str | None = setting(
        None, "prompt of those samples; default: the start of a held-out document, `def ` for `python`"
    )
    sample_tokens: int = setting(160, "tokens of such a sample; 0: no samples", low=0)
    time_limit: float | None = setting(None, "stop cleanly and resumably after this long", unit="time", above=0)
    deterministic: bool = setting(False, "only deterministic kernels; slower on GPUs")


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights move."""

    name: str = setting(
        "adamw",
        "update rule",
        choices=tuple(OPTIMIZERS),
    )
    lr: float | Auto = setting(
        "auto",
        "peak learning rate; auto: by the size of a model from scratch, 1e-5 to 2e-5 for trained weights, 1e-4 to 2e-4 "
        "for adapters",
        above=0,
        example="0.0003",
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "Adam's averages; momentum and RMSProp use the first")
    eps: float = setting(1e-8, "Adam's denominator", above=0)
    weight_decay: float = setting(0.1, "on matrices only", low=0.0)
    schedule: str = setting("cosine", "shape of the learning rate", choices=("cosine", "wsd", "linear", "constant"))
    warmup: float = setting(0.1, "steps of linear warm-up (>= 1), or a share of the run (< 1)", low=0.0)
    min_lr: float = setting(0.1, "final learning rate as a share of the peak", low=0.0, high=1.0)
    decay: float = setting(0.2, "wsd: share of the run spent decaying at the end", above=0.0, high=1.0)
    lr_scaling: str = setting(
        "none", "scale lr with global_batch / reference_batch", choices=("none", "linear", "sqrt")
    )
    reference_batch: int | None = setting(None, "the global batch that `lr` was tuned for", low=1)

    @property
    def peak_lr(self) -> float:
        """Returns the peak learning rate; `auto` is a run's to resolve (config/job.py), and a small model's rate where
        nothing has a job."""
        return SMALL_MODEL_LR if isinstance(self.lr, str) else self.lr


@dataclass(frozen=True)
class Axes:
    """How one model becomes many: the keys of [parallel] that a plan resolves."""

    dp: int | Auto = setting("auto", "data-parallel ranks; auto: what the other degrees leave", low=1)
    zero: int | Auto = setting(
        "auto", "ZeRO stage; auto: the smallest whose memory fits, 0 for one replica", low=min(ZERO), high=max(ZERO)
    )
    replicate: int | Auto = setting(
        "auto", "replicas of the sharded model, dp = replicate x shards; auto: 1, or dp with zero = 0", low=1
    )
    tp: int | Auto = setting("auto", "tensor-parallel ranks; auto: 1", low=1)
    sequence: bool | Auto = setting(
        "auto", "sequence parallelism inside tp (alias sp); auto: on when tp > 1 divides seq_len"
    )
    cp: int | Auto = setting("auto", "context-parallel ranks, which share every sequence; auto: 1", low=1)
    cp_kind: str = setting("ring", "how context-parallel ranks attend", choices=("ring", "ulysses"))
    pp: int | Auto = setting("auto", "pipeline-parallel ranks; auto: 1", low=1)
    schedule: str = setting("1f1b", "pipeline schedule", choices=tuple(SCHEDULES))
    virtual_stages: int | Auto = setting(
        "auto", "pipeline stages per rank; auto: 2 for interleaved, zbv and dualpipev, else 1", low=1
    )
    split: tuple[int, ...] | Auto | Literal["even"] = setting(
        "auto", "layers per stage, in model order; `even` counts layers, `auto` balances their time", low=1
    )
    ep: int | Auto = setting(
        "auto", "expert-parallel ranks, out of dp x cp x tp; auto: 1, every rank has all experts", low=1
    )
    strategy: str = setting(
        "collective",
        "how gradients meet",
        choices=("collective", "parameter-server", "local-steps"),
        available=("collective",),
    )
    fill_bubbles: str = setting(
        "none", "side work for idle pipeline slots; `eval`: forwards of held-out batches", choices=("none", "eval")
    )


@dataclass(frozen=True)
class ParallelConfig(Axes):
    """How one model becomes many. What you set is a constraint; the rest is `auto`."""

    layout: str | None = setting(None, "a layout string such as `dp=2 zero=3 tp=2 sp`; sets the keys above")


@dataclass(frozen=True)
class MemoryConfig:
    """Number formats, and what is kept, computed again or moved out."""

    precision: str = setting(
        "auto",
        "number formats; bf16 computes in bf16 over fp32 weights, -true keeps the weights in it too; "
        "auto: bf16 on GPUs, fp32 on CPUs",
        choices=("auto", *PRECISIONS),
        example='"bf16"',
    )
    loss_scale: float | Auto = setting(
        "auto",
        "fp16: what the loss is multiplied by; auto: halved when something overflows, doubled now and then",
        above=0,
    )
    reduce_dtype: str = setting(
        "auto",
        "format in which data-parallel ranks add up gradients; auto: fp32, or that of -true weights",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    fp8_recipe: str = setting(
        "rowwise", "fp8: a scale for each row of a matrix, or one for all of it", choices=("rowwise", "tensorwise")
    )
    fp8_head: bool = setting(False, "fp8: the head's matmuls too")
    limit: int | Auto = setting(
        "auto", "memory one rank may use; `auto`: the device's or the cgroup's", unit="bytes", low=1
    )
    recompute: str = setting(
        "auto",
        "what backward computes again: every block, cheap parts of each, sqrt(L) groups of blocks, every K-th block; "
        "auto: nothing, unless the job does not fit",
        choices=("auto", *RECOMPUTE, EVERY_K),
    )
    offload: str = setting(
        "auto",
        "what leaves the device: `optimizer` its state and update, `all` the parameters too; `nvme`: optimizer, to a "
        "disk; "
        "auto: nothing, unless the job does not fit on a GPU",
        choices=("auto", "none", "optimizer", "all", "nvme"),
    )
    offload_to: str = setting("cpu", "where offloaded state lives", choices=("cpu", "nvme"))
    offload_dir: str | None = setting(None, "directory on the disk for `nvme`; default: run.dir")
    offload_buffer: int = setting(
        256 * 2**20, "memory through which a disk is read and written", unit="bytes", low=2**16
    )
    offload_tmpfs: bool = setting(False, "allow an offload_dir that lies in memory (tmpfs)")
    activation_offload: bool = setting(False, "what forward keeps for backward waits in CPU memory (CUDA only)")


@dataclass(frozen=True)
class AdapterConfig:
    """Small trained matrices beside frozen weights."""

    kind: str = setting(
        "none",
        "train small adapters instead of all weights; `qlora` keeps the frozen ones in 4 bits",
        choices=("none", "lora", "qlora"),
    )
    rank: int = setting(16, "columns of an adapter's two matrices", low=1)
    alpha: float = setting(32.0, "their product is multiplied with alpha / rank", above=0)
    dropout: float = setting(0.0, "share of an adapter's inputs that is left out while training", low=0.0, high=0.95)
    targets: tuple[str, ...] = setting(
        ("q", "k", "v", "o"),
        "linear layers that get adapters: short, full or Hugging Face names, wildcards, or `all-linear`",
    )
    train_also: tuple[str, ...] = setting(
        (), "modules that are trained whole beside the adapters, such as `embed`, `head`, `*norm`"
    )
    path: str | None = setting(
        None, "a directory in PEFT's format to start from, which also says rank, alpha, targets and train_also"
    )


@dataclass(frozen=True)
class SpeedConfig:
    """What makes a step faster and leaves its numbers what they are. Every one can be switched off."""

    compile: str = setting(
        "auto",
        "blocks become compiled kernels; `graphs` also replays their launches; `trace` runs their graphs with plain "
        "kernels; "
        "auto: blocks on GPUs",
        choices=("auto", "none", "blocks", "graphs", "trace"),
    )
    fuse: bool | Auto = setting(
        "auto", "one matmul for q, k and v, one for gate and up; auto: no, compiled blocks lose by it"
    )
    copies: bool | Auto = setting(
        "auto",
        "16-bit weights stay beside the fp32 master weights and are written by the update itself; auto: on one GPU",
    )
    loss: str = setting(
        "auto",
        "too many logits at once: `recompute` makes them again in backward, `fused` takes their gradient at once; "
        "auto: fused if it can be",
        choices=("auto", "recompute", "fused"),
    )
    kernels: str = setting(
        "auto",
        "norms and activations by torch, with a kernel for norms' backward (`own`), or by liger; auto: own in compiled "
        "blocks on GPUs",
        choices=("auto", "torch", "own", "liger"),
    )
    products: str = setting(
        "auto",
        "large matmuls by the kernel that torch takes (`library`), or by the fastest with the same bits (`measured`); "
        "auto: measured in compiled blocks on GPUs",
        choices=("auto", "library", "measured"),
    )
    results: str = setting(
        "auto",
        "when a loss is read: `at-once`, or `late`, with the next step queued; auto: late on GPUs, but not with fp16 "
        "or "
        "on_nan=skip",
        choices=("auto", "at-once", "late"),
    )
    allocator: str = setting(
        "auto",
        "GPU memory in segments that grow (`expandable`), or torch's default; auto: expandable",
        choices=("auto", "default", "expandable"),
    )


@dataclass(frozen=True)
class CommConfig:
    """How processes talk."""

    backend: str = setting("auto", "process-group backend", choices=("auto", "gloo", "nccl"))
    interface: str | None = setting(
        None,
        "network interface of the ranks: a name, several (each node has one), or a network such as 10.0.0.0/16; "
        "default: loopback on one node, the way to the first node on several",
    )
    timeout: float = setting(300.0, "how long a collective may wait", unit="time", above=0)
    all_reduce: str = setting(
        "auto",
        "all-reduce algorithm",
        choices=("auto", "backend", "ring", "tree", "butterfly", "rabenseifner", "hierarchical"),
        available=("auto", "backend"),
    )
    quantize_weights: str = setting("none", "compressed weight gathers", choices=("none", "int8"), available=("none",))
    quantize_gradients: str = setting(
        "none", "compressed gradient reductions", choices=("none", "int4", "int8"), available=("none",)
    )
    secondary_shard: int | None = setting(None, "ranks per node that keep a second shard", later=True)
    bucket: int | Auto = setting(
        "auto", "gradient bytes per all-reduce; auto: 4 MiB on CPUs, 25 MiB on GPUs", unit="bytes", low=1
    )
    staleness: int = setting(0, "steps a worker may run ahead", low=0, later=True)


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved and how much of it is kept."""

    every: int | str = setting(
        "auto", "steps between checkpoints, a time such as 5m, or `auto` (every 5 minutes and at the end)"
    )
    keep: int = setting(2, "newest checkpoints to keep", low=1)
    background: bool = setting(False, "write while training goes on: a step waits for a copy in host memory only")
    verify: bool = setting(True, "check every digest when loading")
    peers: int = setting(0, "copies in other nodes' memory", low=0, later=True)


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes and how it reacts."""

    dir: str = setting("runs", "where run directories go")
    name: str | None = setting(None, "name of this run; default: the model's name and a number")
    loggers: tuple[str, ...] = setting(
        ("jsonl",), "where metrics go", choices=("jsonl", "tensorboard", "wandb", "mlflow")
    )
    project: str | None = setting(None, "project of W&B, experiment of MLflow; default: shardwise")
    entity: str | None = setting(None, "team or user of W&B; default: the one who is logged in")
    tags: tuple[str, ...] = setting((), "labels of this run in W&B and MLflow")
    offline: bool = setting(False, "W&B writes files only, which `wandb sync` sends later")
    on_nan: str = setting(
        "rollback",
        "what a loss that is not a number does: `rollback` goes back to the newest checkpoint, passes over the batch "
        "and costs no step anything; `skip` leaves that update out on all ranks, and goes back after three in a row: "
        "each update waits for the norm, on GPUs too; `stop` ends the run",
        choices=("stop", "skip", "rollback"),
    )
    on_spike: str = setting(
        "report",
        "what three steps in a row do whose loss or gradient norm is far above the last 64: a line, or `rollback`: "
        "back to the newest checkpoint before them, and their batches are passed over",
        choices=("ignore", "report", "rollback"),
    )
    on_out_of_memory: str = setting(
        "stop",
        "`smaller`: a run whose memory ran out starts again from its newest checkpoint with at most half the "
        "micro-batch, the same global batch and the same losses; on one node, without torchrun",
        choices=("stop", "smaller"),
    )
    check_replicas: int = setting(
        100,
        "steps between comparisons of what replicas hold, bit by bit; also after every checkpoint. A minority takes "
        "the bits of the majority, else the run goes back; 0: none",
        low=0,
    )
    max_restarts: int = setting(
        3, "restarts without a person, after a rank was killed, crashed or got stuck; 0: none", low=0
    )
    replan: bool = setting(False, "plan again when machines are lost", later=True)
    spares: int = setting(0, "processes kept ready", low=0, later=True)
    profile: str | None = setting(
        None, "first and last step to trace, such as 10:13; a file per rank in trace/, for ui.perfetto.dev"
    )
    events_every: int = setting(10, "steps between sampled events; 0: none", low=0)


@dataclass(frozen=True)
class Config:
    """All sections of a config."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    adapter: AdapterConfig = AdapterConfig()
    speed: SpeedConfig = SpeedConfig()
    comm: CommConfig = CommConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
