"""Makes the directory in which odd inputs are typed: good files, and next to each what may become of it.

small.toml           a config of a tiny model, which trains in milliseconds
stories.jsonl        its text
runs/good            a finished run of two steps, and `hf`, its export
tokens               its text, prepared
toml/ data/ model/ weights/ adapter/ clusters/ broken/   what is odd
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from commands import SMALL, STORIES

from shardwise.cli.main import main
from shardwise.errors import Exit

DEEP = "[" * 20_000
CONFIGS = {
    "misspelt": "[train]\nstpes = 3\n",
    "section": "[trian]\nsteps = 3\n",
    "top": "steps = 3\n",
    "twice": "[train]\nsteps = 3\nsteps = 4\n",
    "twice-section": "[train]\nsteps = 3\n[train]\nseed = 4\n",
    "cut": "[train\nsteps = 3\n",
    "unquoted": "[run]\nname = my run\n",
    "yaml": "train:\n  steps: 3\n",
    "json": '{"train": {"steps": 3}}\n',
    "deep": f"a = {DEEP}\n",
    "nan": "[optimizer]\nlr = nan\n",
    "inf": "[optimizer]\nlr = inf\n",
    "text": '[train]\nsteps = "many"\n',
    "list": "[train]\nsteps = [1, 2]\n",
    "table": "[train.steps]\na = 1\n",
    "section-value": "train = 3\n",
    "section-list": "[[train]]\nsteps = 3\n",
    "date": "[train]\nsteps = 2026-11-19\n",
    "true": "[train]\nsteps = true\n",
    "float": "[train]\nsteps = 2.5\n",
    "empty": "",
    "comment": "# nothing\n",
}
CLUSTERS = {
    "empty": "",
    "cut": "[[tier\n",
    "unknown": 'gpu = "b9000"\ncount = 8\n',
    "run": "[train]\nsteps = 3\n",
}
LONG = "It was a long day, and nobody came. " * 40
DATA: dict[str, str | bytes] = {
    "empty.txt": "",
    "blank.txt": " \n\n\t\n",
    "one.txt": "a",
    "latin.txt": "caf\xe9 au lait ".encode("latin-1") * 200,
    "binary.txt": bytes(range(256)) * 40,
    "utf16.txt": LONG.encode("utf-16"),
    "cut.jsonl": '{"text": "fine"}\n{"text": "not',
    "list.jsonl": "[1, 2]\n",
    "number.jsonl": "5\n",
    "null.jsonl": '{"text": null}\n',
    "five.jsonl": '{"text": 5}\n',
    "body.jsonl": '{"body": "x"}\n',
    "empty.jsonl": "",
    "nan.jsonl": '{"text": NaN}\n',
    "chat-text.jsonl": '{"messages": "hi"}\n',
    "chat-none.jsonl": '{"messages": []}\n',
    "chat-no-role.jsonl": '{"messages": [{"content": "x"}]}\n',
    "chat-no-content.jsonl": '{"messages": [{"role": "user"}]}\n',
    "chat-number.jsonl": '{"messages": [{"role": "user", "content": 5}]}\n',
    "cut.json": '[{"text": "a"}',
    "object.json": "{}",
    "word.json": '"text"',
    "header.csv": "text\n",
    "columns.csv": "a,b\n1,2\n",
    "text.parquet": LONG,
    "text.arrow": LONG,
    "text.jsonl.gz": LONG,
    "picture.png": b"\x89PNG\r\n",
    "table.xlsx": b"PK",
    "folder.txt/inside.md": "",
}
MODELS: dict[str, dict[str, Any] | str] = {
    "empty": "",
    "cut": '{"model_type": "llama", ',
    "list": "[1, 2]",
    "nan": {"hidden_size": float("nan")},
    "negative": {"num_hidden_layers": -2},
    "zero": {"num_attention_heads": 0},
    "words": {"hidden_size": "32"},
    "halves": {"hidden_size": 32.5},
    "null": {"hidden_size": None},
    "huge": {"num_hidden_layers": 10**12},
    "heads": {"num_attention_heads": 3},
    "unknown": {"model_type": "brain"},
    "no-type": {"model_type": None, "architectures": None},
    "deeper": {"num_hidden_layers": 3},
    "wider": {"intermediate_size": 65},
}
"""What config.json says in a copy of `hf`, or what of it is another."""
WEIGHTS: dict[str, bytes | None] = {"none": None, "nothing": b"", "text": b"hello, world", "zeros": bytes(5000)}
BROKEN = {
    "config": ("config.toml", "[[["),
    "config-gone": ("config.toml", None),
    "plan": ("plan.json", "{oops"),
    "metrics": ("metrics.jsonl", "not json\n"),
    "manifest": ("checkpoints/step-2/manifest.json", "{}"),
    "manifest-gone": ("checkpoints/step-2/manifest.json", None),
    "weights": ("checkpoints/step-2/weights.safetensors", "hello"),
    "weights-gone": ("checkpoints/step-2/weights.safetensors", None),
}
"""Runs with one file that holds something else, or is gone."""


def make(root: Path) -> Path:
    """Make it in an empty directory, which is the current one from then on."""
    os.chdir(root)
    shutil.copy(STORIES, "stories.jsonl")
    _write_small()
    assert main(["train", "small.toml", "--nproc", "1", "--no-verify", "run.name=good"]) == Exit.DONE
    assert main(["export", "good", "--no-verify", "--out", "hf"]) == Exit.DONE
    assert main(["data", "prepare", "stories.jsonl", "--out", "tokens"]) == Exit.DONE
    for name, text in CONFIGS.items():
        _put(f"toml/{name}.toml", text)
    for name, text in CLUSTERS.items():
        _put(f"clusters/{name}.toml", text)
    for name, content in DATA.items():
        _put(f"data/{name}", content)
    os.symlink("nowhere", "data/dangling.txt")
    _spoil_models()
    for name, (file, content) in BROKEN.items():
        shutil.copytree("runs/good", f"broken/{name}")
        if content is None:
            os.remove(f"broken/{name}/{file}")
        else:
            _put(f"broken/{name}/{file}", content)
    return root


def _spoil_models() -> None:
    config = json.loads(Path("hf/config.json").read_text(encoding="utf-8"))
    for name, change in MODELS.items():
        shutil.copytree("hf", f"model/{name}")
        _put(f"model/{name}/config.json", change if isinstance(change, str) else json.dumps(config | change))
    for name, weights in WEIGHTS.items():
        shutil.copytree("hf", f"weights/{name}")
        os.remove(f"weights/{name}/model.safetensors")
        if weights is not None:
            _put(f"weights/{name}/model.safetensors", weights)
    shutil.copytree("hf", "model/tokenizer")
    _put("model/tokenizer/tokenizer.json", "[]")
    _put("adapter/adapter_config.json", "[]")


def _write_small() -> None:
    sections: dict[str, list[str]] = {}
    for word in [*SMALL, "train.steps=2", "data.source=stories.jsonl"]:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        if value != str(STORIES):
            sections.setdefault(section, []).append(f"{name} = {value if value[0].isdigit() else json.dumps(value)}")
    _put("small.toml", "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items()))


def _put(name: str, content: str | bytes) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
