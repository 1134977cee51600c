"""Tab: which words may follow, and what the scripts make of them in a real bash, zsh and fish."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.candidates import candidates
from shardwise.cli.completion import SCRIPTS
from shardwise.cli.main import main


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("shardwise ", {"train", "plan", "completion"}, set()),
        ("shardwise tr", {"train"}, {"plan"}),
        ("shardwise train op", {"optimizer."}, {"train."}),
        ("shardwise train optimizer.", {"optimizer.lr=", "optimizer.schedule="}, {"train.steps="}),
        ("shardwise train model.num", {"model.num_layers="}, set()),
        ("shardwise train optimizer.schedule=", {"optimizer.schedule=wsd"}, {"wsd"}),
        ("shardwise train model.preset=llama3", {"model.preset=llama3-8b"}, {"model.preset=gpt2"}),
        ("shardwise train train.deterministic=", {"train.deterministic=true"}, set()),
        ("shardwise train --dry", {"--dry-run"}, {"--nproc"}),
        ("shardwise train --resume ", {"auto"}, {"train."}),
        ("shardwise plan ", {"llama3-8b", "qwen3-8b"}, {"last"}),
        ("shardwise plan llama3-8b --cluster 8xh", {"8xh100", "8xh20"}, {"8xb200"}),
        ("shardwise plan llama3-8b --as ", {"megatron"}, set()),
        ("shardwise explain ze", {"zero"}, set()),
        ("shardwise init --recipe ", {"moe", "chat-lora"}, set()),
        ("shardwise data ", {"prepare", "show"}, set()),
        ("shardwise data prepare --tok", {"--tokenizer"}, set()),
        ("shardwise completion ", {"bash", "zsh", "fish"}, set()),
        ("shardwise resume ", {"last", "one", "train."}, set()),
        ("shardwise compare one o", {"one"}, {"last"}),
        ("shardwise nonsense ", set(), {"train"}),
        ("shardwise train 'open", set(), {"train."}),
    ],
)
def test_words_that_may_follow(line, some, none, workdir):
    (workdir / "runs/one").mkdir(parents=True)
    (workdir / "runs/one/config.toml").write_text("")
    found = set(candidates(line))
    assert some <= found and not none & found


def test_a_script_for_each_shell_is_printed(capsys):
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script + "\n"


BASH = """
shardwise() { "$PYTHON" -m shardwise "$@"; }
eval "$(shardwise completion bash)"
complete -p shardwise
for words in ver 'train optimizer.schedule=w' 'train optimizer.l' 'watch o'
do
  COMP_LINE="shardwise $words"
  COMP_POINT=${#COMP_LINE}
  _shardwise
  printf '%s\\n' "${COMPREPLY[@]}"
done
"""


# zsh has its builtins for completion only while it completes: here they say what they are told.
ZSH = """
shardwise() { "$PYTHON" -m shardwise "$@" }
compdef() { print -r -- "$@" }
compadd() { print -r -- "$@" }
compset() { print -r -- "$@" }
_files() { print files }
eval "$(shardwise completion zsh)"
for line in 'shardwise ver' 'shardwise train optimizer.l' 'shardwise train data.source=o'
do
  words=(${(z)line})
  CURRENT=$#words
  _shardwise
done
"""

FISH = """
function shardwise; $PYTHON -m shardwise $argv; end
shardwise completion fish | source
for words in ver 'train optimizer.l' 'train data.source=o' 'train ow'
  complete -C "shardwise $words"
end
"""


def completed(shell: list[str], script: str, workdir: Path) -> list[str]:
    """Returns the lines of a real shell, in a directory with a run and a file."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    (workdir / "runs/one").mkdir(parents=True)
    (workdir / "runs/one/config.toml").write_text("")
    (workdir / "own.toml").write_text("")
    environment = {"PYTHON": sys.executable, "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}
    environment |= {"HOME": str(workdir / "runs")}
    done = subprocess.run([*shell, "-c", script], cwd=workdir, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes(workdir: Path):
    """bash has broken `optimizer.schedule=w` at `=`, and takes what follows."""
    spec, *words = completed(["bash", "--norc", "--noprofile"], BASH, workdir)
    assert spec == "complete -o default -F _shardwise shardwise"
    assert words == ["verify", "wsd", "optimizer.lr=", "optimizer.lr_scaling=", "one"]


def test_zsh_completes(workdir: Path):
    """Keys get no space behind them, and a path may stand behind the `=` of one."""
    keys = "-S  -- optimizer.lr= optimizer.lr_scaling="
    assert completed(["zsh", "-f"], ZSH, workdir) == ["_shardwise shardwise", "-- verify", keys, "-P *=", "files"]


def test_fish_completes(workdir: Path):
    """Paths are offered where there is no word of ours, behind the `=` of a key too."""
    words = ["verify", "optimizer.lr=", "optimizer.lr_scaling=", "data.source=own.toml", "own.toml"]
    assert completed(["fish", "--no-config"], FISH, workdir) == words


def test_no_torch_is_imported():
    script = (
        "import sys\nfrom shardwise.cli.candidates import candidates\n"
        "assert candidates('shardwise train model.preset=') and candidates('shardwise plan ')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
