"""Driver, followers and client together, over sockets, with a machine that needs no model."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import resource
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.serving.engine import driver as driver_module
from hocket.serving.engine.channel import Channel, ChannelListener
from hocket.serving.engine.driver import Driver
from hocket.serving.engine.follower import follow
from hocket.serving.front.ask import Ask
from hocket.serving.front.client import ReplicaClient, ReplicaLost, _merged_outputs
from hocket.serving.front.completion import Completer
from hocket.serving.front.frames import MAX_COMMAND, FrameReader, decode_frame, encode, hello
from hocket.serving.request import Output, Request, RequestRefused, SamplingParams, TokenLogprobs
from hocket.serving.scheduling.group import SchedulerGroup
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.scheduler import Scheduler
from hocket.serving.scheduling.step import StepPlan
from tests.serving.token_part import TokenPart, answer

TOKEN = bytes(reversed(range(32)))


def limits(**fields: Any) -> SchedulerLimits:
    given = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
    }
    return SchedulerLimits(**{**given, **fields})


class World:
    """A replica whose ranks are threads: `stages` x `width` ranks.

    Args:
        before: called with (rank, plan) before each step of a rank.
        later: whether results are collected, as on a device.
    """

    def __init__(
        self,
        path: Path,
        bounds: SchedulerLimits,
        stages: int = 1,
        width: int = 1,
        before: Callable[[int, StepPlan], None] = lambda rank, plan: None,
        later: bool = False,
        data: int = 1,
        **driver: Any,
    ) -> None:
        self._options = driver
        width *= data
        self.door = ChannelListener(path, TOKEN)
        self.parts: list[TokenPart] = []
        hidden: list[queue.Queue[int]] = [queue.Queue() for _ in range(width * (stages - 1))]
        for rank in range(stages * width):
            stage, index = divmod(rank, width)
            self.parts.append(
                TokenPart(
                    bounds.block_size,
                    samples=stage == stages - 1 and index % (width // data) == 0,
                    taken=hidden[rank - width] if stage else None,
                    given=hidden[rank] if stage < stages - 1 else None,
                    before=lambda plan, rank=rank: before(rank, plan),
                    later=later,
                )
            )
        self.ends = {rank: socket.socketpair() for rank in range(1, stages * width)}
        self.bounds = bounds
        self.schedulers = [Scheduler(bounds) for _ in range(data)]
        self.scheduler = self.schedulers[0]
        self._data_ranks = {r: r % width // (width // data) for r in range(1, stages * width)}
        self.driver: Driver | None = None
        self.beats = 0
        self.errors: dict[int, BaseException] = {}
        self.threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(stages * width)
        ]
        for thread in self.threads:
            thread.start()

    def _rank(self, rank: int) -> None:
        try:
            if rank:
                follow(Channel(self.ends[rank][1]), self.parts[rank])
                self.ends[rank][1].close()
                return
            entered = self.door.accept(20, MAX_COMMAND)
            assert entered is not None
            parent, _ = entered
            self.door.close()
            self.driver = Driver(
                SchedulerGroup(self.schedulers),
                self.parts[0],
                parent,
                {r: Channel(ours) for r, (ours, _) in self.ends.items()},
                data_ranks=self._data_ranks,
                depth=self.bounds.depth,
                beat=self._beat,
                **self._options,
            )
            parent.write(encode({"event": "ready", "num_blocks": self.bounds.num_blocks}))
            self.driver.run()
        except BaseException as error:
            self.errors[rank] = error
            for ours, theirs in self.ends.values():
                (theirs if rank else ours).close()
            if self.driver is not None:
                self.driver.parent.close()

    def _beat(self) -> None:
        self.beats += 1

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads)


@contextlib.asynccontextmanager
async def replica(
    tmp_path: Path, bounds: SchedulerLimits | None = None, **fields: Any
) -> AsyncIterator[tuple[ReplicaClient, World]]:
    """A replica that is ready; at the end it is stopped and all its threads have ended well."""
    world = World(tmp_path / "door", bounds or limits(), **fields)
    client = await ReplicaClient.connect(tmp_path / "door", TOKEN)
    try:
        yield client, world
    finally:
        await asyncio.wait_for(client.stop(), 60)
        await client.close()
        await asyncio.to_thread(world.join)
        for ours, _ in world.ends.values():
            ours.close()
    assert not world.errors, world.errors


async def all_of(stream: Any) -> Output:
    outputs = [output async for output in stream]
    whole = outputs[0]
    for output in outputs[1:]:
        assert whole.finish_reason is None
        whole = _merged_outputs(whole, output)
    assert whole.finish_reason is not None
    return whole


def request(name: object, tokens: list[int], count: int = 8, **sampling: Any) -> Request:
    return Request(
        id=str(name),
        tokens=tuple(tokens),
        sampling=SamplingParams(max_new_tokens=count, **sampling),
    )


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=length)


SHAPES = [(1, 1, 1), (1, 3, 1), (2, 1, 2), (2, 2, 3), (3, 1, 4)]
LATER = [(1, 1, 2), (1, 3, 2), (2, 2, 2), (3, 1, 4)]
CASES = [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in LATER]


@pytest.mark.parametrize(("stages", "width", "depth", "later"), CASES)
def test_many_mixed_requests_are_answered_rightly(
    tmp_path: Path, stages: int, width: int, depth: int, later: bool
) -> None:
    """A small cache, chunks, preemptions and shared beginnings change no token."""
    draw = random.Random(stages)
    shared = prompt(7, 24)
    asked = []
    for number in range(120):
        own = prompt(number, draw.choice([1, 3, 9, 40, 70]))
        asked.append(request(number, (shared if number % 3 else []) + own, draw.randint(1, 24)))

    async def main() -> list[Output]:
        lookahead = later and stages == 1
        bounds = limits(depth=depth, num_blocks=40, lookahead=lookahead)
        async with replica(tmp_path, bounds, stages=stages, width=width, later=later) as (
            client,
            world,
        ):
            found = await asyncio.gather(*(all_of(client.submit(one)) for one in asked))
            figures = await client.measured()
            assert figures["measured"]["steps"] == len(world.parts[0].plans)
            assert figures["stats"]["generated_tokens"] == sum(len(one.tokens) for one in found)
            assert figures["stats"]["preempted"] > 0
            assert (world.parts[(stages - 1) * width].most_launched == 2) == later
        assert all(part.plans == world.parts[0].plans for part in world.parts)
        return found

    found = asyncio.run(main())
    for one, output in zip(asked, found, strict=True):
        assert output.tokens == answer(one.tokens, one.sampling.max_new_tokens)
        assert output.finish_reason == "length"


@pytest.mark.parametrize(("stages", "width", "depth"), [(1, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_data_ranks_of_one_replica_run_every_step_together(
    tmp_path: Path, stages: int, width: int, depth: int
) -> None:
    """Each has rows of its own, or an idle plan of the same step; no token is another."""
    draw = random.Random(3)
    shared = prompt(7, 24)
    asked = [request("first", prompt(1, 9), 6)]
    for number in range(60):
        own = prompt(number, draw.choice([1, 3, 9, 40]))
        asked.append(request(number, (shared if number % 3 else []) + own, draw.randint(1, 24)))

    computed: dict[int, list[int]] = {}

    async def main() -> list[Output]:
        bounds = limits(depth=depth, num_blocks=40)
        async with replica(
            tmp_path, bounds, stages=stages, width=width, data=2,
            before=lambda rank, plan: computed.setdefault(rank, []).append(len(plan.rows)),
        ) as (client, world):  # fmt: skip
            found = [await all_of(client.submit(asked[0]))]
            found += await asyncio.gather(*(all_of(client.submit(one)) for one in asked[1:]))
            stats = (await client.measured())["stats"]
            assert stats["finished"] == len(asked)
            assert stats["blocks_total"] == 2 * bounds.num_blocks
            assert stats["preempted"] > 0
            assert stats["prefix_hits"] > 0
        assert all(one.stats().finished > 10 for one in world.schedulers)
        assert all(part.plans == world.parts[0].plans for part in world.parts)
        idle = [not rows for busy, rows in zip(computed[0], computed[width], strict=True) if busy]
        assert all(idle[:6])  # while one data rank answers the only request
        assert not all(idle)
        for rank, rows in computed.items():
            assert rows == computed[rank % (2 * width) // width * width]
        return found

    found = asyncio.run(main())
    for one, output in zip(asked, found, strict=True):
        assert output.tokens == answer(one.tokens, one.sampling.max_new_tokens)


def test_several_plans_are_in_flight_through_the_stages(tmp_path: Path) -> None:
    """Chunks of one prompt follow each other without waiting for results."""
    ahead: list[int] = []
    last_ran: list[int] = [-1]
    free = threading.Event()

    def before(rank: int, plan: StepPlan) -> None:
        if rank == 1:
            free.wait(60)
            last_ran[0] = plan.number
        else:
            ahead.append(plan.number - last_ran[0])
            if len(ahead) == 3:
                free.set()

    async def main() -> Output:
        bounds = limits(depth=3, max_num_batched_tokens=8)
        async with replica(tmp_path, bounds, stages=2, before=before) as (client, _):
            return await all_of(client.submit(request("long", prompt(0, 60), 3)))

    found = asyncio.run(main())
    assert found.tokens == answer(prompt(0, 60), 3)
    # Three chunks had been run by the first stage before the last stage ran any.
    assert ahead[:3] == [1, 2, 3]


def slowly(rank: int, plan: StepPlan) -> None:
    time.sleep(0.002)


def test_a_cancelled_request_frees_its_row_and_others_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, limits(max_num_seqs=2), before=slowly) as (client, world):
            streams = [client.submit(request(n, prompt(n, 5), 100)) for n in range(2)]
            for stream in streams:
                await anext(stream)
            waiting = client.submit(request("next", prompt(9, 5), 4))
            streams[0].cancel()
            with pytest.raises(StopAsyncIteration):
                await anext(streams[0])
            assert (await all_of(waiting)).tokens == answer(prompt(9, 5), 4)
            # One whose task is cancelled while it waits, and one that is merely forgotten.
            task = asyncio.create_task(all_of(streams[1]))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            forgotten = client.submit(request("forgotten", prompt(3, 5), 100))
            await anext(forgotten)
            del forgotten, streams, task
            assert (await all_of(client.submit(request("last", prompt(8, 5), 4)))).finish_reason
            while (await client.measured())["stats"]["running"]:
                await asyncio.sleep(0.01)
            assert world.scheduler.idle

    asyncio.run(main())


def test_bad_requests_are_refused_and_the_next_one_is_answered(tmp_path: Path) -> None:
    bad = [
        {"id": "a", "tokens": [], "sampling": {}},
        {"id": "b", "tokens": [1], "sampling": {"temperature": -1}},
        {"id": "c", "tokens": [1], "sampling": {"nonsense": 1}},
        {"id": "d", "tokens": ["x"], "sampling": {}},
        {"id": "e", "tokens": [1], "sampling": {"max_new_tokens": 10**12}},
        {"id": "f", "tokens": [10**12], "sampling": {}},
        {"id": "g"},
        {"id": 7, "tokens": [1], "sampling": []},
        [],
        None,
        "text",
    ]

    async def main() -> None:
        async with replica(tmp_path) as (client, _):
            refused: list[Any] = []
            hear = client._hear
            client._hear = lambda message: (  # type: ignore[method-assign]
                refused.append(message) if message["event"] == "refused" else hear(message)
            )
            for one in bad:
                client._write(encode({"do": "add", "request": one}))
            good = await all_of(client.submit(request("good", [1, 2], 5)))
            assert good.tokens == answer([1, 2], 5)
            assert [one["id"] for one in refused] == [
                "a", "b", "c", "d", "e", "f", "g", 7, None, None, None,
            ]  # fmt: skip
            client._hear = hear  # type: ignore[method-assign]
            with pytest.raises(RequestRefused, match="128") as caught:
                await all_of(client.submit(request("long", prompt(0, 200), 5)))
            assert caught.value.kind == "too_long"

    asyncio.run(main())


def test_a_drained_replica_ends_what_it_has_and_takes_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path) as (client, _):
            running = asyncio.create_task(all_of(client.submit(request(0, prompt(0, 5), 40))))
            await asyncio.sleep(0)
            drained = asyncio.create_task(client.drain())
            await asyncio.sleep(0)
            with pytest.raises(RequestRefused, match="ending"):
                await all_of(client.submit(request(1, [1], 2)))
            await asyncio.wait_for(drained, 60)
            assert running.done() or (await asyncio.wait_for(running, 60))
            assert running.result().tokens == answer(prompt(0, 5), 40)

    asyncio.run(main())


def test_a_parent_that_does_not_read_is_not_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not read stays bounded, its commands are heard, and it may go on."""
    monkeypatch.setattr(driver_module, "HIGH", 1 << 13)
    world = World(tmp_path / "door", limits(max_model_len=2000, num_blocks=1000, max_num_seqs=4))
    end = socket.socket(socket.AF_UNIX)
    end.connect(str(tmp_path / "door"))
    end.sendall(hello(TOKEN))
    end.settimeout(60)
    end.recv(1000)
    assert world.driver is not None
    parent = world.driver.parent
    parent._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for name in ("a", "b"):
        one = Request(id=name, tokens=(1, 2), sampling=SamplingParams(max_new_tokens=1500))
        end.sendall(encode({"do": "add", "request": one.to_json()}))
    part = world.parts[0]
    seen = -1
    while len(part.plans) != seen or seen < 20:
        seen = len(part.plans)
        time.sleep(0.4)
    assert seen < 1000
    assert parent.unsent_bytes < (1 << 13) + 1000
    end.sendall(encode({"do": "abort", "ids": ["b"]}))
    while world.scheduler.stats().running > 1:
        time.sleep(0.01)
    assert len(part.plans) == seen
    reader = FrameReader(1 << 28)
    tokens: list[int] = []
    finished = False
    while not finished:
        for payload in reader.feed(end.recv(1 << 16)):
            for output in decode_frame(payload).get("outputs", ()):
                if output["id"] == "a":
                    tokens += output["tokens"]
                    finished = "finish_reason" in output
    assert tokens == answer((1, 2), 1500)
    end.close()
    world.join()
    assert not world.errors


def test_an_idle_replica_sleeps(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, limits(depth=2), stages=2) as (client, _):
            await all_of(client.submit(request(0, [1], 3)))
            before = resource.getrusage(resource.RUSAGE_SELF)
            await asyncio.sleep(0.5)
            after = resource.getrusage(resource.RUSAGE_SELF)
            switches = after.ru_nvcsw - before.ru_nvcsw
            assert switches < 40, "something wakes again and again"

    asyncio.run(main())


def test_a_replica_whose_parent_hangs_up_leaves(tmp_path: Path) -> None:
    world = World(tmp_path / "door", limits(depth=2), stages=2)

    async def main() -> None:
        client = await ReplicaClient.connect(tmp_path / "door", TOKEN)
        stream = client.submit(request(0, [1], 100))
        await anext(stream)
        await client.close()
        with pytest.raises(ReplicaLost):
            await all_of(stream)
        with pytest.raises(ReplicaLost):
            client.submit(request(1, [1], 100))

    asyncio.run(main())
    world.join()
    assert not world.errors


def test_a_rank_that_fails_ends_the_replica_and_every_stream_is_reported(tmp_path: Path) -> None:
    def before(rank: int, plan: StepPlan) -> None:
        if rank == 1 and plan.number == 5:
            raise RuntimeError("a fault of ours")

    world = World(tmp_path / "door", limits(depth=2), stages=2, before=before)

    async def main() -> None:
        client = await ReplicaClient.connect(tmp_path / "door", TOKEN)
        streams = [client.submit(request(n, [n], 50)) for n in range(4)]
        found = await asyncio.wait_for(
            asyncio.gather(*map(all_of, streams), return_exceptions=True), 60
        )
        assert all(isinstance(one, ReplicaLost) for one in found)
        with pytest.raises(ReplicaLost):
            await client.drain()
        await client.close()

    asyncio.run(main())
    world.join()
    assert isinstance(world.errors[1], RuntimeError)
    assert isinstance(world.errors[0], ConnectionError)


def test_a_window_is_recorded_on_every_rank(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path, limits(depth=3), stages=3) as (client, world):
            running = asyncio.create_task(all_of(client.submit(request(0, [1], 60))))
            rows = (await asyncio.wait_for(client.record(5), 60))["ranks"]
            assert len(rows) == 3
            plans = [[event["plan"] for event in row["events"]] for row in rows]
            assert plans[0] == plans[1] == plans[2]
            assert len(plans[0]) == 5
            assert [row["events"][0]["thread"] for row in rows] == ["rank 0", "rank 1", "rank 2"]
            assert len((await client.record(2))["ranks"]) == 3
            assert (await running).finish_reason == "length"
            assert all(part.noted is None for part in world.parts)

    asyncio.run(main())


def test_a_run_records_a_window_without_being_asked(tmp_path: Path) -> None:
    kept: list[list[Any]] = []

    async def main() -> None:
        async with replica(
            tmp_path, limits(depth=2), stages=2, window=(10, 4), on_timeline=kept.append
        ) as (client, _):
            heard: list[str] = []
            hear = client._hear
            client._hear = lambda message: (  # type: ignore[method-assign]
                heard.append(message["event"]),
                hear(message),
            )
            await all_of(client.submit(request(0, [1], 60)))
            assert "timeline" not in heard

    asyncio.run(main())
    ((first, second),) = kept
    plans = [event["plan"] for event in first["events"]]
    assert len(plans) == 4
    assert plans[0] >= 10
    assert [event["plan"] for event in second["events"]] == plans


def test_prompt_logprobs_come_in_order_however_the_prompt_is_cut(tmp_path: Path) -> None:
    tokens = prompt(1, 50)

    async def main() -> Output:
        bounds = limits(max_num_batched_tokens=16, max_logit_rows=7)
        async with replica(tmp_path, bounds) as (client, _):
            return await all_of(client.submit(request(0, tokens, 2, prompt_logprobs=0)))

    found = asyncio.run(main())
    assert found.prompt_logprobs == [
        TokenLogprobs(token, -float(k)) for k, token in enumerate(tokens[1:])
    ]
    assert found.tokens == answer(tokens, 2)


def test_a_replica_that_dies_as_it_is_greeted_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left unread resets the connection; nobody is left to be told of that in print."""
    made: list[Any] = []
    connect = asyncio.open_unix_connection

    async def recorded(path: str) -> Any:
        made.append(found := await connect(path))
        return found

    async def main() -> None:
        path = str(tmp_path / "door")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            door.setblocking(False)
            asking = asyncio.ensure_future(ReplicaClient.connect(path, TOKEN))
            came, _ = await asyncio.get_running_loop().sock_accept(door)
            while not select.select([came], (), (), 0)[0]:
                await asyncio.sleep(0.001)
            came.close()  # with the greeting unread
            with pytest.raises(ReplicaLost, match="reset by peer"):
                await asking
        await asyncio.sleep(0.01)
        ((_, writer),) = made
        closed = writer._protocol._get_close_waiter(writer)
        # What asyncio looks at when the future goes: True, it prints the exception.
        assert closed.done()
        assert not closed._log_traceback

    monkeypatch.setattr(asyncio, "open_unix_connection", recorded)
    asyncio.run(main())


def test_a_wrong_token_does_not_come_in(tmp_path: Path) -> None:
    world = World(tmp_path / "door", limits())

    async def main() -> None:
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(ReplicaClient.connect(tmp_path / "door", bytes(32)), 60)
        client = await ReplicaClient.connect(tmp_path / "door", TOKEN.hex())
        assert client.capacity["num_blocks"] == 64
        await client.stop()
        with pytest.raises(ReplicaLost):
            await ReplicaClient.connect(tmp_path / "nowhere", TOKEN)

    asyncio.run(main())
    world.join()


def test_outputs_that_nobody_reads_are_merged(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path) as (client, _):
            stream = client.submit(request(0, [1], 30, logprobs=0))
            other = client.submit(request(1, [2], 30))
            await all_of(other)
            await client.drain()
            whole = await anext(stream)
            assert whole.tokens == answer([1], 30)
            assert whole.finish_reason == "length"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(main())


def test_tokens_without_text_of_their_own_are_reported_too(tmp_path: Path) -> None:
    """As bytes of a character that is not whole; a client that asks for ids gets all of them."""

    async def main() -> None:
        async with replica(tmp_path) as (client, _):
            completer = Completer(client, lambda ids: "")
            ask = Ask(prompts=((1, 2),), sampling=SamplingParams(max_new_tokens=9), id="call")
            (found,) = await completer.start(ask).collect()
            assert found.tokens == answer([1, 2], 9)
            assert found.text == ""

    asyncio.run(main())


def test_prompts_of_requests_that_were_sent_away_are_not_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with replica(tmp_path) as (client, _):
            completer = Completer(client, lambda ids: "")
            few = SamplingParams(max_new_tokens=2)
            away = Ask(prompts=((1,) * 100_000,), sampling=few, id="away")
            with pytest.raises(RequestRefused):
                await completer.start(away).collect()
            assert completer.counts.prompt_tokens == 0
            both = Ask(prompts=((1, 2), (3, 4, 5)), n=2, sampling=few, id="both")
            await completer.start(both).collect()
            assert completer.counts.prompt_tokens == 5
            assert completer.counts.completion_tokens == 8

    asyncio.run(main())
