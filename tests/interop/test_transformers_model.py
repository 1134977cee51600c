"""transformers' models behind our decoder's interface, in one process: losses, chance, continuing, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foreign_models import KINDS, ODD, UNKNOWN_TO_OURS, write_model
from transformers import AutoModelForCausalLM

from shardwise.errors import UserError
from shardwise.interop.huggingface.load_save import read_spec
from shardwise.interop.transformers.model import TransformersModel, find_block_list
from shardwise.interop.transformers.spec import TransformersSpec, can_mask, spec_from_transformers
from shardwise.model.cache import KeyValueCache
from shardwise.model.decoder import IGNORE, Losses
from shardwise.report.header import builder_lines
from shardwise.run.generate import Sampling, generate

TOKENS = torch.arange(2, 22).view(2, 10) * 11 % 256


def load(directory: Path) -> TransformersModel:
    spec = read_spec(directory)
    assert isinstance(spec, TransformersSpec)
    model = TransformersModel(spec)
    model.read(directory)
    return model.train()


@pytest.fixture(params=KINDS)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(request.param, tmp_path / request.param)


def test_losses_and_logits_are_those_of_transformers(model_dir: Path) -> None:
    """Also in training mode, where OPT's config asks for dropout."""
    model, truth = load(model_dir), AutoModelForCausalLM.from_pretrained(model_dir).eval()
    targets = TOKENS.roll(-1, 1)
    targets[:, -1] = targets[0, 3] = IGNORE
    with torch.no_grad():
        losses, right = model(TOKENS, targets), truth(TOKENS, labels=TOKENS)
        assert torch.equal(model(TOKENS), right.logits)
    assert isinstance(losses, Losses) and model.training
    wanted = torch.nn.functional.cross_entropy(right.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert losses.cross_entropy.item() == pytest.approx(wanted.item(), rel=1e-6)


@torch.no_grad()
def test_a_cache_continues_where_it_was(model_dir: Path) -> None:
    model, cache = load(model_dir), KeyValueCache(10)
    parts = [model(part, cache=cache) for part in TOKENS.split([4, 1, 5], 1)]
    assert cache.length == 10 and torch.allclose(torch.cat(parts, 1), model(TOKENS), atol=1e-5)


def test_greedy_text_is_the_same_with_and_without_a_cache(model_dir: Path) -> None:
    """With one, each new token goes through the model alone."""
    model, seen = load(model_dir), []
    assert model.remembers
    model.inner.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with_cache = list(generate(model, [5, 6, 7], 12, Sampling(temperature=0)))
    assert seen == [3] + 11 * [1]
    model.__dict__["remembers"] = False
    assert list(generate(model, [5, 6, 7], 12, Sampling(temperature=0))) == with_cache
    assert seen[12:] == list(range(3, 15)), "all tokens before, again"


def test_an_architecture_with_another_kind_of_cache_computes_everything_again(tmp_path: Path) -> None:
    model = load(write_model("mamba", tmp_path / "mamba"))
    assert not model.remembers
    tokens, truth = [5, 6, 7], AutoModelForCausalLM.from_pretrained(tmp_path / "mamba").eval()
    found = list(generate(model, tokens, 4, Sampling(temperature=0)))
    for _ in range(4):
        tokens = [*tokens, int(truth(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())]
    assert found == tokens[3:]


def test_a_cache_that_answers_otherwise_is_not_used(tmp_path: Path) -> None:
    """Here it is one that forgets."""
    model = load(write_model("opt", tmp_path / "opt"))
    plain = model.inner.forward

    def forward(input_ids, past_key_values=None, use_cache=False):
        return plain(input_ids=input_ids, use_cache=use_cache)

    model.inner.forward = forward
    assert not model.remembers


def test_a_checkpoint_may_name_a_tied_weight_once(tmp_path: Path) -> None:
    model = load(write_model("opt", tmp_path / "opt"))
    once = {name: value.detach().clone() + 1 for name, value in model.named_parameters()}
    model.load_tensors(once)
    assert all(torch.equal(value, once[name]) for name, value in model.named_parameters())
    name = next(iter(once))
    with pytest.raises(UserError, match="does not hold opt"):
        model.load_tensors({key: value for key, value in once.items() if key != name})
    with pytest.raises(UserError, match="does not hold opt"):
        model.load_tensors({**once, "more": torch.zeros(1)})


@pytest.mark.parametrize("kind", ["gpt_neox", "dynamic"])
def test_documents_of_a_row_are_kept_apart(kind: str, tmp_path: Path) -> None:
    """Each has the logits that it has alone."""
    model = load(write_model(kind, tmp_path / kind))
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0] * 10])[:, : TOKENS.shape[1]]
    packed_BTV = model(TOKENS, documents_BT=documents_BT)
    for row, (first, last) in [(0, (0, 3)), (0, (3, 5)), (0, (5, TOKENS.shape[1])), (1, (0, TOKENS.shape[1]))]:
        alone_BTV = model(TOKENS[row : row + 1, first:last])
        assert (packed_BTV[row : row + 1, first:last] - alone_BTV).abs().max() < 1e-5


def test_documents_are_refused_where_an_architecture_cannot_keep_them_apart(model_dir: Path) -> None:
    model = load(model_dir)
    if model.spec.name == "gpt_neox":
        assert can_mask(model.spec)
        return
    assert not can_mask(model.spec)
    with pytest.raises(UserError, match="document_mask"):
        model(TOKENS, TOKENS, documents_BT=torch.zeros_like(TOKENS))


def test_a_spec_is_stored_and_read_back(model_dir: Path) -> None:
    spec = read_spec(model_dir)
    assert isinstance(spec, TransformersSpec)
    assert TransformersSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert (spec.hidden, spec.num_layers, spec.vocab, spec.num_heads) == (24, 3, 256, 4)
    assert spec.positions == ("learned" if model_dir.name == "opt" else "rope")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "opt", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "opt", "hidden_size": 30, "num_attention_heads": 4}, "cannot build"),
        ({"model_type": "whisper-never"}, "is not supported"),
    ],
)
def test_configs_that_cannot_work(config: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        spec_from_transformers(config)


def test_experts_inside_of_blocks_are_not_the_blocks() -> None:
    block = torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8))})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block, torch.nn.Linear(2, 2)])})
    assert find_block_list(model)[0] == "layers"
    with pytest.raises(UserError, match="no list of blocks"):
        find_block_list(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", [*ODD, *UNKNOWN_TO_OURS])
def test_odd_kinds_have_the_losses_and_gradients_of_transformers(kind: str, tmp_path: Path) -> None:
    """Two steps of training each, so that what changes weights or state in passing is seen."""
    directory = write_model(kind, tmp_path / "model")
    model, truth = load(directory), AutoModelForCausalLM.from_pretrained(directory).train()
    assert kind in UNKNOWN_TO_OURS or not model.spec.why_not_ours
    losses = []
    for each in (model, truth):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            logits = each(TOKENS) if each is model else each(input_ids=TOKENS, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


@pytest.mark.parametrize("kind", UNKNOWN_TO_OURS)
def test_what_our_decoder_lacks_is_run_by_transformers_with_the_reason(kind: str, tmp_path: Path) -> None:
    spec = read_spec(write_model(kind, tmp_path / "model"))
    assert isinstance(spec, TransformersSpec)
    assert "is not supported" in spec.why_not_ours
    [line] = builder_lines(spec)
    assert "transformers' own code runs this model" in line and spec.why_not_ours in line


def test_what_transformers_cannot_run_either_is_refused_for_our_reason(tmp_path: Path) -> None:
    config = json.loads((write_model("dynamic", tmp_path / "model") / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"rope_scaling.*spiral"):
        read_spec(tmp_path / "model")


def test_more_positions_are_not_offered_as_a_key_that_is_refused(tmp_path: Path) -> None:
    """Shapes of such a model cannot be overridden."""
    from shardwise.config.job import check_length
    from shardwise.config.load import load_config

    directory = write_model("dynamic", tmp_path / "dynamic")
    loaded = load_config(None, [f"model.path={directory}", "train.seq_len=32"])
    with pytest.raises(UserError, match="longer than llama was trained for") as caught:
        check_length(loaded.config, read_spec(directory), loaded.origins)
    assert "config.json" in caught.value.fix and "model.max_seq_len" not in caught.value.fix


def test_every_parameter_has_the_format_that_was_asked_for(tmp_path: Path) -> None:
    """FSDP2 shards parameters of one format together."""
    directory = write_model("ernie4_5_moe", tmp_path / "model")
    spec = read_spec(directory)
    assert isinstance(spec, TransformersSpec)
    for dtype in (torch.float64, torch.bfloat16):
        read, drawn = TransformersModel(spec, dtype=dtype), TransformersModel(spec, dtype=dtype)
        read.read(directory)
        drawn.draw()
        assert {value.dtype for model in (read, drawn) for value in model.parameters()} == {dtype}


def test_a_config_that_transformers_itself_cannot_run_is_no_bug_of_ours(tmp_path: Path) -> None:
    """DeepSeek-V2's config as transformers writes it does not say how many experts a token visits."""
    from foreign_models import HYBRID
    from transformers import CONFIG_MAPPING

    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    values = HYBRID | heads | {"num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4}
    config = CONFIG_MAPPING["deepseek_v2"](**values)
    config.save_pretrained(tmp_path)
    model = TransformersModel(spec_from_transformers(json.loads((tmp_path / "config.json").read_text())))
    model.draw()
    with pytest.raises(UserError, match="transformers' own code of deepseek_v2 fails") as caught:
        model(TOKENS, TOKENS)
    assert "argument 'k' must be int" in caught.value.why
    model.inner.forward = lambda **given: [][1]  # of ours, or of a hook
    with pytest.raises(IndexError):
        model(TOKENS, TOKENS)


def test_a_model_whose_backward_draws_at_random_is_refused_where_it_is_trained() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8, "feed_forward_size": 40}
    config = {"model_type": "reformer", "vocab_size": 256, "axial_pos_embds": False, "is_decoder": True, **sizes}
    model = TransformersModel(spec_from_transformers(config | {"attn_layers": ["local"], "num_hidden_layers": 1}))
    model.draw()
    with pytest.raises(UserError, match="cannot be trained here"):
        model(TOKENS, TOKENS)
    with torch.no_grad():
        assert model(TOKENS).shape == (2, 10, 256)


def test_no_end_of_positions_is_no_bound() -> None:
    """XLNet's config writes -1."""
    config = {"model_type": "xlnet", "vocab_size": 256, "d_model": 32, "n_head": 4, "d_head": 8, "n_layer": 1}
    assert spec_from_transformers(config).max_seq_len == 2**30
