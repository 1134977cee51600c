"""Proofs: they hold for what is right, and a mistake of any size that matters makes `verify` exit with 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from foreign_models import MODULES, write_model

from shardwise.errors import Exit, UserError
from shardwise.interop.huggingface.load_save import read_spec
from shardwise.parallel.engine import Engine
from shardwise.prove import verify
from shardwise.prove.reference import Record
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

CPU = torch.device("cpu")


def plan_of(**layout: object) -> Plan:
    values = dict(device="cpu", precision="bf16", seq_len=64, num_steps=9, threads_per_rank=1, reason="")
    return Plan(**values | dict(global_batch=8, micro_batch=2) | layout)  # type: ignore[arg-type]


def proof_of(
    plan: Plan, broken: str = "", spec: ModelSpec | None = None, adapter: AdapterConfig | None = None
) -> verify.Proof:
    """Runs on a rank. `broken`: a method of the engine that does nothing."""
    kept = getattr(Engine, broken) if broken else None
    try:
        if broken:
            setattr(Engine, broken, lambda self, *arguments: None)
        adapter = adapter or AdapterConfig()
        return verify.prove(spec or preset("tiny"), plan, OptimizerConfig(), dist.get_rank(), CPU, adapter=adapter)
    finally:
        if broken:
            setattr(Engine, broken, kept)


def test_a_right_layout_is_proven_and_every_rank_knows(ranks) -> None:
    proofs = ranks.run(proof_of, 4, plan_of(dp=2, zero=3, tp=2))
    assert all(proof.holds and proof.largest < 1e-12 for proof in proofs)
    assert len({proof.gradients for proof in proofs}) == 1


@pytest.mark.parametrize("broken", ["sum_partial", "multiply"])
def test_a_broken_layout_is_found(ranks, broken: str) -> None:
    proof = ranks.run(proof_of, 2, plan_of(tp=2, sequence=True), broken)[0]
    assert not proof.holds and proof.worst


@pytest.mark.parametrize("broken", ["", "multiply"])
@pytest.mark.parametrize("kind", ["opt", "gpt_oss"])
def test_so_is_a_model_that_only_transformers_knows(ranks, tmp_path: Path, kind: str, broken: str) -> None:
    ranks.preload(*MODULES)
    spec = read_spec(write_model(kind, tmp_path / kind))
    proofs = ranks.run(proof_of, 2, plan_of(dp=2, zero=3, global_batch=7), broken, spec)
    assert all(proof.holds == (not broken) for proof in proofs)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_so_are_adapters_on_such_a_model(ranks, tmp_path: Path, kind: str) -> None:
    ranks.preload(*MODULES)
    spec = read_spec(write_model("gpt_neox", tmp_path / "neox"))
    plan = plan_of(dp=2, zero=3, global_batch=7, recompute="full")
    adapter = AdapterConfig(kind=kind, rank=4, targets=("all-linear",))
    assert all(proof.holds for proof in ranks.run(proof_of, 2, plan, "", spec, adapter))
    assert not ranks.run(proof_of, 2, plan, "multiply", spec, adapter)[0].holds


def test_a_missing_or_infinite_tensor_differs_without_bound() -> None:
    good = Record([1.0], [1.0], {"a": torch.ones(2)}, {"a": torch.ones(2)})
    missing = Record([1.0], [1.0], {}, {"a": torch.ones(2)})
    broken = Record([1.0], [1.0], {"a": torch.tensor([1.0, float("nan")])}, {"a": torch.ones(2)})
    assert verify.compare(good, good)[0] == (0.0, 0.0, 0.0, 0.0)
    assert verify.compare(missing, good)[0][2] == verify.compare(broken, good)[0][2] == float("inf")


def test_the_verb_exits_with_one_when_numbers_differ(run_here, monkeypatch, capsys) -> None:
    """One process proves itself too: here, after its clipping was taken out."""
    monkeypatch.setattr(Engine, "multiply", lambda self, factor: None)
    assert run_here("verify", "--nproc", 1, "--steps", 2) == Exit.FOUND_WRONG
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "do not train with it" in shown


def test_the_verb_reports_as_json(run_here, capsys) -> None:
    assert run_here("verify", "--nproc", 1, "--steps", 1, "--json", "model.preset=mixtral-8x7b") == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True and found["steps"] == 1


def test_proofs_are_remembered_by_layout_and_kind_of_model() -> None:
    key = verify.proof_key(preset("tiny"), plan_of(dp=2))
    assert key != verify.proof_key(preset("tiny"), plan_of(dp=2, precision="fp32")), "mixed precision takes another way"
    assert key != verify.proof_key(preset("tiny"), plan_of(dp=2, zero=1))
    assert key != verify.proof_key(preset("gpt2"), plan_of(dp=2))
    assert key != verify.proof_key(preset("tiny"), plan_of(dp=2, global_batch=7))
    ways = [("none", "cpu"), ("optimizer", "cpu"), ("optimizer", "nvme"), ("all", "cpu"), ("all", "nvme")]
    keys = {verify.proof_key(preset("tiny"), plan_of(dp=2, offload=what, offload_to=to)) for what, to in ways}
    assert len(keys) == len(ways), "each way of offloading is proven for itself"
    assert torch.__version__ in key


def test_a_damaged_memory_only_means_a_new_proof(tmp_path: Path) -> None:
    file = tmp_path / verify.PROOFS_FILE
    assert verify.read_proofs(file) == {}
    for text in ("{", "[1]"):
        file.write_text(text)
        assert verify.read_proofs(file) == {}
    verify.remember(file, "a layout", verify.Proof("dp=2", 3, 0.0, 0.0, 0.0, 0.0, "", 1.0))
    assert "a layout" in verify.read_proofs(file)


def test_an_older_torch_is_refused_for_split_models() -> None:
    from shardwise.launch.worker import check_torch

    pipeline = plan_of(pp=2, split=(1, 1))
    for plan in (pipeline, plan_of(dp=2, zero=3), plan_of(tp=2)):
        with pytest.raises(UserError, match=r"needs torch 2\.11 or newer, this is 2\.9\.1"):
            check_torch(plan, "2.9.1+cu128")
        check_torch(plan, "2.11.0")
        check_torch(plan, "3.0.0a0")
    check_torch(plan_of(dp=2), "2.9.1")
