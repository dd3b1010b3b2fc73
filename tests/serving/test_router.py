"""The router: by load, by cached prefix, around replicas that die or are full."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.serving.front.client import ReplicaLost
from hocket.serving.front.router import NoReplica, Router
from hocket.serving.request import Output, Request, RequestRefused, SamplingParams
from hocket.serving.scheduling.known_prefixes import KnownPrefixes, prefix_keys

BLOCK = 4
names = itertools.count()


class Stream:
    def __init__(self, outputs: list[Output | Exception]) -> None:
        self.outputs = outputs
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        for one in self.outputs:
            if isinstance(one, Exception):
                raise one
            yield one

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    """A replica that answers each request with what it was told to."""

    def __init__(self, *outputs: Output | Exception, at_once: Exception | None = None) -> None:
        self.outputs = list(outputs) or [Output(id="", tokens=[1], finish_reason="length")]
        self.at_once = at_once
        self.seen: list[Request] = []
        self.lost: ReplicaLost | None = None
        self.stats = {"running": 1, "tokens_per_second": 2.5, "name": "a"}

    def submit(self, request: Request) -> Stream:
        if self.at_once is not None:
            raise self.at_once
        self.seen.append(request)
        return Stream(self.outputs)


def request(*tokens: int, new: int = 8, salt: str = "") -> Request:
    return Request(
        id=str(next(names)), tokens=tokens, sampling=SamplingParams(max_new_tokens=new), salt=salt
    )


def router(*clients: Client, blocks: int = 100) -> Router:
    found = Router(BLOCK)
    for number, client in enumerate(clients):
        found.add(number, client, blocks)
    return found


async def read(found: Router, one: Request) -> list[Output]:
    return [output async for output in found.submit(one)]


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(prompts, prompts)
def test_blocks_are_equal_exactly_as_far_as_the_prompts_are(a: list[int], b: list[int]) -> None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    same = min(len(a), len(b)) if same is None else same
    keys = prefix_keys(a, BLOCK), prefix_keys(b, BLOCK)
    both = sum(x == y for x, y in zip(*keys, strict=False))
    assert both == same // BLOCK
    assert not set(prefix_keys(a, BLOCK, "other")) & set(keys[0])


@given(st.lists(prompts, min_size=1, max_size=30), st.integers(0, 12))
def test_what_is_remembered_is_bounded_and_never_more_than_was_sent(
    sent: list[list[int]], most: int
) -> None:
    prefixes = KnownPrefixes(most)
    for prompt in sent:
        keys = prefix_keys(prompt, BLOCK)
        prefixes.add(keys)
        assert len(prefixes) <= most
        # The newest prompt is held from its beginning, as far as there is room.
        assert prefixes.hit(keys) == min(len(set(keys)), most)


@given(st.lists(st.tuples(prompts, st.integers(1, 300)), max_size=40), st.integers(1, 4))
def test_what_is_counted_is_what_is_there(sent: list[tuple[list[int], int]], count: int) -> None:
    clients = [Client() for _ in range(count)]
    found = router(*clients)
    streams = [found.submit(request(*prompt, new=new)) for prompt, new in sent]
    loads = [len(replica.loads) for replica in found.replicas.values()]
    assert sum(loads) == len(sent) == sum(len(client.seen) for client in clients)
    for stream in streams:
        assert stream.replica is not None
        stream.cancel()
        assert stream.stream.cancelled  # type: ignore[attr-defined]
    assert [replica.outstanding for replica in found.replicas.values()] == [0.0] * count


def test_load_is_spread_and_a_shared_prompt_follows_its_cache() -> None:
    first, second = Client(), Client()
    found = router(first, second)
    shared = list(range(64))
    for number in range(6):  # each ends before the next comes: only the cache decides
        asyncio.run(read(found, request(*shared, 100 + number)))
    assert (len(first.seen), len(second.seen)) == (6, 0)
    for number in range(6):  # nothing ends, and nothing is shared
        found.submit(request(*(1000 + 10 * number + i for i in range(8)))).__aiter__()
    kept = [found.submit(request(*(2000 + 10 * n + i for i in range(8)))) for n in range(6)]
    assert len(kept) == 6
    assert abs(sum(len(r.loads) for r in found.replicas.values()) - 6) == 0
    assert {len(r.loads) for r in found.replicas.values()} == {3}


def test_a_queue_longer_than_the_prefix_sends_a_request_elsewhere() -> None:
    busy, idle = Client(), Client()
    found = router(busy, idle)
    asyncio.run(read(found, request(*range(16))))
    kept = [found.begin(found.replicas[0], request(*range(100, 180), new=64))]
    assert kept
    (first, _), (_, held) = found.order(request(*range(16), 99))
    assert first.number == 1
    assert held == 16
    # A prefix longer than what stands before it is worth the wait.
    found.replicas[0].prefixes.add(prefix_keys(range(1000, 1400), BLOCK))
    ((first, held), _) = found.order(request(*range(1000, 1401)))
    assert (first.number, held) == (0, 400)


def test_the_salt_keeps_prefixes_apart() -> None:
    found = router(Client(), Client())
    found.submit(request(*range(32), salt="one"))
    assert max(held for _, held in found.order(request(*range(32), salt="two"))) == 0
    assert max(held for _, held in found.order(request(*range(32), salt="one"))) == 31


def test_a_full_replica_passes_a_request_on_and_the_last_refusal_is_reported() -> None:
    def full() -> RequestRefused:
        return RequestRefused("full", kind="full", retry_after=2.0)

    second = Client()
    found = router(Client(full()), second)
    (output,) = asyncio.run(read(found, request(1, 2)))
    assert output.finish_reason == "length"
    assert len(second.seen) == 1

    timings = []
    found = router(Client(full()), Client(at_once=full()))
    found.listeners.append(timings.append)
    with pytest.raises(RequestRefused) as refused:
        asyncio.run(read(found, request(1, 2)))
    assert refused.value.retry_after == 2.0
    assert [(t.refused, t.failed) for t in timings] == [(True, False)]
    assert all(not replica.loads for replica in found.replicas.values())


def test_another_refusal_is_not_passed_on() -> None:
    second = Client()
    found = router(Client(RequestRefused("too long", kind="too_long")), second)
    with pytest.raises(RequestRefused, match="too long"):
        asyncio.run(read(found, request(1, 2)))
    assert not second.seen


def test_a_replica_that_dies_ends_its_requests_and_gets_no_more() -> None:
    timings = []
    dying = Client(Output(id="", tokens=[5]), ReplicaLost("gone"))
    found = router(dying)
    found.listeners.append(timings.append)
    with pytest.raises(ReplicaLost):
        asyncio.run(read(found, request(1, 2)))
    assert [(t.failed, t.tokens) for t in timings] == [(True, 1)]
    dying.at_once = ReplicaLost("gone")
    with pytest.raises(NoReplica):
        found.submit(request(1, 2))
    found.remove(0)
    assert not found.ready
    with pytest.raises(NoReplica):
        found.submit(request(1, 2))
    found.add(0, Client(), 10)  # it is back, with an empty cache
    assert found.order(request(*range(8)))[0][1] == 0
    assert len(asyncio.run(read(found, request(1, 2)))) == 1


def test_a_dying_replica_is_passed_over_before_anybody_has_removed_it() -> None:
    alive = Client()
    found = router(Client(at_once=ReplicaLost("gone")), alive)
    asyncio.run(read(found, request(1, 2)))
    assert len(alive.seen) == 1


def test_a_router_whose_replicas_are_all_lost_is_not_ready() -> None:
    first, second = Client(), Client()
    found = router(first, second)
    assert found.ready
    first.lost = ReplicaLost("gone")
    assert found.ready
    second.lost = ReplicaLost("gone")
    assert not found.ready


def test_a_server_that_ends_says_so() -> None:
    found = router(Client())
    found.close("the server is ending")
    assert not found.ready
    with pytest.raises(NoReplica, match="ending"):
        found.submit(request(1, 2))


def test_figures_are_added_up() -> None:
    stats = router(Client(), Client()).stats
    assert stats["running"] == 2
    assert stats["tokens_per_second"] == 5.0
    assert stats["replicas"][1]["name"] == "a"
    assert "name" not in stats


def test_the_timing_of_an_answer() -> None:
    timings = []
    found = router(
        Client(
            Output(id="", tokens=[1, 2], cached=3), Output(id="", tokens=[3], finish_reason="stop")
        )
    )
    found.listeners.append(timings.append)
    asyncio.run(read(found, request(1, 2, 3, 4)))
    (one,) = timings
    assert (one.tokens, one.cached, one.prompt, one.finished) == (3, 3, 4, True)
    assert one.came <= one.first <= one.ended


def test_a_stream_that_nobody_reads_leaves_nothing() -> None:
    found = router(Client())
    found.submit(request(1, 2))
    assert not found.replicas[0].loads
