"""Proves a user's own layout: it and one process train the same small model in fp64, and every number is compared.

`prove` is called by all ranks together, by `shardwise verify` in processes of its own and by `train` before its first
step. In fp64 only real mistakes survive: rounding is at 1e-15, the limit at 1e-9. What was proven is remembered beside
the runs, per layout, kind of model, torch version and version of this package.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.shrink import shrink_adapter, shrink_plan, shrink_spec
from shardwise.prove.trial import train_in_layout
from shardwise.run.session import Session
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

LIMIT = 1e-9
NUM_STEPS = 3
PROOF_SCALE = 2.0**16  # loss scale for layouts that will train in fp16: exact in fp64
PROOFS_FILE = ".proofs.json"  # the file inside run.dir that remembers what was proven


@dataclass(frozen=True)
class Proof:
    """The largest differences between a layout and one process."""

    layout: str
    steps: int
    losses: float
    norms: float
    gradients: float  # of the first step, relative to the largest entry of their tensor
    parameters: float  # after the last step, the same
    worst: str  # the tensor with the largest difference
    seconds: float

    @property
    def largest(self) -> float:
        """The largest of the four differences."""
        return max(self.losses, self.norms, self.gradients, self.parameters)

    @property
    def holds(self) -> bool:
        return self.largest <= LIMIT

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "largest": self.largest, "limit": LIMIT, "same": self.holds}


def prove(
    spec: ModelSpec,
    plan: Plan,
    optimizer: OptimizerConfig,
    rank: int,
    device: torch.device,
    steps: int = NUM_STEPS,
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008  (frozen)
) -> Proof:
    """Collective over the ranks of `plan`, which is executed as it is while the model shrinks. Returns rank 0's result
    on every rank."""
    began = time.perf_counter()
    small = shrink_plan(plan, max_ranks=plan.world)
    trial = Trial(
        num_steps=steps,
        global_batch=small.global_batch,
        micro_batch=small.micro_batch,
        seq_len=small.seq_len,
        # 8-bit states round by design; who updates which elements is the same as with AdamW.
        optimizer=replace(optimizer, lr=1e-3, name=OPTIMIZERS[optimizer.name].full or optimizer.name),
        adapter=shrink_adapter(adapter, spec),
        through_fsdp=plan.uses_fsdp,
        loss_scale=PROOF_SCALE if plan.scales_loss else "auto",
        attention="math" if device.type == "cuda" else "auto",  # fused GPU kernels have no fp64
    )
    small = replace(small, num_steps=steps, precision="fp64", reduce_dtype="auto", loss_scale=trial.loss_scale)
    shape = shrink_spec(spec, small)
    record = train_in_layout(shape, small, trial, rank, device)
    found = [0.0] * 5
    worst = ""
    if rank == 0:
        differences, worst = compare(record, train_plain(shape, trial, device))
        found = [*differences, time.perf_counter() - began]
    if plan.world > 1:
        tensor = torch.tensor(found, dtype=torch.float64, device=device)
        dist.broadcast(tensor, 0)
        found = tensor.tolist()
    losses, norms, gradients, parameters, seconds = found
    return Proof(plan.layout, steps, losses, norms, gradients, parameters, worst, seconds)


def compare(record: Record, truth: Record) -> tuple[tuple[float, float, float, float], str]:
    """Returns the largest difference of losses, norms, gradients and parameters, and the tensor that differs most."""
    losses = max(abs(a - b) for a, b in zip(record.losses, truth.losses, strict=True))
    norms = max(abs(a - b) / max(b, 1e-30) for a, b in zip(record.norms, truth.norms, strict=True))
    by_name = {f"gradient of {name}": d for name, d in _differences(record.gradients, truth.gradients).items()}
    gradients = max(by_name.values())
    by_name |= _differences(record.parameters, truth.parameters)
    parameters = max(value for name, value in by_name.items() if not name.startswith("gradient"))
    return (losses, norms, gradients, parameters), max(by_name, key=lambda name: by_name[name])


def _differences(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference per tensor, relative to its largest entry; a tensor that is missing on one side
    differs without bound."""
    differences = dict.fromkeys(found.keys() ^ truth.keys(), float("inf"))
    for name in found.keys() & truth.keys():
        a, b = found[name].cpu().double(), truth[name].cpu().double()
        if a.shape != b.shape or not bool(torch.isfinite(a).all()):
            differences[name] = float("inf")
        elif b.numel():
            # Some gradients are zero but for rounding (biases of keys): those are measured against a small number.
            differences[name] = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
    return differences


# Before a run's first step ------------------------------------------------------------------------------------------


def prove_once(session: Session) -> str | None:
    """Collective. Proves this layout unless that was done before, and raises if it does not hold. Returns a line to
    print, or None."""
    config, spec, plan = session.config, session.spec, session.plan
    rank, device = session.ranks.rank, session.device
    if plan.world == 1 and plan.offload == "none":
        return None
    try:
        file, key = Path(config.run.dir) / PROOFS_FILE, proof_key(spec, plan, config.adapter)
    except UserError as problem:  # a model that cannot be made smaller; every rank finds the same
        return (
            f"proof    {plan.layout}: none before the first step, {problem.what} ({problem.why}); "
            "the proof is the repetition in one process at the end"
        )
    known = rank == 0 and key in read_proofs(file)
    if plan.world > 1:
        flag = torch.tensor([int(known)], device=device)
        dist.broadcast(flag, 0)
        known = bool(flag)
    if known:
        return None
    proof = prove(spec, plan, config.optimizer, rank, device, adapter=config.adapter)
    if not proof.holds:
        raise UserError(
            f"{plan.layout} does not compute what one process computes",
            why=f"a small model of this kind, {proof.steps} steps in fp64: {describe(proof)}"
            + (f"; most of all {proof.worst}" if proof.worst else ""),
            fix="please report this; another parallel.layout, or --no-verify to train all the same",
            code=Exit.FOUND_WRONG,
        )
    if rank == 0:
        remember(file, key, proof)
    return f"proof    {plan.layout}: {proof.steps} steps in fp64, small model of this kind; {describe(proof)}"


def describe(proof: Proof) -> str:
    return (
        f"largest difference from one process: losses {proof.losses:.1g}, gradients {proof.gradients:.1g}, "
        f"parameters {proof.parameters:.1g}"
    )


def proof_key(spec: ModelSpec, plan: Plan, adapter: AdapterConfig = AdapterConfig()) -> str:  # noqa: B008  (frozen)
    """Returns a text for what a proof covers: the layout, the number of micro-batches as far as it matters, the kind of
    model, the versions."""
    from shardwise import __version__

    small = shrink_plan(plan, max_ranks=plan.world)
    shape = replace(shrink_spec(spec, small), name="any")
    kind = " ".join(f"{name}={value}" for name, value in shape.to_dict().items())
    batch = f"{small.global_batch}/{small.micro_batch}"
    way = "mixed" if plan.uses_fsdp else "copies" if plan.copies else "plain"
    way += " scaled" if plan.scales_loss else ""
    if adapter.kind != "none":
        way += f" {asdict(shrink_adapter(adapter, spec))}"
    way += " activation_offload" if plan.activation_offload else ""
    way += " disk" if plan.offload_to == "nvme" else ""
    return f"{plan.layout} {way} | batch {batch} | {plan.device} | torch {torch.__version__} | {__version__} | {kind}"


def read_proofs(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(file: Path, key: str, proof: Proof) -> None:
    """Notes a proof in a file, as well as it can: one that cannot be written down is made again next time."""
    proofs = read_proofs(file) | {key: {"largest_difference": proof.largest, "time": time.time()}}
    try:
        write_atomically(file, json.dumps(proofs, indent=1) + "\n")
    except (OSError, UserError):
        return
