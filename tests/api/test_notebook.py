"""The cells of a real notebook: training in the kernel's process and on two ranks, and what a mistake looks like."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.needs("ipykernel")
SMALL = """
import shardwise as sw
small = {
    "model": {"num_layers": 2, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "ffn": 64},
    "train": {"steps": 2, "seq_len": 32, "global_batch": 4, "eval_batches": 1, "sample_tokens": 0},
    "data.source": "text.txt", "run.dir": "runs", "parallel.dp": 1,
}
"""
Cell = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """cell(code) runs a cell of one notebook; what it printed, and what it showed as its value or as an error."""
    from jupyter_client.manager import KernelManager

    place = tmp_path_factory.mktemp("notebook")
    (place / "text.txt").write_text("It was a long day, and nobody came. " * 400)
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(place))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def run(code: str) -> tuple[str, str]:
        printed, shown = [], []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                shown.extend(content["traceback"])

        client.execute_interactive(code, timeout=120, output_hook=hear)
        return "".join(printed), "\n".join(shown)

    yield run
    client.stop_channels()
    manager.shutdown_kernel()


def test_a_notebook_trains(cell: Cell):
    """In its own process; then on two ranks, with a function of a cell and a list that it fills."""
    printed, shown = cell(SMALL + "sw.train(small)")
    assert "step 2/2" in printed and "runs/tiny-001" in shown and "finished, 2 steps" in shown
    own = (
        "import torch.nn.functional as F\nseen = []\n"
        "def own(logits, targets):\n    return F.cross_entropy(logits, targets, ignore_index=-100, reduction='none')\n"
        "run = sw.train(small | {'parallel.dp': 2}, loss=own, callbacks=lambda step: seen.append(step.loss))\n"
        "len(seen), run.losses == seen"
    )
    printed, shown = cell(own)
    assert "starting 2 processes" in printed and "largest difference" in printed and shown == "(2, True)"


def test_a_notebook_shows_a_mistake_in_three_lines_and_the_signature_of_plan(cell: Cell):
    shown = cell(SMALL + "sw.train(small | {'train.stpes': 3})")[1]
    lines = shown.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["error:", "why", "fix"] and "did you mean `steps`?" in lines[2]
    assert cell("import inspect; 'fewest_gpus' in inspect.signature(sw.plan).parameters")[1] == "True"
