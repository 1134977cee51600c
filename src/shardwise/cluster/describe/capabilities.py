"""What the GPUs and libraries of a machine allow: the number format that is chosen, and what is refused with another
way named. No torch.

Invariant: nothing falls back without a word. What was asked for outright is refused where it cannot work; what was left
open is chosen so that it works, and the plan's reason says so.
"""

from __future__ import annotations

import importlib.util

from shardwise.cluster.describe.machine import Machine
from shardwise.config.keys import Origins, where_written
from shardwise.errors import UserError
from shardwise.spec.extras import FLASH4_INSTALL, LOWBIT_INSTALL
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schema import Config

FP8_CAPABILITY, BF16_CAPABILITY, FLASH4_CAPABILITY = (8, 9), (8, 0), (9, 0)


def choose_precision(config: Config, machine: Machine, origins: Origins) -> str:
    """Returns the value of memory.precision that runs: what is set, else bf16 on GPUs that multiply in it, else
    fp32."""
    asked = config.memory.precision
    if asked == "fp64" and machine.gpus:
        raise UserError(
            "memory.precision = fp64 is for CPUs only",
            why="it exists for proofs",
            fix="memory.precision=fp32",
            where=where_written(origins, "memory.precision"),
        )
    if asked != "auto" and PRECISIONS[asked].is_fp8:
        _check_fp8(machine, origins)
    if asked != "auto" and PRECISIONS[asked].matmul == "bf16":
        _check_bf16(machine, origins)
    if OPTIMIZERS[config.optimizer.name].is_low_bit:
        _check_torchao(origins)
    if asked != "auto":
        return asked
    return "bf16" if machine.gpus and not _without_bf16(machine) else "fp32"


def _without_bf16(machine: Machine) -> str:
    """Returns in words the first GPU that does not multiply in bf16, or nothing."""
    old = next((gpu for gpu in machine.gpus if gpu.capability < BF16_CAPABILITY), None)
    return f"{old.name} has capability {_dotted(old.capability)}, bf16 needs {_dotted(BF16_CAPABILITY)}" if old else ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def why_precision(config: Config, machine: Machine) -> str:
    """Returns why `auto` became this number format, as the end of a plan's reason; nothing where it was set."""
    if config.memory.precision != "auto" or not machine.gpus:
        return ""
    old = _without_bf16(machine)
    return f"; fp32, because {old}" if old else "; bf16 over fp32 weights, which GPUs compute fastest"


def _check_bf16(machine: Machine, origins: Origins) -> None:
    if old := _without_bf16(machine):
        raise UserError(
            "bf16 needs a GPU that multiplies in bf16",
            why=f"{old} (Ampere and newer)",
            fix="memory.precision=fp16, which scales the loss, or memory.precision=fp32",
            where=where_written(origins, "memory.precision"),
        )


def _check_fp8(machine: Machine, origins: Origins) -> None:
    old = [gpu for gpu in machine.gpus if gpu.capability < FP8_CAPABILITY]
    if machine.gpus and not old:
        return
    found = f"{old[0].name} has {_dotted(old[0].capability)}" if old else machine.gpu_problem or "there is no GPU here"
    raise UserError(
        "memory.precision = fp8 needs a GPU that multiplies in fp8",
        why=f"that begins with compute capability {_dotted(FP8_CAPABILITY)} (Ada, Hopper); {found}",
        fix=f"memory.precision={'bf16' if not old or old[0].capability >= BF16_CAPABILITY else 'fp32'}",
        where=where_written(origins, "memory.precision", "parallel.layout"),
    )


def _check_torchao(origins: Origins) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "optimizer.name = adamw8bit needs torchao, which is not installed",
            why="8-bit states are torchao's",
            fix=f"{LOWBIT_INSTALL}, or leave optimizer.name out",
            where=where_written(origins, "optimizer.name"),
        )


CUDA_ATTENTION = ("flex", "cudnn", "flash", "flash4")


def check_cuda_only(config: Config, spec: ModelSpec, machine: Machine, origins: Origins) -> None:
    """Refuses values of keys that need a GPU where there is none."""
    none = machine.gpu_problem or "there is no GPU here"
    if config.comm.backend == "nccl" and not machine.gpus:
        raise _needs("comm.backend = nccl", "a GPU", none, "comm.backend=gloo", origins)
    kernel = config.model.attention
    if kernel in CUDA_ATTENTION and not machine.gpus:
        raise _needs(f"model.attention = {kernel}", "a GPU", none, "model.attention=auto", origins)
    if kernel == "flash4":
        _check_flash4(machine, origins)
    if config.speed.compile == "graphs" and not machine.gpus:
        raise _needs("speed.compile = graphs", "a GPU", none, "speed.compile=blocks", origins)
    if config.speed.kernels != "liger":
        return
    key, instead = "speed.kernels = liger", "speed.kernels=torch"
    if not machine.gpus:
        raise _needs(key, "a GPU", none, instead, origins)
    if not spec.is_ours:
        raise _needs(key, "a model of this package", f"{spec.name} brings layers of its own", instead, origins)
    if importlib.util.find_spec("liger_kernel") is None:
        why = "norms and activations would be its kernels; compiled blocks have such kernels without it"
        raise _needs(
            key, "liger-kernel, which is not installed", why, f"{instead}, or pip install liger-kernel", origins
        )


def _check_flash4(machine: Machine, origins: Origins) -> None:
    key, instead = "model.attention = flash4", "model.attention=auto"
    if old := next((gpu for gpu in machine.gpus if gpu.capability < FLASH4_CAPABILITY), None):
        raise too_old_for_flash4(old.name, old.capability, origins)
    if not has_flash4():
        why = "its kernels are those of FlashAttention 4, a package of its own"
        fix = f"{instead}, or {FLASH4_INSTALL}"
        raise _needs(key, "flash-attn-4, which is not installed", why, fix, origins)


def too_old_for_flash4(name: str, capability: tuple[int, int], origins: Origins) -> UserError:
    why, what = f"{name} has capability {_dotted(capability)}", f"capability {_dotted(FLASH4_CAPABILITY)} (Hopper)"
    return _needs("model.attention = flash4", f"a GPU of {what} or newer", why, "model.attention=auto", origins)


def attention_here(config: Config, machine: Machine) -> str:
    """Returns the attention of a `Job` on this machine: `measured` where `auto` finds FlashAttention 4 among the
    kernels that it times. Masks of documents are not for it, and its deterministic backward takes as long as
    cuDNN's."""
    gpus = machine.gpus
    if config.data.document_mask is True or config.train.deterministic or not gpus:
        return "sdpa"
    if config.model.attention != "auto":
        return "flash4" if config.model.attention == "flash4" else "sdpa"
    return "measured" if has_flash4() and all(gpu.capability >= FLASH4_CAPABILITY for gpu in gpus) else "sdpa"


def has_flash4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def _needs(value: str, what: str, why: str, fix: str, origins: Origins) -> UserError:
    return UserError(f"`{value}` needs {what}", why=why, fix=fix, where=where_written(origins, value.split(" ")[0]))
