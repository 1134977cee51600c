"""benchmarks/planner_accuracy.py on made-up directories: what it reads, what it skips and why, and its figures."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy.process import CONTEXT, PAIR, RING, SWITCH
from accuracy.question import load_stack, question_of, table
from accuracy.run import GIB, Run, Skip, read_runs
from accuracy.score import Answer, quantile, spearman
from planner_accuracy import answer

from shardwise.cluster.describe.table import known_devices

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

ROW = {
    "source": "somebody",
    "model": "llama-8B-MHA",
    "params": 8858636288,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 32,
    "ffn": 14336,
    "vocab": 131072,
    "seq": 4096,
    "gpus": 16,
    "gpu_kind": "H100-80G-SXM",
    "nodes": 2,
    "tp": 4,
    "pp": 2,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "dp": 2,
    "zero": 1,
    "sp": 1,
    "recompute": "none",
    "micro_batch": 1,
    "global_batch": 256,
    "precision": "bf16",
    "step_time_s": 9.5,
    "tokens_per_s_per_gpu": "",
    "tflops_per_gpu": "",
    "mfu": "",
    "peak_mem_gb": 40,
    "note": "1f1b; untied emb",
    "stack": "nanotron",
    "status": "ok",
    "compile": "",
    "async_tp": "",
}
OTHER = {
    "source": "arXiv 2401.10241",
    "gpu": "A100-80GB",
    "n_gpus": 8,
    "gpus_per_node": 8,
    "model": "GPT-1.5B",
    "params_b": 1.5,
    "layers": 22,
    "hidden": 2304,
    "heads": 24,
    "vocab": "",
    "seq": 1024,
    "tp": 1,
    "pp": 8,
    "vpp": 1,
    "cp": 1,
    "ep": 1,
    "dp": 1,
    "shard": "none",
    "gbs": 144,
    "mbs": 6,
    "ga": 24,
    "precision": "fp16",
    "recompute": "none",
    "offload": "",
    "step_time_s": 1.24,
    "tok_s_gpu": "",
    "tflops_gpu": "",
    "mem_gb": 59,
    "status": "sourced",
    "notes": "schedule ZB-1p",
}


def run_of(**changes: object) -> Run:
    return Run("file.csv", 2, {name: str(value) for name, value in (ROW | changes).items()})


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def accuracy(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "planner_accuracy.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_directory_it_has_never_seen(tmp_path):
    rows = [ROW | {"tp": tp, "dp": 8 // tp, "step_time_s": 9.0 + tp} for tp in (1, 2, 4, 8)]
    rows += [
        ROW | {"micro_batch": 2},
        ROW | {"status": "failed", "tp": 1, "dp": 8, "micro_batch": 32, "step_time_s": ""},
    ]
    write(tmp_path / "new.csv", [*rows, ROW | {"gpu_kind": "Etched-1"}, ROW | {"dp": 3}])
    write(tmp_path / "other.csv", [OTHER, OTHER | {"notes": "schedule ZB-2p"}])
    write(tmp_path / "calib_links.csv", [{"bytes": 1, "time": 2}])
    done = accuracy(tmp_path, "--json", tmp_path / "result.json", "--rows", tmp_path / "rows.out")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    new = result["all"]["files"]["new.csv"]
    assert (new["rows"], new["step"]["rows"], new["oom"]["failed"]) == (6, 5, 1)
    assert new["ranking"]["groups"] == 1
    assert result["all"]["files"]["other.csv"]["memory"]["rows"] == 1  # ZB-2p holds more than any schedule of ours
    assert result["skipped"]["new.csv"] == {
        "unknown GPU kind 'Etched-1'": 1,
        "tp x pp x cp x dp is not the number of GPUs": 1,
    }
    assert result["date"] and result["versions"]["shardwise"]
    assert "calib_links.csv: not training runs" in done.stdout
    assert len((tmp_path / "rows.out").read_text().splitlines()) == 1 + 6 + 2


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_nothing_to_read_is_a_mistake_of_the_user(tmp_path, name):
    (tmp_path / "empty").mkdir()
    done = accuracy(tmp_path / name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no ") and "\n  fix  " in done.stderr


def test_both_headers_are_one_kind_of_row(tmp_path):
    write(tmp_path / "other.csv", [OTHER])
    [run] = read_runs(tmp_path / "other.csv") or []
    asked = question_of(run)
    assert (asked.plan.schedule, asked.plan.pp, asked.plan.num_microbatches) == ("zero-bubble", 8, 24)
    assert asked.plan.split == (2, 3, 3, 3, 3, 3, 3, 2)  # embedding and head count as a layer each
    assert (asked.stack.name, asked.cluster.device.name, run.memory_bytes) == ("megatron-lm", "a100-80", 59 * GIB)


def test_a_row_is_rebuilt():
    asked = question_of(run_of())
    plan = asked.plan
    assert plan.layout == question_of(run_of(note="1f1b; untied emb", sp="1")).plan.layout
    assert (plan.tp, plan.pp, plan.dp, plan.zero, plan.sequence, plan.num_microbatches) == (4, 2, 2, 1, True, 128)
    assert (asked.model.num_parameters, asked.model.gated, asked.model.tied) == (ROW["params"], True, False)
    assert asked.cluster.world == 16 and asked.assumed == ("network: the vendor's reference system",)
    assert asked.mfu(9.5) == pytest.approx(asked.model.flops_per_token(4096) * 256 * 4096 / (9.5 * 16 * 989e12))


@pytest.mark.parametrize(
    "name, params, expected",
    [
        ("llama-8B", 8858636288, (True, False, "rope")),
        ("llama-8B", 8858636288 - 131072 * 4096, (True, True, "rope")),
        ("somebody's", 6979588096, (False, False, "rope")),
        ("gpt-7B", 6998724608, (False, False, "learned")),
    ],
)
def test_the_parameter_count_decides_what_columns_leave_open(name, params, expected):
    found = question_of(run_of(model=name, params=params, note="")).model
    assert (found.gated, found.tied, found.positions) == expected
    assert found.num_parameters == pytest.approx(params, rel=1e-3)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"precision": "nvfp4"}, "4-bit"),
        ({"pp": 64, "gpus": 512, "nodes": 64}, "more pipeline stages than layers"),
        ({"model": "unheard-of", "layers": ""}, "no layers and widths"),
        ({"recompute": "some"}, "unknown recomputation"),
        ({"note": "BATCH-MISMATCH"}, "do not match"),
    ],
)
def test_what_cannot_be_asked_says_why(changes, reason):
    with pytest.raises(Skip, match=reason):
        question_of(run_of(**changes))


def test_other_spellings():
    asked = question_of(
        run_of(dp="", precision="bfloat16", recompute="Full", zero="FSDP", sp="true", micro_batch="1.0")
    )
    plan = asked.plan
    assert (plan.dp, plan.precision, plan.recompute, plan.zero, plan.sequence) == (2, "bf16", "full", 3, True)


def test_what_a_framework_does_in_a_pipeline():
    asked = question_of(
        run_of(stack="torchtitan", zero=3, vpp="", note="Interleaved1F1B", micro_batch="", precision="fp8-rowwise")
    )
    plan = asked.plan
    assert (plan.zero, plan.schedule, plan.virtual_stages, plan.num_microbatches) == (1, "interleaved", 2, 4)
    assert (plan.precision, plan.fp8_recipe) == ("fp8", "rowwise")


def test_what_a_row_leaves_open_is_said():
    asked = question_of(run_of(stack="unheard-of", zero=3, recompute="", micro_batch=""))
    assert asked.stack.name == "torchtitan" and "stack unheard-of: as torchtitan" in asked.assumed
    assert any("recomputation" in word for word in asked.assumed) and any(
        "micro-batch" in word for word in asked.assumed
    )
    assert not asked.recompute_known


def test_a_network_in_the_note_comes_first():
    for note, rate in {
        "node-node 4x100Gb RoCE": 6.25e9,
        "1600 Gbps node-node interconnect": 25e9,
        "400Gb/s per GPU": 50e9,
        "8 IB HCAs per node (200 Gb/s)": 25e9,
        "400 Gb/s per node": 6.25e9,
    }.items():
        assert question_of(run_of(note=note)).cluster.tiers[-1].bandwidth == pytest.approx(rate), note


def test_a_network_that_was_measured_has_its_latency():
    one, other = (question_of(run_of(source=source)).cluster for source in ("ultrascale-playbook", "somebody"))
    assert one.tiers[0] == other.tiers[0]
    assert one.tiers[1] == replace(other.tiers[1], alpha=3e-5)


def test_the_tables_name_what_exists():
    assert {entry["kind"] for entry in table()["gpu"]} <= set(known_devices())
    assert all(load_stack(entry["name"]).name == entry["name"] for entry in table()["stack"])


def test_communicators_take_memory_for_every_rank_of_theirs_in_a_node():
    """2 nodes of 8: tp=4 pp=2 dp=2. nanotron has two groups of all ranks, and one that sums the gradient norm over tp
    and pp."""
    asked = question_of(run_of())
    near = 8 + 8 + 4 + 4  # all, all, tp; of tp and pp 4 in each node. Pairs have no switch
    assert asked.outside_bytes == CONTEXT + 4 * RING + 2 * PAIR + SWITCH * near
    usual = question_of(run_of(stack="megatron-core"))
    assert usual.outside_bytes == CONTEXT + 2 * RING + 2 * PAIR + SWITCH * (8 + 4)
    older = question_of(run_of(stack="megatron-core", gpu_kind="A100-80GB"))
    assert older.outside_bytes == CONTEXT + 2 * RING + 2 * PAIR
    one = question_of(run_of(gpus=8, nodes=1, tp=8, pp=1, dp=1))
    assert one.outside_bytes == CONTEXT + 3 * (RING + SWITCH * 8)  # the last is that of tp


def rebuilt(**changes: object) -> Answer:
    return answer(run_of(gpus=128, nodes=16, **changes))


def test_a_run_fails_for_what_it_needs_and_not_for_what_lingers():
    """Gathered inputs of 32 layers are most of what tp=32 reserves, where there is room."""
    full = rebuilt(tp=32, pp=1, dp=4, micro_batch=32)
    card, outside = full.question.cluster.device.memory, full.question.outside_bytes
    assert full.prediction.memory_bytes > card > full.needed[0].peak + outside
    assert not full.fails and full.predicted_bytes == card - outside
    small = rebuilt(tp=32, pp=1, dp=4, micro_batch=4)
    assert small.predicted_bytes == small.prediction.memory_bytes > small.needed[0].peak
    assert rebuilt(tp=1, pp=1, dp=128, micro_batch=2).fails


def test_communicators_decide_where_little_is_left():
    found = answer(run_of(gpus=8, nodes=1, tp=4, pp=1, dp=2, zero=0, micro_batch=4))
    card, outside = found.question.cluster.device.memory, found.question.outside_bytes
    assert found.fails and found.needed[0].peak + CONTEXT < card < found.needed[0].peak + outside


def test_ranks_and_quantiles_as_in_a_statistics_book():
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826817)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert quantile([1, 2, 3, 4], 0.5) == 2.5 and quantile([], 0.5) is None
