"""Cores and memory are what this process may use, whatever the hardware has. Control groups are read from real
files."""

import os
import sys

import pytest

from shardwise.cluster.describe.machine import (
    cpu_model,
    cpu_quota,
    find_gpus,
    memory_limit,
    this_machine,
    usable_cores,
    usable_memory,
)


@pytest.fixture
def root(tmp_path):
    def tree(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return tree


def test_this_machine_is_plausible():
    machine = this_machine()
    assert 1 <= machine.cores <= os.cpu_count()
    assert machine.memory_bytes > 2**28
    assert machine.platform == sys.platform
    assert cpu_model()


def test_version_2_takes_the_tightest_limit_on_the_way_up(root):
    base = "sys/fs/cgroup"
    where = root({
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{base}/jobs/mine/memory.max": "max\n", f"{base}/jobs/mine/cpu.max": "max 100000\n",
        f"{base}/jobs/memory.max": "4294967296\n", f"{base}/jobs/cpu.max": "150000 100000\n",
    })  # fmt: skip
    assert memory_limit(where) == 4 * 2**30
    assert cpu_quota(where) == 1.5
    assert usable_memory(where) <= 4 * 2**30
    assert usable_cores(where) <= 2


def test_version_1(root):
    base = "sys/fs/cgroup"
    where = root({
        "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a\n",
        f"{base}/memory/a/memory.limit_in_bytes": "1073741824\n",
        f"{base}/cpu/a/cpu.cfs_quota_us": "50000\n", f"{base}/cpu/a/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert memory_limit(where) == 2**30
    assert usable_cores(where) == 1


def test_no_limits(root):
    base = "sys/fs/cgroup"
    where = root({
        "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
        f"{base}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/cpu/cpu.cfs_quota_us": "-1\n", f"{base}/cpu/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert (memory_limit(where), cpu_quota(where)) == (None, None)
    assert (memory_limit(where / "nowhere"), cpu_quota(where / "nowhere")) == (None, None)


def test_the_group_of_the_host_is_not_mounted_in_a_container(root):
    where = root({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "2147483648\n"})
    assert memory_limit(where) == 2 * 2**30


def test_gpus_agree_with_torch():
    import torch

    expected = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in find_gpus()[0]] == expected
