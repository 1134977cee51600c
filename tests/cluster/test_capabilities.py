"""Machines that lack something: what was asked for outright is refused in three lines with another way named, what was
left open is chosen so that it works. Machines are descriptions; nothing here needs a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shardwise.cluster.describe import capabilities
from shardwise.cluster.describe.capabilities import has_flash4
from shardwise.cluster.describe.machine import Gpu, Machine, read_gpus
from shardwise.cluster.describe.usable import TorchBuild, torch_build, why_unusable
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.plan.resolve.resolve import resolve
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

GIB = 2**30
NO_GPU = Machine(8, 64 * GIB, (), "linux")
CPU_TORCH = Machine(8, 64 * GIB, (), "linux", "1 x NVIDIA H200 cannot be used: torch 2.13.0+cpu is built without CUDA")
H200 = Machine(8, 64 * GIB, (Gpu("NVIDIA H200", 140 * GIB, (9, 0)),), "linux")
A100 = Machine(8, 64 * GIB, (Gpu("NVIDIA A100", 80 * GIB, (8, 0)),), "linux")
V100 = Machine(8, 64 * GIB, (Gpu("Tesla V100", 32 * GIB, (7, 0)),), "linux")
SMALL_CARD = Machine(8, 8 * GIB, (Gpu("NVIDIA T1000", 4 * GIB, (8, 0)),), "linux")


def plan_on(machine: Machine, *words: str, model: str = "tiny") -> Plan:
    loaded = load_config(None, words)
    return resolve(loaded.config, preset(model), machine, None, 1000, loaded.origins).plan


def refusal(machine: Machine, *words: str, model: str = "tiny") -> UserError:
    with pytest.raises(UserError) as caught:
        plan_on(machine, *words, model=model)
    assert len(str(caught.value).splitlines()) == 3 and caught.value.where in (None, "command line")
    return caught.value


@pytest.mark.parametrize(
    ("machine", "words", "what", "why", "fix"),
    [
        (
            NO_GPU,
            "memory.precision=fp8",
            "needs a GPU that multiplies in fp8",
            "there is no GPU here",
            "memory.precision=bf16",
        ),
        (
            CPU_TORCH,
            "memory.precision=fp8",
            "needs a GPU",
            "torch 2.13.0+cpu is built without CUDA",
            "memory.precision=bf16",
        ),
        (
            A100,
            "memory.precision=fp8",
            "needs a GPU",
            "8.9 (Ada, Hopper); NVIDIA A100 has 8.0",
            "memory.precision=bf16",
        ),
        (V100, "memory.precision=fp8", "needs a GPU", "Tesla V100 has 7.0", "memory.precision=fp32"),
        (
            V100,
            "memory.precision=bf16",
            "bf16 needs a GPU",
            "Tesla V100 has capability 7.0, bf16 needs 8.0",
            "memory.precision=fp32",
        ),
        (V100, "memory.precision=bf16-true", "bf16 needs a GPU", "Tesla V100", "memory.precision=fp16"),
        (NO_GPU, "comm.backend=nccl", "`comm.backend = nccl` needs a GPU", "there is no GPU here", "comm.backend=gloo"),
        (CPU_TORCH, "comm.backend=nccl", "needs a GPU", "built without CUDA", "comm.backend=gloo"),
        (NO_GPU, "model.attention=cudnn", "`model.attention = cudnn` needs a GPU", "no GPU", "model.attention=auto"),
        (NO_GPU, "speed.compile=graphs", "`speed.compile = graphs` needs a GPU", "no GPU", "speed.compile=blocks"),
        (
            NO_GPU,
            "speed.kernels=liger",
            "`speed.kernels = liger` needs a GPU",
            "there is no GPU here",
            "speed.kernels=torch",
        ),
        (NO_GPU, "memory.activation_offload=true", "nothing to move on a CPU", "", "memory.activation_offload=false"),
    ],
)
def test_what_the_machine_lacks_is_named_with_another_way(
    machine: Machine, words: str, what: str, why: str, fix: str
) -> None:
    problem = refusal(machine, words)
    assert what in problem.what and why in problem.why and fix in problem.fix


@pytest.mark.parametrize(
    "machine", [NO_GPU, CPU_TORCH, V100, A100, H200], ids=lambda m: m.gpus[0].name if m.gpus else "no GPU"
)
def test_what_is_left_open_works_everywhere(machine: Machine) -> None:
    plan = plan_on(machine)
    has_bf16 = machine in (A100, H200)
    assert plan.device == ("cuda" if machine.gpus else "cpu")
    assert plan.precision == ("bf16" if has_bf16 else "fp32")
    assert ("fp32, because Tesla V100 has capability 7.0" in plan.reason) == (machine is V100)


def test_the_fixes_work_on_the_same_machine() -> None:
    assert plan_on(V100, "memory.precision=fp16").precision == "fp16"
    assert plan_on(NO_GPU, "memory.precision=bf16").precision == "bf16"
    assert plan_on(NO_GPU, "comm.backend=gloo", "speed.kernels=torch").kernels == "torch"


def test_too_little_memory_is_said_before_anything_is_loaded() -> None:
    problem = refusal(SMALL_CARD, "train.seq_len=4096", model="llama3-8b")
    assert problem.code == Exit.OUT_OF_MEMORY and "4.0 GiB" in str(problem)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_liger_that_is_not_installed_is_said_with_the_way_without_it() -> None:
    problem = refusal(H200, "speed.kernels=liger")
    assert "liger-kernel, which is not installed" in problem.what
    assert problem.fix == "speed.kernels=torch, or pip install liger-kernel"
    assert plan_on(H200, "speed.kernels=torch").kernels == "torch"


@pytest.mark.skipif(has_flash4(), reason="flash-attn-4 is installed")
def test_flash4_that_is_not_installed_is_said_with_the_way_without_it() -> None:
    problem = refusal(H200, "model.attention=flash4")
    assert "flash-attn-4, which is not installed" in problem.what
    assert problem.fix == "model.attention=auto, or pip install 'shardwise[flash]'"


def test_flash4_on_an_older_card_is_refused() -> None:
    problem = refusal(A100, "model.attention=flash4")
    assert "capability 9.0" in problem.what and "8.0" in problem.why and problem.fix == "model.attention=auto"


@pytest.fixture
def has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if flash-attn-4 were installed."""
    monkeypatch.setattr(capabilities, "has_flash4", lambda: True)


MIXED_CARDS = Machine(8, 64 * GIB, (*H200.gpus, *A100.gpus), "linux")


@pytest.mark.usefixtures("has_it")
@pytest.mark.parametrize(
    ("machine", "words", "attention"),
    [
        (H200, [], "flash4"),
        (H200, ["model.attention=flash4"], "flash4"),
        (H200, ["model.attention=cudnn"], "sdpa"),
        (H200, ["memory.precision=fp32"], "sdpa"),
        (H200, ["data.document_mask=true"], "sdpa"),
        (H200, ["train.deterministic=true"], "sdpa"),
        (H200, ["memory.precision=fp8", "train.seq_len=256"], "flash4"),
        (A100, [], "sdpa"),
        (MIXED_CARDS, [], "sdpa"),
        (NO_GPU, [], "sdpa"),
    ],
)
def test_the_plan_says_which_attention_it_is_priced_with(machine: Machine, words: list[str], attention: str) -> None:
    assert plan_on(machine, *words).attention == attention


def test_auto_without_the_package_is_priced_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "has_flash4", lambda: False)
    assert plan_on(H200).attention == "sdpa"


@pytest.mark.parametrize("words", [["speed.compile=blocks"], ["speed.compile=graphs"], ["speed.fuse=true"]])
def test_liger_and_a_compiler_exclude_each_other(words: list[str]) -> None:
    problem = refusal(H200, "speed.kernels=liger", *words)
    assert words[0].replace("=", " = ") in problem.what and "speed.kernels=torch" in problem.fix


# What the driver and torch say ----------------------------------------------------------------------------------------

CARD = f"{140 * GIB}\t9\t0\t0\tNVIDIA H200"


@pytest.mark.parametrize(
    ("first", "build", "said"),
    [
        ("cuda\t12\t8", TorchBuild("2.11.0+cu128", "12.8"), ""),
        ("cuda\t12\t4", TorchBuild("2.11.0+cu128", "12.8"), ""),  # an older driver of the same major version will do
        ("cuda\t13\t0", TorchBuild("2.11.0+cu126", "12.6"), ""),
        (
            "cuda\t12\t4",
            TorchBuild("2.13.0+cu130", "13.0"),
            "driver 550.54 runs CUDA up to 12.4 and torch 2.13.0+cu130 needs 13.0",
        ),
        (
            "cuda\t12\t8",
            TorchBuild("2.13.0+cpu", None),
            "1 x NVIDIA H200 cannot be used: torch 2.13.0+cpu is built without CUDA",
        ),
        (
            "error\t803\tsystem has unsupported display driver / cuda driver combination",
            TorchBuild("2.11.0+cu128", "12.8"),
            "the NVIDIA driver 550.54 does not start: system has unsupported display driver",
        ),
    ],
)
def test_gpus_that_torch_cannot_use_are_left_out_with_a_reason(first: str, build: TorchBuild, said: str) -> None:
    gpus, problem = read_gpus(f"{first}\n{CARD}" if first.startswith("cuda") else first, build, "550.54")
    assert bool(gpus) == (not said)
    assert said in problem and bool(problem) == bool(said)


def test_a_machine_without_a_driver_has_no_problem() -> None:
    assert read_gpus("", TorchBuild("2.13.0+cpu", None)) == ((), "")
    assert why_unusable(None, (12, 4)) == ""


def test_torchs_build_is_read_without_loading_it(tmp_path: Path) -> None:
    import torch

    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda)
    (tmp_path / "version.py").write_text(
        "__version__ = '2.11.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    assert torch_build(tmp_path) == TorchBuild("2.11.0+cu128", "12.8")
    assert torch_build(tmp_path / "nothing") is None
