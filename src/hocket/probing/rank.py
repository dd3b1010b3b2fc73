"""The rank's entry: `main(context, payload)`, called in every rank of a probe.

One run holds as many ranks as any part needs; those that a part does not need sleep meanwhile. Rank
0 tells of each part as soon as it is done, so that what a later part breaks costs only that part.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from hocket.probing import fit, host
from hocket.probing.collective_bench import COLLECTIVES, Room
from hocket.probing.compute import Compute
from hocket.probing.repeats import rounded
from hocket.probing.sharing import sharing_slowdowns
from hocket.probing.sizes import ProbeSizes, group_sizes, probe_sizes
from hocket.runtime.allocator import keep_freed_memory
from hocket.runtime.device import claim_device, pick_backend, pick_device
from hocket.runtime.host_cores import usable_cpus
from hocket.spec.measured import Curve, DevicePair, to_rows

if TYPE_CHECKING:
    from hocket.launch import RankContext

LONG = 600.0
"""Seconds that one part may be silent, and that other ranks wait for it: a part is over in a few on
an idle machine, and others may hold the cores for long."""


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Measure.

    Args:
        context: this rank's place in the world.
        payload: `quick`; `cores` of the machine; `worlds`, the numbers of ranks that talk or
            compute at once; `pairs`, how many devices or cores are tried two by two.

    Raises:
        HocketError: no such device, or fewer than ranks.
    """
    Probe(context, payload, probe_sizes(context.device_kind, payload["quick"])).run()


class Probe:
    """One rank's part of it."""

    def __init__(self, context: RankContext, payload: dict[str, Any], form: ProbeSizes) -> None:
        self.context, self.payload, self.sizes = context, payload, form
        self.device = pick_device(context.device_kind, context.local_rank)
        for text in claim_device(self.device):
            context.emit({"event": "lacking", "what": f"rank {context.rank}: {text}"})
        keep_freed_memory()
        backend = pick_backend("auto", self.device, max(2, context.world_size), True)
        context.expect(LONG)
        context.init_process_group(backend, self.device, timeout=LONG)
        self.room = Room(context.rank, context.world_size, self.device)
        self.compute = Compute(self.device, self.sizes)
        self.alone = context.rank == 0

    def run(self) -> None:
        """All parts, in their order."""
        self.room.wait()
        first, own = host.clock(), time.process_time()
        self._alone()
        self.room.wait()
        worlds = [n for n in self.payload["worlds"] if n <= self.room.size]
        if self.device.type == "cpu" and worlds:
            self._say("ranks that compute at once")
            cores, seconds = self.payload["cores"], self.sizes.seconds["sharing"]
            self._tell(
                "sharing", sharing_slowdowns(self.room, self.compute, worlds, cores, seconds)
            )
            self._pulse("sharing")
        backends = self._backends()
        self._pairs(backends[0])
        self._pulse("pairs")
        cases = [(b, w, g) for b in backends for w in worlds for g in group_sizes(w)]
        for backend, world, ranks in cases:
            least = self.sizes.rounds if backend == backends[0] else self.sizes.others
            seconds = self.sizes.seconds["collectives"] / len(cases)
            self._curves(backend, world, ranks, seconds, least)
            self._pulse("collectives")
        own = self.room.total(time.process_time() - own)
        if self.alone:
            load = host.load_between(first, host.clock(), own)
            self.context.emit({"event": "load", "cores": round(load, 3)})

    def _backends(self) -> list[str]:
        """What ranks of this machine can talk by, the runtime's own choice first."""
        if self.device.type == "cuda":
            return ["nccl"]
        from hocket.runtime import shm

        reason = shm.why_not_shm(self.room.size)
        if reason is None:
            return ["shm", "gloo"]
        if self.alone:
            self.context.emit({"event": "lacking", "what": f"backend shm: {reason}"})
        return ["gloo"]

    def _alone(self) -> None:
        """What one rank measures while the others sleep."""
        if not self.alone:
            return
        for name, what in (
            ("products", "matmuls"),
            ("streams", "memory"),
            ("dispatch", "small operations"),
            ("kernels", "other operations"),
            ("updates", "the optimizer"),
            ("serving", "what serving calls"),
        ):
            self._say(what)
            try:
                found = getattr(self.compute, name)()
                self._tell("kernels" if name == "serving" else name, found)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                self.context.emit({"event": "lacking", "what": f"{what}: too large for the GPU"})
        if self.device.type == "cpu":
            self._tell("pulses", self.compute.pulses)

    def _pulse(self, part: str) -> None:
        """How fast rank 0 is now, while the others sleep: the longer it is looked at, the nearer
        the mean speed is to what runs will find."""
        if self.alone and self.device.type == "cpu":
            self._tell("pulses", self.compute.pulse(part))
        self.room.wait()

    def _pairs(self, backend: str) -> None:
        """A small and a large message between each two devices; on CPU between cores."""
        count = min(self.room.size, self.payload["pairs"])
        if count < 2:
            return
        self._say("pairs")
        axis = self.room.axis(count, count, backend)
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        messages = (self.sizes.messages[0], self.sizes.messages[-1])
        before = self._pin()
        found = []
        for a, b in pairs:
            calls = {
                ("send", size): self.room.there_and_back(axis, a, b, size) for size in messages
            }
            each = self.sizes.seconds["pairs"] / len(pairs)
            taken = self.room.rounds(calls, communicating=2, seconds=each, least=self.sizes.rounds)
            small, large = (taken["send", size].seconds for size in messages)
            rate = (messages[1] - messages[0]) / max(large - small, large / 2)
            path = "MEM" if self.device.type == "cpu" else ""
            found.append(
                DevicePair(
                    first=a, second=b, path=path, rate=rounded(rate), latency=small, measured=True
                )
            )
        if before:
            os.sched_setaffinity(0, before)
        self._tell("pairs", found)

    def _pin(self) -> frozenset[int]:
        """Give each rank a core of its own, so that pairs of ranks are pairs of cores."""
        if self.device.type != "cpu" or not hasattr(os, "sched_setaffinity"):
            return frozenset()
        cpus = sorted(usable_cpus())
        os.sched_setaffinity(0, {cpus[self.room.rank % len(cpus)]})
        return frozenset(cpus)

    def _curves(self, backend: str, world: int, ranks: int, seconds: float, least: int) -> None:
        """Each collective by size, in all groups of `ranks` among `world` ranks at once."""
        self._say(f"{backend}, groups of {ranks} among {world} ranks")
        axis = self.room.axis(world, ranks, backend)
        operations = (*COLLECTIVES, "send") if ranks == 2 else COLLECTIVES
        sizes = dict.fromkeys(operations, self.sizes.messages)
        if backend == "shm" and self.room.summed:
            sizes["sum"] = tuple(s for s in self.sizes.messages if s <= self.room.summed)
        taken = self.room.curves(axis, sizes, seconds=seconds, least=least)
        curves = []
        for operation, measured in sizes.items():
            points = [taken[operation, size] for size in measured]
            times = tuple(point.seconds for point in points)
            lines = fit.latency_fit(measured, times)
            wrong = fit.fit_errors(measured, times)
            curves.append(
                Curve(
                    backend=backend,
                    operation=operation,
                    ranks=ranks,
                    world=world,
                    sizes=measured,
                    seconds=times,
                    spread=tuple(point.spread for point in points),
                    lines=lines,
                    error=round(statistics.median(wrong), 4),
                    busy=tuple(point.busy for point in points),
                    worst=round(max(wrong), 4),
                )
            )
        self._tell("curves", curves)

    def _say(self, what: str) -> None:
        if self.alone:
            self.context.emit({"event": "phase", "name": f"measuring {what}"})
            self.context.expect(LONG)

    def _tell(self, key: str, rows: list[Any]) -> None:
        if self.alone:
            self.context.emit({"event": "measured", "key": key, "rows": to_rows(key, rows)})
