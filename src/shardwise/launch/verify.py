"""Starts and executes the ranks that prove a layout, for `shardwise verify`. torch is imported by the ranks only."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.interop.transformers.spec import spec_from_dict
from shardwise.launch.local import start_ranks
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schema import AdapterConfig, CommConfig, Config, OptimizerConfig

if TYPE_CHECKING:
    from shardwise.config.load import Loaded
    from shardwise.plan.resolve.resolve import Resolved

NO_LIMIT = 2**62  # bytes of memory: what is proven is a small model, whatever the real one needs


def plan_to_prove(loaded: Loaded, spec: ModelSpec, nproc: int | None) -> Resolved:
    """Returns the plan for a machine that has memory for everything: a proof is about numbers."""
    from shardwise.cluster.describe.machine import this_machine
    from shardwise.plan.resolve.resolve import resolve

    config = loaded.config
    here = this_machine()
    # fp8 takes the way of bf16, which `auto` means on a GPU; the numbers are those of fp64.
    computes_bf16 = here.gpus if config.memory.precision == "auto" else PRECISIONS[config.memory.precision].is_fp8
    precision = "bf16" if computes_bf16 else config.memory.precision
    # Tensors that wait in CPU memory are the same tensors, and here there is no other memory.
    memory = replace(config.memory, limit=NO_LIMIT, precision=precision, activation_offload=False)
    config = replace(config, memory=memory)
    machine = replace(here, gpus=())
    return resolve(config, spec, machine, nproc, 1, loaded.origins)


def verify_layout(spec: ModelSpec, plan: Plan, config: Config, steps: int) -> dict[str, Any]:
    """Starts the ranks of `plan`, which is small enough to be proven here; returns the proof as they wrote it
    (prove/verify.py)."""

    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
        run = RunDir(Path(folder))
        for place in (run.log, run.crash):
            place.mkdir()
        sections = {"optimizer": asdict(config.optimizer), "adapter": asdict(config.adapter)}
        job = {"model": spec.to_dict(), "plan": plan.to_dict(), **sections, "steps": steps}
        run.proof_job.write_text(json.dumps(job), encoding="utf-8")
        if plan.world == 1:
            code = verify_rank(run, Ranks())
        else:
            code = start_ranks(run, plan.world, plan.threads_per_rank, None, ["--verify"])
        if code or not run.proof.is_file():
            details = "".join(file.read_text(encoding="utf-8") for file in sorted(run.crash.glob("rank*.txt"))[:1])
            raise UserError(
                f"{plan.layout} could not be run to the end",
                why=details.strip().splitlines()[-1] if details else f"its ranks ended with code {code}",
                fix="please report this with the layout",
                code=Exit.FOUND_WRONG,
            )
        return json.loads(run.proof.read_text(encoding="utf-8"))


def verify_rank(run: RunDir, ranks: Ranks) -> int:
    """Executes one rank of `shardwise verify` and returns its exit code; rank 0 leaves the result in the directory."""
    import torch
    import torch.distributed as dist

    from shardwise.launch.failures import crash
    from shardwise.launch.worker import start_process_group
    from shardwise.prove.verify import prove

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
        return crash(run, ranks, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(Exit.DONE)
