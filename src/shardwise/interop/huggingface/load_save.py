"""This is the entry to the Hugging Face world: it finds a model here, reads its config, moves weights in and out.

Owns nothing itself; the parts are `directory.py` (finding), `config.py` (config to spec), `export.py` (spec to
config), `names.py` (tensor names) and `weights.py` (data). Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError
from shardwise.interop.huggingface.config import ARCHITECTURES, spec_from_config
from shardwise.interop.huggingface.directory import find_model_dir, read_config
from shardwise.interop.huggingface.export import config_from_spec
from shardwise.interop.huggingface.reader import NotOurs
from shardwise.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from shardwise.interop.transformers.model import TransformersModel
    from shardwise.model.decoder import Decoder

__all__ = [
    "config_from_spec",
    "find_model_dir",
    "load_weights",
    "read_config",
    "read_spec",
    "save_model",
    "spec_from_config",
]


def read_spec(directory: Path) -> ModelSpec:
    """Returns the shapes that config.json describes: one of our architectures, or whatever transformers can build.
    Where ours lacks an option of the config, transformers' own code runs the model, and says why."""
    config = read_config(directory)
    kind = config.get("model_type")
    refusal = None
    if not isinstance(kind, str) or kind in ARCHITECTURES:
        try:
            return spec_from_config(config)
        except NotOurs as error:
            refusal = error
    from shardwise.interop.transformers.spec import spec_from_transformers

    try:
        return spec_from_transformers(config, refusal.what if refusal else "")
    except UserError:
        if refusal:
            raise refusal from None
        raise


def load_weights(model: Decoder | TransformersModel, directory: str | Path) -> None:
    """Streams a checkpoint's tensors into the model's own, whatever their device and dtype."""
    from shardwise.interop.huggingface import weights as hf_weights
    from shardwise.interop.transformers.model import TransformersModel

    if isinstance(model, TransformersModel):
        model.read(Path(directory))
    else:
        hf_weights.load_weights(model, Path(directory))


def save_model(
    model: Decoder | TransformersModel,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    extra_files: Iterable[Path] = (),
    source: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes a directory that transformers loads, completely or not at all. With a `source` the model may be without
    memory: the tensors are taken from there, one at a time."""
    from shardwise.interop.huggingface import weights as hf_weights

    hf_weights.save_model(model, Path(directory), dtype, max_shard_bytes, extra_files, source)
