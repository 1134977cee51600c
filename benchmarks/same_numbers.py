"""Does the code of this tree compute what the code of another commit computes, to the last bit?

    python benchmarks/same_numbers.py --base COMMIT [--only WORD] [--deadline 300] [--out FILE]

A change that only moves or renames code must leave every number as it is. This script checks COMMIT out into a
temporary worktree of git, runs a list of small jobs with the code there and with the code here, and compares bit by
bit: every loss, gradient norm and held-out loss in metrics.jsonl, with whatever else is computed and not timed, and
every tensor that was saved: the parameters and optimizer states of checkpoints, and exported weights. Each job is typed
as a user would type it, so nothing in here has to follow when code moves. A job takes three steps of a model of 150 k
parameters on made-up text. Together they go through every axis, every schedule, the number formats that a CPU has,
adapters, recomputation, offloading, compiled graphs, resuming in another layout and exporting.

What depends on time or on the machine is pinned: pipelines are split by hand and micro-batches have a size. So is what
got another default on purpose: the learning rate, and a global batch of 16, for which older commits evaluated on the
same rows. The one job with `micro_batch=auto` is so small that everything fits, so that both sides must choose the
largest. A checkpoint's rng.safetensors is left out: older commits kept torch's own generator as each process had seeded
it, and nothing that is trained draws from it. Both sides run on this machine, one after the other; numbers of different
machines or versions of torch cannot be compared like this.

The exit code is 1 if anything differs or a job did not run. The rows of a complete comparison are kept in
results/same_numbers.json. All jobs took 27 minutes on two busy cores; `--only pipeline` or `--only bf16` takes some of
them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ABORTED, ATTEMPTS = "killed by SIGABRT", 3
"""A thread of gloo aborted ranks of older commits now and then while they ended, on busy cores: such a job starts
again, and its row says how often."""

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
RESULTS = HERE / "results" / "same_numbers.json"
SIDES = ("base", "here")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SMALL = words(
    "model.num_layers=4 model.hidden=64 model.num_heads=4 model.num_kv_heads=2 model.head_dim=16 model.ffn=96"
)
JOB = words(
    "data.source=text.jsonl data.validation_fraction=0.1 train.seq_len=32 train.global_batch=16 train.micro_batch=2 "
    "train.steps=3 train.eval_every=2 train.eval_batches=2 train.sample_tokens=0 optimizer.warmup=1 "
    "optimizer.lr=1.5e-3 run.name=run"
)
EXPERTS = words("model.preset=tiny-moe model.expert_ffn=48 model.num_experts=4 model.num_layers=2")
LATENT = words(
    "model.preset=deepseek-v3 model.num_layers=3 model.hidden=64 model.num_heads=4 model.num_kv_heads=4 model.ffn=96 "
    "model.vocab=256 "
    "model.q_lora_rank=24 model.kv_lora_rank=16 model.qk_nope_head_dim=8 model.qk_rope_head_dim=8 model.v_head_dim=16 "
    "model.num_experts=8 model.experts_per_token=2 model.expert_ffn=32 model.first_dense_layers=1 "
    "model.num_expert_groups=2 "
    "model.topk_groups=1"
)
GEMMA = words(
    "model.preset=gemma2-2b model.num_layers=4 model.hidden=64 model.num_heads=4 model.num_kv_heads=2 "
    "model.head_dim=16 model.ffn=96 "
    "model.vocab=256 model.sliding_window=8 model.query_scale_dim=16"
)
GPT2 = words(
    "model.preset=gpt2 model.num_layers=4 model.hidden=64 model.num_heads=4 model.num_kv_heads=4 model.head_dim=16 "
    "model.ffn=96 "
    "model.vocab=256"
)

COMPUTED = (
    "loss",
    "grad_norm",
    "eval_loss",
    "lr",
    "tokens",
    "target_tokens",
    "aux_loss",
    "z_loss",
    "expert_load_max",
    "expert_load_min",
    "dropped_tokens",
    "scale",
    "skipped",
)
"""What a line of metrics.jsonl has that does not depend on time."""

FOREIGN = """
import torch
from transformers import OPTConfig, OPTForCausalLM
torch.manual_seed(0)
shape = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, ffn_dim=50)
shape |= dict(word_embed_proj_dim=24, max_position_embeddings=64)
shape |= dict(vocab_size=256, bos_token_id=0, eos_token_id=0, pad_token_id=1)
OPTForCausalLM(OPTConfig(**shape)).save_pretrained("foreign")
"""
"""A model that only transformers can build, with random weights. Run once; both sides read what it has written."""


@dataclass(frozen=True)
class Job:
    name: str
    layout: str
    precision: str
    more: str = ""  # words of the config
    model: tuple[str, ...] = SMALL
    after: tuple[str, ...] = ()  # more commands in the same directory

    @property
    def title(self) -> str:
        return f"{self.name} {self.layout} {self.precision}"

    def commands(self) -> list[tuple[str, ...]]:
        how = ("--nproc", "1") if self.layout == "dp=1" else (f"parallel.layout={self.layout}",)
        first = (
            "train",
            "--no-verify",
            *self.model,
            *JOB,
            *how,
            f"memory.precision={self.precision}",
            *words(self.more),
        )
        return [first, *map(words, self.after)]


JOBS = [
    Job("plain", "dp=1", "fp32"),
    Job("plain", "dp=1", "bf16"),
    Job("plain", "dp=1", "fp64"),
    Job("plain", "dp=1", "fp16"),
    Job("true", "dp=1", "bf16-true"),
    Job("data", "dp=2", "fp32"),
    Job("zero", "dp=2 zero=1", "bf16"),
    Job("zero", "dp=2 zero=2", "fp32"),
    Job("zero", "dp=2 zero=3", "fp64"),
    Job("zero", "dp=2 zero=3", "bf16"),
    Job("hybrid", "dp=4 zero=3 replicate=2", "fp32"),
    Job("tensor", "dp=1 tp=2 sp", "fp32"),
    Job("tensor", "dp=1 tp=2", "bf16", "parallel.sequence=false"),
    Job("pipeline", "dp=1 pp=2 schedule=1f1b split=3,1", "fp32"),
    Job("pipeline", "dp=1 pp=2 schedule=interleaved split=1,1,1,1", "bf16"),
    Job("pipeline", "dp=1 pp=2 schedule=zero-bubble split=2,2", "fp64"),
    Job("pipeline", "dp=1 pp=2 schedule=zbv split=1,1,1,1", "bf16"),
    Job("fill", "dp=1 pp=2 schedule=gpipe split=2,2", "fp32", "parallel.fill_bubbles=eval"),
    Job("context", "dp=1 cp=2", "fp32", "data.document_mask=true"),
    Job("context", "dp=1 cp=2", "bf16", "parallel.cp_kind=ulysses"),
    Job("experts", "dp=2 ep=2", "fp32", model=EXPERTS),
    Job("experts", "dp=2 zero=1 ep=2", "bf16", model=EXPERTS),
    Job("latent", "dp=1", "fp32", model=LATENT),
    Job("many", "dp=2 zero=3 tp=2 sp", "bf16"),
    Job("many", "dp=2 zero=2 pp=2 schedule=zero-bubble split=2,2", "fp32"),
    Job("tied", "dp=2 zero=1", "fp32", "model.tied=true"),
    Job("tied", "dp=1 pp=2 schedule=1f1b split=2,2", "fp64", "model.tied=true"),
    Job("gemma", "dp=1 tp=2 sp", "fp32", model=GEMMA),
    Job("gpt2", "dp=1", "bf16", "optimizer.name=rmsprop", model=GPT2),
    Job("lora", "dp=2 zero=2", "fp32", "adapter.kind=lora adapter.rank=4 adapter.dropout=0.1 adapter.train_also=norm"),
    Job("lora", "dp=1 pp=2 schedule=zero-bubble split=2,2", "bf16", "adapter.kind=lora adapter.targets=all-linear"),
    Job("qlora", "dp=1", "bf16", "adapter.kind=qlora adapter.rank=4 adapter.targets=all-linear"),
    Job("qlora", "dp=1 tp=2", "fp32", "adapter.kind=qlora adapter.rank=4"),
    Job("recompute", "dp=1", "bf16", "memory.recompute=selective"),
    Job("recompute", "dp=2 zero=3", "fp32", "memory.recompute=full"),
    Job("offload", "dp=1", "fp32", "memory.offload=optimizer"),
    Job("8-bit", "dp=2 zero=1", "fp32", "optimizer.name=adamw8bit model.ffn=192"),
    Job("late", "dp=2", "fp32", "speed.results=late"),
    Job("fused", "dp=1", "fp32", "speed.fuse=true speed.loss=recompute data.packing=whole"),
    Job("traced", "dp=1", "bf16", "speed.compile=trace"),
    Job("auto", "dp=2", "fp32", "train.micro_batch=auto"),
    Job("foreign", "dp=2 zero=3", "fp32", model=("model.path=foreign",)),
    Job(
        "resumed",
        "dp=2 zero=2",
        "fp32",
        after=("resume run --no-verify --allow train.steps train.steps=5 parallel.layout=tp=2",),
    ),
    Job(
        "exported",
        "dp=2 zero=1",
        "fp32",
        after=(
            "export run --to hf --out exported",
            f"train --no-verify model.path=exported {' '.join(JOB)} --nproc 1 adapter.kind=lora adapter.rank=4 "
            f"run.name=tuned",
            "export tuned --merge-lora --out merged",
        ),
    ),
]


def write_text(file: Path) -> None:
    """Sixty short documents of words drawn from a fixed seed."""
    draw = random.Random(0)
    known = words(
        "the a miller map lantern kettle well bridge found lost carried painted near under behind until because"
    )
    with file.open("w", encoding="utf-8") as out:
        for _ in range(60):
            text = " ".join(draw.choice(known) for _ in range(draw.randint(20, 90))) + ".\n"
            out.write(json.dumps({"text": text}) + "\n")


@contextlib.contextmanager
def worktree(commit: str, at: Path) -> Iterator[Path]:
    """The files of a commit, without touching this tree."""
    git = ["git", "-C", str(TREE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(at), commit], check=True)
    try:
        yield at
    finally:
        subprocess.run([*git, "remove", "--force", str(at)], check=False)


def commit_of(name: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(TREE), "rev-parse", "--verify", name + "^{commit}"], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name} is no commit of {TREE}: {done.stderr.strip()}")
    return done.stdout.strip()


def environment(tree: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # A thread that waits gives its core away, so that a busy machine is not much slower.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def check_import(tree: Path) -> None:
    """What is installed must not win over the tree's own code."""
    command = [sys.executable, "-c", "import shardwise; print(shardwise.__file__)"]
    found = subprocess.run(command, env=environment(tree), cwd=tree, capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).resolve().is_relative_to((tree / "src").resolve()):
        sys.exit(f"Python takes shardwise from {found.strip()}, not from {tree / 'src'}")


def run(commands: list[tuple[str, ...]], tree: Path, folder: Path, deadline: float) -> str:
    """Run the commands of a job in `folder`. Returns what went wrong, or nothing. Whatever is left of it is killed."""
    ends = time.monotonic() + deadline
    for number, command in enumerate(commands):
        log = folder / f"output-{number}.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardwise", *command],
                cwd=folder,
                env=environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"`{command[0]}` was not done after {deadline:.0f} s"
            finally:
                if process.poll() is None:
                    end(process)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            said = log.read_text(errors="replace").splitlines()
            error = [line for line in said if line.startswith("error:")] or said[-1:] or ["nothing said"]
            return f"`{command[0]}` ended with {code}: {error[0].strip()}"
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """Its ranks are in sessions of their own: the launcher is asked twice to end them at once, before it is killed
    itself."""
    for _ in range(2):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return


def numbers(folder: Path) -> dict[str, str]:
    """Every computed number of every metrics.jsonl, in hexadecimal, by where it stands."""
    found = {}
    for file in sorted(folder.glob("runs/*/metrics.jsonl")):
        for at, line in enumerate(map(json.loads, file.read_text().splitlines())):
            if "event" in line:
                if proof := line.get("proof"):
                    found[f"{file.parent.name}, proof"] = str(float(proof["largest_difference"]).hex())
                continue  # fill_bubbles evaluates when there is time; that line depends on the clock
            for key in COMPUTED:
                if key in line:
                    value = line[key]
                    found[f"{file.parent.name}, line {at}, step {line['step']}, {key}"] = (
                        value.hex() if isinstance(value, float) else str(value)
                    )
    return found


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def values(self) -> np.ndarray | None:
        """As numbers, where the format is one of floating point that numpy can be given."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.content, "<u2").astype("<u4") << 16).view("<f4").astype(float)
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}
        return np.frombuffer(self.content, kinds[self.dtype]).astype(float) if self.dtype in kinds else None


PART = re.compile(r"(\w+)-\d+-of-\d+\.safetensors")
BOX = re.compile(r"(.*)\[([\d:,]+)\]")


def tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of every safetensors file, by file and name. What a checkpoint has in slices is put together under
    the name of the one file that one rank would have written, as older commits did."""
    found = {}
    boxes: dict[str, list[tuple[list[slice], Stored]]] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        if "foreign" in file.relative_to(folder).parts or file.name.startswith("rng"):
            continue
        part = PART.fullmatch(file.name) if (file.parent / "manifest.json").is_file() else None
        where = file.relative_to(folder).with_name(f"{part[1]}.safetensors") if part else file.relative_to(folder)
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, about in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                piece = content[start + begin : start + end]
                stored = Stored(about["dtype"], tuple(about["shape"]), piece)
                if part and (box := BOX.fullmatch(name)):
                    ranges = [slice(*map(int, one.split(":"))) for one in box[2].split(",")]
                    boxes.setdefault(f"{where}: {box[1]}", []).append((ranges, stored))
                else:
                    found[f"{where}: {name}"] = stored
    return found | {name: put_together(parts) for name, parts in boxes.items()}


def put_together(parts: list[tuple[list[slice], Stored]]) -> Stored:
    """The tensor that slices make up."""
    shape = tuple(max(of_dim) for of_dim in zip(*([one.stop for one in ranges] for ranges, _ in parts), strict=True))
    size = len(parts[0][1].content) // max(1, math.prod(parts[0][1].shape))
    whole = np.zeros((*shape, size), dtype=np.uint8)
    for ranges, stored in parts:
        whole[tuple(ranges)] = np.frombuffer(stored.content, np.uint8).reshape(*stored.shape, size)
    return Stored(parts[0][1].dtype, shape, whole.tobytes())


def chosen(folder: Path) -> dict[str, Any]:
    """What each run of a job has settled on, so that a planner that chooses otherwise is named before the numbers it
    changes."""
    keys = (
        "layout",
        "micro_batch",
        "precision",
        "threads_per_rank",
        "split",
        "recompute",
        "offload",
        "compile",
        "loss",
    )
    plans = {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob("runs/*/plan.json"))}
    return {f"{name}, {key}": plan.get(key) for name, plan in plans.items() for key in keys}


def first_number(base: dict[str, str], here: dict[str, str]) -> str:
    for key in [*base, *(key for key in here if key not in base)]:
        a, b = base.get(key, "missing"), here.get(key, "missing")
        if a != b:
            shown = [repr(float.fromhex(value)) if "0x" in value else value for value in (a, b)]
            return f"{key}: {shown[0]}, here {shown[1]}"
    return ""


def first_tensor(base: dict[str, Stored], here: dict[str, Stored]) -> str:
    for key in [*base, *(key for key in here if key not in base)]:
        a, b = base.get(key), here.get(key)
        if a == b:
            continue
        if a is None or b is None:
            return f"{key}: only {'here' if a is None else 'in the base'}"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{key}: {a.dtype} {list(a.shape)}, here {b.dtype} {list(b.shape)}"
        x, y = a.values(), b.values()
        if x is None or y is None:
            return f"{key}: other bytes"
        return f"{key}: {int((x != y).sum())} of {x.size} elements, largest difference {np.abs(x - y).max():.2g}"
    return ""


def compare(item: Job, trees: dict[str, Path], folder: Path, foreign: Path | None, deadline: float) -> dict[str, Any]:
    """Both sides of one job. Their files are gone afterwards."""
    row: dict[str, Any] = {"job": item.name, "layout": item.layout, "precision": item.precision, "words": item.more}
    failed = []
    for side, tree in trees.items():
        home = folder / side
        for attempt in range(1, ATTEMPTS + 1):
            home.mkdir()
            write_text(home / "text.jsonl")
            if foreign is not None and "model.path=foreign" in item.model:
                shutil.copytree(foreign, home / "foreign")
            began = time.monotonic()
            problem = run(item.commands(), tree, home, deadline)
            row |= {f"{side}_s": round(time.monotonic() - began, 1), f"{side}_aborts": attempt - 1}
            if ABORTED not in problem or attempt == ATTEMPTS:
                break
            shutil.rmtree(home)
        if problem:
            failed.append(f"{side}: {problem}")
    base, here = folder / "base", folder / "here"
    plans = [chosen(base), chosen(here)]
    others = [
        f"{key}: {plans[0][key]}, here {plans[1].get(key)}" for key in plans[0] if plans[0][key] != plans[1].get(key)
    ]
    losses, states = [numbers(base), numbers(here)], [tensors(base), tensors(here)]
    missing = [] if failed or (losses[0] and states[0]) else ["no numbers or no tensors were written"]
    number, tensor = first_number(*losses), first_tensor(*states)
    row |= {
        "ran": not (failed or missing),
        "numbers": len(losses[0]),
        "tensors": len(states[0]),
        "numbers_equal": not (failed or missing or number),
        "tensors_equal": not (failed or missing or tensor),
        "first_difference": next((text for text in [*failed, *missing, *others, number, tensor] if text), None),
    }
    for home in (base, here):
        shutil.rmtree(home)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("job", "layout", "format", "numbers", "tensors", "first difference")
    lines = [heads] + [
        (
            row["job"],
            row["layout"],
            row["precision"],
            *(
                f"{row[what]} same" if row[f"{what}_equal"] else "DIFFER" if row["ran"] else "NOT RUN"
                for what in ("numbers", "tensors")
            ),
            row["first_difference"] or "-",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    return "\n".join("  ".join([f"{text:<{w}}" for text, w in zip(line, widths)] + [line[-1]]) for line in lines)


def foreign_model(folder: Path) -> Path | None:
    """None without transformers; jobs that need it are then left out, and that is said."""
    if importlib.util.find_spec("transformers") is None:
        return None
    subprocess.run([sys.executable, "-c", FOREIGN], cwd=folder, env=environment(TREE), check=True, capture_output=True)
    return folder / "foreign"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="the commit whose numbers are right")
    parser.add_argument("--only", default="", metavar="WORD", help="jobs whose name, layout or format contains it")
    parser.add_argument(
        "--deadline", type=float, default=300.0, metavar="SECONDS", help="for one side of a job (default: 300)"
    )
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(TREE)}, for all jobs only")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    jobs = [item for item in JOBS if args.only in item.title]
    if not jobs:
        sys.exit(
            f"no job has `{args.only}` in its name; names are {', '.join(dict.fromkeys(item.name for item in JOBS))}"
        )
    commit, rows, began = commit_of(args.base), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as name, worktree(commit, Path(name) / "tree") as base:
        folder, trees = Path(name), dict(zip(SIDES, (base, TREE)))
        for tree in trees.values():
            check_import(tree)
        foreign = foreign_model(folder) if any("model.path=foreign" in item.model for item in jobs) else None
        for number, item in enumerate(jobs, 1):
            if "model.path=foreign" in item.model and foreign is None:
                print(f"[{number:>2}/{len(jobs)}] {item.title}: left out, transformers is not installed", flush=True)
                continue
            print(f"[{number:>2}/{len(jobs)}] {item.title} ", end="", flush=True)
            row = compare(item, trees, folder, foreign, args.deadline)
            rows.append(row)
            same = "same" if row["first_difference"] is None else "DIFFERENT" if row["ran"] else "NOT RUN"
            print(f"... base {row['base_s']:.0f} s, here {row['here_s']:.0f} s: {same}", flush=True)
    different = [row for row in rows if row["first_difference"] is not None]
    status = subprocess.run(
        ["git", "-C", str(TREE), "status", "--porcelain", "src"], capture_output=True, text=True
    ).stdout
    report = {
        "base": commit,
        "here": commit_of("HEAD"),
        "changed_since_here": bool(status.strip()),
        "date": time.strftime("%Y-%m-%d"),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "same": not different,
        "rows": rows,
    }
    print("\n" + table(rows))
    print(
        f"\n{len(rows) - len(different)} of {len(rows)} jobs have the numbers of {commit[:12]}, bit by bit; torch "
        f"{report['torch']}"
    )
    out = args.out or (None if args.only else RESULTS)
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
