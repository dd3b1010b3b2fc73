"""NCCL simulated: do the operations that the ranks of a job enqueue complete?

A CUDA rank does not wait while it enqueues. What it enqueues is one list, whatever the other ranks
do, so whether a job completes follows from the lists of all ranks, without a device:

    compute stream   takes a rank's list in order; stops at a wait until that operation is done
    communicator     one FIFO queue per rank; only the operation at its head can run
    collective       runs once it is the head of the queue of every member
    send, recv       run once they are the heads of the queues of both ends (NCCL promises no
                     buffering)
    batch            sends and receives between `ncclGroupStart` and `ncclGroupEnd` are one place in
                     the queue: all of them are at its head together

torch decides the queue of a send or a receive (`ProcessGroupNCCL::pointToPoint`):

    eager   the process group is bound to a device (`init_process_group(device_id=...)`): all
            operations of a group share one queue, and its communicator exists from the start
    lazy    it is not: each pair of ranks has a queue of its own, for both directions. A
            communicator is created at its first operation, while the host waits for all its
            members. A batch takes the communicator of the group, under this rule too

An operation is enqueued behind the waits of the compute stream before it, because torch makes
NCCL's stream wait for the current stream. A job that issues operations from other streams can
complete although this simulation says that it does not, never the reverse.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Group = tuple[Any, ...]
"""A communicator: a label that tells groups of equal ranks apart, then their global ranks."""

RULES = ("eager", "lazy")
_UNEVEN = ("all-to-all",)
"""Collectives whose sizes may differ between members."""


@dataclasses.dataclass(eq=False, slots=True)
class EnqueuedOp:
    """One operation as one rank enqueues it.

    Attributes:
        name: `all-reduce`, `all-gather`, ..., `send` or `recv`.
        group: the communicator.
        rank: global rank that enqueues it.
        numel, dtype: of the tensor that it is called with.
        peer: global rank at the other end of a send or a receive; None for a collective.
        root: global rank of a rooted collective's root.
        blocks: the compute stream waits for it (a synchronous collective).
        where: what it belongs to, for messages: an action of the schedule, a line of code.
        index: its place among the operations of its trace; set by `Trace.enqueue`.
        batch: index of the first operation of the batch that it is part of; -1: of none.
    """

    name: str
    group: Group
    rank: int
    numel: int = 0
    dtype: str = ""
    peer: int | None = None
    root: int | None = None
    blocks: bool = False
    where: str = ""
    index: int = -1
    batch: int = -1

    def signature(self) -> tuple[Any, ...]:
        """What all members of a collective must agree on."""
        return self.name, None if self.name in _UNEVEN else self.numel, self.dtype, self.root

    def __str__(self) -> str:
        end = "" if self.peer is None else f" {'to' if self.name == 'send' else 'from'} {self.peer}"
        where = f" ({self.where})" if self.where else ""
        return f"{self.name}{end} of {self.numel} {self.dtype} on {self.group[0]}{where}"


class Trace:
    """What one rank enqueues, in order.

    Args:
        rank: global rank.
        like: a trace whose operations this rank enqueues too, over groups of its own.
        groups: for `like`: each of its groups to this rank's, whose ranks do what those at the
            same places do.

    Attributes:
        ops: the operations in the order of their enqueueing.
        events: `i` enqueues operation i, `~i` waits for it.
    """

    def __init__(
        self,
        rank: int,
        like: Trace | None = None,
        groups: Mapping[Group, Group] | None = None,
    ) -> None:
        self.rank = rank
        self.ops: list[EnqueuedOp] = [] if like is None else like.ops
        self.events: list[int] = [] if like is None else like.events
        self._groups = groups

    def enqueue(self, op: EnqueuedOp) -> EnqueuedOp:
        """Note an operation; returns it, to be waited for."""
        op.index = len(self.ops)
        self.ops.append(op)
        self.events.append(op.index)
        return op

    def enqueue_batch(self, ops: Sequence[EnqueuedOp]) -> None:
        """Note sends and receives that NCCL runs as one operation, all on one group."""
        assert ops
        assert all(op.peer is not None and op.group == ops[0].group for op in ops), ops
        first = len(self.ops)
        for op in ops:
            self.enqueue(op)
            op.batch = first

    def wait(self, op: EnqueuedOp) -> None:
        """Note that the compute stream waits for an operation."""
        self.events.append(~op.index)

    def group(self, op: EnqueuedOp) -> Group:
        """The communicator of an operation, as this rank's."""
        return op.group if self._groups is None else self._groups[op.group]

    def peer(self, op: EnqueuedOp) -> int:
        """The other end of a send or receive, as this rank's."""
        assert op.peer is not None, op
        return self._at_same_place(op, op.peer)

    def root(self, op: EnqueuedOp) -> int | None:
        """The root of a collective, as this rank's."""
        return None if op.root is None else self._at_same_place(op, op.root)

    def _at_same_place(self, op: EnqueuedOp, rank: int) -> int:
        if self._groups is None:
            return rank
        place: int = op.group.index(rank)
        return self._groups[op.group][place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitingRank:
    """A rank that never ends.

    Attributes:
        rank: global rank.
        operation: at the head of the queue that holds it up.
        behind: operations enqueued behind that one on the same communicator.
        ranks: the ranks that it waits for.
    """

    rank: int
    operation: str
    behind: int
    ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ranks": list(self.ranks)}

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        behind = f", {self.behind} behind it" if self.behind else ""
        return f"rank {self.rank}: {self.operation}{behind}; waits for rank {ranks or 'none'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderVerdict:
    """Whether a job completes.

    Attributes:
        rule: `eager` or `lazy`.
        waiting: the ranks that never end; empty if the job completes.
        mismatches: operations that meet and differ in name, size, dtype or root.
        cycle: ranks that wait for each other, each for the next, the last for the first.
    """

    rule: str
    waiting: tuple[WaitingRank, ...]
    mismatches: tuple[str, ...]
    cycle: tuple[int, ...]

    @property
    def ends(self) -> bool:
        return not self.waiting

    @property
    def ok(self) -> bool:
        return self.ends and not self.mismatches

    def to_json(self) -> dict[str, Any]:
        return {
            "ends": self.ends,
            "waiting": [w.to_json() for w in self.waiting],
            "mismatches": list(self.mismatches),
            "cycle": list(self.cycle),
        }

    def picture(self) -> str:
        """The cycle, a line a rank; empty if the job completes.

        rank 1 -- recv from 0 of 64 bfloat16 on pp --> rank 0
        rank 0 -- send to 2 of 64 bfloat16 on pp   --> rank 2
        """
        by_rank = {w.rank: w for w in self.waiting}
        after = [*self.cycle[1:], *self.cycle[:1]]
        width = max((len(by_rank[r].operation) for r in self.cycle), default=0)
        return "\n".join(
            f"rank {r} -- {by_rank[r].operation.ljust(width)} --> rank {n}"
            for r, n in zip(self.cycle, after, strict=True)
        )


def simulate_nccl(traces: Sequence[Trace], rule: str = "eager") -> OrderVerdict:
    """Simulate the traces of all ranks, in order of rank, by NCCL's rules.

    Args:
        traces: one per global rank.
        rule: `eager` or `lazy`.
    """
    assert rule in RULES, rule
    assert [trace.rank for trace in traces] == list(range(len(traces)))
    return _Player(traces, rule).play()


class _Player:
    """One job as it runs."""

    def __init__(self, traces: Sequence[Trace], rule: str) -> None:
        self.traces = traces
        self.rule = rule
        self.position = [0] * len(traces)
        self.done = [bytearray(len(trace.ops)) for trace in traces]
        self.entered = [bytearray(len(trace.ops)) for trace in traces]
        self.queues: list[dict[Any, deque[int]]] = [defaultdict(deque) for _ in traces]
        self.heads: list[tuple[int, int]] = []  # (rank, op) that became heads, not looked at yet
        batches = {id(trace.ops): _parts(trace) for trace in traces}
        self.parts = [  # of each batch, those not done yet
            {first: set(parts) for first, parts in batches[id(trace.ops)].items()}
            for trace in traces
        ]
        self.messages: dict[tuple[Any, str, int, int], int] = {}  # heads that wait for their end
        self.members: dict[Group, list[tuple[int, int]]] = defaultdict(list)
        self.created: set[Any] = set()
        self.arrived: dict[Any, set[int]] = defaultdict(set)
        self.runnable = deque(range(len(traces)))
        self.mismatches: list[str] = []

    def play(self) -> OrderVerdict:
        while self.runnable:
            self.advance(self.runnable.popleft())
            while self.heads:
                self.match(*self.heads.pop())
        waiting = tuple(
            self.reason(rank)
            for rank, trace in enumerate(self.traces)
            if self.position[rank] < len(trace.events) or any(self.queues[rank].values())
        )
        return OrderVerdict(
            rule=self.rule,
            waiting=waiting,
            mismatches=tuple(self.mismatches),
            cycle=_cycle({w.rank: w.ranks for w in waiting}),
        )

    def key(self, rank: int, op: EnqueuedOp) -> Any:
        """The queue of an operation."""
        group = self.traces[rank].group(op)
        if op.peer is not None and op.batch < 0 and self.rule == "lazy":
            return group, frozenset((rank, self.traces[rank].peer(op)))
        return group

    def advance(self, rank: int) -> None:
        """Let a rank's compute stream continue until it has to wait."""
        trace, done, entered = self.traces[rank], self.done[rank], self.entered[rank]
        while self.position[rank] < len(trace.events):
            event = trace.events[self.position[rank]]
            if event < 0:
                if not done[~event]:
                    return
            else:
                op = trace.ops[event]
                if not entered[event]:
                    key = self.key(rank, op)
                    if self.rule == "lazy" and not self.create(rank, op, key):
                        return
                    entered[event] = 1
                    queue = self.queues[rank][key]
                    place = event if op.batch < 0 else op.batch
                    if place == event:
                        queue.append(event)
                    if queue[0] == place:
                        self.heads.append((rank, event))
                if op.blocks and not done[event]:
                    return
            self.position[rank] += 1

    def create(self, rank: int, op: EnqueuedOp, key: Any) -> bool:
        """Whether the communicator exists; else the host waits here for its other members."""
        if key in self.created:
            return True
        arrived = self.arrived[key]
        arrived.add(rank)
        members = self.parties(rank, op)
        if len(arrived) < len(members):
            return False
        self.created.add(key)
        self.runnable.extend(other for other in members if other != rank)
        return True

    def parties(self, rank: int, op: EnqueuedOp) -> tuple[int, ...]:
        """The global ranks that an operation involves."""
        trace = self.traces[rank]
        alone = op.peer is not None and op.batch < 0
        return (rank, trace.peer(op)) if alone else trace.group(op)[1:]

    def match(self, rank: int, index: int) -> None:
        """Run an operation that became the head of its queue, if the others are heads as well."""
        trace, op = self.traces[rank], self.traces[rank].ops[index]
        group = trace.group(op)
        if op.peer is None:
            members = self.members[group]
            members.append((rank, index))
            if len(members) == len(group) - 1:
                del self.members[group]
                self.compare(members)
                for member in members:
                    self.finish(*member)
            return
        peer = trace.peer(op)
        other = "recv" if op.name == "send" else "send"
        met = self.messages.pop((group, other, peer, rank), None)
        if met is None:
            assert (group, op.name, rank, peer) not in self.messages, "one of a kind in a batch"
            self.messages[group, op.name, rank, peer] = index
            return
        end = self.traces[peer].ops[met]
        if (end.numel, end.dtype) != (op.numel, op.dtype):
            self.mismatches.append(f"rank {rank}: {op} meets rank {peer}: {end}")
        self.finish(rank, index)
        self.finish(peer, met)

    def compare(self, members: Iterable[tuple[int, int]]) -> None:
        calls: dict[tuple[Any, ...], tuple[int, EnqueuedOp]] = {}
        for rank, index in members:
            trace, op = self.traces[rank], self.traces[rank].ops[index]
            calls.setdefault((*op.signature()[:3], trace.root(op)), (rank, op))
        if len(calls) > 1:
            text = "; ".join(f"rank {rank}: {op}" for rank, op in calls.values())
            self.mismatches.append(f"one collective, called differently: {text}")

    def finish(self, rank: int, index: int) -> None:
        self.done[rank][index] = 1
        op = self.traces[rank].ops[index]
        queue = self.queues[rank][self.key(rank, op)]
        assert queue[0] == (index if op.batch < 0 else op.batch)
        self.runnable.append(rank)
        parts = self.parts[rank].get(op.batch)
        if parts is not None:
            parts.remove(index)
            if parts:
                return
        queue.popleft()
        if queue:
            entered = self.entered[rank]
            others = self.parts[rank].get(queue[0], {queue[0]})
            self.heads += [(rank, other) for other in sorted(others) if entered[other]]

    # --- why a rank never ends -----------------------------------------------------------------

    def reason(self, rank: int) -> WaitingRank:
        trace, position = self.traces[rank], self.position[rank]
        queues = {key: queue for key, queue in self.queues[rank].items() if queue}
        if position < len(trace.events):
            event = trace.events[position]
            index = event if event >= 0 else ~event
            op = trace.ops[index]
            if not self.entered[rank][index]:  # its communicator is not there yet
                arrived = self.arrived[self.key(rank, op)]
                missing = tuple(r for r in self.parties(rank, op) if r not in arrived)
                return WaitingRank(
                    rank=rank, operation=f"creating the communicator of {op}", behind=0,
                    ranks=missing,
                )  # fmt: skip
            queue = queues[self.key(rank, op)]
        else:
            queue = next(iter(queues.values()))
        head = trace.ops[min(self.parts[rank].get(queue[0], {queue[0]}))]
        if head.peer is not None:
            missing = (trace.peer(head),)
        else:
            ready = {r for r, _ in self.members[trace.group(head)]}
            missing = tuple(r for r in trace.group(head)[1:] if r not in ready)
        return WaitingRank(rank=rank, operation=str(head), behind=len(queue) - 1, ranks=missing)


def _parts(trace: Trace) -> dict[int, set[int]]:
    """The operations of each batch of a trace, by the first of them."""
    found: dict[int, set[int]] = {}
    for op in trace.ops:
        if op.batch >= 0:
            found.setdefault(op.batch, set()).add(op.index)
    return found


def _cycle(waits: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Ranks that wait for each other in a ring; empty if a wait ends at a rank that ended."""
    for start in waits:
        path: list[int] = []
        place: dict[int, int] = {}
        rank = start
        while rank in waits and rank not in place:
            place[rank] = len(path)
            path.append(rank)
            rank = next((r for r in waits[rank] if r in waits), -1)
        if rank in place:
            return tuple(path[place[rank] :])
    return ()
