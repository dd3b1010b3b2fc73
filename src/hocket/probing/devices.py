"""Devices: what NVML knows of the GPUs of this machine and of what joins them.

NVML comes through the library nvidia-ml-py, as a module whose functions are called here by their
names; tests hand in a recorded one. Whatever a driver refuses to say stays unknown.

    path    as `nvidia-smi topo -m` writes it, from the nearest:
    NV12    twelve NVLinks, direct or through a switch
    PIX     one PCIe switch       PXB   several       PHB   the host bridge of one CPU
    NODE    bridges of one NUMA node                  SYS   between NUMA nodes
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hocket.probing import network
from hocket.spec.measured import DevicePair, MeasuredDevice

_MOST_LINKS = 36
_GENERATION = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVML's numbers of NVLink versions: 2.0 and 2.2 are generation 2, and so on."""
_SWITCH, _GPU = 2, 0
_ACTIVE = 1
_PATHS = ((10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"))
_READ, _NVLINK = 0, 2
"""Kinds of access between two GPUs that NVML is asked about; its answer 0 means yes."""

_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s each way of one lane of PCIe by generation, its line code counted."""


@dataclasses.dataclass(frozen=True)
class FoundDevices:
    """Devices, what joins each two, and in words what NVML did not say."""

    devices: tuple[MeasuredDevice, ...] = ()
    pairs: tuple[DevicePair, ...] = ()
    unknown: tuple[str, ...] = ()


def pcie_rate(generation: int, width: int) -> float:
    """Bytes/s each way; 0 if either is unknown."""
    return _LANE.get(generation, 0.0) * width


def find_devices(root: Path = Path("/")) -> FoundDevices:
    """The GPUs of this machine, through the library as it is installed.

    Never fails: a missing library, driver or GPU is said in `unknown`.
    """
    try:
        import pynvml
    except ImportError:
        if not any((root / "dev").glob("nvidia[0-9]*")):
            return FoundDevices()
        return FoundDevices(unknown=("GPUs: the package nvidia-ml-py is not installed",))
    return read_nvml(pynvml, root)


def compute_capability() -> tuple[int, int] | None:
    """The CUDA compute capability that all GPUs of this machine have at least; None where NVML
    does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver: ranks will ask torch
        return None
    try:
        found = [
            pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return min(((int(major), int(minor)) for major, minor in found), default=None)
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_gpus() -> int:
    """GPUs that this process may use, by NVML and `CUDA_VISIBLE_DEVICES`; 0 where NVML reports
    none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return 0
    try:
        return len(_visible(pynvml))
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[str]:
    """Indices or UUIDs of the GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [name.strip() for name in given.split(",") if name.strip()]


def free_device_memory(count: int) -> int | None:
    """Bytes free on the least free of the first `count` GPUs that this process may use; None where
    NVML does not report them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in _visible(pynvml)[:count]
        ]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(one).free) for one in handles)
    except (pynvml.NVMLError, ValueError):
        return None
    finally:
        pynvml.nvmlShutdown()


def read_nvml(nvml: Any, root: Path = Path("/")) -> FoundDevices:
    """What `nvml`, a module of NVML's functions, says of its GPUs.

    `root` is where /sys hangs, for the network cards and NUMA nodes.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if any((root / "dev").glob("nvidia[0-9]*")):
            return FoundDevices(unknown=(f"GPUs: NVML does not start: {error}",))
        return FoundDevices()
    try:
        return _Reader(nvml, root).found()
    except nvml.NVMLError as error:  # a GPU that was lost while it was looked at
        return FoundDevices(unknown=(f"GPUs: NVML failed: {error}",))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Reader:
    def __init__(self, nvml: Any, root: Path) -> None:
        self.nvml, self.root = nvml, root
        self.handles, self.hidden = [], 0
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self.handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError:  # of a container that may not open it, or lost
                self.hidden += 1
        self.cards = network.cards(root)
        self.silent: dict[str, int] = {}

    def found(self) -> FoundDevices:
        buses = [self._bus(handle) for handle in self.handles]
        links = [self._links(handle) for handle in self.handles]
        devices = [self._device(i, buses[i], links[i]) for i in range(len(self.handles))]
        pairs = [
            self._pair(devices, links, a, b)
            for a in range(len(devices))
            for b in range(a + 1, len(devices))
        ]
        unknown = tuple(
            f"NVML does not report {what} of {count} of {len(devices)} GPUs"
            for what, count in self.silent.items()
        )
        if self.hidden:
            unknown += (f"GPUs: NVML may not open {self.hidden} of them",)
        return FoundDevices(tuple(devices), tuple(pairs), unknown)

    def _ask(self, what: str | None, function: str, *arguments: Any) -> Any:
        """The answer of one function, or None; `what` counts a refusal among the unknown."""
        try:
            call: Callable[..., Any] = getattr(self.nvml, function)
            return call(*arguments)
        except (self.nvml.NVMLError, AttributeError):
            if what is not None:
                self.silent[what] = self.silent.get(what, 0) + 1
            return None

    def _bus(self, handle: Any) -> str:
        info = self._ask("the PCI address", "nvmlDeviceGetPciInfo", handle)
        return _address(info) if info is not None else ""

    def _links(self, handle: Any) -> list[tuple[int, str, int]]:
        """Of each NVLink that is there: whether it is active, where it leads, to what kind."""
        found = []
        for link in range(_MOST_LINKS):
            state = self._ask(None, "nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                continue
            peer, kind = "", -1
            if state == _ACTIVE:
                info = self._ask(None, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                peer = _address(info) if info is not None else ""
                answer = self._ask(None, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
                kind = -1 if answer is None else int(answer)
            found.append((int(state), peer, kind))
        return found

    def _device(
        self, index: int, bus: str, links: Sequence[tuple[int, str, int]]
    ) -> MeasuredDevice:
        handle = self.handles[index]
        name = self._ask("the name", "nvmlDeviceGetName", handle) or "GPU"
        memory = self._ask("the memory", "nvmlDeviceGetMemoryInfo", handle)
        active = [link for link in links if link[0] == _ACTIVE]
        version = 0
        if links:
            answer = self._ask("the NVLink version", "nvmlDeviceGetNvLinkVersion", handle, 0)
            version = _GENERATION.get(int(answer or 0), 0)
        generation = self._ask("the PCIe", "nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0
        # The width that the slot gives: a card of 16 lanes may sit in a slot of 8. The generation
        # falls while a GPU idles, so that is asked for at its most.
        width = self._ask("the PCIe width", "nvmlDeviceGetCurrPcieLinkWidth", handle) or 0
        numa = network.numa_node(self.root, bus)
        return MeasuredDevice(
            index=index,
            name=name.decode() if isinstance(name, bytes) else str(name),
            memory=int(memory.total) if memory is not None else 0,
            nvlink=version,
            links=len(active),
            links_total=len(links),
            switch=any(kind == _SWITCH for _, _, kind in active),
            pcie=int(generation),
            width=int(width),
            pcie_rate=pcie_rate(int(generation), int(width)),
            numa=max(0, numa),
            numa_known=numa >= 0,
            bus=bus,
            nics=network.nearest_cards(self.root, bus, self.cards),
        )

    def _pair(
        self,
        devices: Sequence[MeasuredDevice],
        links: Sequence[Sequence[tuple[int, str, int]]],
        a: int,
        b: int,
    ) -> DevicePair:
        one, other = self.handles[a], self.handles[b]
        direct = sum(peer == devices[b].bus for state, peer, _ in links[a] if state == _ACTIVE)
        if not direct and devices[a].switch and devices[b].switch:
            direct = min(devices[a].links, devices[b].links)
        level = self._ask(None, "nvmlDeviceGetTopologyCommonAncestor", one, other)
        path = f"NV{direct}" if direct else "SYS" if level is None else _path(int(level))
        peer = self._ask("peer access", "nvmlDeviceGetP2PStatus", one, other, _READ)
        return DevicePair(first=a, second=b, path=path, peer=peer == 0, links=direct)


def _path(level: int) -> str:
    return next((name for most, name in _PATHS if level <= most), "SYS")


def _address(info: Any) -> str:
    """`0000:07:00.0` of NVML's PCI information, whose domain has eight digits."""
    text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    text = text.strip("\x00").lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}" if rest.count(":") else text
