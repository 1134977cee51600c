"""`torchrun --nnodes 2 ... -m shardwise train` on two nodes: by a fixed address and by its own rendezvous."""

from __future__ import annotations

import sys

from nodes import Node, finish
from training import STEPS, check_same_losses, run_of, train


def torchrun(*words: object) -> list[str]:
    """Returns the command of one node; the run's own words follow those of torchrun."""
    ours = [word for word in train()[1:] if word not in ("--nproc", "1")]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--nnodes=2", *map(str, words), *ours]


def test_two_agents_with_a_fixed_address_and_no_common_directory_train_as_one_process(nodes, one_process):
    a, b = nodes(2, shared=False)
    fixed = [f"--master-addr={a.address}", "--master-port=29500"]
    commands = [node.start(*torchrun(*fixed, f"--node-rank={rank}")) for rank, node in enumerate((a, b))]
    assert finish(commands, 120) == [0, 0]
    check_same_losses(a, one_process)
    assert f"step {STEPS}/{STEPS}" in commands[0].output
    assert (run_of(a) / "events" / "rank1.jsonl").stat().st_size > 0, "rank 1 is on the second node"


def test_agents_that_meet_by_their_own_rendezvous_are_told_what_127_0_1_1_means_and_train_by_version_6(
    nodes, one_process
):
    """c10d has ranks meet at the first node's own name, which means 127.0.1.1 there and nothing on the other."""
    a, b = nodes(2)

    def meet(address: str, node: Node, *words: object) -> list[str]:
        is_host = str(node is a).lower()
        at = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29500", f"--rdzv-conf=is_host={is_host}"]
        return torchrun(*at, "--rdzv-id=1", *words)

    commands = [node.start(*meet(a.address, node)) for node in (a, b)]
    assert 0 not in finish(commands, 90)
    told = [command for command in commands if "the ranks of this job were told to meet at n1" in command.output]
    assert told, commands[0].story()  # torchrun may end the other's before it speaks
    assert all(f"--local-addr with its own address (here {one.node.address})" in one.output for one in told)
    assert not run_of(a).exists(), "no node trains a world of its own"

    commands = [node.start(*meet(f"[{a.address6}]", node, f"--local-addr={node.address6}")) for node in (a, b)]
    assert finish(commands, 120) == [0, 0]
    check_same_losses(a, one_process)
