"""The pool of rank processes itself: what comes back, what a failure or a hang says, and that nothing is left
behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import PATHS, RankFailure, RankHang, RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

AT_ONCE_S = 45.0  # on busy cores; whoever waited for a rank that sleeps would wait for 50 s


@dataclass
class Parcel:
    name: str
    weight: torch.Tensor


def add_rank(parcel: Parcel, *, scale: float = 1.0) -> Parcel:
    return Parcel(f"{parcel.name} {dist.get_rank()}", parcel.weight * scale + dist.get_rank())


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def assert_works(ranks: RankPool, world: int = 3) -> None:
    assert ranks.run(sum_of_ranks, world) == [world * (world + 1) / 2] * world


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int], limit_s: float = AT_ONCE_S) -> list[int]:
    """Those that are still there at the end."""
    end = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_a_fresh_rank_has_run_nothing_before(ranks):
    first, same = (ranks.run(os.getpid, 1) for _ in range(2))
    assert first == same != ranks.run(os.getpid, 1, fresh=True)


def is_loaded(module: str) -> bool:
    return module in sys.modules


def test_a_module_is_preloaded_once_for_all_ranks(ranks):
    before = ranks.run(is_loaded, 2, "this")
    ranks.preload("this")
    assert (before, ranks.run(is_loaded, 2, "this")) == ([False] * 2, [True] * 2)
    with pytest.raises(RuntimeError, match="no_such_module cannot be imported"):
        ranks.preload("no_such_module")
    assert_works(ranks, 2)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_reduce_over_gloo(ranks, world):
    assert_works(ranks, world)


def test_results_come_in_rank_order(ranks):
    answers = ranks.run(add_rank, 3, Parcel("from", torch.ones(2)), scale=10.0)
    assert [answer.name for answer in answers] == ["from 0", "from 1", "from 2"]
    assert [answer.weight.tolist() for answer in answers] == [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]


def echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).to(torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 5),
        torch.arange(12.0).view(3, 4).t()[1:],
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}-{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_any_plain_tensor_travels(ranks, tensor):
    for answer in ranks.run(echo, 2, tensor):
        assert type(answer) is type(tensor)
        assert (answer.dtype, answer.shape, answer.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
        assert torch.equal(answer, tensor)


def thousand_tensors() -> list[torch.Tensor]:
    return [torch.full((10,), float(index)) for index in range(1000)]


def test_many_tensors_need_no_file_descriptors(ranks):
    ranks.run(os.getpid, 4)  # each rank has a channel
    gc.collect()  # what tests before left open may be closed at any time
    before = len(os.listdir("/proc/self/fd"))
    answers = ranks.run(thousand_tensors, 4)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [tensor[0].item() for tensor in answers[3]] == list(range(1000))


def sharded() -> DTensor:
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def test_a_sharded_result_is_refused(ranks):
    with pytest.raises(
        RankFailure, match=r"a DTensor cannot leave its process: send its full_tensor\(\) or to_local\(\)"
    ):
        ranks.run(sharded, 2)
    assert_works(ranks)


def test_a_function_without_a_name_is_refused(ranks):
    with pytest.raises(TypeError, match="give a function at the top of a module"):
        ranks.run(lambda: None, 2)


def in_which_directory() -> str:
    return os.getcwd()


def test_ranks_work_where_the_test_does(ranks, workdir):
    assert ranks.run(in_which_directory, 2) == [str(workdir)] * 2


# Failures.


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the loss is a pear")
    dist.all_reduce(torch.ones(1))


def test_an_error_on_one_rank_is_told_at_once_while_others_wait_for_it(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(raise_on, 4, 2)
    assert time.monotonic() - start < AT_ONCE_S
    first, *sections = str(caught.value).split("\n\nrank ")
    assert first.startswith("test_ranks.raise_on on 4 ranks failed") and first.endswith(
        "rank 2: ValueError: the loss is a pear"
    )
    assert sections[0].startswith("2: Traceback") and 'raise ValueError("the loss is a pear")' in sections[0]
    assert "rank_process.py" not in sections[0]
    assert sorted(section[0] for section in sections) == ["0", "1", "2", "3"]
    assert_works(ranks)


def raise_after_leaving(rank: int) -> None:
    """The others complain before the culprit does."""
    if dist.get_rank() == rank:
        complained = Path(f"complaint{1 - rank}")
        dist.destroy_process_group()
        while not complained.exists():
            time.sleep(0.01)
        raise ValueError("I left first")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        Path(f"complaint{dist.get_rank()}").touch()
        raise


def test_the_original_error_comes_first_however_late_it_is(ranks, workdir):
    with pytest.raises(RankFailure) as caught:
        ranks.run(raise_after_leaving, 2, 1)
    text = str(caught.value)
    assert text.splitlines()[0].endswith("rank 1: ValueError: I left first")
    assert text.index("rank 1: Traceback") < text.index("rank 0: Traceback")


def raise_while_others_sleep() -> None:
    print("about to think", dist.get_rank())
    if dist.get_rank() == 0:
        raise KeyError("missing")
    time.sleep(50)  # deaf to what happens to rank 0


def test_ranks_that_do_not_notice_an_error_are_shown_and_killed(ranks):
    pids = ranks.run(os.getpid, 2)
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(raise_while_others_sleep, 2)
    assert time.monotonic() - start < AT_ONCE_S
    text = str(caught.value)
    assert "rank 0: KeyError: 'missing'" in text.splitlines()[0]
    assert "rank 1: had not finished 3 s later" in text and "in raise_while_others_sleep" in text
    assert "about to think 0" in text and "about to think 1" in text
    assert not wait_until_gone(pids)
    assert_works(ranks)


def end_abruptly(rank: int, how: int) -> None:
    if dist.get_rank() == rank:
        if how == 0:
            os._exit(3)
        os.kill(os.getpid(), how)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "how, named", [(9, "was killed by SIGKILL"), (signal.SIGILL, "was killed by SIGILL"), (0, "ended with exit code 3")]
)
def test_a_rank_that_dies_is_named_at_once(ranks, how, named):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(end_abruptly, 3, 1, int(how))
    assert time.monotonic() - start < AT_ONCE_S
    first, section, *_ = str(caught.value).split("\n\nrank ")
    assert first.endswith(f"rank 1: {named}") and section.startswith(f"1: {named}")
    assert ("in end_abruptly" in section) == (how == signal.SIGILL)  # Python's own last words
    assert_works(ranks)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(50)  # the line to be found
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


def test_a_hang_shows_the_stack_of_every_rank(ranks):
    line = 1 + Path(__file__).read_text().splitlines().index("        time.sleep(50)  # the line to be found")
    pids = ranks.run(os.getpid, 4)
    start = time.monotonic()
    with pytest.raises(RankHang) as caught:
        ranks.run(sleep_on, 4, 1, timeout=5)
    assert 5 <= time.monotonic() - start < AT_ONCE_S
    first, *sections = str(caught.value).split("\n\nrank ")
    assert first.endswith("rank 0, rank 1, rank 2 had not finished")
    assert [section[:2] for section in sections] == ["0:", "1:", "2:", "3:"]
    assert f"line {line} in sleep_on" in sections[1]
    assert all("all_reduce" in sections[waiting] and "in sleep_on" in sections[waiting] for waiting in (0, 2))
    assert sections[3].startswith("3: had finished") and "in _take_jobs" in sections[3]
    assert all(section.rstrip().endswith("in <module>") for section in sections)
    assert not wait_until_gone(pids)
    assert_works(ranks)


def test_an_interrupted_test_leaves_no_busy_rank(ranks):
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    pids = ranks.run(os.getpid, 2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            ranks.run(sleep_on, 2, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wait_until_gone(pids)
    assert_works(ranks)


# Nothing of a job is left for the next.


def state() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "random": (random.random(), np.random.rand(), torch.rand(1).item()),
        "environment": {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        "path": list(sys.path),
        "cwd": os.getcwd(),
        "terminate": signal.getsignal(signal.SIGTERM),
        "groups": dist.distributed_c10d._world.group_count,
        "mesh": len(torch.distributed.device_mesh._mesh_resources.mesh_stack),
    }


def change_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_float32_matmul_precision("medium")
    os.environ["SHARDWISE_LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    init_device_mesh("cpu", (dist.get_world_size(),)).__enter__()


def test_no_setting_survives_a_job(ranks):
    before = ranks.run(state, 2)
    ranks.run(change_everything, 2)
    assert ranks.run(state, 2) == before


def reduce_over_mesh(num_earlier_groups: int) -> list[float]:
    """The names of a mesh's groups depend on how many there were: a mesh of an earlier job would reduce over other
    ranks."""
    for _ in range(num_earlier_groups):
        dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole: Any = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    over_a: Any = distribute_tensor(torch.arange(8.0), mesh["a"], [Shard(0)])
    return [(whole * 2).sum().full_tensor().item(), (over_a * 2).sum().full_tensor().item()]


def test_meshes_of_earlier_jobs_are_forgotten(ranks):
    for repeat in range(10):
        assert ranks.run(reduce_over_mesh, 4, repeat % 3) == [[56.0, 56.0]] * 4


# The processes.


def test_the_pool_grows_as_needed(ranks):
    with pytest.raises(RankFailure):
        ranks.run(raise_on, 2, 0)
    [template] = ranks.pids()  # all ranks have gone
    two = ranks.run(os.getpid, 2)
    three = ranks.run(os.getpid, 3)
    assert three[:2] == two and len(set(three)) == 3
    assert ranks.run(os.getpid, 2) == two
    assert ranks.pids() == [template, *three] and all(map(alive, ranks.pids()))


ORPHANS = f"""
import os, sys; sys.path[:0] = {PATHS!r}
import ranks
pool = ranks.RankPool()
pool.run(os.getpid, 2)
print(*pool.pids(), flush=True)
pool.run(os.system, 2, "echo $$ >> started; exec sleep 50")
"""


def test_no_process_outlives_a_killed_pytest(tmp_path):
    started = tmp_path / "started"
    started.touch()
    command = [sys.executable, "-c", ORPHANS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        while process.poll() is None and started.read_text().count("\n") < 2:
            time.sleep(0.05)
        pids += map(int, started.read_text().split())
        assert len(pids) == 5 and all(map(alive, pids))  # template, two ranks, what these have started
        process.kill()
    assert not wait_until_gone(pids)


def test_close_ends_all_processes(ranks):
    """The last one here: whoever runs a job after it pays for a new template."""
    assert_works(ranks)
    pids = ranks.pids()
    assert len(pids) >= 4 and all(map(alive, pids))
    ranks.close()
    assert not any(map(alive, pids)) and ranks.pids() == []
