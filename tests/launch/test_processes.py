"""Real processes, real gloo, real signals: what happens to a run that is split over ranks, and when somebody kills it.

A Python of its own takes seconds to start: where only what a running job does is looked at, its processes are forked
from warm ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from commands import SMALL, WarmProcess, finish, losses_of, run_command, start_command, warm_command

from shardwise.errors import Exit
from shardwise.run.rundir import RunDir

Process = subprocess.Popen[str] | WarmProcess
LONG = [*SMALL, "train.steps=100000", "run.name=long", "optimizer.schedule=constant", "optimizer.warmup=0"]
"""Ends only when told to. The learning rate does not depend on the number of steps, so any cut can be compared."""


def wait_for_step(run: Path, step: int, process: Process, deadline_s: float = 180.0) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if (run / "metrics.jsonl").exists() and max(losses_of(run), default=0) >= step:
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended before step {step}:\n{process.communicate()[0]}")
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no step {step} within {deadline_s} s; output so far:\n{process.communicate()[0]}")


def children(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():  # ranks are started from a thread of their own
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found += map(int, (thread / "children").read_text().split())
    return found


def process_of_rank(rank: int, process: Process, deadline_s: float = 180.0) -> int:
    """As soon as it is started: the one whose errors go into that rank's log. The first rank has the terminal."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.poll() is None:
        for pid in children(process.pid):
            with suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/2")).name.startswith(f"rank{rank}."):
                    return pid
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no rank {rank} within {deadline_s} s; output so far:\n{process.communicate()[0]}")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path(f"/proc/{pid}").exists() else False


def test_two_ranks_compute_what_one_process_computes(ranks, tmp_path):
    words = [*SMALL, "train.steps=6", "memory.precision=fp64", "train.micro_batch=2"]
    two = warm_command(ranks, "train", "--nproc", 2, *words, "run.name=two", cwd=tmp_path)
    one = warm_command(ranks, "train", "--nproc", 1, *words, "run.name=one", cwd=tmp_path)
    assert two.returncode == one.returncode == Exit.DONE, two.stdout + two.stderr + one.stdout + one.stderr
    assert "proof    steps 1-3 repeated in one process" in two.stdout
    a, b = losses_of(tmp_path / "runs/two"), losses_of(tmp_path / "runs/one")
    assert list(a.values()) == pytest.approx(list(b.values()), abs=1e-12)
    # Adam forgives a wrong scale of the gradients; their norm does not.
    norms = [losses_of(tmp_path / "runs" / name, "grad_norm") for name in ("two", "one")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    assert {file.name for file in (tmp_path / "runs/two/events").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}


def test_experts_balance_over_all_ranks_as_in_one_process(ranks, tmp_path):
    """The router's bias moves by the counts of the whole step, so they must be summed over ranks."""
    words = [*SMALL, "model.preset=tiny-moe", "model.expert_ffn=32", "model.router=sigmoid-bias",
             "model.bias_update_rate=0.05", "train.steps=5", "memory.precision=fp64"]  # fmt: skip
    two = warm_command(ranks, "train", *words, "run.name=two", cwd=tmp_path, nproc=2)
    one = warm_command(ranks, "train", "--nproc", 1, *words, "run.name=one", cwd=tmp_path)
    assert two.returncode == one.returncode == Exit.DONE, two.stderr + one.stderr
    assert losses_of(tmp_path / "runs/two") == pytest.approx(losses_of(tmp_path / "runs/one"), abs=1e-12)


def test_ctrl_c_commits_and_the_run_goes_on_exactly(ranks, tmp_path):
    """In fp64, because nobody knows how many steps it will have done: in fp32 roundings grow with them."""
    exact = [*LONG, "memory.precision=fp64"]
    process = WarmProcess(ranks, "train", "--nproc", 2, *exact, cwd=tmp_path)
    run = tmp_path / "runs/long"
    wait_for_step(run, 3, process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process)
    assert process.returncode == Exit.INTERRUPTED, output
    assert "resumable" in output and "Traceback" not in output
    done = max(losses_of(run))
    assert (run / "checkpoints" / f"step-{done}" / "manifest.json").is_file()
    longer = ("--allow", "train.steps", f"train.steps={done + 3}")
    again = warm_command(ranks, "resume", run, "--nproc", 1, *longer, cwd=tmp_path)
    assert again.returncode == Exit.DONE, again.stdout + again.stderr
    words = ["run.name=straight", f"train.steps={done + 3}"]
    straight = warm_command(ranks, "train", "--nproc", 1, *exact, *words, cwd=tmp_path)
    assert straight.returncode == Exit.DONE, straight.stdout + straight.stderr
    assert losses_of(run) == pytest.approx(losses_of(tmp_path / "runs/straight"), abs=1e-9)


def test_a_run_listens_on_loopback_only_and_ends_when_another_terminal_says_stop(ranks, tmp_path):
    process = WarmProcess(ranks, "train", "--nproc", 2, *LONG, cwd=tmp_path)
    wait_for_step(tmp_path / "runs/long", 2, process)
    listening = addresses_listening({process.pid, *children(process.pid)})
    watch = run_command("watch", "long", "--once", cwd=tmp_path)
    stop = run_command("stop", "last", cwd=tmp_path)
    output = finish(process)
    assert listening, "the store that ranks meet at must be found, or this test sees nothing"
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(listening) <= loopback, listening
    assert "running" in watch.stdout
    assert stop.returncode == Exit.DONE and "stopped" in stop.stdout
    assert process.returncode == Exit.STOPPED, output
    assert RunDir(tmp_path / "runs/long").state() == "stopped"


def addresses_listening(pids: set[int]) -> list[str]:
    """The addresses, as the kernel writes them, on which any of these processes waits for connections."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if (target := os.readlink(link)).startswith("socket:["):
                    sockets.add(target[8:-1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:  # 0A: LISTEN
                listening.append(words[1].split(":")[0])
    return listening


def test_a_killed_rank_is_named_and_the_run_resumes_until_sigterm(ranks, tmp_path):
    process = WarmProcess(ranks, "train", "--nproc", 2, *LONG, "checkpoint.every=2", "run.max_restarts=0", cwd=tmp_path)
    run = tmp_path / "runs/long"
    wait_for_step(run, 5, process)
    os.kill(process_of_rank(1, process), signal.SIGKILL)
    output = finish(process)
    assert process.returncode == Exit.HARDWARE, output
    assert "rank 1 was killed by SIGKILL" in output and "Traceback" not in output and "gloo/transport" not in output
    assert "class KILLED, cause outside this run" in output and "another rank" not in output
    last = max(losses_of(run))
    again = WarmProcess(ranks, "resume", run, cwd=tmp_path)
    wait_for_step(run, last + 2, again)
    os.kill(again.pid, signal.SIGTERM)
    output = finish(again)
    assert again.returncode == Exit.STOPPED, output
    assert "SIGTERM" in output and "Traceback" not in output
    done = max(losses_of(run))
    assert (run / "checkpoints" / f"step-{done}" / "manifest.json").is_file()


def test_ranks_that_are_killed_or_stopped_start_again_to_the_same_weights(ranks, tmp_path):
    words = ["--no-verify", *SMALL, "train.steps=150", "checkpoint.every=10", "train.eval_batches=1"]
    straight = warm_command(ranks, "train", "--nproc", 2, *words, "run.name=straight", cwd=tmp_path)
    assert straight.returncode == Exit.DONE, straight.stderr
    process = WarmProcess(ranks, "train", "--nproc", 2, *words, "run.name=hurt", cwd=tmp_path)
    run = tmp_path / "runs/hurt"
    for step, rank, number in ((15, 1, signal.SIGKILL), (60, 0, signal.SIGSTOP)):
        wait_for_step(run, step, process)
        os.kill(sorted(children(process.pid))[rank], number)
    output = finish(process)
    assert process.returncode == Exit.DONE, output
    assert "fault    KILLED: rank 1 was killed by SIGKILL" in output, output
    assert "fault    STOPPED: rank 0 is stopped" in output and "Traceback" not in output, output
    events = [line["event"] for line in RunDir(run).lines() if "event" in line]
    assert events == ["started", "restarted", "resumed", "restarted", "resumed", "finished"]
    assert losses_of(run) == losses_of(tmp_path / "runs/straight")
    assert contents(run / "checkpoints/step-150") == contents(tmp_path / "runs/straight/checkpoints/step-150")


def contents(folder: Path) -> dict[str, str]:
    """The tensors' files of a checkpoint, by their digests."""
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}
    assert found
    return found


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def test_a_stopped_rank_does_not_keep_anybody_from_ending_the_run(ranks, tmp_path):
    process = WarmProcess(ranks, "train", "--nproc", 2, "--no-verify", *LONG, cwd=tmp_path)
    wait_for_step(tmp_path / "runs/long", 2, process)
    everybody = [process.pid, *children(process.pid)]
    os.kill(process.pid, signal.SIGTSTP)  # Ctrl-Z
    until(lambda: {state_of(pid) for pid in everybody} == {"T"})
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: "T" not in {state_of(pid) for pid in everybody})
    os.kill(sorted(children(process.pid))[1], signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)  # two at once would be one
    output = finish(process, 60)
    assert process.returncode == Exit.INTERRUPTED, output
    assert time.monotonic() - began < 20 and "STOPPED  at once, by Ctrl-C" in output and "SIGKILL" not in output
    assert RunDir(tmp_path / "runs/long").state() == "stopped"


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    process = start_command("train", "--nproc", 2, *LONG, cwd=tmp_path)
    wait_for_step(tmp_path / "runs/long", 2, process)
    ranks = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while any(map(alive, ranks)) and time.monotonic() < end:
        time.sleep(0.2)
    survivors = [pid for pid in ranks if alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert not survivors
    event = json.loads((tmp_path / "runs/long/metrics.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "stopped"


def test_torchrun_can_start_the_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "-m", "shardwise", "train", *SMALL, "train.steps=3", "run.name=joined"]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(losses_of(tmp_path / "runs/joined")) == 3
    assert json.loads((tmp_path / "runs/joined/plan.json").read_text())["dp"] == 2


def test_bf16_trains_on_a_cpu_that_announces_amx_and_forbids_it(tmp_path):
    """oneDNN's AMX kernels die with SIGILL on such machines (seen with torch 2.13); see launch/worker.py."""
    words = [*SMALL, "train.steps=2", "memory.precision=bf16-true", "run.name=half"]
    result = run_command("train", "--nproc", 1, *words, cwd=tmp_path)
    assert result.returncode == Exit.DONE, (result.returncode, result.stdout)
    assert all(loss < 6 for loss in losses_of(tmp_path / "runs/half").values())
