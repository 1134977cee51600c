"""Runs one rank: sets the process up, trains, and turns whatever happens into an exit code.

Started by local.py through rank.py, by torchrun through `shardwise train`, or called directly when one process is
enough. What is needed is in the run directory, or comes from the process that has read it already (start.py). This is
where the run meets the planner that it asks, the proof of its layout and the reporter: `run` knows none of them.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import terminal
from shardwise.cluster.describe.machine import this_machine
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.files import refused
from shardwise.launch.failures import crash, fail, keep_traceback, lacks_compiler, no_compiler, ran_out_of_memory
from shardwise.launch.planner import RunPlanner
from shardwise.model.dtypes import COMPUTED
from shardwise.plan.resolve.fit import rank_memory_limit
from shardwise.prove.repeat import repeat_first_steps
from shardwise.prove.verify import prove_once
from shardwise.report.header import weights_line
from shardwise.report.reporter import Reporter
from shardwise.run.build import corpus_of, model_spec
from shardwise.run.guards import StopRequests, ending_with
from shardwise.run.heartbeat import Heartbeat, heartbeat_of
from shardwise.run.loop import train
from shardwise.run.own_parts import OwnParts
from shardwise.run.ranks import Ranks, ranks_from_environment
from shardwise.run.rundir import RunDir
from shardwise.run.session import RunInputs, Session
from shardwise.spec.plan import Plan
from shardwise.spec.schema import CommConfig
from shardwise.terminal import patience, shell_word

OLDEST_TORCH = (2, 11)


def main(argv: list[str] | None = None) -> int:
    """Runs a rank that launch/rank.py has started, and returns its exit code."""
    return for_launcher(_run(argv, ranks_from_environment()))


def for_launcher(code: int) -> int:
    """Returns the code with which a rank's process ends. torchrun's process API kills all ranks when one exits with an
    error. An orderly end is none: its code is in the run's last event, where the launcher reads it."""
    orderly = (Exit.STOPPED, Exit.INTERRUPTED, Exit.DIVERGED, Exit.FOUND_WRONG)
    return int(Exit.DONE) if code in orderly else code


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
        from shardwise.launch.verify import verify_rank

        with ending_with(args.launcher):
            return verify_rank(run, ranks)
    return run_worker(run, ranks, None, args.from_step, args.launcher, verify=not args.no_verify)


def run_worker(
    run: RunDir,
    ranks: Ranks,
    inputs: RunInputs | None = None,
    from_step: int | None = None,
    launcher: int | None = None,
    verify: bool = True,
    own: OwnParts | None = None,
) -> int:
    """Trains as this rank and returns the exit code. Clean stops return theirs; a launcher reads it from the run's last
    event instead.

    `inputs` is what this process has read already; None where it is to be read from the run directory, beside `own`
    parts of the program that started the ranks.
    """
    say = terminal.say if ranks.is_first else lambda line: None
    session: Session | None = None
    stops: StopRequests | None = None
    heartbeat = heartbeat_of(ranks.heartbeat)
    try:
        with ending_with(launcher):  # ranks that wait for each other to start would wait for minutes
            session = _set_up(run, ranks, inputs or _read_inputs(run, own or OwnParts()), from_step, heartbeat)
        with (
            run.join_lock(),
            StopRequests(run, session.config.train.time_limit, say, launcher) as stops,
        ):
            if verify:
                heartbeat.enter("proving")
                with patience("proving  this layout on a small model ...", 3.0) if ranks.is_first else nullcontext():
                    line = prove_once(session)
                if line:
                    say(line)
            code = _train(session, stops)
    except UserError as error:
        if error.__cause__ is not None:  # raised by a part of the program
            keep_traceback(run, ranks)
        return fail(run, ranks, error.code, str(error))
    except OSError as error:
        error.filename = error.filename or str(run.path)  # a failed write does not know its file
        problem = refused(error)
        return fail(run, ranks, problem.code, str(problem))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return fail(run, ranks, Exit.OUT_OF_MEMORY, str(ran_out_of_memory(error, run, ranks, session)))
    except KeyboardInterrupt:
        when = (
            "at once: steps since the last checkpoint are lost"
            if stops and stops.has_begun
            else "before the first step"
        )
        text = f"STOPPED  by Ctrl-C {when}\n  do     {run.how_to_resume()}"
        return fail(run, ranks, Exit.INTERRUPTED, text)
    except Exception as error:
        if lacks_compiler(error):
            return fail(run, ranks, Exit.USER_MISTAKE, str(no_compiler(run)))
        return crash(run, ranks, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _train(session: Session, stops: StopRequests) -> int:
    """Trains, with the reporter that listens and the planner that answers, and returns the exit code."""
    planner = RunPlanner(session.config, session.spec, session.device.type)
    with Reporter(session, stops, repeat_first_steps) as reporter:
        if line := weights_line(session.config, session.spec):
            reporter.say(line)
        code = train(session, stops, planner, reporter)
        return code or (Exit.DONE if reporter.is_right else Exit.FOUND_WRONG)


def _read_inputs(run: RunDir, own: OwnParts) -> RunInputs:
    """Returns what the launcher left in the run directory."""
    config = load_config(run.config).config
    spec = model_spec(config.model)
    corpus = own.corpus(config, spec) if own.corpus else corpus_of(config, spec, progress=False)
    return RunInputs(config, spec, corpus, Plan.from_dict(run.read_plan()), own=own)


def _set_up(run: RunDir, ranks: Ranks, inputs: RunInputs, from_step: int | None, heartbeat: Heartbeat) -> Session:
    """Prepares the device and joins the other ranks; returns the session."""
    config, plan = inputs.config, inputs.plan
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
        # Some virtual machines announce AMX and then forbid it: oneDNN's 16-bit kernels die there with SIGILL. This is
        # read at the first matmul; AVX-512 computes the same.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    if ranks.world > 1:
        start_process_group(plan, device)
    limit = rank_memory_limit(config, this_machine().times(ranks.nodes), plan)
    return Session(run, inputs, ranks, device, limit, from_step, heartbeat)


def check_torch(plan: Plan, version: str) -> None:
    """Refuses a torch on which splitting a model is not proven: before OLDEST_TORCH, FSDP2 lacks what ZeRO and
    pipelines here rely on."""
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
    """Refuses a run that was planned for GPUs where torch cannot use them, with the reason that torch gives."""
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
        fix="`shardwise doctor` looks closer; "
        f"CUDA_VISIBLE_DEVICES= shardwise resume {shell_word(run.path)}   trains on CPUs",
        code=Exit.HARDWARE,
    )


def start_process_group(comm: CommConfig, device: torch.device) -> None:
    """Joins the other ranks, unless this process has joined them already."""
    backend = comm.backend if comm.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=comm.timeout))
