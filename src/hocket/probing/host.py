"""Host: cores, caches, memory and load of this machine, as a process of ours may use them.

Read from /proc and /sys, of Linux; what is not there is unknown (0), except the cores.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from pathlib import Path

from hocket.runtime.host_cores import cpu_quota, usable_cores, usable_cpus
from hocket.runtime.host_memory import file_text, host_memory
from hocket.spec.measured import Host

CLOCK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def host(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> Host:
    """The machine as seen from this process.

    Args:
        root: where /proc and /sys hang.
        cpus: CPUs that processes may run on. None: this process's affinity.
    """
    mine = cpus if cpus is not None else usable_cpus()
    topology = {cpu: file_text(_cpu(root, cpu) / "topology/physical_package_id") for cpu in mine}
    nodes = [
        node for node in (root / "sys/devices/system/node").glob("node[0-9]*")
        if mine & cpu_list(file_text(node / "cpulist"))
    ]  # fmt: skip
    first = min(mine)
    return Host(
        name=platform.node() or "localhost",
        cpu=cpu_name(root),
        cores=usable_cores(root, mine),
        sockets=len({package for package in topology.values() if package}),
        numa_nodes=len(nodes),
        limit=cpu_quota(root),
        caches=tuple(_cpu_cache_bytes(root, first, level) for level in (1, 2, 3)),
        memory=host_memory(root),
    )


def cpu_name(root: Path = Path("/")) -> str:
    """`AMD EPYC 9R14`; the architecture where the kernel says no name."""
    text = file_text(root / "proc/cpuinfo")
    found = re.search(r"^(?:model name|Model|cpu model|uarch)\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine() or "CPU"
    return re.sub(r"\s+", " ", re.sub(r"\((?:R|TM|r|tm)\)|\bCPU\b|@.*", " ", name)).strip()


def _cpu_cache_bytes(root: Path, cpu: int, level: int) -> int:
    """Bytes of the data cache of that level that a core reaches; 0 where there is none."""
    for index in sorted((_cpu(root, cpu) / "cache").glob("index[0-9]*")):
        said = re.fullmatch(r"(\d+)([KMG]?)", file_text(index / "size"))
        if (
            said is not None
            and file_text(index / "level") == str(level)
            and file_text(index / "type") != "Instruction"
        ):
            return int(said[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[said[2]]
    return 0


@dataclasses.dataclass(frozen=True)
class Clock:
    """CPU seconds that all programs together have used on some CPUs, at a moment."""

    busy: float
    wall: float


def clock(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> Clock:
    """That moment: two of them give the load between them. Time stolen by a hypervisor counts."""
    mine = cpus if cpus is not None else usable_cpus()
    busy = 0
    for line in file_text(root / "proc/stat").splitlines():
        name, *values = line.split()
        if re.fullmatch(r"cpu\d+", name) and int(name[3:]) in mine:
            user, nice, system, _, _, irq, softirq, *rest = map(int, values)
            busy += user + nice + system + irq + softirq + (rest[0] if rest else 0)
    uptime = file_text(root / "proc/uptime").split()
    return Clock(busy / CLOCK, float(uptime[0]) if uptime else 0.0)


def load_between(first: Clock, last: Clock, own: float) -> float:
    """Cores' worth of time that others took, `own` CPU seconds being ours."""
    wall = last.wall - first.wall
    return max(0.0, last.busy - first.busy - own) / wall if wall > 0 else 0.0


def cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _cpu(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"
