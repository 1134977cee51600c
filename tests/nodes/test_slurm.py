"""SLURM itself, on nodes whose names do not resolve."""

from __future__ import annotations

import pytest
from nodes import finish
from slurm_cluster import CLOUD_GPUS, CLOUD_NODES, Slurm


def test_slurm_starts_a_task_on_each_node_and_knows_them_by_address(slurm: Slurm):
    said = slurm.tool(
        "srun", "--nodes=2", "--gpus-per-node=2", "--label", "sh", "-c", "hostname; getent hosts n1 n2; true"
    )
    assert set(said.splitlines()) == {"0: n1", "1: n2", "0: 127.0.1.1       n1", "1: 127.0.1.1       n2"}
    assert "NodeAddr=10.77.0.2" in slurm.tool("scontrol", "show", "node", "n2")


@pytest.mark.parametrize(
    "options, code",
    [
        (f"--nodes={CLOUD_NODES} --gpus-per-node={CLOUD_GPUS}", 0),
        (f"--nodes={CLOUD_NODES + 1} --gpus-per-node={CLOUD_GPUS}", 1),
        (f"--nodes=2 --gpus-per-node={CLOUD_GPUS + 1}", 1),
    ],
)
def test_slurm_says_what_it_would_do_on_nodes_that_are_not_there(shared_slurm: Slurm, options: str, code: int):
    (shared_slurm.controller.files / "job.sh").write_text("#!/bin/sh\nhostname\n")
    words = ["sbatch", "--test-only", "--partition=cloud", *options.split(), "job.sh"]
    assert finish([asked := shared_slurm.controller.start(*words, SLURM_CONF=shared_slurm.conf)]) == [code]
    assert ("to start at" in asked.output) == (code == 0), asked.output
