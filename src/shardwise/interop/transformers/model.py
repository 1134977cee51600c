"""Puts transformers' own modelling code behind our decoder's interface: it takes tokens and targets and returns summed
losses or logits.

Owns building, reading and writing of such a model. Invariant: dropout and other random choices are off, as in our own
decoder, so that every layout computes the same numbers; and no code of a model directory is run. Needs memory for the
whole model on the CPU while it is read. Router losses of mixtures of experts are not added.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.interop.transformers.apart import keeps_apart
from shardwise.interop.transformers.spec import TransformersSpec, no_document_mask
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import Losses
from shardwise.model.loss import TokenLosses, cross_entropy_sum
from shardwise.terminal import counted

RANDOM_BACKWARD = {"reformer"}
KERNELS = {"auto": None, "sdpa": "sdpa", "math": "eager", "flex": "flex_attention"}


class TransformersModel(nn.Module):
    """Is built without memory; `read` or `draw` gives it weights, on the CPU."""

    def __init__(self, spec: TransformersSpec, attention: str = "auto", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.spec, self.attention, self.dtype = spec, attention, dtype
        self.inner: Any = build_without_memory(json.loads(spec.config_json), KERNELS[attention])
        if dtype == torch.float64:
            self.inner.config._experts_implementation = "eager"  # grouped_mm has no fp64
        self.kernel = str(self.inner.config._attn_implementation)
        is_odd = self.kernel == "eager" and attention == "auto"
        self.losses: TokenLosses | None = None  # in the place of cross-entropy
        self.kernel_reason = f"transformers has no fused attention for {spec.name}: eager" if is_odd else ""
        self.train()

    def blocks(self) -> list[nn.Module]:
        return list(self.get_submodule(f"inner.{self.spec.blocks}").children())

    def train(self, mode: bool = True) -> TransformersModel:
        """Sets the mode of this module only. The inner model is never in training mode: it would drop values, or
        layers, at random."""
        super().train(mode)
        self.inner.eval()
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
        x_BTD: Tensor | None = None,
        rows_B: Tensor | None = None,
    ) -> Tensor | Losses:
        """Returns logits, or with targets the summed losses, as `Decoder.forward` returns them."""
        assert positions_BT is None and x_BTD is None, "a model of transformers is whole"
        if documents_BT is not None and not keeps_apart(self.spec):
            raise no_document_mask(self.spec.name)
        if cache is not None:
            return self._continue(tokens_BT, cache)
        if targets_BT is not None and torch.is_grad_enabled() and self.inner.config.model_type in RANDOM_BACKWARD:
            raise UserError(
                f"{self.spec.name} cannot be trained here",
                why="transformers computes its backward in training mode only, where hashes and dropout are drawn at "
                "random: no two layouts would agree",
                fix="another architecture; eval and generate take this one",
            )
        logits_BTV = self.logits(tokens_BT, documents_BT)
        if targets_BT is None:
            return logits_BTV
        total = cross_entropy_sum(
            lambda logits: logits, logits_BTV.flatten(0, 1), targets_BT.flatten(), logits_BTV.shape[-1], self.losses
        )
        return Losses(total, total.new_zeros(()), total.new_zeros(()))

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Returns the logits of whole rows. Where the documents of a row are numbered, positions begin anew with each,
        which tells transformers that they do not see each other."""
        positions = {} if documents_BT is None else {"position_ids": _positions_within(documents_BT)}
        try:
            return self.inner(input_ids=tokens_BT, use_cache=False, **positions).logits
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as problem:
            if not _is_theirs(problem):
                raise
            raise UserError(
                f"transformers' own code of {self.spec.name} fails with this config.json",
                why=f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}",
                fix="take a config.json that transformers alone can run, or another version of transformers",
            ) from problem

    # Generation -----------------------------------------------------------------------------------------------------

    def _continue(self, tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        """Returns the logits of new tokens, by the model's own cache; without one everything before is computed
        again."""
        num_new = tokens_BT.shape[1]
        all_BT = cache.append(0, tokens_BT[..., None])[0][..., 0]
        cache.advance(num_new)
        if not self.remembers:
            return self.logits(all_BT)[:, -num_new:]
        found = self.inner(input_ids=tokens_BT, past_key_values=cache.theirs, use_cache=True)
        cache.theirs = found.past_key_values
        return found.logits

    @cached_property
    def remembers(self) -> bool:
        """Whether transformers' cache works here. It is tried once, on a few tokens: caches of some kinds of models are
        called otherwise, or need to be made by hand, and a wrong one would only be seen in the text. Every rank of a
        layout tries at the same time."""
        if "past_key_values" not in inspect.signature(self.inner.forward).parameters:
            return False
        tokens_BT = torch.arange(8, device=next(self.parameters()).device)[None] % self.spec.vocab
        past, parts = None, []
        with torch.no_grad():
            whole_BTV = self.logits(tokens_BT)
            try:
                for part_BT in tokens_BT.split([5, 1, 2], 1):
                    found = self.inner(input_ids=part_BT, past_key_values=past, use_cache=True)
                    past = found.past_key_values
                    parts.append(found.logits)
            except Exception:  # whatever an architecture raises when it is continued in this way
                return False
        if past is None:
            return False
        limit = torch.finfo(whole_BTV.dtype).eps ** 0.5 * whole_BTV.abs().max()
        return bool((torch.cat(parts, 1) - whole_BTV).abs().max() <= limit)

    # Weights --------------------------------------------------------------------------------------------------------

    def read(self, directory: Path) -> None:
        """Reads a directory's safetensors by transformers, which knows how their names have changed over time."""
        from shardwise.interop.huggingface.weights import list_files, shorten, translate_read_errors

        list_files(directory)  # complete, and no pickles
        quiet_transformers()
        with translate_read_errors(directory):
            self.inner, about = type(self.inner).from_pretrained(
                directory,
                config=self.inner.config,
                attn_implementation=self.kernel,
                dtype=self.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        self._of_one_dtype()
        for what in ("missing", "mismatched"):
            if wrong := about[f"{what}_keys"]:
                raise UserError(
                    f"{counted(len(wrong), f'{what} tensor')} in {directory}",
                    why=shorten([str(name) for name in sorted(wrong)]),
                    fix="check that config.json belongs to these weights",
                )

    def draw(self) -> None:
        """Gives the model memory with some weights in it, for a checkpoint to be put there."""
        config = self.inner.config
        self.inner = type(self.inner)._from_config(config, dtype=self.dtype, attn_implementation=self.kernel)
        self._of_one_dtype()

    def draw_from(self, seed: int) -> None:
        """Gives the model the same weights on every rank, none of them exactly zero or one, where a mistake could hide:
        for a proof."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self.draw()
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)

    def _of_one_dtype(self) -> None:
        """Gives every parameter the one number format: transformers keeps some in fp32 whatever is asked for (routers'
        biases of ERNIE 4.5), and FSDP2 shards parameters of one format together."""
        for parameter in self.inner.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        self.train()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads a checkpoint's tensors: of a tied weight it may have one name or all."""
        found = self.load_state_dict(dict(tensors), strict=False)
        held = {id(value) for name, value in self.state_dict(keep_vars=True).items() if name in tensors}
        absent = [name for name in found.missing_keys if id(self.state_dict(keep_vars=True)[name]) not in held]
        if absent or found.unexpected_keys:
            raise UserError(
                f"this checkpoint does not hold {self.spec.name}",
                why=f"missing or left over: {', '.join([*absent, *found.unexpected_keys][:6])}",
                fix="take the checkpoint of a run with this model",
            )

    def save(self, directory: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        """Writes config.json and safetensors into a directory that exists, as transformers writes them."""
        quiet_transformers()
        model = self.inner.to(dtype) if dtype else self.inner
        model.save_pretrained(directory, max_shard_size=max_shard_bytes)


def _positions_within(documents_BT: Tensor) -> Tensor:
    """Returns the position of every token within its own document."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.zeros_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return places_T - (places_T * begins_BT).cummax(1).values


def _is_theirs(problem: Exception) -> bool:
    """Returns whether transformers' code, or a layer of torch that it calls, raised this: not a hook of ours or of
    FSDP2, no lack of memory, no device."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__")) if trace else ""
    if isinstance(problem, RuntimeError) and not re.search(r"\b(sizes?|shapes?|dimensions?|dtype)\b", str(problem)):
        return False
    return module.startswith(("transformers.", "torch.nn."))


# Building -------------------------------------------------------------------------------------------------------------


def build_without_memory(config: Mapping[str, Any], attention: str | None = None) -> Any:
    """Returns the model on `meta`, of the class that transformers has for this model_type; `auto_map` is not looked
    at."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    quiet_transformers()
    plain = {key: _with_floats(value) for key, value in config.items() if key not in ("auto_map", "model_type")}
    about = CONFIG_MAPPING[config["model_type"]].from_dict(plain)
    if getattr(about, "rescale_every", 0):  # RWKV divides weights in place where it is not in training mode, for fp16
        about.rescale_every = 0
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(about)]
    with torch.device("meta"):
        try:
            return kind._from_config(about, attn_implementation=attention)
        except (ValueError, ImportError) as problem:
            if attention is None:
                raise
            raise UserError(
                f"transformers has no {attention} attention for {config['model_type']}",
                why=str(problem).splitlines()[0],
                fix="model.attention=auto",
            ) from problem


def _with_floats(value: Any) -> Any:
    """Returns a value of a config with the floats that JSON does not have: transformers writes infinity as
    `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, Mapping):
        named = value.get("__float__")
        return float(named) if isinstance(named, str) else {key: _with_floats(item) for key, item in value.items()}
    return value


def find_block_list(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Returns the longest list of modules that is not inside another one, and its name: experts and the like are inside
    of blocks."""
    lists = {name: found for name, found in model.named_modules() if isinstance(found, nn.ModuleList) and len(found)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise UserError(
            f"{type(model).__name__} has no list of blocks",
            why="what is gathered and dropped together is one block of an nn.ModuleList",
            fix="use a model with a list of layers",
        )
    name = max(outer, key=lambda name: len(outer[name]))
    return name, list(outer[name].children())


@contextmanager
def as_if_run() -> Iterator[None]:
    """Lets transformers take tensors without values for those of a run. For those of a compiler it builds masks that a
    run has no use for."""
    from transformers import masking_utils

    before = getattr(masking_utils, "is_tracing", None)
    if before is None:  # a version that does not ask
        yield
        return
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = before


def quiet_transformers() -> None:
    """Silences progress bars and advice: those of every rank would cover what a run says."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
