"""Play a schedule event by event, on a compute and a communication lane per rank.

    compute         F, B, I, W in the order of the rank's line; one that consumes a message begins
                    once it has arrived
    communication   a rank's messages, sent and received, one at a time in the order of its line,
                    as a communicator of NCCL runs them: one begins once both ends have come to it,
                    the action before its send and the one before its receive having ended.
                    REDUCE_GRAD queues with what the rank sends and holds up no compute

A message that costs nothing is not modelled: it arrives as its producer ends.
"""

from __future__ import annotations

from collections import defaultdict

from hocket.spec.errors import ScheduleError
from hocket.spec.prices import Prices
from hocket.spec.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
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
        self.lane = [0.0] * schedule.num_ranks  # end of what each rank sends or reduces
        self.queue = [0.0] * schedule.num_ranks  # end of each rank's messages
        self.arrival: dict[Action, float] = {}  # receive to its end
        self.steps = [0] * schedule.num_ranks
        self.events: list[Event] = []
        self.changes: list[list[int]] = [[] for _ in self.now]  # activation bytes, in order

    def run(self) -> None:
        steps = self.steps
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
                    + board(self.schedule.ranks, mark=[(rank, steps[rank])])
                )

    def perform(self, rank: int, action: Action) -> bool:
        """Do one action; False for a message whose other end has not come to it."""
        if action.kind in RECEIVES:
            return False  # done by its send
        if action.kind in SENDS:
            return self.message(rank, action)
        if action.kind == REDUCE_GRAD:
            start = max(self.now[rank], self.lane[rank])
            self.lane[rank] = start + self.prices.of(action.kind, action.stage)
            self.note(rank, action, "communication", start, self.lane[rank])
        for part in action.parts or (action,):
            if part.kind in COMPUTE:
                self.compute(rank, part)
        return True

    def message(self, rank: int, send: Action) -> bool:
        kind = RECV_F if send.kind == SEND_F else RECV_B
        receive = Action(send.peer_stage, kind, send.microbatch)
        peer = self.schedule.stage_ranks[receive.stage]
        line, step = self.schedule.ranks[peer], self.steps[peer]
        if step == len(line) or line[step] != receive:
            return False
        self.steps[peer] += 1
        seconds = self.prices.of(send.kind, send.stage)
        if not seconds:
            self.arrival[receive] = self.now[rank]
            return True
        ends = (self.now[rank], self.now[peer], self.queue[rank], self.queue[peer])
        start = max(*ends, self.lane[rank])
        end = start + seconds
        self.lane[rank] = self.queue[rank] = self.queue[peer] = end
        self.arrival[receive] = end
        self.note(rank, send, "communication", start, end)
        self.note(peer, receive, "communication", start, end)
        return True

    def compute(self, rank: int, action: Action) -> None:
        start = self.now[rank]
        if action.kind != WEIGHT:
            kind = RECV_F if action.kind == FORWARD else RECV_B
            receive = Action(action.stage, kind, action.microbatch)
            start = max(start, self.arrival.pop(receive, 0.0))
        self.now[rank] = start + self.prices.of(action.kind, action.stage)
        self.note(rank, action, "compute", start, self.now[rank])
        held = self.prices.activation_bytes
        if held and action.kind == FORWARD:
            self.changes[rank].append(held[action.stage])
        elif held and action.kind in (BACKWARD, WEIGHT):
            self.changes[rank].append(-held[action.stage])

    def note(self, rank: int, action: Action, lane: str, start: float, end: float) -> None:
        if lane == "communication" and end <= start:
            return  # what is free leaves no span
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
