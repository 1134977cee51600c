"""Jobs over ssh, with a command in place of ssh that runs what it is given here; a real sshd is for `make
test-cluster`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from plan_files import ON_32_GPUS, plan_file

from shardwise.errors import Exit, UserError
from shardwise.launch.by_ssh import Hosts, SshOptions, check_hosts, given, head_address, script
from shardwise.launch.planned_job import Wanted, launch_spec
from shardwise.launch.spec import LaunchSpec

SSH = """#!/bin/sh
for word; do last=$word; done
[ "$1" = -G ] && { echo "hostname ${HEAD_IS:-10.1.0.1}"; exit 0; }
echo "$@" >>"$NOTES/words"
case " $* " in *" lost "*) exit 255 ;; esac
exec sh -c "$last"
"""
NODE = """#!/bin/sh
trap 'echo told; exit 75' TERM
{ stat -c %a "$SHARDWISE_SECRET_FILE"; cat "$SHARDWISE_SECRET_FILE"; } >"$NOTES/secret-$SHARDWISE_NODE"
echo "$SHARDWISE_NODE of $SHARDWISE_NODES at $SHARDWISE_HEAD:$SHARDWISE_PORT, wandb $WANDB_API_KEY"
printf '%s\\n' "$@" >"$NOTES/args-$SHARDWISE_NODE"
[ -f "$2" ] && cp "$2" "$NOTES/plan-$SHARDWISE_NODE"
[ -z "$WAITS" ] || while :; do sleep 0.05; done
exit "${CODE:-0}"
"""


@pytest.fixture
def spec(workdir: Path) -> LaunchSpec:
    two = plan_file(workdir, text=ON_32_GPUS.replace("dp = 32", "dp = 16"))
    return launch_spec([str(two)], ["run.loggers=wandb"], Wanted())


@pytest.fixture
def options(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> SshOptions:
    for name, text in {"ssh": SSH, "node": NODE}.items():
        (workdir / name).write_text(text)
        (workdir / name).chmod(0o755)
    (workdir / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(workdir / "notes"))
    monkeypatch.setenv("WANDB_API_KEY", "key-of-mine")
    program = (str(workdir / "node"),)
    return SshOptions(("h1", "me@h2"), (str(workdir / "ssh"),), program, str(workdir), port=7000)


def started(spec: LaunchSpec, options: SshOptions) -> tuple[Hosts, list[str]]:
    lines: list[str] = []
    head = head_address(options)
    inputs = [given(spec, options, number, head, "ab" * 16, os.environ) for number in range(2)]
    return Hosts(options, script(spec, options), inputs, lines.append), lines


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_every_host_starts_the_one_line_and_knows_its_place(spec, options, workdir):
    hosts, lines = started(spec, options)
    assert hosts.wait() == 0
    assert sorted(lines) == [
        "h1    | 0 of 2 at 10.1.0.1:7000, wandb key-of-mine",
        "me@h2 | 1 of 2 at 10.1.0.1:7000, wandb key-of-mine",
    ]
    for node in (0, 1):
        args = (workdir / "notes" / f"args-{node}").read_text().splitlines()
        assert tuple(args) == spec.command(spec.parts[0])[1:]


def test_secrets_are_in_a_file_of_the_owner_and_in_no_list_of_processes(spec, options, workdir):
    hosts, _ = started(spec, options)
    assert hosts.wait() == 0
    assert (workdir / "notes" / "secret-1").read_text().split() == ["600", "ab" * 16]
    words = (workdir / "notes" / "words").read_text()
    assert "ab" * 16 not in words and "key-of-mine" not in words and "BatchMode=yes" in words


def test_nothing_is_copied_unless_it_is_asked_for(spec, options, workdir):
    hosts, _ = started(spec, replace(options, copy=True))
    assert hosts.wait() == 0
    copied = Path((workdir / "notes" / "args-0").read_text().splitlines()[1])
    assert copied.name == "job.toml" and copied.parent != workdir and not copied.exists(), "it is gone with the job"
    assert (workdir / "notes" / "plan-1").read_text() == (workdir / "job.toml").read_text()


def test_nodes_save_and_end_when_this_end_lets_go(spec, options, workdir, monkeypatch):
    monkeypatch.setenv("WAITS", "yes")
    hosts, lines = started(spec, options)
    for node in (0, 1):
        wait_for(workdir / "notes" / f"args-{node}")
    hosts.let_go()
    assert hosts.wait() == Exit.STOPPED
    assert lines.count("h1    | told") == 1 and lines.count("me@h2 | told") == 1


def test_nodes_end_with_the_program_that_has_started_them(spec, options, workdir, monkeypatch):
    """A killed program closes the standard inputs of its hosts as well."""
    monkeypatch.setenv("WAITS", "yes")
    words = ["launch", "ssh", "h1,h2", "job.toml", "run.loggers=wandb", "--submit", "--ssh", options.ssh[0]]
    words += ["--program", options.program[0]]
    job = subprocess.Popen([sys.executable, "-m", "shardwise", *words], stdout=subprocess.PIPE, text=True)
    wait_for(workdir / "notes" / "args-1")
    running = subprocess.run(["pgrep", "-f", options.program[0]], capture_output=True, text=True).stdout.split()
    assert running
    job.send_signal(signal.SIGKILL)
    job.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in running) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in running if Path(f"/proc/{pid}").exists()] == []


def test_a_host_that_cannot_be_reached_ends_the_others(spec, options, monkeypatch):
    monkeypatch.setenv("WAITS", "yes")
    hosts, _ = started(spec, replace(options, hosts=("h1", "lost")))
    with pytest.raises(UserError, match="ssh has lost lost") as refused:
        hosts.wait()
    assert refused.value.code == Exit.HARDWARE
    assert [connection.returncode is None for connection in hosts.connections] == [False, False]


def test_the_head_s_exit_code_is_the_job_s(spec, options, monkeypatch):
    monkeypatch.setenv("CODE", "4")
    hosts, _ = started(spec, options)
    assert hosts.wait() == Exit.DIVERGED


@pytest.mark.skipif(shutil.which("setsid") is None, reason="setsid is not installed")
def test_a_detached_job_goes_on_alone_and_cleans_up(spec, options, workdir, monkeypatch):
    monkeypatch.setenv("CODE", "0")
    hosts, lines = started(spec, replace(options, detach=True))
    hosts.let_go()
    assert hosts.wait() == 0
    log = Path(spec.run_dir) / ".launch" / f"{spec.name}-node-0.log"
    end = time.monotonic() + 20
    while not log.exists() or "0 of 2" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert f"h1    | started, prints to {log}" in lines


@pytest.mark.parametrize("variant", [{}, {"copy": True}, {"detach": True}])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_what_hosts_run(spec, options, variant):
    text = script(spec, replace(options, **variant))
    done = subprocess.run(
        ["shellcheck", "--shell=sh", "--exclude=SC2016", "-"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "hosts, what",
    [(("h1",), "1 host for 2 nodes"), (("h1", "h1"), "named twice"), (("h1", "-oProxyCommand=x"), "is no host"),
     (("h1", "h2;rm"), "is no host")],
)  # fmt: skip
def test_hosts_that_cannot_be_are_refused(spec, options, hosts, what):
    with pytest.raises(UserError, match=what):
        check_hosts(spec, replace(options, hosts=hosts))


def test_a_head_on_localhost_is_refused_for_two_hosts(options, monkeypatch):
    monkeypatch.setenv("HEAD_IS", "127.0.0.1")
    with pytest.raises(UserError, match=r"first host's address is 127\.0\.0\.1"):
        head_address(options)
    assert head_address(replace(options, head="10.0.0.9")) == "10.0.0.9"
