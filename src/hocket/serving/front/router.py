"""Router: which replica answers a request, by load and by cached prefix.

A request goes where the least work stands before its end:

    tokens that a replica has yet to compute  +  tokens of the prompt that its cache does not hold

The first grows with every request that is sent there and shrinks with every token that comes
back. The second is found by remembering, of each replica, the blocks of the prompts it was given:
a chain of hashes, block by block, so that a block counts only after all those before it (as the
replica's own prefix cache keys them). The memory is bounded by what that cache can hold, and the
least recently used goes first. A short queue elsewhere wins over a cached prefix that is shorter
than the queue, which is what the prefix would have saved.

A request that one replica sends away because its queue is full is offered to the others, and only
what none of them takes is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Protocol

from hocket.serving.front.client import ReplicaLost
from hocket.serving.request import Output, Request, RequestRefused
from hocket.serving.scheduling.known_prefixes import KnownPrefixes, prefix_keys
from hocket.spec.errors import HocketError

EXPECTED = 128.0
"""Tokens of an answer before any has been seen; then the mean of those that ended."""

LEARNT = 0.05
"""Weight of the newest answer in that mean."""


class NoReplica(HocketError):
    """No replica answers at the moment: they start, have died, or the server is ending."""


class RoutedStream(Protocol):
    """Outputs of one request, the last with its `finish`."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None:
        """End the request; its memory is free at once."""


class ReplicaProtocol(Protocol):
    """One replica, as `front.client.ReplicaClient` speaks to it."""

    def submit(self, request: Request) -> RoutedStream: ...


@dataclasses.dataclass
class ReplicaLoad:
    """What one request still asks of its replica, in tokens."""

    prompt: float
    answer: float
    num_generated: int = 0

    @property
    def tokens(self) -> float:
        return self.prompt + self.answer


@dataclasses.dataclass
class Timing:
    """What one request met with; times by the monotonic clock.

    Attributes:
        prompt, cached: its tokens, and of those found in a cache. tokens: of the answer.
        came, first, ended: when it came, and when its first and last token did.
        replica: that had it. finished: answered to the end. refused, failed: why it was not.
    """

    prompt: int
    cached: int = 0
    tokens: int = 0
    came: float = dataclasses.field(default_factory=time.monotonic)
    first: float | None = None
    ended: float | None = None
    replica: int = -1
    finished: bool = False
    refused: bool = False
    failed: bool = False

    def record_output(self, output: Output) -> None:
        if output.tokens and self.first is None:
            self.first = time.monotonic()
        self.tokens += len(output.tokens)
        self.cached = max(self.cached, output.cached)
        self.finished = output.finish_reason is not None and output.finish_reason != "error"
        self.failed = output.finish_reason == "error"

    def end(self, replica: int) -> None:
        """Nothing comes any more."""
        self.ended, self.replica = time.monotonic(), replica


class RoutedReplica:
    """What the router knows of one replica.

    Attributes:
        number: of the replica. client: speaks to it. loads: its requests.
        prefixes: what its cache may hold.
    """

    def __init__(self, number: int, client: ReplicaProtocol, blocks: int) -> None:
        self.number = number
        self.client = client
        self.prefixes = KnownPrefixes(blocks)
        self.loads: dict[int, ReplicaLoad] = {}

    @property
    def outstanding(self) -> float:
        """Tokens that it has yet to compute."""
        return sum(load.tokens for load in self.loads.values())


class Router:
    """Sends each request to one of the replicas that live; itself a `ReplicaProtocol`.

    Args:
        block_size: tokens of one block of the replicas' caches.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.replicas: dict[int, RoutedReplica] = {}
        self.expected = EXPECTED
        self.routed: dict[int, int] = {}
        self.closed = ""
        self.listeners: list[Callable[[Timing], None]] = []
        self.running = 0
        self.swapping = 0
        self._arrived = asyncio.Event()
        self._busy = 0.0
        self._since = 0.0
        self._numbers = 0

    # --- which replicas there are ------------------------------------------------------------

    def add(self, number: int, client: ReplicaProtocol, blocks: int) -> None:
        """A replica is ready; it begins with an empty cache."""
        self.replicas[number] = RoutedReplica(number, client, blocks)
        self.routed.setdefault(number, 0)
        self._arrived.set()

    def remove(self, number: int) -> None:
        """A replica takes no request any more. Those it has go on, or end with its death."""
        self.replicas.pop(number, None)

    def close(self, why: str) -> None:
        """Take no request any more, and say why."""
        self.closed = why

    @property
    def ready(self) -> bool:
        """Whether a request would find a replica."""
        # A client knows that its replica died before the supervisor has removed it.
        living = (getattr(one.client, "lost", None) is None for one in self.replicas.values())
        return (any(living) or self.swapping > 0) and not self.closed

    # --- requests ----------------------------------------------------------------------------

    def order(self, request: Request) -> list[tuple[RoutedReplica, int]]:
        """The replicas, the best one first, each with the tokens of the prompt that it holds."""
        keys = prefix_keys(request.tokens, self.block_size, request.salt)
        size = len(request.tokens)
        # The last token is computed in any case: its logits are what is asked for.
        hits = [
            (replica, min(replica.prefixes.hit(keys) * self.block_size, max(size - 1, 0)))
            for replica in self.replicas.values()
        ]
        return sorted(
            hits,
            key=lambda pair: (
                pair[0].outstanding + size - pair[1],
                len(pair[0].loads),
                self.routed[pair[0].number],
                pair[0].number,
            ),
        )

    def submit(self, request: Request) -> Routed | Waiting:
        """Send a request to a replica; while replicas are `swapping` weights and none is there, to
        the next that is.

        Raises:
            NoReplica: none lives, or the server is ending.
        """
        if self.closed:
            raise NoReplica(self.closed)
        order = self.order(request)
        if not order and self.swapping:
            return Waiting(self, request)
        if not order:
            raise NoReplica("no replica of the model is ready")
        return Routed(self, request, [replica.number for replica, _ in order])

    def begin(self, replica: RoutedReplica, request: Request) -> tuple[int, RoutedStream]:
        """Hand a request to one replica, and count it."""
        keys = prefix_keys(request.tokens, self.block_size, request.salt)
        held = min(replica.prefixes.hit(keys) * self.block_size, max(len(request.tokens) - 1, 0))
        stream = replica.client.submit(request)
        self._numbers += 1
        answer = min(self.expected, float(request.sampling.max_new_tokens))
        replica.loads[self._numbers] = ReplicaLoad(len(request.tokens) - held, answer)
        replica.prefixes.add(keys)
        self.routed[replica.number] += 1
        return self._numbers, stream

    def record_output(
        self, replica: RoutedReplica, number: int, request: Request, output: Output
    ) -> None:
        """Tokens came back: so much less is left."""
        load = replica.loads.get(number)
        if load is None:
            return
        load.prompt = 0.0
        load.num_generated += len(output.tokens)
        left = float(request.sampling.max_new_tokens) - load.num_generated
        # A long answer is expected to go on for as long again as an average one.
        load.answer = max(
            0.0, min(left, max(self.expected - load.num_generated, self.expected / 2))
        )

    def end(self, replica: RoutedReplica, number: int, *, finished: bool) -> None:
        """A request is over, however it ended."""
        load = replica.loads.pop(number, None)
        if load is not None and finished:
            self.expected += LEARNT * (load.num_generated - self.expected)

    @property
    def busy(self) -> float:
        """Seconds in which at least one request was there."""
        return self._busy + (time.monotonic() - self._since if self.running else 0.0)

    def begun(self) -> None:
        """A request was taken."""
        if not self.running:
            self._since = time.monotonic()
        self.running += 1

    def ended(self, timing: Timing) -> None:
        """It is over; notifies its counter."""
        self.running -= 1
        if not self.running:
            self._busy += time.monotonic() - self._since
        for listener in self.listeners:
            listener(timing)

    # --- figures of them ----------------------------------------------------------------

    @property
    def stats(self) -> dict[str, Any]:
        """Sums over the replicas, and each one's own under `replicas`."""
        each = {n: stats_of(replica.client) for n, replica in sorted(self.replicas.items())}
        return {**added(each.values()), "replicas": each}


class Routed:
    """A request's outputs from whichever replica took it."""

    def __init__(self, router: Router, request: Request, order: Iterable[int]) -> None:
        self.router = router
        self.request = request
        self.timing = Timing(prompt=len(request.tokens))
        self.replica: RoutedReplica | None = None
        self.untried = list(order)
        self._number = 0
        self._over = False
        self._next()
        router.begun()

    def _next(self) -> None:
        """Try the next replica of the order that still lives. Raises NoReplica, or its refusal."""
        full: RequestRefused | None = None
        while self.untried:
            replica = self.router.replicas.get(self.untried.pop(0))
            if replica is None:
                continue
            try:
                self._number, self.stream = self.router.begin(replica, self.request)
            except ReplicaLost:  # it died just now: the supervisor has not heard of it yet
                continue
            except RequestRefused as error:
                if error.kind != "full":
                    raise
                full = error
                continue
            self.replica = replica
            return
        raise full or NoReplica("no replica of the model is ready")

    def _end(self, *, finished: bool = False) -> None:
        replica = self._leave(finished=finished)
        if replica is not None:
            self.timing.end(replica.number)
            self.router.ended(self.timing)

    def _leave(self, *, finished: bool = False) -> RoutedReplica | None:
        """The replica that had it has it no more."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self.router.end(replica, self._number, finished=finished)
        return replica

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs. Raises RequestRefused where none takes it; else as `ReplicaProtocol`."""
        finished = False
        try:
            while True:
                try:
                    async for output in self.stream:
                        assert self.replica is not None
                        self.router.record_output(self.replica, self._number, self.request, output)
                        self.timing.record_output(output)
                        finished = output.finish_reason is not None
                        yield output
                    return
                except RequestRefused as error:
                    if error.kind != "full" or not self.untried or self._over:
                        raise
                    refused_by = self._leave()
                    try:
                        self._next()
                    except (NoReplica, RequestRefused):
                        self.replica = refused_by
                        raise error from None
        except HocketError as error:
            self.timing.refused = isinstance(error, RequestRefused)
            self.timing.failed = not self.timing.refused
            raise
        finally:
            self._end(finished=finished)

    def cancel(self) -> None:
        """End the request at its replica."""
        self._over = True
        self.stream.cancel()
        self._end()

    def __del__(self) -> None:
        self._end()  # dropped before anybody listened


class Waiting:
    """A request that waits for the next replica; its outputs from there."""

    def __init__(self, router: Router, request: Request) -> None:
        self.router, self.request = router, request
        self._stream: Routed | None = None
        self._over = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """As `Routed`. Raises NoReplica where the swap ends without one."""
        while not self._over:
            self.router._arrived.clear()
            found = self.router.submit(self.request)
            if isinstance(found, Waiting):
                with contextlib.suppress(TimeoutError):  # the swap may end without one
                    await asyncio.wait_for(self.router._arrived.wait(), 0.5)
                continue
            self._stream = found
            async for output in found:
                yield output
            return

    def cancel(self) -> None:
        """End the request."""
        self._over = True
        if self._stream is not None:
            self._stream.cancel()


def stats_of(client: ReplicaProtocol) -> dict[str, Any]:
    """A replica's newest figures as plain values; empty before its first."""
    found = getattr(client, "stats", None)
    if found is None:
        return {}
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return dataclasses.asdict(found)
    return dict(found) if isinstance(found, Mapping) else {}


def added(each: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of several replicas added up, number by number; what is no number is left out."""
    total: dict[str, Any] = {}
    for figures in each:
        for name, value in figures.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                total[name] = total.get(name, 0) + value
    return total
