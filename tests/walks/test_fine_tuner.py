"""An engineer with a model of Hugging Face's, conversations, and an hour: adapters, evaluation, one model of it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from walking import ENCODINGS, Step, walk

if TYPE_CHECKING:
    from ranks import RankPool

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [("Wo wohnt Zoë?", "Zoë wohnt in Köln, 東京 und Łódź."), ("What is 2 + 2?", "2 + 2 = 4 → four 🎉")]
CHAT = "data.source=chat.jsonl train.seq_len=64 train.global_batch=4 train.eval_batches=1 train.sample_tokens=8"

STEPS = [
    Step("plan base --cluster 1xh100 --top 1", "shardwise train plans/base-1x1xh100/1.toml"),
    Step("init chat.toml --recipe chat-lora model.path=base data.source=chat.jsonl", "shardwise train chat.toml"),
    Step("train model.path=base CHAT --dry-run adapter.kind=lora train.steps=3", "usual for lora adapters"),
    Step("train model.path=base CHAT --nproc 1 adapter.kind=lora train.steps=3 run.name=tuned",
         "parameters are trained, 18.97% of the model's"),
    Step("watch tuned --once", "finished, 3 of 3 steps"),
    Step("eval tuned", "perplexity"),
    Step("eval base data.source=chat.jsonl train.seq_len=64", "perplexity"),
    Step("generate tuned --chat --prompt 'Wo wohnt Zoë?' --max-tokens 4 --json", '"prompt": "Wo wohnt Zo'),
    Step("export tuned --out adapter", "wrote    adapter"),
    Step("export tuned --out merged --merge-lora --no-verify", "wrote    merged"),
    Step("generate merged --prompt 'Wo wohnt' --max-tokens 4", "Wo wohnt"),
    Step("convert merged --to shardwise --out ours", "wrote    ours"),
    Step("train model.path=base CHAT --nproc 1 adapter.kind=lora adapter.path=adapter train.steps=1 run.name=on",
         "run      runs/on"),
    Step("train model.path=base CHAT --nproc 1 train.steps=2 run.name=whole", "going on with"),
    Step("compare tuned whole", "adapter.kind"),
    Step("resume tuned", "has finished its 3 steps"),
    Step("resume tuned --nproc 1 --allow train.steps train.steps=4", "from step 3"),
    Step("export whole --out adapter", "adapter already exists", 2),
    Step("export whole --out whole-hf --merge-lora", "whole has no adapters to merge", 2),
    Step("train model.path=base CHAT adapter.kind=lora adapter.targets=w_pack", "matches no linear layer", 2),
    Step("train model.path=base data.source=chat.jsonl train.seq_len=4k", "is longer than", 2),
    Step("train model.path=base-without-tokenizer CHAT", "tokenizer", 2),
    Step("train model.path=base CHAT --learning_rate 2e-5", "write `optimizer.lr=2e-05`", 2),
    Step("train model.path=meta-llama/Llama-3.2-1B CHAT", "hf download meta-llama/Llama-3.2-1B", 2),
    Step("eval tuned --tasks arc_easy --limit 2", "pip install 'shardwise[tasks]'", 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer and a chat template, as transformers writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "base"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([text for pair in TALK for text in pair], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_engineer_fine_tunes(encoding: str, place: Path, base: Path, ranks: RankPool):
    (place / "base").symlink_to(base)
    (place / "base-without-tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / "base-without-tokenizer" / name).symlink_to(base / name)
    rows = [[("user", question), ("assistant", answer)] for question, answer in TALK] * 60
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    (place / "chat.jsonl").write_text(text, encoding="utf-8")
    walk(STEPS, encoding, place, ranks, {"CHAT": CHAT})
