"""Cores: a container's quota counts wherever cores are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.runtime import host_cores


@pytest.mark.parametrize(
    ("quota", "cpus", "cores"),
    [
        ("200000 100000", 16, 2),
        ("50000 100000", 16, 1),
        ("250000 100000", 16, 3),  # the nearest, as half a core is one
        ("1600000 100000", 4, 4),
        ("max 100000", 16, 16),
        (None, 16, 16),
    ],
)
def test_a_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cpus: int, cores: int
) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    if quota is not None:
        (folder / "cpu.max").write_text(quota + "\n")
    assert host_cores.usable_cores(tmp_path, range(cpus)) == cores
    monkeypatch.setattr(host_cores.os, "cpu_count", lambda: cpus)
    assert host_cores.machine_cores(tmp_path) == cores
