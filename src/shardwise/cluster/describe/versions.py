"""Finds which libraries are installed, and the line that installs the ones that are not."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

CORE = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "fsspec", "rich")

# distribution(s) that provide it, what it is for, how to get it
OPTIONAL = (
    (("pyarrow",), "reads .parquet", "pip install 'shardwise[parquet]'"),
    (("zstandard",), "reads .zst", "pip install 'shardwise[zstd]'"),
    (("datasets",), "hub datasets", "pip install 'shardwise[datasets]'"),
    (("sentencepiece",), "reads tokenizer.model", "pip install 'shardwise[sentencepiece]'"),
    (("torchao",), "adamw8bit", "pip install 'shardwise[lowbit]'"),
    (("flash-attn-4",), "attention", "pip install 'shardwise[flash]'"),
    (("transformers",), "any causal LM", "pip install 'shardwise[transformers]'"),
    (("peft",), "loads adapters", "pip install peft"),
    (("lm-eval",), "eval --tasks", "pip install 'shardwise[tasks]'"),
    (("pyyaml",), "reads manifests", "pip install 'shardwise[kubernetes]'"),
    (("ray",), "launch ray", "pip install 'shardwise[ray]'"),
    (("liger-kernel",), "GPU kernels", "pip install liger-kernel"),
    (("tensorboard",), "logger", "pip install 'shardwise[tensorboard]'"),
    (("wandb",), "logger", "pip install 'shardwise[wandb]'"),
    (("mlflow-skinny", "mlflow"), "logger", "pip install 'shardwise[mlflow]'"),
)


@dataclass(frozen=True)
class Library:
    """A library, its version (None: not installed), what it is for and how it is installed."""

    name: str
    version: str | None
    purpose: str = ""
    install: str = ""


def core_libraries() -> list[Library]:
    return [Library(name, _version(name), install="pip install shardwise") for name in CORE]


def optional_libraries() -> list[Library]:
    found = []
    for names, purpose, install in OPTIONAL:
        version = next((version for name in names if (version := _version(name))), None)
        found.append(Library(names[0], version, purpose, install))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
