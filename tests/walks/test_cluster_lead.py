"""Someone who decides what a cluster is for: which layout, how many cards, how long, how much, in whose words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from walking import ENCODINGS, Step, walk

if TYPE_CHECKING:
    from ranks import RankPool

LLAMA = "llama3-8b --seq 8k --batch 1M --top 1 parallel.tp=1 parallel.pp=1 parallel.cp=1"
"""A search that is narrowed down to a blink."""

CLUSTER = """
gpu = "h100"
nodes = 2
per_node = 8
price = 2.5

[[tier]]
name = "nvlink"
span = 8
bandwidth = "450GB/s"

[[tier]]
name = "nic"
span = 16
bandwidth = "50GB/s"
"""

STEPS = [
    Step("explain presets", "llama3-70b"),
    Step("plan tiny --cluster 4x8xh100 --top 2", "cluster  4x8xh100: 32 x 79.1 GiB"),
    Step("plan LLAMA --cluster 8xh200", "prove    shardwise verify plans/llama3-8b-1x8xh200/1.toml"),
    Step("plan LLAMA --cluster 8xh200", "waits for"),
    Step("plan LLAMA --cluster 8xh200 --what-if memory=80GB --out what-if", "memory=80GB"),
    Step("plan LLAMA --cluster 8xh200 --why-not 'dp=4 tp=2' --out why-not", "why-not"),
    Step("plan LLAMA --cluster our.toml --tokens 1B --within 30d --out within", "GPU"),
    Step("plan LLAMA --cluster our.toml --tokens 1B --budget 500k --out budget", "cost"),
    Step("plan LLAMA --cluster our.toml:nodes=4 --fewest-gpus --out fewest", "cluster  4x8xh100"),
    Step("plan LLAMA --cluster 8xh200 --as megatron --out as", "--num-layers 32"),
    Step("plan LLAMA --cluster 8xh200 --as torchtitan --out as", "[parallelism]"),
    Step("plan LLAMA --cluster 8xh200 --as deepspeed --out as", '"zero_optimization"'),
    Step("plan LLAMA --cluster 8xh200 --as accelerate --out as", "distributed_type"),
    Step("plan LLAMA --cluster 8xh200 --json --out json", '"schema": 1'),
    Step("train plans/llama3-8b-1x8xh200/1.toml --dry-run", "llama3-8b does not fit", 3),
    Step("plan tiny --cluster 8xh200 --as torchtitan", "torchtitan 0.2.2 would not train tiny as it is", 2),
    Step("plan LLAMA --cluster 8xh200 --within 30d", "--within 30d needs --tokens", 2),
    Step("plan LLAMA --cluster 8xh200 --tokens 1T --within 1h --out late", "no layout here trains", 2),
    Step("plan LLAMA --cluster 8xh100:nick=50GB/s", "did you mean `nic`?", 2),
    Step("plan LLAMA --cluster 8xb9000", "unknown GPU `b9000`", 2),
    Step("plan llama3-70b --cluster 1xl4 parallel.tp=1 parallel.pp=1", "llama3-70b does not fit on 1x1xl4", 2),
    Step("plan LLAMA --cluster small.toml", "bandwidth", 2),
]
MEASURED = [
    Step("doctor --out here.toml", "wrote     here.toml"),
    Step("plan tiny --cluster here.toml --top 1 parallel.tp=1 parallel.pp=1", "prove    shardwise verify"),
    Step("doctor --out here.toml", "here.toml already exists", 2),
]
"""Takes seconds, so it is done on the terminal that shows least."""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_cluster_lead_plans(encoding: str, place: Path, ranks: RankPool):
    (place / "our.toml").write_text(CLUSTER, encoding="utf-8")
    (place / "small.toml").write_text('gpu = "h100"\n[[tier]]\nname = "new"\nspan = 1\n', encoding="utf-8")
    walk(STEPS + (MEASURED if encoding == "ascii" else []), encoding, place, ranks, {"LLAMA": LLAMA})
