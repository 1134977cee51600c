"""What one GPU can show of several: NCCL in a group of one, and two ranks on one card, which gloo lets share it.

NCCL refuses two ranks on one card, and gloo sends no single tensors from one GPU tensor to another: pipelines and rings
need two cards. Losses and norms are those of the plain model; every collective is one that CPU ranks wait for, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_training
import torch
import torch.distributed as dist
from ranks import RankPool
from recorded_training import SPEC, TRIAL, recorded

from shardwise.parallel.mesh import build_mesh
from shardwise.prove.reference import train_plain
from shardwise.prove.trial import trial_plan

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("repeatable_on_gpu")]

CARD = "cuda:0"
LIMIT_S = 180
LAYOUTS = {"dp=2": {"dp": 2}, "zero=1": {"dp": 2, "zero": 1}, "zero=3": {"dp": 2, "zero": 3}, "tp=2": {"tp": 2}}


@pytest.fixture
def nccl(repeatable_on_gpu: None) -> None:
    """A group of one, which `clean_gpu` ends."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_collectives_of_one_rank_return_what_it_gave(nccl: None) -> None:
    given = torch.randn(6, 5, device=CARD)
    reduced, broadcast = given.clone(), given.clone()
    gathered, scattered, exchanged = (torch.empty_like(given) for _ in range(3))
    dist.all_reduce(reduced)
    dist.broadcast(broadcast, 0)
    dist.all_gather_into_tensor(gathered, given)
    dist.reduce_scatter_tensor(scattered, given)
    dist.all_to_all_single(exchanged, given)
    assert all(torch.equal(found, given) for found in (reduced, broadcast, gathered, scattered, exchanged))


def test_a_collective_waits_for_its_stream_and_the_host_waits_for_neither(nccl: None) -> None:
    values = torch.ones(2**20, device=CARD)
    dist.all_reduce(values)  # the first one connects, and that takes the host's time
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # cycles: some tenths of a second
        values.add_(1)
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        after = values + 1
    assert not stream.query(), "the host waited"
    torch.cuda.current_stream().wait_stream(stream)
    assert bool((after == 3).all())


def test_a_mesh_of_one_rank_has_a_group_of_nccl_for_fsdp2(nccl: None) -> None:
    mesh = build_mesh(trial_plan(TRIAL), SPEC, 0, torch.device(CARD), fsdp=True)
    assert mesh.fsdp is not None and mesh.is_alone
    assert dist.get_backend(mesh.fsdp.get_group()) == "nccl" and mesh.fsdp.size() == 1


def test_one_rank_through_fsdp2_over_nccl_is_the_plain_model_and_waits_as_over_gloo(
    nccl: None, ranks: RankPool
) -> None:
    trial = replace(TRIAL, through_fsdp=True)
    found = recorded({}, trial, CARD)
    truth = train_plain(SPEC, trial, torch.device(CARD))
    assert found["losses"] == pytest.approx(truth.losses, rel=1e-12)
    assert found["norms"] == pytest.approx(truth.norms, rel=1e-10)
    [on_cpu] = ranks.run(recorded, 1, {}, trial, "cpu")
    assert found["waits"] == on_cpu["waits"]


def on_one_device(layout: dict[str, int], device: str, folder: Path) -> list[dict]:
    """What two processes return that share a device, in rank order. One that fails or is late fails the test with its
    last words."""
    program, store = recorded_training.__file__, folder / "store"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    commands = [[sys.executable, program, str(rank), "2", str(store), device, json.dumps(layout)] for rank in range(2)]
    started = []
    for rank, command in enumerate(commands):
        with open(folder / f"{rank}.err", "w") as errors:
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=kept))
    said: list[str] = []
    try:
        for rank, process in enumerate(started):
            try:
                said.append(process.communicate(timeout=LIMIT_S)[0])
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} has not ended within {LIMIT_S} s\n{words_of(folder)}", pytrace=False)
            assert process.returncode == 0, words_of(folder)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [json.loads(text.splitlines()[-1]) for text in said]


def words_of(folder: Path) -> str:
    """What the ranks complained of last."""
    return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in sorted(folder.glob("*.err")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_that_share_a_card_are_the_plain_model_and_wait_as_cpu_ranks(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    truth = train_plain(SPEC, TRIAL, torch.device(CARD))
    on_card = on_one_device(LAYOUTS[name], CARD, tmp_path)
    on_cpu = ranks.run(recorded, 2, LAYOUTS[name], TRIAL, "cpu")
    for found in (*on_card, *on_cpu):
        assert found["losses"] == pytest.approx(truth.losses, rel=1e-12)
        assert found["norms"] == pytest.approx(truth.norms, rel=1e-10)
    assert [found["waits"] for found in on_card] == [found["waits"] for found in on_cpu]
