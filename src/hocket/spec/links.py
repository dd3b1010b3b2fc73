"""Links: the wires between ranks by name, as numbers and as what a group of ranks loses on them.

    nvlink3                              every pair of ranks over NVLink 3 and its switch
    nvlink3x2+net100g                    pairs of ranks over NVLink 3, 100 Gb/s between the pairs
    pcie4@H100-SXM-80                    as fast relative to this machine as PCIe 4 is to an H100
    pcie4@A100-SXM-80:scale=5200         ... this machine computing 5200 times slower than it
    12GB/s                               a rate of one's own

Rates are bytes per second per direction. A link inside a domain belongs to one rank; the link
between domains belongs to the whole domain, as a host's network card does. Groups that use a link
at once share it. A collective is estimated as a ring (Patarasu and Yuan 2009): 2 (n-1)/n of
the message for an all-reduce, (n-1)/n for its halves, one hop's latency for each turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from hocket.spec.errors import OptionError
from hocket.spec.link_kinds import LinkKind, kind

GPU = "A100-SXM-80"
"""Whose ratio of communication to compute is emulated where no other is named."""

ELEMENT = 2
"""Bytes of an element on the GPU that is emulated: messages count as if they were bf16."""

LARGEST_WORLD = 64
"""Ranks that can feel links: their wires are kept in one small shared memory."""


def ring_share(operation: str, ranks: int) -> float:
    """Of a collective's message, what each rank of a ring of `ranks` sends."""
    if operation in ("send", "receive", "broadcast", "reduce"):
        return 1.0
    if operation == "barrier" or ranks < 2:
        return 0.0
    return (2.0 if operation == "all-reduce" else 1.0) * (ranks - 1) / ranks


def ring_hops(operation: str, ranks: int) -> int:
    """Hops that follow one another in a collective of `ranks`."""
    if operation in ("send", "receive"):
        return 1
    return (2 if operation == "all-reduce" else 1) * (ranks - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one collective or message puts on the wires.

    Attributes:
        tier: index of the links it crosses.
        ports: the wires' ends that it uses (see `Links.ports`).
        volume: bytes on each of them. rate: bytes/s that it may have at most.
        latency: seconds that it takes even if it is empty.
    """

    tier: int
    ports: tuple[int, ...]
    volume: float
    rate: float
    latency: float

    @property
    def seconds(self) -> float:
        """Alone on its wires."""
        return self.latency + self.volume / self.rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the ranks of one job.

    Attributes:
        tiers: (link, ranks that reach each other over it), the innermost first; the last one's
            number is None: it reaches all.
        gpu: whose ratio of communication to compute is emulated.
        scale: how many times slower this machine computes than that GPU; None: to be measured.
    """

    tiers: tuple[tuple[LinkKind, int | None], ...]
    gpu: str = GPU
    scale: float | None = None

    @classmethod
    def parse(cls, text: str) -> Links:
        """Read the text form. Raises OptionError with the nearest name, or what a number may be."""
        body, colon, options = text.strip().partition(":")
        names, at, gpu = body.partition("@")
        if not names.strip():
            raise OptionError(
                "no link was named", hint="--emulate-links nvlink3 or --emulate-links pcie4"
            )
        if at and not gpu.strip():
            raise OptionError(f"links {text!r} name no GPU after @", hint=f"{names}@{GPU}")
        scale = None
        if colon:
            key, equals, value = options.partition("=")
            if key.strip() != "scale" or not equals:
                raise OptionError(
                    f"links {text!r}: {options!r} is not scale=NUMBER", hint=f"{body}:scale=5000"
                )
            scale = _number(value, text)
        parts = names.split("+")
        tiers = tuple(_tier(part, text, last=i == len(parts) - 1) for i, part in enumerate(parts))
        sizes = [size for _, size in tiers if size is not None]
        for inner, outer in itertools.pairwise(sizes):
            if outer <= inner or outer % inner:
                raise OptionError(
                    f"links {text!r}: a domain of {outer} ranks cannot be made of domains of "
                    f"{inner}",
                    hint="from the innermost outwards: nvlink3x2+pcie4x4+net100g",
                )
        return cls(tiers=tiers, gpu=gpu.strip() or GPU, scale=scale)

    def __str__(self) -> str:
        names = "+".join(k.name + ("" if size is None else f"x{size}") for k, size in self.tiers)
        gpu = "" if self.gpu == GPU else f"@{self.gpu}"
        return names + gpu + ("" if self.scale is None else f":scale={self.scale!r}")

    def check(self, world_size: int) -> None:
        """Refuse a world that its domains do not fill. Raises OptionError."""
        if world_size > LARGEST_WORLD:
            raise OptionError(
                f"--emulate-links serves up to {LARGEST_WORLD} ranks, not {world_size}"
            )
        for link, size in self.tiers:
            if size is not None and (size > world_size or world_size % size):
                raise OptionError(
                    f"{link.name}x{size}: {world_size} ranks do not fill domains of {size}",
                    hint=f"--emulate-links {self.tiers[-1][0].name}"
                    if world_size < 2 * size
                    else f"a layout whose ranks are a multiple of {size}",
                )

    # --- where a group lies ------------------------------------------------------------------

    def tier(self, ranks: Sequence[int]) -> int:
        """Index of the innermost links that reach all of `ranks`."""
        for index, (_, size) in enumerate(self.tiers):
            if size is None or len({rank // size for rank in ranks}) == 1:
                return index
        raise AssertionError(self.tiers)

    def unit(self, tier: int) -> int:
        """Ranks behind one end of a tier's links: one inside, a whole domain between domains."""
        return 1 if tier == 0 else self.tiers[tier - 1][1] or 1

    def ports(self, world_size: int) -> list[float]:
        """Bytes/s of every wire's end: tier by tier, for each unit its way out and its way in."""
        found: list[float] = []
        for tier, (link, _) in enumerate(self.tiers):
            rate = link.rate * link.share / (self.scale or 1.0)
            found += [rate] * (2 * (world_size // self.unit(tier)))
        return found

    def traffic(
        self, operation: str, nbytes: float, ranks: Sequence[int], world_size: int
    ) -> Traffic:
        """What a collective of `nbytes` among `ranks` (for a message: source, target) costs.

        Bytes are the GPU's; seconds are this machine's.
        """
        tier = self.tier(ranks)
        link, size = self.tiers[tier]
        unit = self.unit(tier)
        base = sum(2 * (world_size // self.unit(t)) for t in range(tier))
        units = list(dict.fromkeys(rank // unit for rank in ranks))
        ports: tuple[int, ...]
        if operation in ("send", "receive"):
            ports = (base + 2 * units[0], base + 2 * units[-1] + 1)
        else:
            ports = tuple(base + 2 * u + way for u in units for way in (0, 1))
        scale = self.scale or 1.0
        rate = link.rate * link.share / scale
        peers = (size or world_size) // unit - 1
        if link.spread and peers > 0:
            rate *= max(1, len(units) - 1) / peers
        return Traffic(
            tier=tier,
            ports=ports,
            volume=ring_share(operation, len(ranks)) * nbytes,
            rate=rate,
            latency=ring_hops(operation, len(ranks)) * link.latency * scale,
        )

    def seconds(
        self, operation: str, nbytes: float, ranks: Sequence[int], world_size: int
    ) -> float:
        """Seconds of a collective that has its links for itself."""
        if len(ranks) < 2:
            return 0.0
        return self.traffic(operation, nbytes, ranks, world_size).seconds


def _tier(text: str, whole: str, *, last: bool) -> tuple[LinkKind, int | None]:
    match = re.fullmatch(r"\s*(.+?)(?:x(\d{1,18}))?\s*", text)
    if match is None:
        raise OptionError(f"links {whole!r} hold an empty part", hint="nvlink3x2+net100g")
    link = kind(match[1])
    size = None if match[2] is None else int(match[2])
    if last and size is not None:
        raise OptionError(
            f"links {whole!r}: {link.name}x{size} joins {size} ranks, and nothing joins the rest",
            hint=f"{whole.partition('@')[0]}+net100g, or {link.name} alone for all ranks",
        )
    if not last and (size is None or size < 2):
        raise OptionError(
            f"links {whole!r}: how many ranks does {link.name} join?", hint=f"{link.name}x2+..."
        )
    return link, size


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise OptionError(
            f"links {whole!r}: scale is {text!r}; it is the factor by which this machine "
            "computes than the GPU, a positive number",
            hint="leave it out and it is measured",
        )
    return value
