"""Processor cores that processes may use: the affinity, and the quotas of control groups.

Read from /proc and /sys, of Linux. A container's CPU limit is a quota: all CPUs stay visible.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from hocket.runtime.host_memory import control_groups, file_text


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Cores that this process may use: its CPUs, or fewer where a quota grants less time.

    Args:
        root: where /proc and /sys are.
        cpus: CPUs that processes may run on. None: this process's affinity.
    """
    return _granted(len(cpus if cpus is not None else usable_cpus()), root)


def machine_cores(root: Path = Path("/")) -> int:
    """Cores that all processes of this machine, or of this container, share."""
    return _granted(os.cpu_count() or 1, root)


def usable_cpus() -> frozenset[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that the control groups of this process grant; 0 without a limit."""
    limits = []
    for folder in control_groups(root):
        words = file_text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max" and float(words[1]) > 0:
            limits.append(float(words[0]) / float(words[1]))
        quota, period = (file_text(folder / f"cpu.cfs_{key}_us") for key in ("quota", "period"))
        if quota and period and float(quota) > 0 and float(period) > 0:
            limits.append(float(quota) / float(period))
    return min(limits, default=0.0)


def _granted(cores: int, root: Path) -> int:
    """`cores`, or what a quota grants of them. Half a core is one: a process needs one to run."""
    quota = cpu_quota(root)
    return max(1, min(cores, int(quota + 0.5))) if quota else cores
