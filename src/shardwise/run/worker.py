"""One rank: sets the process up, trains, and turns whatever happens into an exit code.

Started by launch/local.py through launch/rank.py, by torchrun through `shardwise train`, or called
directly when one process is enough. Everything it needs is in the run directory.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.cluster.machine import this_machine
from shardwise.config.load import load_config
from shardwise.config.schema import CommConfig, Config
from shardwise.errors import Exit, UserError
from shardwise.files import refused
from shardwise.launch.ranks import Ranks, ranks_from_environment
from shardwise.plan.plan import Plan
from shardwise.plan.resolve import rank_memory_limit
from shardwise.run.build import model_spec
from shardwise.run.guards import StopRequests
from shardwise.run.loop import Session, train
from shardwise.run.rundir import RunDir


def main(argv: list[str] | None = None) -> int:
    """What launch/rank.py calls after the imports."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.run.worker")
    parser.add_argument("run_dir")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--launcher", type=int, help="the process that must live as long as this one")
    args = parser.parse_args(argv)
    code = run_worker(RunDir(Path(args.run_dir)), ranks_from_environment(), args.from_step, args.launcher)
    # torchrun's process API kills all ranks when one exits with an error. An orderly end is none: its code is in the run's
    # last event, where the launcher reads it.
    return int(Exit.DONE) if code in (Exit.STOPPED, Exit.INTERRUPTED, Exit.DIVERGED) else code


def run_worker(run: RunDir, ranks: Ranks, from_step: int | None = None, launcher: int | None = None) -> int:
    """Train as this rank. Clean stops return their code; a launcher reads it from the run's last event instead."""
    say = functools.partial(print, flush=True) if ranks.is_first else lambda line: None
    try:
        config = load_config(run.config).config
        session = _set_up(run, ranks, config, from_step)
        with (
            run.join_lock() if ranks.is_first else nullcontext(),
            StopRequests(run, config.train.time_limit, say, launcher) as stops,
        ):
            code = train(session, stops)
    except UserError as error:
        return _fail(run, ranks, error.code, str(error))
    except OSError as error:
        error.filename = error.filename or str(run.path)  # a failed write does not know its file
        problem = refused(error)
        return _fail(run, ranks, problem.code, str(problem))
    except torch.OutOfMemoryError as error:
        return _fail(run, ranks, Exit.OUT_OF_MEMORY, _out_of_memory(error))
    except MemoryError:
        return _fail(run, ranks, Exit.OUT_OF_MEMORY, _out_of_memory("the system gave no more memory"))
    except KeyboardInterrupt:
        return _fail(run, ranks, Exit.INTERRUPTED, "STOPPED  by Ctrl-C before the first step")
    except Exception as error:
        return _crash(run, ranks, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _set_up(run: RunDir, ranks: Ranks, config: Config, from_step: int | None) -> Session:
    """The plan, the device, the other ranks."""
    plan = Plan.from_dict(run.read_plan())
    if plan.world != ranks.world:
        raise UserError(
            f"this job has {ranks.world} processes, the plan needs {plan.world}",
            why=f"{plan.layout} was planned for {run.path}",
            fix=f"start {plan.world} processes, or set parallel.dp={ranks.world}",
        )
    device = torch.device("cuda", ranks.local_rank) if plan.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(plan.threads_per_rank)
    if device.type == "cpu" and plan.precision == "bf16-true":
        # Some virtual machines announce AMX and then forbid it: oneDNN's bf16 kernels die there with SIGILL. This is read
        # at the first matmul; AVX-512 computes the same.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
        # Recomputed logits make a backward thread the first to use cuBLAS there; torch sets the context itself and says so.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    if ranks.world > 1:
        start_process_group(config.comm, device)
    limit = rank_memory_limit(config, this_machine(), plan)
    return Session(run, config, plan, model_spec(config.model), ranks, device, limit, from_step=from_step)


def start_process_group(comm: CommConfig, device: torch.device) -> None:
    backend = comm.backend if comm.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=comm.timeout))


def _fail(run: RunDir, ranks: Ranks, code: Exit, text: str) -> int:
    """The other ranks' words go to their logs; the launcher shows them if the first rank had none of its own."""
    print(text, file=sys.stderr, flush=True)
    if ranks.is_first:
        _last_word(run, code, text.splitlines()[0])
    return int(code)


def _crash(run: RunDir, ranks: Ranks, error: Exception) -> int:
    """A bug of ours, or a peer that went away: the traceback goes to a file, one line to the person."""
    lost_peer = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo" in str(error).lower()
    code = Exit.HARDWARE if lost_peer else Exit.BUG
    file = run.crash / f"rank{ranks.rank}.txt"
    try:
        file.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        traceback.print_exc()
    if ranks.is_first or not lost_peer:
        print(
            f"error: rank {ranks.rank}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            file=sys.stderr,
        )
        print(
            f"  why  {'another rank went away' if lost_peer else 'this is a bug of shardwise'}; details in {file}",
            file=sys.stderr,
        )
        print(f"  fix  shardwise resume {run.path}", file=sys.stderr, flush=True)
    if ranks.is_first:
        _last_word(run, code, str(error)[:500])
    return int(code)


def _last_word(run: RunDir, code: Exit, why: str) -> None:
    event = "stopped" if code in (Exit.STOPPED, Exit.INTERRUPTED) else "failed"
    with suppress(OSError):  # the disk may be full, which is what was just said
        run.append({"event": event, "exit": int(code), "why": why, "wall_time": time.time()})


def _out_of_memory(error: object) -> str:
    return (
        "error: out of memory\n"
        f"  why  {str(error).splitlines()[0]}\n"
        "  fix  train.micro_batch=1, a shorter train.seq_len, or a smaller model; then `shardwise resume`"
    )
