"""Recorded machines in the place of NVML: what its functions answer, by device and link."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

REFUSED = object()
"""An answer that NVML refuses."""


class NVMLError(Exception):
    pass


class Recorded:
    """A module of NVML's functions that answers from tables.

    Attributes:
        devices: a table each: name, memory, bus, generation, width, version, and links: for each
            link (state, bus it leads to, kind of what is there: 0 a GPU, 2 a switch).
        levels, peers: topology level and READ access by pair of indices.
    """

    NVMLError = NVMLError

    def __init__(
        self,
        devices: list[dict[str, Any]],
        levels: Callable[[int, int], Any] = lambda a, b: 50,
        peers: Callable[[int, int], Any] = lambda a, b: 0,
        starts: bool = True,
    ) -> None:
        self.devices, self.levels, self.peers, self.starts = devices, levels, peers, starts
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.starts:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _value(self, index: int, key: str) -> Any:
        value = self.devices[index].get(key, REFUSED)
        if value is REFUSED:
            raise NVMLError("Not Supported")
        return value

    def nvmlDeviceGetName(self, device: int) -> Any:
        return self._value(device, "name")

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return types.SimpleNamespace(total=self._value(device, "memory"))

    def nvmlDeviceGetPciInfo(self, device: int) -> Any:
        return types.SimpleNamespace(busId=self._value(device, "bus"))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, device: int) -> Any:
        return self._value(device, "generation")

    def nvmlDeviceGetCurrPcieLinkWidth(self, device: int) -> Any:
        return self._value(device, "width")

    def nvmlDeviceGetNvLinkVersion(self, device: int, link: int) -> Any:
        return self._value(device, "version")

    def _link(self, device: int, link: int) -> Any:
        links = self._value(device, "links")
        if link >= len(links):
            raise NVMLError("Invalid Argument")
        return links[link]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> Any:
        return self._link(device, link)[0]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> Any:
        return types.SimpleNamespace(busId=self._link(device, link)[1])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: int, link: int) -> Any:
        return self._link(device, link)[2]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> Any:
        level = self.levels(one, other)
        if level is REFUSED:
            raise NVMLError("Not Supported")
        return level

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> Any:
        assert index == 0
        return self.peers(one, other)


def bus(index: int) -> str:
    return f"00000000:{0x10 * (index + 1):02X}:00.0"


def dgx_a100() -> Recorded:
    """Eight A100 on an NVSwitch: twelve links each, all of which lead to the switch."""
    switch = "00000000:C4:00.0"
    devices = [
        {
            "name": b"NVIDIA A100-SXM4-80GB",
            "memory": 81920 << 20,
            "bus": bus(i),
            "generation": 4,
            "width": 16,
            "version": 5,
            "links": [(1, switch, 2)] * 12,
        }
        for i in range(8)
    ]
    return Recorded(devices, levels=lambda a, b: 20 if a // 2 == b // 2 else 50)


def bridged_3090() -> Recorded:
    """Two RTX 3090 with a bridge of four links, in slots of eight lanes."""
    devices = [
        {
            "name": "NVIDIA GeForce RTX 3090",
            "memory": 24 << 30,
            "bus": bus(i),
            "generation": 4,
            "width": 8,
            "version": 4,
            "links": [(1, bus(1 - i), 0)] * 4,
        }
        for i in range(2)
    ]
    return Recorded(devices, levels=lambda a, b: 30)
