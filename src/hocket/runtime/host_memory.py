"""Memory of this machine that processes may use: /proc/meminfo and the limits of control groups.

Read from /proc and /sys, of Linux; what is not there is unknown (0).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that processes may use: what there is, or the control group's limit if that is less."""
    found = re.search(r"^MemTotal:\s*(\d+) kB", file_text(root / "proc/meminfo"), re.MULTILINE)
    total = int(found[1]) << 10 if found else 0
    limits = [
        int(text)
        for folder in control_groups(root)
        for text in (file_text(folder / "memory.max"), file_text(folder / "memory.limit_in_bytes"))
        if text.isdigit()
    ]
    return min([total, *(one for one in limits if 0 < one < total)])


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that processes may still take without swapping: MemAvailable, or what the limit of a
    control group leaves, where files that were read and can be dropped are not counted as used."""
    text = file_text(root / "proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    free = [int(found[1]) << 10] if found else [host_memory(root)]
    for folder in control_groups(root):
        for limit, used, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = file_text(folder / limit), file_text(folder / used)
            if most.isdigit() and now.isdigit():
                statistics = file_text(folder / "memory.stat")
                dropped = re.search(rf"^{files} (\d+)", statistics, re.MULTILINE)
                kept = int(now) - (int(dropped[1]) if dropped else 0)
                free.append(max(0, int(most) - kept))
    return min(free)


def control_groups(root: Path) -> list[Path]:
    """Folders of the control groups of this process, from its own up to the root."""
    base = root / "sys/fs/cgroup"
    found = [base, base / "cpu", base / "memory"]
    for line in file_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        start = base / controllers if controllers else base
        while path.strip("/"):
            found.append(start / path.strip("/"))
            path = path.rpartition("/")[0]
    return found


def file_text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
