"""benchmarks/gpu/throughput.py without a GPU: contenders compute the same, time is divided completely, results are kept
and shown."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu.contender import batches, build
from gpu.golden import compared, judge
from gpu.parts import STEP, Busy, divide, gaps, part_of, profile_of
from gpu.shapes import CONTENDERS, SHAPES, case_of
from gpu.speed_page import GOLDEN, PAGE, cells, golden_table, page, plot, table, tables
from gpu.targets import judged
from gpu.with_ours import plan_of, predicted, run_with

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results/throughput_h200.json"


@pytest.fixture(scope="module")
def trained():
    """Four steps of each contender from equal weights: case, contender, losses."""
    found = {}
    for name in ("ours", "plain", "transformers"):
        case = case_of("dense", name)
        contender = build(case)
        found[name] = case, contender, [float(contender.step(*batch)) for batch in batches(case)]
    return found


@pytest.mark.parametrize("name", ["plain", "transformers"])
def test_contenders_have_our_losses_tokens_and_parameters(trained, name):
    (our_case, ours, our_losses), (case, contender, losses) = trained["ours"], trained[name]
    assert contender.parameters == ours.parameters
    assert case.tokens == our_case.tokens == 64
    assert losses == pytest.approx(our_losses, rel=1e-5)
    assert len(set(losses)) == 4, "weights and batches move from step to step"


def test_experts_of_transformers_are_ours():
    """Only the first loss: ours also balances its experts, so weights differ after it."""
    cases = {name: case_of("experts", name) for name in ("ours", "transformers")}
    made = {name: build(case) for name, case in cases.items()}
    assert made["ours"].parameters == made["transformers"].parameters
    losses = [float(contender.step(*batches(cases[name])[0])) for name, contender in made.items()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_flops_are_counted_as_the_page_says(trained):
    case, contender, _ = trained["plain"]
    spec, shape = case.shape.spec, case.shape
    embedding, attention = spec.vocab * spec.hidden, 6 * spec.num_layers * spec.hidden * shape.seq_len
    assert shape.flops_per_token == 6 * (contender.parameters - embedding) + attention
    assert shape.frozen_flops_per_token == 4 * (contender.parameters - embedding) + attention
    assert SHAPES["1.5b"].flops_per_token / 1e9 == pytest.approx(8.22, abs=0.01)  # 65,800 tok/s are 55 % of 989 TFLOP/s


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_add_cat_mul_2", "elementwise"),
        ("triton_red_fused__fused_rms_norm__to_copy_add_1", "elementwise"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_0", "loss"),
        ("_cross_entropy", "loss"),  # of kernels/triton/loss.py
        ("triton_poi_fused__to_copy_3", "copies"),
        (
            "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",
            "optimizer",
        ),
        ("_adamw8bit", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., Copy<c10::BFloat16, float>>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "elementwise"),
        ("_lora_add", "elementwise"),
        ("_norm_gradient", "elementwise"),
        ("_squared_norm", "optimizer"),
        ("a kernel that nobody knows", "other"),
    ],
)
def test_kernels_have_parts(kernel, part):
    assert part_of(kernel) == part


def test_every_moment_counts_once():
    busy = [Busy("gemm", 10, 20), Busy("flash", 15, 24), Busy("adam", 16, 18), Busy("gemm", 30, 31)]
    parts, names = divide(busy)
    assert (parts["matmul"], parts["attention"], parts["optimizer"], parts["idle"]) == (11, 4, 0, 6)
    assert sum(parts.values()) == 21 and names["gemm"] == 11
    assert gaps(busy) == {("flash", "gemm"): 6}


def test_a_trace_becomes_seconds_per_step():
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 100.0, "dur": 30.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 140.0, "dur": 10.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 500.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0.0, "dur": 5.0},
    ]
    found = profile_of({"traceEvents": events}, steps=2)
    assert found["window_s"] == pytest.approx(25e-6) and found["parts_s"]["idle"] == pytest.approx(5e-6)
    assert found["busy_s"] == pytest.approx(20e-6) and found["host_waits"] == 0.5
    assert found["gaps"] == [[0.005, "nvjet_a", "Memcpy DtoH"]]


def test_a_step_before_the_host_is_ahead_is_left_out():
    kernels = [{"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": ts, "dur": 30.0} for ts in (100, 190, 230, 270)]
    named = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": STEP, "tid": 7, "ts": ts, "dur": 9.0}
        for ts in (100, 190, 270)
    ]
    other = [{"ph": "X", "cat": "gpu_user_annotation", "name": STEP, "tid": 8, "ts": 100, "dur": 9.0}]
    found = profile_of({"traceEvents": kernels + named + other}, steps=2, before=1)
    assert found["window_s"] == pytest.approx(55e-6) and found["parts_s"]["idle"] == pytest.approx(10e-6)
    waits = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": ts, "dur": 1.0} for ts in (1, 2, 3)
    ]
    assert profile_of({"traceEvents": kernels + named + waits}, steps=2, before=1)["host_waits"] == 1
    unnamed = profile_of({"traceEvents": kernels}, steps=2, before=1)
    assert unnamed["window_s"] == pytest.approx(200e-6 / 3), "all three, where nobody knows where the first one ends"


def call(*words: str) -> str:
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu/throughput.py", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_are_kept_shown_and_not_measured_twice(tmp_path):
    path = tmp_path / "found.json"
    words = ("--smoke", "--shapes", "dense", "--rounds", "2", "--steps", "2", "--json", str(path), "--only")
    call(*words, "plain", "nobody")
    found = json.loads(path.read_text())
    row, failed = found["rows"]["dense/plain"], found["rows"]["dense/nobody"]
    assert len(row["losses"]) == 2 + 2 * 2 and len(row["round_medians_s"]) == 2
    assert row["tokens_per_s"] == pytest.approx(64 / row["median_s"])
    assert failed["kind"] == "error" and "nobody" in failed["error"]
    assert cells(row)[0] in table(found) and cells(failed)[0] == "failed"
    again = call("--smoke", "--json", str(path), "--rows", "dense/plain")
    assert json.loads(path.read_text()) == found and "plain: " not in again
    made = page(found, {})
    assert tables(found) in made and made.endswith("\nNot measured yet.\n")
    drawn = xml.etree.ElementTree.fromstring(plot(found))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 1


def test_the_page_shows_the_committed_results():
    found, golden = (json.loads(path.read_text("utf-8")) for path in (RESULTS, GOLDEN))
    assert PAGE.read_text("utf-8") == page(found, golden), "run throughput.py --json FILE --show --page"


def test_golden_losses_are_shown_with_their_verdicts():
    truth = {"losses": [2.0, 1.0]}
    runs = {
        "none": truth,
        "wide none": dict(truth),
        "all": {"losses": [2.0, 1.001]},
        "fp8 rowwise": {"losses": [2.0, 1.02]},
    }
    found = {
        "runs": runs,
        "device": "a GPU",
        "versions": {"torch": "2.11"},
        "date": "today",
        "model": "small",
        "steps": 2,
    }
    judge(found)
    assert "holds" not in runs["none"] and runs["all"]["holds"] and not runs["fp8 rowwise"]["holds"]
    assert "| all | +0.100% | 0.5% | 0.0010 | 0.000000 | holds |" in golden_table(found)
    assert "| fp8 rowwise | +2.000% | 1.0% | 0.0200 | 0.000000 | **moves the loss** |" in golden_table(found)


def test_a_loss_that_moves_is_seen():
    truth = [4.0, 3.0, 2.0, 2.0]
    assert compared([4.0, 3.001, 2.0, 2.004], truth, 0.005)["holds"]
    moved = compared([4.0, 3.0, 2.0, 2.02], truth, 0.005)
    assert not moved["holds"] and moved["max_difference"] == pytest.approx(0.02)
    assert not compared([4.0, 3.0, 2.0, math.nan], truth, 0.005)["holds"]


def test_targets_are_judged_by_their_rows():
    def row(speed: float, gib: float) -> dict[str, object]:
        return {"tokens_per_s": speed, "peak_bytes": gib * 2**30, "flops_per_token": 1.0, "profile": None}

    rows = {
        "1.5b/ours": row(67_000, 60),
        "1.5b/transformers-compiled": row(50_000, 50),
        "8b/ours": {"error": "no", "kind": "time"},
    }
    verdicts = {what: verdict for what, _, _, verdict in judged({"rows": rows})}
    assert verdicts == {
        "1.5b: speed": "holds",
        "1.5b: speed, further": "**missed**",
        "1.5b: over compiled transformers": "**missed**",
        "1.5b: memory over theirs": "**missed**",
    }
    rows["1.5b/ours"] = row(71_000, 49)
    assert {verdict for _, _, _, verdict in judged({"rows": rows})} == {"holds"}


def test_a_row_is_predicted_with_the_attention_that_it_took():
    case, words = case_of("32k", "ours"), "the fastest for 1 x 16,384 tokens (ms per layer: flash4 12.30, cudnn 13.64)"
    usual, *others = (
        predicted(run_with(case, {"attention": said}))["step_s"]
        for said in (f"attention cudnn, {words}", f"attention flash4, {words}", "flash4")
    )
    assert usual == predicted(case)["step_s"] == predicted(run_with(case, {}))["step_s"]
    assert others == [predicted(case_of("32k", "ours:attention=flash4"))["step_s"]] * 2 and others[0] < 0.97 * usual


OURS = [
    (shape, name) for shape, names in CONTENDERS.items() if shape in SHAPES for name in names if name.startswith("ours")
]


@pytest.mark.parametrize(("shape", "name"), OURS)
def test_our_rows_are_jobs_that_the_planner_knows(shape, name):
    """An option that is no longer there would be found on the GPU only."""
    case = case_of(shape, name)
    assert predicted(case)["memory_bytes"] < 141e9
    same = plan_of(case) == plan_of(case_of(shape, "ours"))
    assert not same or name == "ours", "a variant has its own plan"
