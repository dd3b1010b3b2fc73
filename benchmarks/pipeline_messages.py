"""The bubble that each way to queue pipeline messages on NCCL costs, by a discrete-event model.

    python -m benchmarks.pipeline_messages [--jitter 0.05] [--backward 3] [--last 1.3]

A rank has a compute stream, which runs its line, and queues of communicators, which run messages in
the order in which they are enqueued. A message is enqueued behind the compute action before it in
the line (torch makes NCCL's stream wait for the current stream), begins once it heads the queues of
both its ends, and takes its time; a compute action that consumes it waits for its end.

    one group      every message of a rank in one queue (what hocket does)
    two groups     one queue for messages to later stages, one for those to earlier ones
    pair groups    a queue for each ordered pair of neighbours: 2 (p - 1) communicators
    batched        one group; neighbouring sends and receives of a line as one group call
                   (batch_isend_irecv), whose messages pass each other

No duration is measured: forwards take 1, backwards 2, halves of them 1. The options make ranks
take other times than those for which the lowering pass orders messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator

from hocket.schedules import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    SENDS,
    Action,
    Schedule,
)

WAYS = ("one group", "two groups", "pair groups", "batched")
COSTS = (0.0, 0.02, 0.1)
SCHEDULES = (
    ("sequential", 1),
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zero-bubble", 1),
    ("zb-v", 2),
)


@dataclasses.dataclass(eq=False)
class Message:
    """One end of a message on its rank: enqueued after `after` compute actions of the line."""

    rank: int
    peer: int
    send: bool
    name: tuple[int, int, int | None]  # stages that it leaves and reaches, microbatch
    after: int
    queue: Hashable
    done: float | None = None


class Model:
    """One step of a schedule with one way to queue its messages."""

    def __init__(self, schedule: Schedule, way: str) -> None:
        self.schedule, self.place = schedule, schedule.stage_ranks
        self.compute: list[list[Action]] = []
        self.queues: list[dict[Hashable, list[list[Message]]]] = []
        self.ends: dict[tuple[bool, tuple[int, int, int | None]], Message] = {}
        for rank, line in enumerate(schedule.ranks):
            compute: list[Action] = []
            queues: dict[Hashable, list[list[Message]]] = defaultdict(list)
            for action in line:
                if action.kind in SENDS or action.kind in RECEIVES:
                    one = self.message(rank, action, len(compute), way)
                    self.ends[one.send, one.name] = one
                    calls = queues[one.queue]
                    if way == "batched" and calls and calls[-1][0].after == one.after:
                        calls[-1].append(one)
                    else:
                        calls.append([one])
                elif action.kind in COMPUTE:
                    compute.append(action)
            self.compute.append(compute)
            self.queues.append(queues)

    def message(self, rank: int, action: Action, after: int, way: str) -> Message:
        send = action.kind in SENDS
        peer = self.place[action.peer_stage]
        stages = (action.stage, action.peer_stage) if send else (action.peer_stage, action.stage)
        queue: Hashable = {
            "two groups": stages[0] < stages[1],
            "pair groups": (rank, peer) if send else (peer, rank),
        }.get(way, "pp")
        return Message(rank, peer, send, (*stages, action.microbatch), after, queue)

    def consumed(self, rank: int, action: Action) -> tuple[int, int, int | None] | None:
        """The message that a compute action waits for."""
        kind = {FORWARD: RECV_F, BACKWARD: RECV_B, INPUT: RECV_B}.get(action.kind)
        if kind is None:
            return None
        source = action.stage + (1 if kind == RECV_B else -1)
        if not 0 <= source < len(self.place) or self.place[source] == rank:
            return None
        return source, action.stage, action.microbatch

    def makespan(self, cost: float, seconds: Callable[[int, Action], float]) -> float:
        """Seconds of the step; `cost` of a message, `seconds` of a rank's action."""
        ranks = range(len(self.compute))
        finished = [[0.0] for _ in ranks]  # ends of compute actions; 0 before the first
        free: list[dict[Hashable, float]] = [defaultdict(float) for _ in ranks]
        queues = [{q: deque(calls) for q, calls in of.items()} for of in self.queues]
        arrived: dict[tuple[int, int, int | None], float] = {}
        for one in self.ends.values():
            one.done = None

        def ready(one: Message) -> float | None:
            calls = queues[one.rank][one.queue]
            ends = finished[one.rank]
            if not calls or one not in calls[0] or one.after >= len(ends):
                return None
            return max(free[one.rank][one.queue], ends[one.after])

        def run(rank: int) -> bool:
            moved = False
            while len(finished[rank]) <= len(self.compute[rank]):
                action = self.compute[rank][len(finished[rank]) - 1]
                start, needed = finished[rank][-1], self.consumed(rank, action)
                if needed is not None:
                    if needed not in arrived:
                        return moved
                    start = max(start, arrived[needed])
                finished[rank].append(start + seconds(rank, action))
                moved = True
            return moved

        def send(rank: int) -> bool:
            moved = False
            for queue, calls in queues[rank].items():
                while calls:
                    for one in calls[0]:
                        end = self.ends[not one.send, one.name]
                        starts = ready(one), ready(end)
                        if one.done is None and starts[0] is not None and starts[1] is not None:
                            one.done = end.done = max(starts[0], starts[1]) + cost
                            arrived[one.name] = one.done
                            moved = True
                    ends = [one.done for one in calls[0] if one.done is not None]
                    if len(ends) < len(calls[0]):
                        break
                    free[rank][queue] = max(ends)
                    calls.popleft()
                    moved = True
            return moved

        while any([*(run(rank) for rank in ranks), *(send(rank) for rank in ranks)]):
            pass
        complete = all(len(f) == len(c) + 1 for f, c in zip(finished, self.compute, strict=True))
        assert complete, "never ends"
        return max(ends[-1] for ends in finished)


@dataclasses.dataclass(frozen=True)
class Durations:
    """How durations differ from those that the lowering pass assumes."""

    jitter: float = 0.0
    backward: float = 2.0
    last: float = 1.0

    def of(self, schedule: Schedule, action: Action, rng: random.Random) -> float:
        seconds = {BACKWARD: self.backward, INPUT: self.backward - 1}.get(action.kind, 1.0)
        if action.stage == schedule.num_stages - 1:
            seconds *= self.last
        return seconds * max(0.1, rng.gauss(1.0, self.jitter))


def steps(schedule: Schedule, cost: float, durations: Durations, draws: int) -> dict[str, float]:
    """Way to mean seconds of a step, with the same draws of durations for each way."""
    found: dict[str, list[float]] = defaultdict(list)
    models = {way: Model(schedule, way) for way in WAYS}
    for draw in range(draws if durations.jitter else 1):
        rng = random.Random(draw)
        drawn = {
            (rank, action): durations.of(schedule, action, rng)
            for rank, line in enumerate(models[WAYS[0]].compute)
            for action in line
        }
        for way, model in models.items():
            found[way].append(model.makespan(cost, lambda r, a, drawn=drawn: drawn[r, a]))  # type: ignore[misc]
    return {way: statistics.mean(values) for way, values in found.items()}


Row = tuple[str, int, int, float, dict[str, float]]


def rows(durations: Durations, draws: int) -> Iterator[Row]:
    """Schedule, stages, microbatches, cost of a message, and seconds by way."""
    for name, virtual in SCHEDULES:
        for pp in (2, 3, 4, 8):
            count = 4 * pp
            layout = Layout(pp=pp, schedule=name, virtual_stages=virtual)
            schedule = build_schedule(layout, count)
            for cost in COSTS:
                yield name, pp, count, cost, steps(schedule, cost, durations, draws)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jitter", type=float, default=0.0, help="standard deviation over mean")
    parser.add_argument("--backward", type=float, default=2.0, help="forwards a backward takes")
    parser.add_argument("--last", type=float, default=1.0, help="how much longer the last stage is")
    parser.add_argument("--draws", type=int, default=5, help="steps drawn, with --jitter")
    arguments = parser.parse_args()
    durations = Durations(arguments.jitter, arguments.backward, arguments.last)
    print("| schedule | stages | microbatches | message |", " | ".join(WAYS), "|")
    print("|---|---|---|---" + "|---" * len(WAYS) + "|")
    worst: dict[tuple[str, float], float] = defaultdict(float)
    for name, pp, count, cost, found in rows(durations, arguments.draws):
        best = min(found.values())
        for way in WAYS:
            worst[way, cost] = max(worst[way, cost], found[way] / best - 1)
        cells = (f"{found[way]:.2f}" for way in WAYS)
        print(f"| {name} | {pp} | {count} | {cost:.0%} |", " | ".join(cells), "|")
    print("\nLongest step over the shortest of the four ways, worst case:\n")
    for cost in COSTS:
        print(f"message {cost:.0%}: " + ", ".join(f"{w} {worst[w, cost]:+.2%}" for w in WAYS))


if __name__ == "__main__":
    main()
