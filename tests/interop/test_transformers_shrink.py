"""Small models of architectures that only transformers knows: the same kinds of layers, much smaller, and they run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.interop.transformers.shrink import MAX_PARAMETERS, shrink_transformers
from shardwise.interop.transformers.spec import TransformersSpec, spec_from_transformers


def as_published(kind: str, **more: Any) -> TransformersSpec:
    """The sizes that transformers has as defaults: those of a real model."""
    from transformers import CONFIG_MAPPING

    return spec_from_transformers(json.loads(CONFIG_MAPPING[kind](**more).to_json_string(use_diff=False)))


@pytest.mark.parametrize("kind", ["gpt_neox", "falcon", "gptj", "starcoder2", "mamba"])
def test_billions_of_parameters_become_few(kind: str) -> None:
    spec = as_published(kind)
    small = shrink_transformers(spec, 67)
    assert spec.num_parameters > 100e6 and small.num_parameters < MAX_PARAMETERS
    assert (small.num_layers, small.vocab, small.name) == (2, 67, spec.name)
    assert json.loads(small.config_json)["model_type"] == kind
    assert (small.num_kv_heads < small.num_heads) == (spec.num_kv_heads < spec.num_heads), "grouped if grouped"


def test_every_kind_of_layer_stays() -> None:
    """By a list of the config (three windows, then a layer that sees everything), or by what a layer holds."""
    small = shrink_transformers(as_published("cohere2"), 67)
    assert json.loads(small.config_json)["layer_types"] == 3 * ["sliding_attention"] + ["full_attention"]
    assert len(set(shrink_transformers(spec := as_published("jamba"), 67).block_parameters)) == len(
        set(spec.block_parameters)
    )


def test_what_cannot_be_narrowed_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="cannot be made smaller") as caught:
        shrink_transformers(as_published("xglm"), 67)
    assert "transformers builds this model: " in caught.value.why
