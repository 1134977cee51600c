"""`shardwise launch ssh` with a real sshd on two nodes, which share neither files nor names."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence

import pytest
from nodes import Node, environment, finish, until
from training import check_same_losses, plan_file, run_of, steps_of

SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
SetEnv {variables}
"""
CLIENT = """
Host h1
  HostName {first}
Host h2
  HostName {second}
Host *
  User root
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
"""


def start_sshd(hosts: Sequence[Node], client: Node) -> None:
    """Starts sshd on the hosts; the client's `ssh -F ssh/config` knows them as h1 and h2."""
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    made = client.files / "ssh"
    made.mkdir()
    for name in ("key", "host_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made / name)]
        subprocess.run(words, check=True)
    public = (made / "host_key.pub").read_text()
    (made / "known_hosts").write_text("".join(f"{host.address} {public}" for host in hosts))
    (made / "config").write_text(
        CLIENT.format(first=hosts[0].address, second=hosts[1].address, folder=client.cwd / "ssh")
    )
    kept = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY")
    variables = " ".join(f"{name}={value}" for name, value in environment().items() if name in kept)
    for host in hosts:
        shutil.copytree(made, host.files / "ssh")
        text = SSHD.format(address=host.address, folder=host.cwd / "ssh", variables=variables)
        (host.files / "ssh" / "sshd_config").write_text(text)
        host.run("mkdir", "-p", "/run/sshd")
        daemon = host.start("/usr/sbin/sshd", "-D", "-e", "-f", "ssh/sshd_config")
        daemon.is_daemon = True
        until(lambda host=host: host.listens_on(22), f"sshd of {host.name} listens", [daemon])


def test_a_job_over_ssh_ends_with_its_terminal_or_goes_on_without_it(nodes, one_process):
    """The hosts have no config file: it is copied when that is asked for."""
    a, b, client = nodes(3, shared=False)
    start_sshd([a, b], client)
    plan_file(client.files / "tiny.toml")
    words = ["shardwise", "launch", "ssh", "h1,h2", "tiny.toml", "--ssh", "ssh -F ssh/config", "--submit"]
    [code] = finish([refused := client.start(*words)], 60)
    assert code != 0 and "tiny.toml" in refused.output and not run_of(a).exists(), refused.story()

    terminal = client.start(*words, "--copy")
    until(lambda: steps_of(a) > 10, "step 10", [terminal], 90)
    assert f"this is node 0, at eth0 ({a.address})" in terminal.output
    terminal.signal(signal.SIGKILL)
    until(lambda: not any("shardwise" in line for host in (a, b) for line in host.processes()), "the hosts end", [], 60)
    stopped_at = steps_of(a)
    assert (run_of(a) / "checkpoints" / f"step-{stopped_at}").is_dir()

    client.run(*words, "--copy", "--detach")
    client.power_off()
    until(lambda: not any("shardwise" in line for host in (a, b) for line in host.processes()), "the end", [], 120)
    check_same_losses(a, one_process)
