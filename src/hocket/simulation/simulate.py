"""Play a schedule event by event, on a compute and a communication lane per rank.

    compute         F, B, I, W in the order of the rank's line; a receive waits there until its
                    message has arrived
    communication   messages in the order they are sent, one at a time; REDUCE_GRAD queues with
                    them and holds up no compute

Links are full duplex: what a rank receives does not delay what it sends.
"""

from __future__ import annotations

from collections import defaultdict

from hocket.spec.errors import ScheduleError
from hocket.spec.prices import Prices
from hocket.spec.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    OVERLAP_F_B,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_F,
    SENDS,
    WEIGHT,
    Action,
    Schedule,
    board,
)
from hocket.spec.timeline import Event, Timeline


def simulate(schedule: Schedule, prices: Prices | None = None) -> Timeline:
    """The predicted timeline of one step.

    Args:
        schedule: lowered and valid.
        prices: of its actions. None: equal stages, a backward takes two forwards, messages are
            free.

    Raises:
        ScheduleError: the schedule never ends; `schedules.validate` says why.
    """
    play = _Play(schedule, prices or Prices.uniform(schedule.num_stages))
    play.run()
    return Timeline.of("predicted", schedule.num_ranks, play.events, play.peaks())


def theoretical_bubble(schedule: Schedule) -> float:
    """The idle share of a schedule by its own: equal stages, B = 2 F, free messages.

    (p - 1) / (m + p - 1) for GPipe and 1F1B on p ranks with m microbatches, 1 - 1/p for the
    sequential one.
    """
    return simulate(schedule).bubble


class _Play:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, prices: Prices) -> None:
        self.schedule = schedule
        self.prices = prices
        self.now = [0.0] * schedule.num_ranks  # end of each compute lane
        self.lane = [0.0] * schedule.num_ranks  # end of each communication lane
        self.arrival: dict[Action, tuple[float, float]] = {}  # receive to journey's start and end
        self.events: list[Event] = []
        self.changes: list[list[int]] = [[] for _ in self.now]  # activation bytes, in order

    def run(self) -> None:
        steps = [0] * self.schedule.num_ranks
        moved = True
        while moved:
            moved = False
            for rank, line in enumerate(self.schedule.ranks):
                while steps[rank] < len(line) and self.perform(rank, line[steps[rank]]):
                    steps[rank] += 1
                    moved = True
        for rank, line in enumerate(self.schedule.ranks):
            if steps[rank] < len(line):
                raise ScheduleError(
                    f"schedule {self.schedule.name!r} never ends: {line[steps[rank]]} waits\n"
                    + board(self.schedule.ranks, mark=(rank, steps[rank]))
                )

    def perform(self, rank: int, action: Action) -> bool:
        """Do one action; False if its message is not even sent yet."""
        if action.kind in RECEIVES:
            if action not in self.arrival:
                return False
            start, end = self.arrival.pop(action)
            self.note(rank, action, "communication", start, end)
            self.now[rank] = max(self.now[rank], end)
        elif action.kind in SENDS:
            start, end = self.occupy(rank, action)
            kind = RECV_F if action.kind == SEND_F else RECV_B
            self.arrival[Action(action.peer_stage, kind, action.microbatch)] = (start, end)
        elif action.kind == REDUCE_GRAD:
            self.occupy(rank, action)
        elif action.kind == OVERLAP_F_B:
            assert action.parts is not None
            for part in action.parts:
                self.compute(rank, part)
        elif action.kind in COMPUTE:
            self.compute(rank, action)
        return True

    def compute(self, rank: int, action: Action) -> None:
        start = self.now[rank]
        self.now[rank] = start + self.prices.of(action.kind, action.stage)
        self.note(rank, action, "compute", start, self.now[rank])
        held = self.prices.activation_bytes
        if held and action.kind == FORWARD:
            self.changes[rank].append(held[action.stage])
        elif held and action.kind in (BACKWARD, WEIGHT):
            self.changes[rank].append(-held[action.stage])

    def occupy(self, rank: int, action: Action) -> tuple[float, float]:
        """Put an action on the communication lane: its start and end."""
        start = max(self.now[rank], self.lane[rank])
        self.lane[rank] = end = start + self.prices.of(action.kind, action.stage)
        self.note(rank, action, "communication", start, end)
        return start, end

    def note(self, rank: int, action: Action, lane: str, start: float, end: float) -> None:
        if lane == "communication" and end <= start:
            return  # a free message leaves no span
        self.events.append(
            Event(
                rank=rank,
                lane=lane,
                kind=action.kind,
                name=str(action),
                start=start,
                end=end,
                stage=action.stage,
                microbatch=action.microbatch,
            )
        )

    def peaks(self) -> list[int]:
        """Bytes at the worst moment per rank; empty where the prices hold none."""
        prices = self.prices
        if not prices.activation_bytes and not prices.resident_bytes:
            return []
        resident: dict[int, int] = defaultdict(int)
        for stage, size in enumerate(prices.resident_bytes):
            resident[self.schedule.stage_ranks[stage]] += size
        found = []
        for rank, changes in enumerate(self.changes):
            now = most = 0
            for change in changes:
                now += change
                most = max(most, now)
            found.append(resident[rank] + most)
        return found
