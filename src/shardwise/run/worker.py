"""One rank: sets the process up, trains, and turns whatever happens into an exit code.

Started by launch/local.py through launch/rank.py, by torchrun through `shardwise train`, or called
directly when one process is enough. Everything it needs is in the run directory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.cluster.describe.machine import this_machine
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.files import refused, write_atomically
from shardwise.interop.transformers.spec import spec_from_dict
from shardwise.launch.ranks import Ranks, ranks_from_environment
from shardwise.model.dtypes import COMPUTED
from shardwise.plan.resolve.fit import rank_memory_limit
from shardwise.prove.verify import prove, prove_once
from shardwise.report.out_of_memory import out_of_memory
from shardwise.run.build import model_spec
from shardwise.run.guards import StopRequests
from shardwise.run.loop import Session, train
from shardwise.run.rundir import RunDir
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig, CommConfig, Config, OptimizerConfig

OLDEST_TORCH = (2, 11)
NO_COMPILER = ("No working C++ compiler", "Failed to find C compiler")
"""What torch.compile says on CPUs, and triton on GPUs."""


def main(argv: list[str] | None = None) -> int:
    """What launch/rank.py calls after the imports."""
    code = _run(argv, ranks_from_environment())
    # torchrun's process API kills all ranks when one exits with an error. An orderly end is none: its code is in the run's
    # last event, where the launcher reads it.
    orderly = (Exit.STOPPED, Exit.INTERRUPTED, Exit.DIVERGED, Exit.FOUND_WRONG)
    return int(Exit.DONE) if code in orderly else code


def run_alone(run: RunDir, options: Sequence[str]) -> int:
    """One process is enough: this one. Returns its exit code as it is."""
    return _run([str(run.path), *options], Ranks())


def _run(argv: list[str] | None, ranks: Ranks) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.rank")
    parser.add_argument("run_dir")
    parser.add_argument("--from-step", type=int)
    parser.add_argument("--launcher", type=int, help="the process that must live as long as this one")
    parser.add_argument("--no-verify", action="store_true", help="train without a proof of the layout")
    parser.add_argument("--verify", action="store_true", help="prove the layout and end")
    args = parser.parse_args(argv)
    run = RunDir(Path(args.run_dir))
    if args.verify:
        return run_verify(run, ranks)
    return run_worker(run, ranks, args.from_step, args.launcher, verify=not args.no_verify)


def run_worker(
    run: RunDir, ranks: Ranks, from_step: int | None = None, launcher: int | None = None, verify: bool = True
) -> int:
    """Train as this rank. Clean stops return their code; a launcher reads it from the run's last event instead."""
    say = functools.partial(print, flush=True) if ranks.is_first else lambda line: None
    session: Session | None = None
    try:
        config = load_config(run.config).config
        session = _set_up(run, ranks, config, from_step)
        with (
            run.join_lock() if ranks.is_first else nullcontext(),
            StopRequests(run, config.train.time_limit, say, launcher) as stops,
        ):
            if verify and (line := prove_once(config, session.spec, session.plan, ranks.rank, session.device)):
                say(line)
            code = train(session, stops)
    except UserError as error:
        return _fail(run, ranks, error.code, str(error))
    except OSError as error:
        error.filename = error.filename or str(run.path)  # a failed write does not know its file
        problem = refused(error)
        return _fail(run, ranks, problem.code, str(problem))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _fail(run, ranks, Exit.OUT_OF_MEMORY, str(_out_of_memory(error, run, ranks, session)))
    except KeyboardInterrupt:
        text = f"STOPPED  by Ctrl-C before the first step\n  do     shardwise resume {run.path}"
        return _fail(run, ranks, Exit.INTERRUPTED, text)
    except Exception as error:
        if any(sign in str(error) for sign in NO_COMPILER):
            return _fail(run, ranks, Exit.USER_MISTAKE, str(_no_compiler(run)))
        return _crash(run, ranks, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def run_verify(run: RunDir, ranks: Ranks) -> int:
    """One rank of `shardwise verify`; rank 0 leaves the result in the directory."""
    try:
        job = json.loads(run.proof_job.read_text(encoding="utf-8"))
        plan, device = replace(Plan.from_dict(job["plan"]), offload_dir=str(run.path)), torch.device("cpu")
        torch.set_num_threads(plan.threads_per_rank)
        if ranks.world > 1:
            start_process_group(CommConfig(), device)
        optimizer = OptimizerConfig(**{**job["optimizer"], "betas": tuple(job["optimizer"]["betas"])})
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job["adapter"].items()}
        adapter = AdapterConfig(**settings)
        proof = prove(spec_from_dict(job["model"]), plan, optimizer, ranks.rank, device, job["steps"], adapter)
        if ranks.is_first:
            write_atomically(run.proof, json.dumps(proof.to_dict()))
    except Exception as error:
        return _crash(run, ranks, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(Exit.DONE)


def _set_up(run: RunDir, ranks: Ranks, config: Config, from_step: int | None) -> Session:
    """The plan, the device, the other ranks."""
    plan = Plan.from_dict(run.read_plan())
    if plan.world != ranks.world:
        raise UserError(
            f"this job has {ranks.world} processes, the plan needs {plan.world}",
            why=f"{plan.layout} was planned for {run.path}",
            fix=f"start {plan.world} processes, or set parallel.dp={ranks.world}",
        )
    check_torch(plan, torch.__version__)
    if plan.device == "cuda":
        check_cuda(run)
    device = torch.device("cuda", ranks.local_rank) if plan.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(plan.threads_per_rank)
    if device.type == "cpu" and COMPUTED[plan.precision].itemsize == 2:
        # Some virtual machines announce AMX and then forbid it: oneDNN's 16-bit kernels die there with SIGILL. This is read
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


def check_torch(plan: Plan, version: str) -> None:
    """Splitting a model is proven from OLDEST_TORCH on; before it FSDP2 lacks what ZeRO and pipelines here rely on."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    splits = plan.pp > 1 or plan.tp > 1 or plan.zero > 0
    if splits and found < OLDEST_TORCH:
        needed = ".".join(str(part) for part in OLDEST_TORCH)
        raise UserError(
            f"{plan.layout} needs torch {needed} or newer, this is {version}",
            why="on older versions a split model is not proven to compute what one process computes",
            fix=f"install torch >= {needed}, or parallel.layout=dp={plan.world}",
        )


def check_cuda(run: RunDir) -> None:
    """A run that was planned for GPUs meets a torch that cannot use them, for a reason that only torch knows."""
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        why = "torch finds none"
    except (RuntimeError, AssertionError) as error:  # its ways to say that CUDA does not start, or was left out
        why = str(error).splitlines()[0]
    raise UserError(
        "this run was planned for a GPU that torch cannot use",
        why=why,
        fix=f"`shardwise doctor` looks closer; CUDA_VISIBLE_DEVICES= shardwise resume {run.path}   trains on CPUs",
        code=Exit.HARDWARE,
    )


def _no_compiler(run: RunDir) -> UserError:
    return UserError(
        "this machine has no compiler for speed.compile",
        why="torch.compile makes C++ on CPUs and starts its GPU kernels from C; neither g++ nor gcc is found",
        fix=f"shardwise resume {run.path} speed.compile=none   or install g++",
    )


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
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = "this is a bug of shardwise"
        if lost_peer:  # in the words of gloo and NCCL it is hard to find
            waited = "time" in said.lower() and "out" in said.lower()
            said = "another rank did not answer within comm.timeout" if waited else "another rank went away"
            why = "it has ended, or is stuck"
        print(f"error: rank {ranks.rank}: {said}\n  why  {why}; details in {file}", file=sys.stderr)
        print(f"  fix  shardwise resume {run.path}", file=sys.stderr, flush=True)
    if ranks.is_first:
        _last_word(run, code, str(error)[:500])
    return int(code)


def _last_word(run: RunDir, code: Exit, why: str) -> None:
    event = "stopped" if code in (Exit.STOPPED, Exit.INTERRUPTED) else "failed"
    with suppress(OSError):  # the disk may be full, which is what was just said
        run.append({"event": event, "exit": int(code), "why": why, "wall_time": time.time()})


def _out_of_memory(error: BaseException, run: RunDir, ranks: Ranks, session: Session | None) -> UserError:
    if session is None:
        return UserError(
            "out of memory before the run began",
            why=str(error) or "the system gave no more memory",
            fix=f"end what else runs on this machine, then `shardwise resume {run.path}`",
            code=Exit.OUT_OF_MEMORY,
        )
    plan = Plan.from_dict(run.read_plan())  # with the micro-batch that the run has chosen
    return out_of_memory(error, run, ranks.rank, session.config, plan, session.spec, session.memory_limit)
