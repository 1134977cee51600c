"""Proves an export: another process reads what was written and computes logits, which are compared with those of the
weights it was written from.

The other process has nothing but the directory. It reads it by transformers where that is installed, whose code shares
no table of names with ours; public converters have dropped whole layers of experts without a word. Both compute in
fp32 on the CPU, from the numbers as they were stored.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.errors import Exit, UserError
from shardwise.run.weights import StoredWeights, find_weights

if TYPE_CHECKING:
    from shardwise.model.decoder import Decoder

CPU = torch.device("cpu")
ROWS, TOKENS = 2, 32
LIMIT = 1e-3
"""How far logits may be apart, as a part of the largest: fp32 in another order of sums stays a hundred times below, a
tensor in the wrong place is a thousand times above."""


@dataclass(frozen=True)
class ExportProof:
    """How far apart logits were, and what read the directory."""

    difference: float
    largest: float  # the largest logit
    reader: str

    @property
    def holds(self) -> bool:
        return self.difference <= LIMIT * self.largest  # not where either is NaN

    def __str__(self) -> str:
        return f"{self.reader} read it in another process: largest difference of logits {self.difference:.1e}"


def prove_export(weights: StoredWeights, directory: Path, dtype: torch.dtype) -> ExportProof:
    """Returns how far the logits of a directory are from those of the weights that were stored there in `dtype`."""
    limit = min(TOKENS, weights.spec.max_seq_len or TOKENS)
    tokens = torch.randint(0, weights.spec.vocab, (ROWS, limit), generator=torch.Generator().manual_seed(0))
    ours = _logits(_as_stored(weights, dtype), tokens)
    with tempfile.TemporaryDirectory() as folder:
        reader, theirs = _logits_of_another_process(directory, tokens, Path(folder))
    difference = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")
    return ExportProof(difference, float(ours.abs().max()), reader)


def wrong_export(proof: ExportProof, directory: Path) -> UserError:
    """Returns three lines for an export that computes something else."""
    return UserError(
        f"{directory} computes something else than the weights it was written from",
        why=f"{proof}, of logits up to {proof.largest:.3g}",
        fix="do not use it: this is a mistake of ours; `shardwise eval` tells how good the run itself is",
        code=Exit.FOUND_WRONG,
    )


def _as_stored(weights: StoredWeights, dtype: torch.dtype) -> Decoder:
    """Returns the model in fp32, with weights that have gone through `dtype`."""
    model = weights.load(CPU, torch.float32)
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if value.is_floating_point() and not name.endswith("router.bias"):
                value.copy_(value.to(dtype))
    return model


@torch.no_grad()
def _logits(model: Decoder, tokens: Tensor) -> Tensor:
    return model(tokens).float()


def _logits_of_another_process(directory: Path, tokens: Tensor, folder: Path) -> tuple[str, Tensor]:
    from safetensors.torch import load_file, save_file

    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    found = subprocess.run(
        [sys.executable, "-m", "shardwise.prove.exported", str(directory.resolve()), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if found.returncode != 0:
        last = (found.stderr.strip() or f"exit code {found.returncode}").splitlines()[-1]
        raise UserError(
            f"{directory} could not be read back",
            why=f"another process ended with: {last[:300]}",
            fix="do not use it; --no-verify writes without reading back, if it was only memory that was missing",
        )
    return found.stdout.strip().splitlines()[-1], load_file(folder / "logits.safetensors")["logits"]


def read_back(directory: str, folder: str) -> None:
    """Is what the other process does: writes the logits of a directory for the tokens it was given, and says what has
    read it."""
    from safetensors.torch import load_file, save_file

    tokens = load_file(Path(folder) / "tokens.safetensors")["tokens"]
    reader, logits = "shardwise", None
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        with torch.no_grad():
            logits = model.eval()(tokens).logits.float()
        reader = f"transformers {transformers.__version__}"
    except ImportError:
        logits = _logits(find_weights(directory).load(CPU, torch.float32), tokens)
    save_file({"logits": logits.contiguous()}, Path(folder) / "logits.safetensors")
    print(reader)


if __name__ == "__main__":
    read_back(*sys.argv[1:])
