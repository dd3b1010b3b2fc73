"""Follower: the loop of every rank of a replica but the driver.

It sleeps on its channel until the driver sends a frame, does what it says, and sleeps again:

    PLAN     run this rank's part of a step; the rank that samples answers RESULT
    RECORD   note what runs when, from the next plan on
    TELL     stop noting, answer EVENTS
    STOP     leave

What arrives is worked off in order. The next plans are looked at before the first is run, so that
the receives of their hidden states are posted early. A result that has to be collected is sent once
the next plan, if it is here already, has been launched: so the device does not wait for the host.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Protocol

from hocket.serving.engine.channel import Channel
from hocket.serving.scheduling.step import StepPlan, StepResult

PLAN, RECORD, TELL, STOP = b"P", b"O", b"T", b"S"
RESULT, EVENTS = b"R", b"E"


class FollowerPart(Protocol):
    """One rank's part of every step (`engine.part.StagePart`)."""

    def expect(self, plan: StepPlan) -> None:
        """A plan that will be run after those before it: prepare for what it receives."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Run it; the result where this rank samples, unless it is to be collected."""

    @property
    def uncollected(self) -> int:
        """Steps whose results are to be collected."""

    def collect(self) -> StepResult | None:
        """The result of the oldest of them; waits for it. None: there is none."""

    @property
    def expert_imbalance(self) -> tuple[float, float] | None:
        """Of the rank of experts with most rows over the mean, before and after its copies were
        last placed; None: it has none, or they were not."""

    def settle(self) -> None:
        """Wait until what was sent has left this process: nothing leaves while it sleeps."""

    def record(self) -> None:
        """Begin to note what runs when."""

    def recorded(self) -> dict[str, Any]:
        """Stop noting; the `events` and `collectives` since `record`, as plain data."""


def follow(channel: Channel, part: FollowerPart) -> None:
    """Serve the driver until it says stop.

    Raises:
        ConnectionError: the driver is gone.
    """
    waiting: deque[tuple[bytes, StepPlan | None]] = deque()
    while True:
        if not waiting:
            part.settle()
            _note(channel.receive(), waiting, part)
        for payload in channel.take():
            _note(payload, waiting, part)
        kind, plan = waiting.popleft()
        if kind == PLAN:
            assert plan is not None
            result = part.run(plan)
            if result is not None:
                channel.send(RESULT + result.encode())
            if part.uncollected and not waiting:
                for payload in channel.take():
                    _note(payload, waiting, part)
            ahead = 1 if waiting and waiting[0][0] == PLAN else 0
            while part.uncollected > ahead:
                result = part.collect()
                assert result is not None
                channel.send(RESULT + result.encode())
        elif kind == RECORD:
            part.record()
        elif kind == TELL:
            channel.send(EVENTS + json.dumps(part.recorded()).encode())
        else:
            assert kind == STOP, kind
            part.settle()
            channel.flush()
            return


def _note(
    payload: bytes, waiting: deque[tuple[bytes, StepPlan | None]], part: FollowerPart
) -> None:
    kind = payload[:1]
    plan = StepPlan.decode(memoryview(payload)[1:]) if kind == PLAN else None
    if plan is not None:
        part.expect(plan)
    waiting.append((kind, plan))
