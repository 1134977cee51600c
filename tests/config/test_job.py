"""What follows from the kind of job: its learning rate with the reason, and how long its sequences may be."""

from __future__ import annotations

import pytest

from shardwise.config.job import check_length, rate_line, settle_job, usual_rate
from shardwise.config.load import load_config
from shardwise.config.reopen import written_origins
from shardwise.config.write import resolved_text
from shardwise.errors import UserError
from shardwise.spec.presets import preset


def rate(name: str, *words: str) -> tuple[float, str]:
    return usual_rate(load_config(None, words).config, preset(name))


def test_a_small_model_from_scratch_keeps_its_rate_and_larger_ones_take_smaller_steps():
    assert rate("tiny") == (1.5e-3, "usual for 4.6 M parameters from scratch")
    rates = [rate(name)[0] for name in ("tiny", "gpt2", "gpt2-xl", "llama3-8b", "llama3-70b")]
    assert rates == [1.5e-3, 6e-4, 4e-4, 3e-4, 1.5e-4]


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["model.path=x"], "tiny", 2e-5),
        (["model.path=x"], "llama3-70b", 1e-5),
        (["model.path=x", "adapter.kind=lora"], "tiny", 2e-4),
        (["model.path=x", "adapter.kind=qlora"], "llama3-70b", 1e-4),
        (["adapter.kind=lora"], "tiny", 2e-4),
    ],
)
def test_trained_weights_and_adapters_have_rates_of_their_own(words, name, expected):
    found, why = rate(name, *words)
    assert found == expected and ("adapters" if "adapter" in str(words) else "going on with") in why


def test_what_somebody_has_set_stays_and_what_was_open_has_its_reason():
    spec = preset("tiny")
    loaded = load_config(None, ["optimizer.lr=0.1", "data.document_mask=false"])
    assert settle_job(loaded.config, spec, document_mask=True, packing="whole") == (loaded.config, {})
    loaded = load_config(None, ["model.path=x"])
    config, origins = settle_job(loaded.config, spec, document_mask=True, packing="whole")
    assert (config.optimizer.lr, config.data.document_mask) == (2e-5, True)
    written = written_origins(resolved_text(config, {**loaded.origins, **origins}))
    line = rate_line(config.optimizer.peak_lr, written)
    assert (
        line == "lr       2e-05 at its peak, usual for going on with 4.6 M trained parameters; optimizer.lr=… sets it"
    )
    assert rate_line(0.1, {"optimizer.lr": "command line"}) is None
    assert origins["data.document_mask"] == "auto: conversations that share a row"


def test_a_trained_model_is_not_given_positions_that_it_has_never_seen():
    def check(name: str, *words: str) -> None:
        loaded = load_config(None, words)
        check_length(loaded.config, preset(name).with_overrides(dict(loaded.config.model.overrides)), loaded.origins)

    with pytest.raises(UserError, match=r"train.seq_len = 4096 is longer than tiny was trained for") as caught:
        check("tiny", "model.path=x", "train.seq_len=4096")
    assert "end at 2048" in caught.value.why and "model.max_seq_len=4096" in caught.value.fix
    check("tiny", "model.path=x", "train.seq_len=2048")
    check("tiny", "train.seq_len=4096")
    check("tiny", "model.path=x", "train.seq_len=4096", "model.max_seq_len=4096")
    check("tiny", "model.path=x", "train.seq_len=4096", "model.rope_scaling=linear", "model.rope_factor=2")
    with pytest.raises(UserError) as caught:
        check("gpt2", "model.path=x", "train.seq_len=4096")
    assert caught.value.fix == "train.seq_len=1024"
