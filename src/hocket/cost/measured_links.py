"""Links: what messages and collectives take between the ranks of a machine that was measured.

A measured collective is three things to a rank: what it gives (its copy into shared memory), the
way (the others' waking), what it takes (reading what the others gave). With more ranks than cores
the measured seconds hold the others' turns as well; a rank's own share of the cores is its work.
"""

from __future__ import annotations

import itertools
import math

from hocket.cost.measured_rates import interpolated_seconds
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.links import ELEMENT
from hocket.spec.links import Links as Wires
from hocket.spec.measured import Curve, MachineMeasurements
from hocket.spec.process_groups import named_groups
from hocket.spec.step_prices import Collective

GIVEN = 1 / 3
"""Of a collective's work, what is done before the others can go on: one copy in; summing or
reading out is two (one read from each of two slots and one write)."""

SENT = 1 / 2
"""Of a message's work: one copy in, one copy out."""

ASLEEP = 1 / 2
"""Of the smallest message's time, what is the sleepers' waking; the rest is the ranks' own work."""


CROSSED = {"shm": "shared memory", "gloo": "sockets"}
"""Backend to what its messages cross."""


class MeasuredLinks:
    """Seconds of communication on one machine.

    Args:
        measured: of the machine.
        backend: `shm`, `gloo` or `nccl`.
        wires: links that are emulated (`--emulate-links`), with their scale; a collective then
            ends when its bytes have run over them as well. None: only what was measured.
        layout: whose ranks lie on the wires. element_bytes: of what is sent here; on the wires an
            element has that of the GPU that is emulated.

    Asking for the price of a message raises OptionError where none was measured over `backend`.
    """

    def __init__(
        self,
        measured: MachineMeasurements,
        backend: str = "shm",
        *,
        wires: Wires | None = None,
        layout: Layout | None = None,
        element_bytes: int = 4,
    ) -> None:
        self.measured = measured
        self.backend = backend
        self.wires = wires
        self.layout = layout
        self.element_bytes = element_bytes
        self.notes: list[str] = []
        self._cores = measured.host.cores if measured.device == "cpu" else 0

    def collective(self, name: str, axis: str, nbytes: int, ranks: int) -> Collective | None:
        """One collective over `ranks` ranks, or a message; None for one rank alone."""
        if ranks < 2:
            return None
        if name in ("send", "receive"):
            return self.message(nbytes, axis)
        operation = "all-reduce" if name in ("all-reduce", "barrier") else name
        return self._seconds_of((name, axis, nbytes), operation, ranks)

    def all_reduce(self, axis: str, nbytes: int, ranks: int) -> Collective | None:
        """A sum over ranks, by the backend."""
        return self.collective("all-reduce", axis, nbytes, ranks)

    def sum(self, axis: str, nbytes: int, ranks: int) -> Collective | None:
        """A sum over ranks that serve: by their kernel up to the size at which it was measured, by
        the backend beyond."""
        most = max((c.sizes[-1] for c in self.measured.curves if c.operation == "sum"), default=0)
        if ranks < 2 or nbytes > most or self.backend != "shm":
            return self.all_reduce(axis, nbytes, ranks)
        return self._seconds_of(("all-reduce", axis, nbytes), "sum", ranks)

    def message(self, nbytes: int, axis: str = "pp") -> Collective:
        """One message to a neighbouring stage, or to the next rank of another axis."""
        return self._seconds_of(("send", axis, nbytes), "send", 2)

    def _seconds_of(self, what: tuple[str, str, int], operation: str, ranks: int) -> Collective:
        name, axis, nbytes = what
        given = SENT if operation == "send" else GIVEN
        curve = self._curve(operation, ranks)
        if curve is None:
            if not any(one.backend == self.backend for one in self.measured.curves):
                raise OptionError(
                    f"send/recv over {self.backend} was not measured",
                    hint="hocket probe",
                )
            self._note(f"{operation} over {ranks} ranks was not measured by {self.backend}: free")
            return Collective(name=name, axis=axis, bytes=nbytes, give=0.0, wait=0.0, take=0.0)
        points = list(zip(map(float, curve.sizes), curve.seconds, strict=True))
        size = float(nbytes)
        if curve.ranks != ranks:
            # As much again for every other rank whose part has to be read.
            size *= ranks / curve.ranks
        whole = interpolated_seconds(points, max(size, 1.0))
        asleep = min(ASLEEP * points[0][1], whole)
        work = whole - asleep
        if self._cores and curve.world > self._cores:
            turns = curve.world / self._cores
            work, asleep = whole / turns, 0.0
        if self.measured.device != "cpu":  # copy engines work, and no rank shares them
            work, asleep = 0.0, whole
        give, take = given * work, (1 - given) * work
        on_wires = self._on_wires(name, axis, nbytes)
        return Collective(
            name=name,
            axis=axis,
            bytes=nbytes,
            give=give,
            # The wires are busy while the ranks take what is there already.
            wait=max(asleep, on_wires - take),
            take=take,
        )

    def _on_wires(self, name: str, axis: str, nbytes: int) -> float:
        """Seconds that a collective's bytes run over the links that are emulated.

        All groups of an axis talk at the same time; those whose bytes leave by the same port share
        it.
        """
        wires, layout = self.wires, self.layout
        if wires is None or layout is None:
            return 0.0
        groups = named_groups(layout, axis)
        size = nbytes / self.element_bytes * ELEMENT
        world = layout.world_size
        if name == "send":
            pairs = [pair for group in groups for pair in itertools.pairwise(group)]
            return max((wires.seconds(name, size, pair, world) for pair in pairs), default=0.0)
        flows = [wires.traffic(name, size, group, world) for group in groups if len(group) > 1]
        load: dict[int, int] = {}
        for port in (port for flow in flows for port in flow.ports):
            load[port] = load.get(port, 0) + 1
        rates = wires.ports(world)
        return max(
            (
                flow.latency
                + flow.volume / min(flow.rate, *(rates[p] / load[p] for p in flow.ports))
                for flow in flows
            ),
            default=0.0,
        )

    def _curve(self, operation: str, ranks: int) -> Curve | None:
        """The curve of so many ranks alone on the machine, or of the nearest number."""
        known = [
            c
            for c in self.measured.curves
            if c.operation == operation and c.backend == self.backend and c.sizes
        ]
        if not known and operation != "all-reduce":
            known = [
                c
                for c in self.measured.curves
                if c.operation == "all-reduce" and c.backend == self.backend
            ]
            if known:
                self._note(
                    f"{operation} was not measured by {self.backend}; estimated as all-reduce"
                )
        if not known:
            return None

        def far(curve: Curve) -> tuple[float, float, int]:
            apart = abs(math.log2(curve.ranks / ranks))
            # One group alone says most; several at once hold each other's turns.
            return apart, abs(math.log2(curve.world / curve.ranks)), curve.world

        found = min(known, key=far)
        if found.ranks != ranks:
            self._note(
                f"{operation} over {ranks} ranks was not measured; scaled from {found.ranks}"
            )
        return found

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
