"""Config files of planned jobs, as short as they can be, for tests of what is launched."""

from __future__ import annotations

from pathlib import Path

ON_32_GPUS = """
[model]
preset = "llama3-8b"
[train]
steps = 2000
global_batch = 128
seq_len = 8192
micro_batch = 1
[parallel]
dp = 32
zero = 2
tp = 1
cp = 1
pp = 1
ep = 1
[memory]
precision = "bf16"
recompute = "selective"
"""


def plan_file(folder: Path, cluster: str = "4x8xh100", text: str = ON_32_GPUS, name: str = "job.toml") -> Path:
    """A config file that says, as `shardwise plan` does, for which cluster it is."""
    path = folder / name
    path.write_text(f"# row 1 of 5, question 0123456789ab: dp=32 zero=2 on 32 of {cluster}\n{text}")
    return path
