"""Reads or builds the shapes, the text and the weights that a config names: what `train`, `eval`, `generate` and
`export` share.

No torch at module level: `train --dry-run` and the launcher use the first half.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwise.checkpoint.listing import MANIFEST, damaged
from shardwise.data.corpus import Corpus, open_corpus
from shardwise.errors import UserError
from shardwise.interop.transformers.spec import TransformersSpec, can_mask, spec_from_dict
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset
from shardwise.spec.schema import Config, ModelConfig

if TYPE_CHECKING:
    import torch

    from shardwise.model.decoder import Decoder
    from shardwise.model.loss import TokenLosses

CACHE = ".data"  # the folder inside run.dir that keeps sources which were tokenised once
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def model_dir(config: ModelConfig) -> Path | None:
    if not config.path:
        return None
    from shardwise.interop.huggingface.load_save import find_model_dir

    return find_model_dir(config.path)


def model_spec(config: ModelConfig) -> ModelSpec:
    """Returns the model's shapes: those of the preset or of the directory's config.json, with the [model] overrides on
    top."""
    directory = model_dir(config)
    spec = preset(config.preset) if directory is None else read_spec(directory)
    return spec.with_overrides(dict(config.overrides)) if config.overrides else spec


def read_spec(directory: Path) -> ModelSpec:
    """Returns the shapes that a Hugging Face directory's config.json describes."""
    from shardwise.interop.huggingface import load_save

    return load_save.read_spec(directory)


def stored_spec(checkpoint: Path, state: dict[str, Any]) -> ModelSpec:
    """Returns the shapes of the model that a checkpoint is of, as its manifest says."""
    try:
        return spec_from_dict(state["model"])
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise damaged(checkpoint / MANIFEST, f"it does not describe a model: {type(error).__name__}: {error}") from None


def corpus_of(config: Config, spec: ModelSpec, progress: bool) -> Corpus:
    return open_corpus(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        vocab=spec.vocab,
        can_mask=partial(can_mask, spec),
        model_dir=model_dir(config.model),
        cache_dir=Path(config.run.dir) / CACHE,
        progress=progress,
    )


def adapted_model(config: Config, spec: ModelSpec, precision: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Returns the whole model of a config with its adapters, as one process trains it."""
    from shardwise.adapters.lora import adapt_whole

    model = build_model(config.model, spec, config.train.seed, dtype, device)
    adapt_whole(model, config.adapter, config.train.seed, precision)
    return model


def build_model(config: ModelConfig, spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Returns a whole decoder on its device: its weights are drawn from (seed, name), or read from the model
    directory."""
    if isinstance(spec, TransformersSpec):
        return _foreign_model(config, spec, dtype, device, model_dir(config))
    model = empty_model(config, spec, dtype, device)
    weights_of(config, seed)(model)
    return model


def weights_of(config: ModelConfig, seed: int) -> Callable[[Decoder], None]:
    """Returns the function that initializes the weights of a decoder, or of a part of one: it draws them from (seed,
    name), or reads them from the model directory."""
    directory = model_dir(config)

    def init_weights(model: Decoder) -> None:
        if directory is None:
            from shardwise.model.initialize import initialize

            initialize(model, seed)
        else:
            from shardwise.interop.huggingface.load_save import load_weights

            load_weights(model, directory)

    return init_weights


def check_attention(config: ModelConfig, device_type: str) -> None:
    """Refuses an attention kernel that this kind of device does not have."""
    from shardwise.kernels.flash4 import kernel_named

    if getattr(kernel_named(config.attention), "needs_cuda", False) and device_type != "cuda":
        why = "FlexAttention has no backward pass on a CPU" if config.attention == "flex" else "it is a kernel of CUDA"
        raise UserError(
            f"model.attention = {config.attention} needs a CUDA GPU",
            why=why,
            fix="model.attention=sdpa, which is exact everywhere",
        )


def empty_model(config: ModelConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Returns the decoder with memory for its weights and nothing in it yet."""
    import torch

    from shardwise.kernels.flash4 import kernel_named
    from shardwise.kernels.fused_head import apply_fused_head
    from shardwise.model.decoder import Decoder

    check_attention(config, device.type)
    if isinstance(spec, TransformersSpec):
        return _foreign_model(config, spec, dtype, device, None)
    with torch.device("meta"):
        model = Decoder(spec, kernel_named(config.attention))
    apply_fused_head(model)
    return model.to(dtype).to_empty(device=device)


def _foreign_model(
    config: ModelConfig, spec: TransformersSpec, dtype: torch.dtype, device: torch.device, directory: Path | None
) -> Decoder:
    """Returns a model of transformers with the calls of our decoder: its weights are read from the directory, or only
    have memory where there is none."""
    from shardwise.interop.transformers.model import TransformersModel

    model = TransformersModel(spec, config.attention, dtype)
    if directory:
        model.read(directory)
    else:
        model.draw()
    return cast("Decoder", model.to(device))


def use_losses(models: Sequence[Decoder], losses: TokenLosses) -> None:
    """Puts a loss of the user's in the place of cross-entropy, wherever a part of the model has the head."""
    from shardwise.interop.transformers.model import TransformersModel

    for model in models:
        holder = model if isinstance(model, TransformersModel) else model.head
        if holder is not None:
            holder.losses = losses


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files that `source` has into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
