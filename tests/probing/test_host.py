"""What /proc and /sys of a recorded machine say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.probing import host
from hocket.runtime import host_cores
from hocket.runtime.host_memory import free_host_memory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of eight CPUs on two sockets, in a control group of two and a half cores."""
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: AMD EPYC(TM) 9R14  CPU @ 2.6GHz\n",
        "proc/meminfo": "MemTotal:       32000000 kB\n",
        "proc/self/cgroup": "0::/user/box\n",
        "proc/stat": "cpu 9 9 9 9\n"
        + "".join(f"cpu{i} 100 0 50 900 5 1 2 7 0 0\n" for i in range(8)),
        "proc/uptime": "1000.0 1.0\n",
        "sys/fs/cgroup/user/box/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/user/cpu.max": "max 100000\n",
        "sys/fs/cgroup/user/memory.max": "1073741824\n",
        "sys/fs/cgroup/user/box/memory.max": "max\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
    }
    for cpu in range(8):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/physical_package_id"] = str(cpu // 4)
        for index, (level, kind, size) in enumerate(
            ((1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1024K"),
             (3, "Unified", "32M"))
        ):  # fmt: skip
            for name, text in (("level", level), ("type", kind), ("size", size)):
                files[f"{base}/cache/index{index}/{name}"] = str(text)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_recorded_machine(root: Path) -> None:
    found = host.host(root, frozenset(range(8)))
    assert found.cpu == "AMD EPYC 9R14"
    assert (found.cores, found.limit) == (3, 2.5)
    assert (found.sockets, found.numa_nodes) == (2, 2)
    assert found.caches == (32 << 10, 1 << 20, 32 << 20)
    assert found.memory == 1 << 30


def test_free_memory_is_what_the_control_group_leaves(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 32000000 kB\nMemAvailable: 20000000 kB\n")
    assert free_host_memory(root) == 20_000_000 << 10
    folder = root / "sys/fs/cgroup/user"
    (folder / "memory.current").write_text(f"{800 << 20}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {300 << 20}\nactive_file 7\n")
    assert free_host_memory(root) == (1024 - 500) << 20


def test_affinity_counts(root: Path) -> None:
    (root / "sys/fs/cgroup/user/box/cpu.max").write_text("max 100000\n")
    found = host.host(root, frozenset({1, 2}))
    assert (found.cores, found.limit, found.sockets, found.numa_nodes) == (2, 0.0, 1, 1)


def test_half_a_core_is_still_one(root: Path) -> None:
    (root / "sys/fs/cgroup/user/box/cpu.max").write_text("30000 100000\n")
    assert host.host(root, frozenset(range(8))).cores == 1
    assert host_cores.usable_cores(root, range(8)) == host_cores.machine_cores(root) == 1


def test_the_first_kind_of_control_groups(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/box\n")
    folder = root / "sys/fs/cgroup/cpu,cpuacct/box"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("400000")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert host_cores.cpu_quota(root) == 4.0
    (folder / "cpu.cfs_quota_us").write_text("-1")
    assert host_cores.cpu_quota(root) == 0.0


def test_load_is_what_others_took(root: Path) -> None:
    first = host.clock(root, frozenset({0, 1}))
    text = (root / "proc/stat").read_text().replace("cpu0 100", "cpu0 300")
    (root / "proc/stat").write_text(text)
    (root / "proc/uptime").write_text("1004.0 1.0\n")
    last = host.clock(root, frozenset({0, 1}))
    assert last.busy - first.busy == pytest.approx(200 / host.CLOCK)
    own = 0.5 * 200 / host.CLOCK
    assert host.load_between(first, last, own) == pytest.approx(own / 4.0)
    assert host.load_between(first, last, 1e9) == 0.0
    assert host.load_between(first, first, 0.0) == 0.0


def test_nothing_there_is_unknown(tmp_path: Path) -> None:
    found = host.host(tmp_path, frozenset({0}))
    assert (found.cores, found.memory, found.caches, found.sockets) == (1, 0, (0, 0, 0), 0)
    assert found.cpu


def test_lists_of_cpus() -> None:
    assert host.cpu_list("0-2,8,10-11") == {0, 1, 2, 8, 10, 11}
    assert host.cpu_list("") == frozenset()


def test_this_machine() -> None:
    found = host.host()
    assert found.cores >= 1
    assert found.memory > 2**28
