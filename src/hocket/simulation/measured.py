"""Prices out of a measured timeline, to be put back into the simulator."""

from __future__ import annotations

import statistics

from hocket.spec.prices import Prices
from hocket.spec.schedule import COMPUTE
from hocket.spec.timeline import Timeline


def measured_prices(timeline: Timeline, num_stages: int) -> Prices:
    """The median seconds of every compute action by stage; messages are taken as free.

    A measured receive is mostly waiting, which the simulator computes itself.
    """
    spans: dict[str, list[list[float]]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE and event.stage is not None:
            by_stage = spans.setdefault(event.kind, [[] for _ in range(num_stages)])
            by_stage[event.stage].append(event.end - event.start)
    return Prices(
        seconds={
            kind: tuple(statistics.median(times) if times else 0.0 for times in by_stage)
            for kind, by_stage in spans.items()
        }
    )
