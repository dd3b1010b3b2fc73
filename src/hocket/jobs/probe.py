"""The probe: what this machine has and how fast it is, measured by ranks of the runtime.

The parent looks at /sys and NVML; torch is imported by the ranks alone.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

import hocket
from hocket.spec.errors import OptionError, RankFailure
from hocket.spec.measured import DevicePair, Host, MachineMeasurements, MeasuredDevice, to_rows
from hocket.spec.rows import to_table

if TYPE_CHECKING:
    from hocket.probing.devices import FoundDevices

Event = dict[str, Any]
Listener = Callable[[Event], None]

DEVICES = ("auto", "cpu", "cuda")
ENTRY = "hocket.probing.rank:main"
BUSY = 0.1
"""Cores' worth of other programs' time from which the figures are said to be disturbed."""


@dataclasses.dataclass(frozen=True)
class ProbeTarget:
    """What is there, before anything is measured; kind is `cpu` or `cuda`."""

    kind: str
    host: Host
    found: FoundDevices


def present_machine(device: str = "auto") -> ProbeTarget:
    """Look at this machine; milliseconds.

    Raises:
        OptionError: no such kind of device, or none of it here.
    """
    from hocket.launch.launcher import cuda_shows
    from hocket.probing import devices, host, network

    if device not in DEVICES:
        raise OptionError(f"unknown device {device!r}", hint=f"use one of {', '.join(DEVICES)}")
    found = devices.find_devices()
    if device == "cuda" and not cuda_shows():
        count = len(found.devices)
        seen = (
            f"NVML sees {count} GPUs, but torch here is built without CUDA"
            if count
            else ("no NVIDIA GPU shows on this machine")
        )
        raise OptionError(f"device cuda cannot be measured: {seen}", hint="--device cpu")
    kind = "cuda" if device != "cpu" and cuda_shows() else "cpu"
    rate = sum(card.rate for card in network.cards())
    return ProbeTarget(kind, dataclasses.replace(host.host(), network=rate), found)


def measure_machine(
    *, device: str = "auto", quick: bool = False, on_event: Listener | None = None
) -> MachineMeasurements:
    """Measure this machine.

    Args:
        device: `cpu`, `cuda`, or `auto`: cuda where there is one.
        quick: fewer sizes and repeats; under 20 s on two cores where the full form is under 90.
        on_event: called with each event of the ranks: `phase`, `measured` ...

    Raises:
        HocketError: no such device, or ranks that died before anything was measured.
    """
    from hocket.launch import Launcher, joined_context
    from hocket.probing.sizes import worlds

    if joined_context() is not None:
        raise OptionError(
            "probe starts its own ranks; it was started as one of another launcher's",
            hint="run it without torchrun",
        )
    here = present_machine(device)
    cuda = here.kind == "cuda"
    count = max(1, len(here.found.devices)) if cuda else here.host.cores
    payload: dict[str, Any] = {
        "quick": quick,
        "cores": here.host.cores,
        "worlds": worlds(here.kind, count, quick),
        "pairs": min(count, 16 if cuda else 4 if quick else 8),
    }
    parts: dict[str, list[Any]] = {}
    unknown = list(here.found.unknown)
    host = here.host

    def listen(event: Event) -> None:
        nonlocal host
        if event["event"] == "measured":
            parts.setdefault(event["key"], []).extend(event["rows"])
        elif event["event"] == "lacking":
            unknown.append(event["what"])
        elif event["event"] == "load":
            host = dataclasses.replace(host, load=event["cores"])
        if on_event is not None:
            on_event(event)

    with Launcher(here.kind, threads=1, warm=False) as launcher:
        try:
            launcher.run(ENTRY, max((1, *payload["worlds"])), payload, on_event=listen)
        except RankFailure as error:
            if not parts:
                raise
            cause = error.message.splitlines()[0] + (f" ({error.hint})" if error.hint else "")
            unknown.append(f"what comes after {list(parts)[-1]}, where a rank failed: {cause}")
    unknown += _lacking(here)
    if host.load > BUSY:
        unknown.append(
            f"the idle machine: other programs took {host.load:.2g} of its {host.cores} cores "
            "meanwhile, so communication and shared cores are slower than they would be"
        )
    found = MachineMeasurements.from_dict(
        {
            "device": here.kind,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "torch": metadata.version("torch"),
            "hocket": hocket.__version__,
            "quick": quick,
            "host": to_table(host),
            "unknown": unknown,
            "devices": to_rows("devices", _devices(here)),
            **parts,
        }
    )
    return dataclasses.replace(found, pairs=_joined(here, found.pairs)) if cuda else found


def _devices(here: ProbeTarget) -> tuple[MeasuredDevice, ...]:
    if here.kind == "cuda":
        return here.found.devices
    return (MeasuredDevice(index=0, name=here.host.cpu, memory=here.host.memory),)


def _joined(here: ProbeTarget, measured: tuple[DevicePair, ...]) -> tuple[DevicePair, ...]:
    """Rates and latencies that were measured, upon what NVML says of the same pairs."""
    by_ends = {(one.first, one.second): one for one in measured}
    found = []
    for pair in here.found.pairs:
        one = by_ends.get((pair.first, pair.second), pair)
        found.append(
            dataclasses.replace(pair, rate=one.rate, latency=one.latency, measured=one.measured)
        )
    return tuple(found) or measured


def _lacking(here: ProbeTarget) -> list[str]:
    """In words, what a machine of this kind cannot tell."""
    found = []
    if here.kind == "cuda":
        if not here.found.devices:
            found.append("what the GPUs are and how they are joined: NVML reports nothing")
        if len(here.found.devices) == 1:
            found.append("links between GPUs: there is one")
        found.append("ranks that compute at once: each has a GPU of its own")
    else:
        if here.found.devices:
            found.append(f"{len(here.found.devices)} GPUs: only the CPU was measured")
        if here.host.cores == 1:
            found.append("links between cores: there is one")
    found.append("the network to other machines: only one machine was measured")
    return found
