"""A schedule under one price, by `durations`, as a Timeline."""

from __future__ import annotations

import numpy as np

from hocket.simulation.durations import Floats, durations
from hocket.spec.prices import Prices
from hocket.spec.schedule import BACKWARD, FORWARD, WEIGHT, Action, Schedule
from hocket.spec.timeline import Event, Timeline


def simulate(schedule: Schedule, prices: Prices | None = None) -> Timeline:
    """The predicted timeline of one step.

    Args:
        schedule: lowered and valid.
        prices: of its actions. None: equal stages, a backward takes two forwards, messages are
            free.

    Raises:
        ScheduleError: the schedule never ends; `schedules.validate` gives the reason.
    """
    prices = prices or Prices.uniform(schedule.num_stages)
    events: list[Event] = []

    def note(rank: int, action: Action, lane: str, start: Floats, end: Floats) -> None:
        if lane == "communication" and end[0] <= start[0]:
            return  # what is free leaves no span
        events.append(
            Event(
                rank=rank,
                lane=lane,
                kind=action.kind,
                name=str(action),
                start=float(start[0]),
                end=float(end[0]),
                stage=action.stage,
                microbatch=action.microbatch,
            )
        )

    durations(schedule, {kind: np.array([row]) for kind, row in prices.seconds.items()}, note)
    return Timeline.of("predicted", schedule.num_ranks, events, _peaks(schedule, prices))


def theoretical_bubble(schedule: Schedule) -> float:
    """The idle share of a schedule by its own: equal stages, B = 2 F, free messages.

    (p - 1) / (m + p - 1) for GPipe and 1F1B on p ranks with m microbatches, 1 - 1/p for the
    sequential one.
    """
    return simulate(schedule).bubble


def _peaks(schedule: Schedule, prices: Prices) -> list[int]:
    """Bytes at the worst moment per rank; empty where the prices hold none."""
    if not prices.activation_bytes and not prices.resident_bytes:
        return []
    found = [0] * schedule.num_ranks
    for rank, line in enumerate(schedule.ranks if prices.activation_bytes else ()):
        now = 0
        for part in (part for action in line for part in action.parts or (action,)):
            if part.kind == FORWARD:
                now += prices.activation_bytes[part.stage]
            elif part.kind in (BACKWARD, WEIGHT):
                now -= prices.activation_bytes[part.stage]
            found[rank] = max(found[rank], now)
    for stage, size in enumerate(prices.resident_bytes):
        found[schedule.stage_ranks[stage]] += size
    return found
