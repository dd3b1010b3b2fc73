"""Network: the cards of this machine, their speed, and which GPU each is near, from /sys."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from hocket.runtime.host_memory import file_text


@dataclasses.dataclass(frozen=True)
class Card:
    """One network card.

    Attributes:
        rate: bytes/s each way, 0 if the driver does not say.
        address: on the PCI bus, empty for a virtual one; path: its place under /sys/devices.
        numa: NUMA node, -1 if unknown.
    """

    name: str
    rate: float
    address: str
    path: str
    numa: int


def cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """Every card that has hardware behind it; InfiniBand by its own name, one for each card."""
    found: dict[str, Card] = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        rates = [
            float(said[1])
            for port in sorted((folder / "ports").glob("*"))
            if (said := re.match(r"([\d.]+) Gb/sec", file_text(port / "rate")))
            and "ACTIVE" in file_text(port / "state")
        ]
        _add(found, folder, sum(rates) * 1e9 / 8)
    for folder in sorted((root / "sys/class/net").glob("*")):
        if (folder / "device").exists():
            speed = file_text(folder / "speed")
            _add(found, folder, float(speed) * 1e6 / 8 if speed.isdigit() else 0.0)
    return tuple(found.values())


def numa_node(root: Path, address: str) -> int:
    """The NUMA node of a PCI device, -1 if unknown."""
    text = file_text(root / "sys/bus/pci/devices" / address / "numa_node") if address else ""
    return int(text) if re.fullmatch(r"\d+", text) else -1


def nearest_cards(root: Path, address: str, cards: tuple[Card, ...]) -> tuple[str, ...]:
    """Names of the cards nearest to a PCI device: those that share most bridges with it; with none
    in common, those of its NUMA node."""
    if not address or not cards:
        return ()
    place = _place(root / "sys/bus/pci/devices" / address)
    shared = {card.name: _common(place, card.path) for card in cards if card.address}
    most = max(shared.values(), default=0)
    if most > 0:
        return tuple(name for name, count in shared.items() if count == most)
    numa = numa_node(root, address)
    return tuple(card.name for card in cards if numa >= 0 and card.numa == numa)


def _add(found: dict[str, Card], folder: Path, rate: float) -> None:
    device = folder / "device"
    path = _place(device)
    last = path.rpartition("/")[2]
    address = last if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", last) else ""
    # An InfiniBand card shows as a network interface too: once is enough.
    key = address or folder.name
    if key not in found or found[key].rate == 0.0:
        numa = file_text(device / "numa_node")
        number = int(numa) if re.fullmatch(r"\d+", numa) else -1
        name = found[key].name if key in found else folder.name
        found[key] = Card(name, rate, address, path, number)


def _common(one: str, other: str) -> int:
    """PCI bridges that two places under /sys/devices have in common, beyond the root complex."""
    count = 0
    for a, b in zip(one.split("/"), other.split("/"), strict=False):
        if a != b:
            break
        count += bool(re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", a))
    return count


def _place(path: Path) -> str:
    return os.path.realpath(path) if path.exists() else ""
