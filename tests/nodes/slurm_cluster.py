"""Runs a real SLURM on nodes: munge with a key of its own on each, a controller, and slurmd on the others.

The controller has the last node. Nodes are known by their addresses, their names resolve nowhere. Two GPUs of each are
device files that nothing stands behind. The partition `cloud` has 64 nodes of 8 GPUs that are never started: what SLURM
thinks of a script can be asked with `sbatch --test-only`.

Needs Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from nodes import Command, Node

TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
GPUS = 2
CLOUD_NODES, CLOUD_GPUS = 64, 8
READY_S = 60.0
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

CONF = """
ClusterName=acted
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=-1
GresTypes=gpu
{nodes}
NodeName=c[1-{cloud_nodes}] State=CLOUD CPUs=64 RealMemory=1000000 Gres=gpu:{cloud_gpus} Feature=h100
PartitionName=real Nodes={real} Default=YES MaxTime=60 State=UP
PartitionName=cloud Nodes=c[1-{cloud_nodes}] MaxTime=INFINITE State=UP
PartitionName=short Nodes=c[1-{cloud_nodes}] MaxTime=60 State=UP
"""


@cache
def why_no_slurm() -> str | None:
    """Returns what is missing for SLURM and how to get it, or None."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None


@dataclass
class Slurm:
    """A running SLURM. Jobs are submitted on its controller, in the shared directory."""

    nodes: list[Node]
    controller: Node
    folder: Path
    daemons: dict[str, Command] = field(default_factory=dict)

    def tool(self, *words: object) -> str:
        """Runs one of SLURM's tools on the controller and returns what it printed."""
        return self.controller.run(*words, SLURM_CONF=self.conf)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def start(self) -> None:
        """Starts everything and returns when all nodes are idle."""
        self.folder.mkdir()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for index in range(GPUS):
            os.mknod(self.folder / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs=4 RealMemory=16000 Gres=gpu:{GPUS} Feature=real"
            for node in self.nodes
        ]
        self.conf.write_text(
            CONF.format(
                controller=self.controller,
                folder=self.folder,
                nodes="\n".join(lines),
                real=",".join(node.name for node in self.nodes),
                cloud_nodes=CLOUD_NODES,
                cloud_gpus=CLOUD_GPUS,
            )
        )
        real = ",".join(node.name for node in self.nodes)
        gpus = f"NodeName={real} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        gpus += f"NodeName=c[1-{CLOUD_NODES}] Name=gpu Count={CLOUD_GPUS}\n"
        (self.folder / "gres.conf").write_text(gpus)
        for node in [*self.nodes, self.controller]:
            self._start_munge(node)
        self._start("slurmctld", self.controller, "slurmctld", "-D", "-f", self.conf)
        for node in self.nodes:
            self.start_slurmd(node)
        self.wait_until(
            lambda: self.tool("sinfo", "-h", "-p", "real", "-o", "%T").split() == ["idle"], "nodes are idle"
        )

    def _start_munge(self, node: Node, folder: str = "/run/munge", *clock: str) -> None:
        """Starts munged with its files in a folder of the node; `clock` stands before its command."""
        node.run("install", "--directory", "--mode=755", folder)
        own = [f"--{name}-file={folder}/{name}" for name in ("pid", "log", "seed")]
        own += [f"--origin={node.address}", f"--key-file={self.folder}/munge.key", f"--socket={folder}/munge.socket.2"]
        self._start(f"munged of {node.name}", node, *clock, "munged", "--foreground", "--force", *own)

    def conf_of_a_host_with_another_clock(self, seconds: int) -> Path:
        """Returns a configuration for SLURM's commands on the controller whose requests are signed by a munged of their
        own, whose clock is so many seconds ahead of, or behind, this machine's."""
        folder = f"/run/munge{seconds:+d}"
        self._start_munge(self.controller, folder, "faketime", "-f", f"{seconds:+d}s")
        socket, own = f"{folder}/munge.socket.2", self.folder / f"clock{seconds:+d}.conf"
        own.write_text(self.conf.read_text().replace("AuthInfo=", f"AuthInfo=socket={socket},"))
        self.wait_until(Path(f"/proc/{self.controller.pid}/root{socket}").exists, "munged listens")
        return own

    def start_slurmd(self, node: Node) -> None:
        """Starts the daemon of a node."""
        self._start(f"slurmd of {node.name}", node, "slurmd", "-D", "-N", node.name, "-f", self.conf)

    def _start(self, name: str, node: Node, *words: object) -> None:
        self.daemons[name] = node.start(*words)
        self.daemons[name].is_daemon = True

    def wait_until(self, holds: object, what: str, within: float = READY_S) -> None:
        """Waits until something holds; the test fails after the deadline with what each daemon printed last."""
        end = time.monotonic() + within
        while not holds():  # type: ignore[operator]
            if time.monotonic() > end:
                stories = "\n".join(f"{name}:\n{command.story()}" for name, command in self.daemons.items())
                state = self.tool("sinfo", "-lN") + self.tool("squeue", "-l")
                pytest.fail(f"not within {within:.0f} s: {what}\n{self.said()}\n{state}\n{stories}", pytrace=False)
            time.sleep(0.2)

    def bring_back(self, node: Node) -> None:
        """Starts SLURM's daemons on a node again."""
        self._start_munge(node)
        self.start_slurmd(node)

    def submit(self, script: Path | str, *options: object) -> int:
        """Submits a batch script and returns the number of its job."""
        return int(self.tool("sbatch", "--parsable", *options, script).strip())

    def queue(self, *words: object) -> int:
        """Submits what `shardwise launch` makes of these words, and returns the number of the job."""
        said = self.tool("shardwise", "launch", "slurm", *words, "--submit")
        found = re.search(r"queued   job (\d+)", said)
        assert found, said
        return int(found[1])

    def said(self) -> str:
        """Returns what all jobs have printed into files of the shared directory."""
        return "".join(file.read_text() for file in sorted(self.controller.files.glob("*.out")))

    def job(self, number: int | str) -> dict[str, str]:
        """Returns what SLURM knows of a job."""
        text = self.tool("scontrol", "show", "job", "--oneliner", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait_for(self, number: int | str, within: float = 90.0) -> dict[str, str]:
        """Waits until a job is over and returns what SLURM knows of it."""
        self.wait_until(lambda: self.job(number)["JobState"] in OVER, f"the end of job {number}", within)
        return self.job(number)
