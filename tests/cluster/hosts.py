"""Two hosts on one machine: network namespaces of their own, joined by a virtual cable.

Each has only its own loopback and one interface, so a process of one reaches the other by its
address alone. Names are resolved by a hosts file of these namespaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Host:
    """One of them: its namespace, the names that lead to it, its address and its interface."""

    namespace: str
    address: str
    interface: str

    def command(self, *words: str) -> list[str]:
        """The words that run a command there."""
        return ["ip", "netns", "exec", self.namespace, *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=100)


@contextlib.contextmanager
def hosts(names: dict[int, list[str]]) -> Iterator[list[Host]]:
    """As many hosts as there are lists of names. Skips where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid()
    made = [
        Host(f"hocket-{number}-{i}", f"10.77.{number % 250}.{i + 1}", f"hk{number}-{i}"[:15])
        for i in names
    ]
    resolved = "127.0.0.1 localhost\n" + "".join(
        f"{host.address} {' '.join(names[i])}\n" for i, host in enumerate(made)
    )
    folders = [Path("/etc/netns") / host.namespace for host in made]
    try:
        try:
            for host in made:
                _ip("netns", "add", host.namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode()[:200]}")
        one, other = made
        _ip(
            *("link", "add", one.interface, "netns", one.namespace, "type", "veth"),
            *("peer", "name", other.interface, "netns", other.namespace),
        )
        for host, folder in zip(made, folders, strict=True):
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(resolved)
        yield made
    finally:
        for host, folder in zip(made, folders, strict=True):
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
