"""LinkKind: one kind of link between devices, by name, in bytes per second per direction.

NVLink is marketed as the sum of both directions, PCIe per direction, networks in bits. A kind holds
its rate in one unit and the marketed figure with it.
"""

from __future__ import annotations

import dataclasses
import re

from hocket.spec.errors import OptionError, nearest
from hocket.spec.units import parse_bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkKind:
    """One kind of link.

    Attributes:
        name: as it is written. title: as a person says it.
        rate: bytes/s per device and direction.
        share: of the rate that rings of many messages reach.
        latency: seconds of one hop.
        marketed: the figure it is sold under, and what that counts.
        spread: there is no switch: a device's links are spread evenly over its peers, so a group
            of n of the domain's D devices has (n-1)/(D-1) of them.
        source: of rate and share.
    """

    name: str
    title: str
    rate: float
    share: float = 1.0
    latency: float = 0.0
    marketed: str = ""
    spread: bool = False
    source: str = ""


def _kinds() -> dict[str, LinkKind]:
    found = []
    measured = "NVIDIA data sheets; rings reach 78% (A100) to 82% (H200) of it (nccl-tests)"
    for generation, links, each in ((2, 6, 25e9), (3, 12, 25e9), (4, 18, 25e9), (5, 18, 50e9)):
        rate = links * each
        for spread in (False, True):
            found.append(
                LinkKind(
                    name=f"nvlink{generation}" + ("-mesh" if spread else ""),
                    title=f"NVLink {generation}" + (", no switch" if spread else ", switch"),
                    rate=rate,
                    share=0.9 if spread else 0.8,
                    latency=1e-6,
                    marketed=f"{2 * rate / 1e9:g} GB/s, both directions",
                    spread=spread,
                    source="V100 cube mesh: 22.5 GB/s at 2, 134.5 at 8 GPUs (nccl-tests)"
                    if spread
                    else measured,
                )
            )
    for generation, rate, sold in ((3, 15.75e9, 16), (4, 31.5e9, 32), (5, 63e9, 64)):
        found.append(
            LinkKind(
                name=f"pcie{generation}",
                title=f"PCIe {generation}.0 x16",
                rate=rate,
                share=0.88,
                latency=1.5e-6,
                marketed=f"{sold} GB/s, each direction",
                source="PCI-SIG rates less encoding; copies reach 55.4 of 63 GB/s (PCIe 5)",
            )
        )
    for gigabits in (1, 10, 25, 50, 100, 200, 400, 800):
        found.append(
            LinkKind(
                name=f"net{gigabits}g",
                title=f"network {gigabits} Gb/s",
                rate=gigabits * 1e9 / 8,
                share=0.73 if gigabits >= 100 else 0.9,
                latency=5e-6 if gigabits >= 100 else 20e-6,
                marketed=f"{gigabits} Gb/s (bits), each direction",
                source="large all-reduces of four nodes reach 73% of 400 Gb/s cards (nccl-tests)",
            )
        )
    return {kind.name: kind for kind in found}


KINDS = _kinds()
"""Every link that has a name."""

_RATE = re.compile(r"[0-9][0-9.]*(?:e[+-]?[0-9]+)?[KMGT]?i?[Bb]/s")


def kind(name: str) -> LinkKind:
    """A link by its name, or a rate of one's own (`12GB/s`, `40Gb/s`).

    Raises:
        OptionError: neither, with the nearest name; or a rate that cannot be.
    """
    found = KINDS.get(name.strip().lower())
    if found is not None:
        return found
    if _RATE.fullmatch(name.strip()):
        rate = parse_bandwidth(name)
        if not 0 < rate <= 1e14:
            raise OptionError(f"a link of {name} cannot be", hint="12GB/s")
        return LinkKind(name=name.strip(), title=name.strip(), rate=rate)
    near = nearest(name.strip().lower(), KINDS)
    hint = f"did you mean {near!r}?" if near else f"one of {', '.join(KINDS)}, or 12GB/s"
    raise OptionError(f"unknown link {name!r}", hint=hint)
