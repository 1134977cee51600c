"""Names of other frameworks are answered with ours, and every answer is one that exists."""

import pytest

from shardwise.config.foreign import _table as foreign_table
from shardwise.config.foreign import foreign_names
from shardwise.config.keys import all_keys, model_spec_keys, section_classes
from shardwise.config.load import load_config
from shardwise.errors import UserError

PROMISED = [
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "tensor_model_parallel_size",
    "zero_stage",
    "max_steps",
    "pipeline_model_parallel_size",
    "gradient_checkpointing",
    "learning_rate",
    "warmup_ratio",
    "warmup_steps",
    "bf16",
    "fp16",
    "num_train_epochs",
    "micro_batch_size",
    "global_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_model_parallel_size",
    "seq_length",
    "block_size",
    "max_seq_length",
    "max_length",
    "activation_checkpoint",
    "offload_optimizer",
    "fsdp",
    "sharding_strategy",
    "save_steps",
    "logging_steps",
    "output_dir",
]


def test_promised_names_are_there():
    assert set(PROMISED) <= set(foreign_names())
    assert len(foreign_names()) >= 80


@pytest.mark.parametrize("name", list(foreign_names()))
def test_each_answer_names_a_key_that_exists(name):
    answer = foreign_names()[name]
    section, _, key = (answer.key or "").partition(".")
    assert answer.key is None or answer.key in all_keys() or (section == "model" and key in model_spec_keys())
    assert answer.say and answer.origin
    assert name not in {key.name for key in all_keys().values()}, "a name of ours would never be answered"


@pytest.mark.parametrize("name", list(foreign_names()))
def test_each_name_is_answered_in_a_file(name, tmp_path):
    section, _, key = name.rpartition(".")
    path = tmp_path / "run.toml"
    path.write_text(f"[{section or 'train'}]\n{key} = 2\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    answer = foreign_names()[name]
    said = f"{caught.value.why} {caught.value.fix}"
    assert answer.origin in said
    assert answer.say in said
    assert (answer.key or "") in said


def test_sections_and_values_map_to_ours():
    assert set(foreign_table()["sections"].values()) <= set(section_classes())
    assert not set(foreign_table()["sections"]) & set(section_classes())
    for dotted, values in foreign_table()["values"].items():
        key = all_keys()[dotted]
        assert key.choices is not None
        assert set(values.values()) <= set(key.choices), dotted
        assert not set(values) & set(key.choices), dotted


@pytest.mark.parametrize(
    ("spelling", "ours"), [("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("half", "fp16-true"), ("float8", "fp8")]
)
def test_other_spellings_of_precision_reach_our_value(spelling, ours):
    key = all_keys()["memory.precision"]
    if key.available is None or ours in key.available:
        assert load_config(None, [f"memory.precision={spelling}"]).config.memory.precision == ours
    else:
        with pytest.raises(UserError, match=f'`memory.precision = "{ours}"` is not available yet'):
            load_config(None, [f"memory.precision={spelling}"])
