"""Finds trained weights wherever they lie: a run, one of its checkpoints, a converted directory, or a Hugging Face
directory.

`find_weights` only looks (no torch); `load` builds the decoder. `generate`, `eval`, `export` and `convert` start here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.adapters.state import read_adapter_state
from shardwise.checkpoint.manifest import read_manifest
from shardwise.config.load import load_config
from shardwise.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from shardwise.errors import UserError
from shardwise.interop.transformers.spec import can_mask
from shardwise.run.build import adapted_model, empty_model, model_dir, read_spec, stored_spec
from shardwise.run.rundir import RunDir, find_run
from shardwise.spec.model import ModelSpec
from shardwise.spec.schema import AdapterConfig, Config, ModelConfig

if TYPE_CHECKING:
    import torch

    from shardwise.checkpoint.store import Checkpoint
    from shardwise.model.decoder import Decoder


@dataclass(frozen=True)
class StoredWeights:
    """Weights on a disk. Exactly one of `checkpoint` (a directory with manifest.json) and `huggingface` (one with
    config.json) is set."""

    name: str
    spec: ModelSpec
    run: RunDir | None  # the run that trained them
    config: Config | None  # the config of that run
    checkpoint: Path | None
    huggingface: Path | None
    tokenizer_dir: Path | None
    adapter: AdapterConfig | None = None  # the checkpoint holds only what was trained beside frozen weights

    def tokenizer(self, asked: str = "auto") -> Tokenizer:
        if self.config and asked == "auto" and self.tokenizer_dir is None:
            asked = self.config.data.tokenizer
        return open_tokenizer(asked, self.tokenizer_dir, BYTES if self.run else self.spec.vocab)

    def can_mask(self) -> bool:
        """Returns whether the model can be told which tokens of a row belong together."""
        return can_mask(self.spec)

    def stored_dtype(self) -> torch.dtype:
        """Returns the number format of the stored tensors (of the first one: all have the same)."""
        from safetensors import SafetensorError, safe_open

        from shardwise.checkpoint.listing import damaged
        from shardwise.checkpoint.part_file import TORCH
        from shardwise.interop.huggingface.weights import list_files

        if self.checkpoint:
            weights = read_manifest(self.checkpoint).tensors("weights")
            return TORCH[next(iter(weights.values())).dtype]
        assert self.huggingface is not None
        file = list_files(self.huggingface)[0]
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(next(iter(tensors.keys()))).dtype
        except (OSError, SafetensorError) as error:
            raise damaged(file, str(error)) from None

    def load(self, device: torch.device, dtype: torch.dtype | None = None, attention: str = "auto") -> Decoder:
        """Returns the decoder with these weights, in `dtype` (default: fp32)."""
        import torch

        from shardwise.checkpoint.store import Checkpoint
        from shardwise.interop.huggingface.load_save import load_weights
        from shardwise.interop.transformers.model import TransformersModel

        if self.adapter is not None:
            return self._merged(device, dtype or torch.float32, attention)
        model = empty_model(ModelConfig(attention=attention), self.spec, dtype or torch.float32, device)
        if self.checkpoint:
            checkpoint = Checkpoint(self.checkpoint, 0)
            if isinstance(model, TransformersModel):
                model.load_tensors(checkpoint.load("weights", verify=True))
            else:
                checkpoint.verify(only="weights")
                self._read_into(model.state_dict(keep_vars=True), checkpoint)
        else:
            assert self.huggingface is not None
            load_weights(model, self.huggingface)
        return model.eval()

    @staticmethod
    def _read_into(places: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        """Fills a model's tensors with those of a checkpoint, one at a time; there must be no others."""
        from shardwise.checkpoint.listing import MANIFEST, damaged

        with checkpoint.open() as reader:
            if unknown := reader.tensors("weights").keys() - places.keys():
                raise damaged(checkpoint.path / MANIFEST, f"the model has no {min(unknown)}")
            for name, place in places.items():
                about = reader.about("weights", name)
                if place.device.type == "cpu":
                    reader.read_into(place.detach(), "weights", name, (0,) * len(about.shape))
                else:
                    place.detach().copy_(reader.read("weights", name))

    @contextmanager
    def streamed(self) -> Iterator[tuple[Decoder | None, Mapping[str, torch.Tensor] | None]]:
        """Yields a model without memory and its tensors, each read when it is asked for; None and None where the
        weights cannot be had without the model."""
        from shardwise.checkpoint.store import Checkpoint
        from shardwise.interop.transformers.spec import TransformersSpec

        if self.checkpoint is None or self.adapter is not None or isinstance(self.spec, TransformersSpec):
            yield None, None
            return
        import torch

        from shardwise.checkpoint.reader import TensorsOnDisk

        checkpoint = Checkpoint(self.checkpoint, 0)
        checkpoint.verify(only="weights")
        model = empty_model(ModelConfig(), self.spec, self.stored_dtype(), torch.device("meta"))
        with checkpoint.open() as reader:
            yield model, TensorsOnDisk(reader, "weights")

    def trained(self) -> dict[str, torch.Tensor]:
        """Returns the adapters and what was trained beside them, by our names."""
        from shardwise.checkpoint.store import Checkpoint

        assert self.checkpoint is not None
        tensors = Checkpoint(self.checkpoint, 0).load("weights", verify=True)
        return {name: value for name, value in tensors.items() if not name.endswith("router.bias")}

    def _merged(self, device: torch.device, dtype: torch.dtype, attention: str) -> Decoder:
        """Returns the frozen weights as they were in training (dequantized where they are NF4), with the adapters added
        to them."""
        import torch

        from shardwise.adapters.lora import merge

        assert self.adapter is not None and self.config is not None and self.checkpoint is not None
        config = replace(
            self.config,
            model=replace(self.config.model, attention=attention),
            adapter=replace(self.adapter, path=None, dropout=0.0),
        )
        model = adapted_model(config, self.spec, "fp32", torch.float32, device)
        places = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.trained().items():
                places[name].copy_(value)
        merge(model, dtype)
        return model.eval()


def find_weights(name: str, runs_dir: str = "runs") -> StoredWeights:
    """Returns the weights that are named by a run directory, a run's name, `last`, a checkpoint directory, a converted
    directory, a model directory or a hub id."""
    path = Path(name)
    if (path / "manifest.json").is_file():
        return _from_checkpoint(path, None)
    is_run = name == "last" or (path / "config.toml").is_file() or (Path(runs_dir) / name / "config.toml").is_file()
    if is_run:
        return _from_run(find_run(name, runs_dir))
    if path.is_file():
        inside = any((path.parent / mark).is_file() for mark in ("config.toml", "manifest.json", "config.json"))
        fix = f"{path.parent} instead of {name}" if inside else "`shardwise runs` lists runs"
        raise UserError(f"{name} is a file", why="weights are given by their directory", fix=fix)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(
            f"{name} holds no model",
            why="it has neither config.toml (a run), manifest.json (a checkpoint) nor config.json (Hugging Face)",
            fix="`shardwise runs` lists runs",
        )
    from shardwise.interop.huggingface.load_save import find_model_dir

    directory = find_model_dir(name)
    has_tokenizer = (directory / "tokenizer.json").is_file()
    return StoredWeights(name, read_spec(directory), None, None, None, directory, directory if has_tokenizer else None)


def _from_run(run: RunDir) -> StoredWeights:
    from shardwise.checkpoint.listing import committed

    found = committed(run.checkpoints)
    if not found:
        raise UserError(
            f"run `{run.name}` has no checkpoint yet",
            why=f"{run.checkpoints} holds no complete one",
            fix=f"`{run.how_to_resume()}` trains on; a checkpoint comes at the end, or set checkpoint.every",
        )
    return _from_checkpoint(found[0], run)


def _from_checkpoint(path: Path, run: RunDir | None) -> StoredWeights:
    if run is None and (path.parent.parent / "config.toml").is_file():
        run = RunDir(path.parent.parent)  # RUN/checkpoints/step-N given directly
    state = read_manifest(path).state
    spec = stored_spec(path, state)
    config = load_config(run.config).config if run else None
    adapter = read_adapter_state(path, state, config, spec)
    tokenizer = run.tokenizer if run else path / "tokenizer"
    fallback = model_dir(config.model) if config and config.data.tokenizer == "auto" else None
    name = run.name if run else path.name
    return StoredWeights(name, spec, run, config, path, None, tokenizer if tokenizer.is_dir() else fallback, adapter)
