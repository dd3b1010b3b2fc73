"""Driver: the loop on rank 0 of a replica, between the parent, the scheduler and the ranks.

    1 hear     what the parent asks, what the ranks answer
    2 plan     one step, if fewer than `depth` are in flight: sent to all followers at once
    3 run      this rank's own part of it
    4 apply    results to the scheduler
    5 tell     the parent what they added, in one frame
    6 sleep    in the kernel, if there was nothing of all this

Where results are collected (on a device), step n + 1 is planned and launched before the result of
step n is waited for, as far as `depth` goes. Otherwise nothing is waited for but in (6).

With several stages, step n + 1 is planned and run here while later stages run step n: the last
stage's result comes back over its channel. In (6) every descriptor is listened to, so that no two
ranks can wait for each other; before it, `FollowerPart.settle` has sent hidden states off.

A parent that does not read is not planned for: beyond `HIGH` bytes of outputs no new step begins
until it reads again, while its commands are still heard. A parent that hangs up ends the replica.
"""

from __future__ import annotations

import dataclasses
import json
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hocket.serving.engine.channel import Channel, ChannelClosed
from hocket.serving.engine.follower import EVENTS, PLAN, RECORD, RESULT, STOP, TELL, FollowerPart
from hocket.serving.engine.measured import ReplicaTotals
from hocket.serving.front.frames import Message, decode_frame, encode
from hocket.serving.request import Output, Request, RequestRefused
from hocket.serving.scheduling.group import SchedulerGroup
from hocket.serving.scheduling.step import StepPlan, StepResult
from hocket.spec.errors import HocketError

HIGH = 1 << 23
"""Bytes of outputs that the parent has not read, above which no step is begun."""
BEAT = 10.0
"""Seconds between signs of life."""
LOOK = 0.1
"""Seconds between looks at deadlines while requests run; between figures sent to the parent."""

Row = dict[str, Any]
OnTimeline = Callable[[list[Row]], dict[str, Any]]
"""Given every rank's `events` and `collectives`, by rank: the Timeline's JSON form."""


class Driver:
    """Runs one replica until it is stopped.

    Args:
        scheduler: of this replica, for each of its data ranks.
        part: this rank's part of every step; it is of data rank 0.
        parent: the channel to the parent.
        followers: channel by rank.
        data_ranks: data rank of each follower by its rank. None: 0 of all.
        depth: plans in flight; at least the number of stages.
        beat: called now and then, as a sign of life.
        on_timeline: what becomes of a recorded window.
        window: (steps, steps): after so many, so many are recorded without being asked for, so
            that a run has a Timeline. None: none are.
        clock: seconds, of a clock that only goes forward.
    """

    def __init__(
        self,
        scheduler: SchedulerGroup,
        part: FollowerPart,
        parent: Channel,
        followers: Mapping[int, Channel] | None = None,
        *,
        data_ranks: Mapping[int, int] | None = None,
        depth: int = 1,
        beat: Callable[[], None] = lambda: None,
        on_timeline: OnTimeline = lambda rows: {"ranks": rows},
        window: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.part = part
        self.parent = parent
        self.followers = dict(followers or {})
        self._data_ranks = dict.fromkeys(self.followers, 0) if data_ranks is None else data_ranks
        self.depth = depth
        self.measured = ReplicaTotals(overlapped=scheduler.limits.lookahead)
        self._beat, self._clock, self._on_timeline = beat, clock, on_timeline
        self._poll = select.poll()
        self._poll.register(parent, select.POLLIN)
        self._by_fd = {channel.fileno(): rank for rank, channel in self.followers.items()}
        for channel in self.followers.values():
            self._poll.register(channel, select.POLLIN)
        self._begun: dict[int, _Begun] = {}
        self._rows_in_flight = [0] * len(scheduler.schedulers)
        self._outputs: list[Output] = []
        self._draining = self._drained = self._stopped = False
        self._unreported = False  # the figures have changed since the parent got them
        self._last_beat = self._last_look = self._last_report = 0.0
        self._window = 0  # steps left to record
        self._wanted = 0  # steps of the next window
        self._asked_for = False  # whether the parent wants the window that is recorded
        self._own = window
        self._rows: dict[int, Row] | None = None

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Until the parent says stop or hangs up; then the followers have left too.

        Raises:
            ConnectionError: a follower is gone.
        """
        try:
            busy = True
            while not self._stopped:
                self._hear(0.0 if busy else self._patience())
                busy = self._step()
                self._tell()
        except _ParentGone:
            pass
        self._leave()

    def _step(self) -> bool:
        """Begin a step, if there is anything to do; whether there was."""
        now = self._clock()
        if now - self._last_look > LOOK:
            self._last_look = now
            self._outputs += (ended := self.scheduler.expire(now))
            self._unreported |= bool(ended)
            if now - self._last_beat > BEAT:
                self._last_beat = now
                self._beat()
        if len(self._begun) >= self.depth or self.parent.unsent_bytes > HIGH:
            return self._collect()
        plans = self.scheduler.plan(now)
        if plans is None:
            return self._collect()
        self._begin_window()
        if self.followers:
            self._send(PLAN, [plan.encode() for plan in plans])
        for rank, plan in enumerate(plans):
            self._rows_in_flight[rank] += len(plan.rows)
        own = plans[0]
        self._begun[own.number] = _Begun(plans, list(self._rows_in_flight), now, len(plans))
        self.part.expect(own)
        result = self.part.run(own)
        self._end_window()
        if result is not None:
            self._apply(0, result)
        elif len(self._begun) >= self.depth:
            self._collect()
        return True

    def _collect(self) -> bool:
        """Wait for the oldest step that this rank launched, if there is one; whether there was."""
        result = self.part.collect()
        if result is None:
            return False
        self._apply(0, result)
        return True

    def _apply(self, rank: int, result: StepResult) -> None:
        now = self._clock()
        begun = self._begun[result.number]
        begun.left -= 1
        if not begun.left:
            del self._begun[result.number]
        plan = begun.plans[rank]
        if not plan.rows:
            return
        self._rows_in_flight[rank] -= len(plan.rows)
        self._outputs += self.scheduler.apply(rank, result, now)
        self._unreported = True
        self.measured.add(plan, begun.batches[rank], begun.at, self._clock())

    def _patience(self) -> float:
        """Seconds to sleep at most."""
        self.part.settle()
        return BEAT if self.scheduler.idle and not self._begun else LOOK

    # --- who speaks to it --------------------------------------------------------------------

    def _hear(self, seconds: float) -> None:
        """Handle what has come; wait for something so long at most."""
        if seconds and self.parent.unsent_bytes:
            self._poll.modify(self.parent, select.POLLIN | select.POLLOUT)
        ready = self._poll.poll(seconds * 1e3)
        if seconds and self.parent.unsent_bytes:
            self._poll.modify(self.parent, select.POLLIN)
        for fd, event in ready:
            rank = self._by_fd.get(fd)
            if rank is not None:
                for payload in self.followers[rank].take():
                    self._answered(rank, payload)
            elif event & ~select.POLLOUT:
                self._asked()
        if self.parent.unsent_bytes:
            with _ToParent():
                self.parent.push()

    def _answered(self, rank: int, payload: bytes) -> None:
        kind = payload[:1]
        if kind == RESULT:
            result = StepResult.decode(memoryview(payload)[1:])
            self._apply(self._data_ranks[rank], result)
        else:
            assert kind == EVENTS, kind
            assert self._rows is not None
            self._rows[rank] = json.loads(payload[1:])
            self._finish_window()

    def _asked(self) -> None:
        with _ToParent():
            commands = self.parent.take()
        for payload in commands:
            command = decode_frame(payload)
            match command["do"]:
                case "add":
                    self._add(command["request"])
                case "abort":
                    for name in command["ids"]:
                        self._unreported |= bool(self.scheduler.abort(name))
                case "drain":
                    self._draining, self._drained = True, False
                case "stop":
                    self._stopped = True
                case "stats":
                    self._emit({"event": "stats", "stats": self._stats(), **self._figures()})
                case "record":
                    self.record(int(command["steps"]))
                case other:
                    raise AssertionError(f"the parent asks for {other!r}")

    def _add(self, given: Any) -> None:
        try:
            if self._draining:
                raise RequestRefused("the server is ending", kind="full")
            self.scheduler.add(Request.from_json(given), self._clock())
        except RequestRefused as error:
            self._refuse(given, error, error.kind, error.retry_after)
        except HocketError as error:
            self._refuse(given, error, "bad", None)

    def _refuse(self, given: Any, error: HocketError, kind: str, retry_after: float | None) -> None:
        name = given.get("id") if isinstance(given, dict) else None
        self._emit(
            {
                "event": "refused",
                "id": name,
                "kind": kind,
                "message": error.message,
                "hint": error.hint,
                "retry_after": retry_after,
            }
        )

    # --- whom it speaks to -------------------------------------------------------------------

    def _send(self, kind: bytes, bodies: Sequence[bytes] = ()) -> None:
        """To all followers, each with the body of its data rank. One whose socket is full reads
        again once it has what was sent."""
        full = [
            channel
            for rank, channel in self.followers.items()
            if not channel.send(kind + bodies[self._data_ranks[rank]] if bodies else kind)
        ]
        if full:
            self.part.settle()
            for channel in full:
                channel.flush()

    def _tell(self) -> None:
        now = self._clock()
        outputs, self._outputs = self._outputs, []
        drained = self._draining and not self._drained and self.scheduler.idle and not self._begun
        due = now - self._last_report > LOOK or drained
        stale = self._unreported and (due or self.scheduler.idle)
        if outputs or stale or (due and self._begun):
            event: Message = {"event": "outputs", "outputs": [one.to_json() for one in outputs]}
            if due or self.scheduler.idle:
                self._last_report, self._unreported = now, False
                event["stats"] = self._stats()
            self._emit(event)
        if drained:
            self._drained = True
            self._emit({"event": "drained"})

    def _emit(self, event: Message) -> None:
        with _ToParent():
            self.parent.write(encode(event))

    def _stats(self) -> dict[str, Any]:
        figures = dataclasses.asdict(self.scheduler.stats())
        imbalance = self.part.expert_imbalance
        if imbalance is not None:
            figures["expert_imbalance"] = dict(zip(("before", "after"), imbalance, strict=True))
        return figures

    def _figures(self) -> dict[str, Any]:
        return {"measured": self.measured.to_json()}

    # --- a window of steps, recorded ---------------------------------------------------------

    def record(self, steps: int) -> None:
        """Have every rank note what runs when in the next `steps` steps (after those that another
        window still records)."""
        self._wanted = max(1, steps)

    def _begin_window(self) -> None:
        if self._window or self._rows is not None:
            return
        wanted, self._wanted = self._wanted, 0
        self._asked_for = wanted > 0
        if not wanted and self._own is not None and self.measured.steps >= self._own[0]:
            wanted, self._own = self._own[1], None
        if wanted:
            self._window = wanted
            self._send(RECORD)
            self.part.record()

    def _end_window(self) -> None:
        if self._window:
            self._window -= 1
            if not self._window:
                self._send(TELL)
                self._rows = {0: self.part.recorded()}
                self._finish_window()

    def _finish_window(self) -> None:
        assert self._rows is not None
        if len(self._rows) == len(self.followers) + 1:
            rows = [row for _, row in sorted(self._rows.items())]
            self._rows = None
            timeline = self._on_timeline(rows)
            if self._asked_for:
                self._emit({"event": "timeline", "timeline": timeline})

    # --- the end -----------------------------------------------------------------------------

    def _leave(self) -> None:
        """Have the followers leave, and wait until they have."""
        self._send(STOP)
        self.part.settle()
        for channel in self.followers.values():
            try:
                while True:
                    channel.receive()
            except ChannelClosed:
                channel.close()
        self.parent.close()


@dataclasses.dataclass
class _Begun:
    """A step in flight: its plan by data rank, the rows in flight with each, when it began, and how
    many data ranks have not answered."""

    plans: list[StepPlan]
    batches: list[int]
    at: float
    left: int


class _ParentGone(Exception):
    """The parent has hung up: the replica has nobody to serve."""


class _ToParent:
    """Within, a closed channel is the parent's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ChannelClosed):
            raise _ParentGone from None
