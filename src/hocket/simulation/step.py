"""A whole training step of every rank of a machine, simulated: Schedule x StepPrices to Timeline.

    batch | F and B of the schedule, sums over tp inside, messages between | gradients over dp |
    ties | loss | norm, clip | optimizer | next step

Ranks are those of the world, not of one pipeline: replicas and tensor ranks compute at the same
time, and share the cores where there are fewer of them. As in `runtime`, a collective that is
begun early (a bucket of gradients) gives its part at once and takes the others' when it is waited
for.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator

from hocket.simulation.processors import (
    Await,
    Begin,
    End,
    Pause,
    Post,
    ProcessorWork,
    Slowdown,
    Step,
    alone,
    play,
)
from hocket.spec.layout import Layout
from hocket.spec.process_groups import named_groups
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    SEND_F,
    SENDS,
    WEIGHT,
    Action,
    Schedule,
)
from hocket.spec.step_prices import Collective, StageStep, StepPrices
from hocket.spec.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """What a simulated step came to.

    Attributes:
        timeline: of one step that all ranks begin together, as a recorded step does.
        seconds: of a step among others: ranks that end early begin the next one.
    """

    timeline: Timeline
    seconds: float


def simulate_step(
    schedule: Schedule,
    layout: Layout,
    prices: StepPrices,
    slowdown: Slowdown = alone,
    *,
    unlike: float = 0.0,
) -> PlayedStep:
    """Play one step of every rank.

    Args:
        schedule: lowered and valid, of the layout's pipeline ranks.
        prices: of every stage and rank.
        slowdown: how many times longer each of n working ranks takes.
        unlike: standard deviation, over its mean, of the time that equal ranks take for equal work.
            Replicas then differ as so many draws from a normal distribution are expected to.

    Raises:
        ScheduleError: the schedule never ends.
    """
    writer = _Writer(schedule, layout, prices, unlike)
    world = layout.world_size
    events = play([list(writer.step(rank, 0)) for rank in range(world)], slowdown)
    timeline = Timeline.of("predicted", world, (e for e in events if e.kind != "step"))
    several = 3
    lines = [[s for n in range(several) for s in writer.step(r, n)] for r in range(world)]
    ends = [e.end for e in play(lines, slowdown) if e.kind == "step" and e.rank == 0]
    return PlayedStep(
        timeline=timeline,
        seconds=(ends[-1] - ends[0]) / (several - 1),
    )


def paces(ranks: int, unlike: float) -> tuple[float, ...]:
    """How many times longer than the mean each of so many equal ranks takes: what is expected of
    ordered draws from a normal distribution (Blom 1958)."""
    if ranks == 1 or not unlike:
        return (1.0,) * ranks
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((i + 1 - 0.375) / (ranks + 0.25)) for i in range(ranks)]
    return tuple(max(0.1, 1 + unlike * score) for score in scores)


class _Writer:
    """Writes the lines of ranks, step by step."""

    def __init__(
        self, schedule: Schedule, layout: Layout, prices: StepPrices, unlike: float = 0.0
    ) -> None:
        self.schedule = schedule
        self.layout = layout
        self.prices = prices
        self.pace = paces(layout.dp, unlike)
        self._groups: dict[str, dict[int, tuple[int, ...]]] = {}

    def step(self, rank: int, number: int) -> Iterator[Step]:
        """One step of one rank of the world."""
        # Who is slow changes from step to step, so that nobody gains on the others.
        dp = self.layout.coordinate(rank)["dp"]
        pace = self.pace[(dp + number) % len(self.pace)]
        for one in self._step(rank, number):
            yield ProcessorWork(one.seconds * pace) if isinstance(one, ProcessorWork) else one

    def _step(self, rank: int, number: int) -> Iterator[Step]:
        where = self.layout.coordinate(rank)
        index = where["pp"]
        mine = self.prices.ranks[index]
        stages = self.schedule.stages_of(index)
        yield Begin("step")
        yield ProcessorWork(mine.before)
        counts = itertools.count()
        first = set(stages)
        for action in self.schedule.ranks[index]:
            for part in action.parts or (action,):
                yield from self._action(part, rank, number, counts, first)
        pending = [
            (("dp", number, stage, at), one)
            for stage in stages
            for at, one in enumerate(self.prices.stages[stage].reductions)
        ]
        # A pipeline's schedule says when a stage's gradients are ready; without that, they are now.
        for key, one in pending:
            yield from _give(one, (key, self._ranks(rank, one.axis)))
        for key, one in pending:
            ranks = self._ranks(rank, one.axis)
            yield from _take(one, (key, ranks), len(ranks))
            yield End((key, ranks), _fields(one))
        for at, one in enumerate(mine.sums):
            yield from _collective(one, ("sum", number, at), self._ranks(rank, one.axis))
        if self.prices.loss is not None:
            yield from _collective(self.prices.loss, ("loss", number), self._ranks(rank, "world"))
        yield ProcessorWork(mine.norm)
        if (norm := self.prices.norm) is not None:
            yield from _collective(norm, ("norm", number), self._ranks(rank, norm.axis))
        yield from _span(ProcessorWork(mine.optimizer), kind="optimizer", name="optimizer")
        yield ProcessorWork(mine.after)
        yield End("step", {"lane": "compute", "kind": "step", "name": str(number)})

    def _ranks(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that one axis of the mesh joins with `rank`."""
        if axis not in self._groups:
            ends = self.schedule.stage_ranks[0], self.schedule.stage_ranks[-1]
            tie = min(ends), max(ends)
            rows = named_groups(self.layout, axis, tie=tie)
            self._groups[axis] = {member: row for row in rows for member in row}
        return self._groups[axis].get(rank, (rank,))

    def _action(
        self, action: Action, rank: int, number: int, counts: Iterator[int], first: set[int]
    ) -> Iterator[Step]:
        stage = self.prices.stages[action.stage]
        fields = {"stage": action.stage, "microbatch": action.microbatch}
        if action.kind in (FORWARD, BACKWARD, INPUT, WEIGHT):
            receive = self._consumed(action)
            if receive is not None:
                yield from self._message(receive, rank, number, fields)
            seconds, inside = _compute(stage, action.kind)
            if action.kind in (BACKWARD, WEIGHT) and action.stage in first:
                first.discard(action.stage)
                seconds = max(0.0, seconds + stage.first_weight)
            name = str(action)
            yield Begin(name)
            for one in inside:
                yield ProcessorWork(seconds / (len(inside) + 1))
                key = (one.axis, number, next(counts))
                yield from _collective(one, key, self._ranks(rank, one.axis))
            yield ProcessorWork(seconds / (len(inside) + 1))
            yield End(name, {"lane": "compute", "kind": action.kind, "name": name, **fields})
        elif action.kind in SENDS:
            yield from self._message(action, rank, number, fields)

    def _consumed(self, action: Action) -> Action | None:
        """The receive that a compute action waits for; where the line posts it costs nothing."""
        place, s = self.schedule.stage_ranks, action.stage
        if action.kind == FORWARD and s > 0 and place[s - 1] != place[s]:
            return Action(s, RECV_F, action.microbatch)
        backward = action.kind in (BACKWARD, INPUT)
        if backward and s + 1 < len(place) and place[s + 1] != place[s]:
            return Action(s, RECV_B, action.microbatch)
        return None

    def _message(
        self, action: Action, rank: int, number: int, fields: dict[str, int | None]
    ) -> Iterator[Step]:
        # What crosses between two stages is estimated by the first of them, both ways.
        one = self.prices.stages[min(action.stage, action.peer_stage)].message
        assert one is not None, action
        fields = {**fields, "bytes": one.bytes}
        sends = action.kind in SENDS
        forward = action.kind in (SEND_F, RECV_F)
        where = self.layout.coordinate(rank)
        place = tuple(index for axis, index in where.items() if axis != "pp")
        target = action.peer_stage if sends else action.stage
        key = ("message", number, place, forward, target, action.microbatch)
        name = str(action)
        yield Begin(name)
        if sends:
            yield ProcessorWork(one.give)
            yield Post(key)
        else:
            yield Await(key)
            yield Pause(one.wait)
            yield ProcessorWork(one.take)
        yield End(
            name,
            {"lane": "communication", "kind": action.kind, "name": name, "axis": "pp", **fields},
        )


def _compute(stage: StageStep, kind: str) -> tuple[float, tuple[Collective, ...]]:
    if kind == FORWARD:
        return stage.forward, stage.forward_collectives
    if kind == WEIGHT:
        return stage.weight, ()
    return (stage.backward if kind == BACKWARD else stage.input), stage.backward_collectives


def _span(work: ProcessorWork, *, kind: str, name: str) -> Iterator[Step]:
    yield Begin(name)
    yield work
    yield End(name, {"lane": "compute", "kind": kind, "name": name})


def _fields(one: Collective) -> dict[str, str | int]:
    return {
        "lane": "communication",
        "kind": one.name,
        "name": f"{one.name} {one.axis}",
        "axis": one.axis,
        "bytes": one.bytes,
    }


def _give(one: Collective, key: tuple[object, tuple[int, ...]]) -> Iterator[Step]:
    yield Begin(key)
    yield ProcessorWork(one.give)
    yield Post(key)


def _take(one: Collective, key: tuple[object, tuple[int, ...]], ranks: int) -> Iterator[Step]:
    yield Await(key, ranks)
    yield Pause(one.wait)
    yield ProcessorWork(one.take)


def _collective(one: Collective, name: object, ranks: tuple[int, ...]) -> Iterator[Step]:
    key = (name, ranks)
    yield from _give(one, key)
    yield from _take(one, key, len(ranks))
    yield End(key, _fields(one))


def exposed(schedule: Schedule, layout: Layout, prices: StepPrices) -> dict[str, float]:
    """Axis to seconds of a step that an average rank gives to communication and computes nothing.

    What ranks wait for each other (a bubble, a slower rank) is no communication and is left out.
    """
    found: dict[str, float] = {}

    def add(one: Collective | None, times: float, seconds: float | None = None) -> None:
        if one is not None and times:
            spent = one.seconds if seconds is None else seconds
            found[one.axis] = found.get(one.axis, 0.0) + times * spent

    for index in range(layout.pp):
        share = 1 / layout.pp  # the ranks of one pipeline index are identical
        for action in schedule.ranks[index]:
            for part in action.parts or (action,):
                stage = prices.stages[part.stage]
                if part.kind in (FORWARD, BACKWARD, INPUT):
                    for one in _compute(stage, part.kind)[1]:
                        add(one, share)
                elif part.kind in SENDS or part.kind in RECEIVES:
                    message = prices.stages[min(part.stage, part.peer_stage)].message
                    assert message is not None, part
                    sends = part.kind in SENDS
                    spent = message.give if sends else message.wait + message.take
                    add(message, share, spent)
        for stage_number in schedule.stages_of(index):
            for one in prices.stages[stage_number].reductions:
                add(one, share)
        for one in prices.ranks[index].sums:
            add(one, share)
    add(prices.loss, 1.0)
    add(prices.norm, 1.0)
    return dict(sorted(found.items()))
