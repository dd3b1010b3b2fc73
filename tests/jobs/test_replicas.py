"""Supervision: replicas that die come back, the others go on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.serving import replicas as module
from hocket.jobs.serving.measured import Keeper
from hocket.jobs.serving.replicas import ReplicaOptions, ReplicaSet
from hocket.jobs.serving.start import folder_prefix, sweep_folders
from hocket.launch import Launcher
from hocket.serving.front.client import ReplicaClient, ReplicaLost
from hocket.serving.front.router import NoReplica, Router
from hocket.serving.request import Request, SamplingParams
from hocket.spec.errors import ModelError, RankFailure
from hocket.spec.serving_forecast import ServingMeasured

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def launcher(_: int = 0) -> Launcher:
    return Launcher("cpu", 1, path=[ROOT], warm=False)


@pytest.fixture
def launchers() -> Iterator[list[Launcher]]:
    found = [launcher(), launcher()]
    yield found
    for one in found:
        one.close()


async def connect(path: Path, token: str) -> tuple[ReplicaClient, dict[str, Any]]:
    client = await ReplicaClient.connect(path, token)
    return client, client.capacity


class Served:
    """Two replicas of two ranks, their router, and what was said of them."""

    def __init__(self, launchers: list[Launcher], folder: Path, **options: Any) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.made: list[Launcher] = []
        self.router = Router(4)
        restarts = options.pop("max_restarts", 3)
        self.replicas = ReplicaSet(
            launchers,
            ReplicaOptions(
                entry="tests.jobs.replica_cases:main",
                size=2,
                payload={"pids": str(folder), **options},
                startup_timeout=30.0,
            ),
            self.router,
            connect,
            relaunch=self.relaunch,
            say=self.said.append,
            max_restarts=restarts,
        )

    def relaunch(self, number: int) -> Launcher:
        self.made.append(launcher())
        return self.made[-1]

    def pids(self) -> list[int]:
        files = [f for f in self.folder.iterdir() if f.name[0].isdigit()]
        # One that is empty was being written when its rank was ended.
        return [int(text) for text in (f.read_text() for f in files if f.suffix == "") if text]

    def pid(self, replica: int, attempt: int, rank: int) -> int:
        file = self.folder / f"{replica}-{attempt}-{rank}"
        for _ in range(500):
            if file.exists() and file.stat().st_size:
                break
            time.sleep(0.02)
        return int(file.read_text())


def run(
    launchers: list[Launcher],
    folder: Path,
    body: Callable[[Served], Awaitable[None]],
    **options: Any,
) -> Served:
    """Start, let `body` do its part, end; then no process may be left."""
    served = Served(launchers, folder, **options)

    async def all_of_it() -> None:
        served.replicas.start()
        try:
            await body(served)
        finally:
            await served.replicas.end()

    try:
        asyncio.run(all_of_it())
    finally:
        for one in served.made:
            one.close()
    end = time.monotonic() + 60  # the kernel ends those of a killed server within moments
    while any(map(alive, served.pids())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in served.pids() if alive(pid)]
    return served


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def ask(served: Served, name: str, new: int = 3) -> list[int]:
    request = Request(id=name, tokens=(1, 2, 3), sampling=SamplingParams(max_new_tokens=new))
    return [token async for output in served.router.submit(request) for token in output.tokens]


async def until(good: Callable[[], bool]) -> None:
    for _ in range(1000):
        if good():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come")


def test_requests_are_answered_and_counted(launchers: list[Launcher], tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    pids = tmp_path / "pids"
    pids.mkdir()

    async def body(served: Served) -> None:
        keeper = Keeper("dp2.tp2", served.router, served.replicas, file)
        await served.replicas.ready()
        keeper.begin(1.5)
        answers = await asyncio.gather(*(ask(served, f"a{n}", new=5) for n in range(8)))
        assert answers == [[0, 1, 2, 3, 4]] * 8
        assert all(served.router.routed.values()), "both replicas were given some"
        await keeper.ask()
        keeper.last()
        # The sockets' folders are gone as soon as the replicas are joined.
        assert not [one for one in served.replicas.replicas if one.client is None]

    run(launchers, pids, body)
    found = ServingMeasured.from_json(file.read_text())
    assert (found.requests, found.output_tokens, found.failed) == (8, 40, 0)
    assert found.prompt_tokens == 24
    assert found.start_seconds == 1.5
    assert found.ttft.p50 > 0
    assert found.tpot.p99 >= found.tpot.p50 > 0
    assert 0 < found.busy_seconds <= found.seconds
    assert [one.cache_tokens for one in found.replicas] == [1024, 1024]
    assert found.replicas[0].decode[0].count == 3
    assert sum(one.requests for one in found.replicas) == 8
    (load,) = found.loads
    assert load.rate > 0


def test_a_killed_rank_ends_its_requests_and_its_replica_comes_back(
    launchers: list[Launcher], tmp_path: Path
) -> None:
    async def body(served: Served) -> None:
        await served.replicas.ready()
        tasks = [asyncio.create_task(ask(served, f"a{n}", new=150)) for n in range(4)]
        await until(lambda: all(len(r.loads) == 2 for r in served.router.replicas.values()))
        os.kill(served.pid(0, 0, 1), signal.SIGKILL)  # a follower: its driver goes with it
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done].count(ReplicaLost) == 2
        assert sum(one == list(range(150)) for one in done) == 2, "the other replica went on"
        assert await ask(served, "next") == [0, 1, 2]
        await served.replicas.ready()
        assert [one.starts for one in served.replicas.replicas] == [2, 1]
        assert await asyncio.gather(*(ask(served, f"b{n}") for n in range(4))) == [[0, 1, 2]] * 4
        assert served.router.routed[0] > 2, "it is given requests again"

    served = run(launchers, tmp_path, body)
    assert any(
        "replica 0 died" in text and "1 of 2 replicas continue" in text for text in served.said
    )


def test_a_replica_that_starts_again_is_missing_until_it_is_ready(
    launchers: list[Launcher], tmp_path: Path
) -> None:
    async def body(served: Served) -> None:
        await served.replicas.ready()
        os.kill(served.pid(1, 0, 0), signal.SIGKILL)
        await until(lambda: served.replicas.replicas[1].starts == 2)
        assert served.replicas.missing() == [{"replica": 1, "state": "starting"}]
        await served.replicas.ready()
        assert served.replicas.missing() == []

    run(launchers, tmp_path, body)


@pytest.mark.parametrize("by", ["the server", "another"])
def test_a_server_whose_fork_server_was_killed_gets_another(
    launchers: list[Launcher], tmp_path: Path, by: str
) -> None:
    """One that was killed from outside is replaced by its launcher, which may have a spare."""

    async def body(served: Served) -> None:
        await served.replicas.ready()
        if by == "the server":
            launchers[1].kill()
        else:
            os.kill(launchers[1]._server.pid, signal.SIGKILL)
        await until(lambda: served.replicas.replicas[1].starts == 2)
        await served.replicas.ready()
        assert await asyncio.gather(*(ask(served, f"b{n}") for n in range(4))) == [[0, 1, 2]] * 4

    assert len(run(launchers, tmp_path, body).made) == (by == "the server")


def test_while_no_replica_lives_requests_are_refused(
    launchers: list[Launcher], tmp_path: Path
) -> None:
    async def body(served: Served) -> None:
        with pytest.raises(NoReplica):
            await ask(served, "early")
        await served.replicas.ready()
        for number in range(2):
            os.kill(served.pid(number, 0, 0), signal.SIGKILL)
        await until(lambda: not served.router.replicas)
        with pytest.raises(NoReplica):
            await ask(served, "none")
        (tmp_path / "go").touch()
        await served.replicas.ready()
        assert await ask(served, "again") == [0, 1, 2]

    run(launchers, tmp_path, body, hold=True)


def test_restarts_are_bounded_and_the_last_word_is_the_error(
    launchers: list[Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.02)

    async def body(served: Served) -> None:
        await served.replicas.ready()
        for number in range(2):
            os.kill(served.pid(number, 0, 1), signal.SIGKILL)
        with pytest.raises(RankFailure, match="killed by SIGKILL"):
            await served.replicas.fatal
        assert [one.state for one in served.replicas.replicas] == ["failed", "failed"]
        assert [one.starts for one in served.replicas.replicas] == [3, 3]

    served = run(launchers, tmp_path, body, dies=True, max_restarts=2)
    assert sum("died 3 times in a row" in text for text in served.said) == 2


def test_a_start_that_fails_is_not_tried_again(launchers: list[Launcher], tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        with pytest.raises(ModelError, match="cannot be served"):
            await served.replicas.ready()

    served = run(launchers, tmp_path, body, fail=True)
    assert max(one.starts for one in served.replicas.replicas) == 1


def test_an_end_during_the_start_leaves_nothing(launchers: list[Launcher], tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        await asyncio.sleep(0.05)

    begun = time.monotonic()
    run(launchers, tmp_path, body)
    assert time.monotonic() - begun < 30


def test_draining_lets_requests_end_and_takes_no_more(
    launchers: list[Launcher], tmp_path: Path
) -> None:
    async def body(served: Served) -> None:
        await served.replicas.ready()
        tasks = [asyncio.create_task(ask(served, f"a{n}", new=20)) for n in range(4)]
        await until(lambda: served.router.running == 4)
        drain = asyncio.create_task(served.replicas.drain(20.0))
        await asyncio.sleep(0)
        with pytest.raises(NoReplica, match="ending"):
            await ask(served, "late")
        assert await asyncio.gather(*tasks) == [list(range(20))] * 4
        assert await drain
        assert [one.state for one in served.replicas.replicas] == ["ended", "ended"]

    run(launchers, tmp_path, body)


def test_requests_that_outlast_the_drain_are_ended(
    launchers: list[Launcher], tmp_path: Path
) -> None:
    async def body(served: Served) -> None:
        await served.replicas.ready()
        task = asyncio.create_task(ask(served, "long", new=100_000))
        await until(lambda: served.router.running == 1)
        assert not await served.replicas.drain(0.1)
        with pytest.raises(ReplicaLost):
            await task

    run(launchers, tmp_path, body)


def test_folders_of_killed_servers_are_swept_and_no_others(tmp_path: Path) -> None:
    ours = folder_prefix()
    names = {f"{ours}4194305-a": False, f"{ours}{os.getpid()}-b": True, f"{ours}x-c": True,
             "hocket-driver-4194305-a": True, "hocket-driver-0123abcd-4194305-a": True,
             "other": True}  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
    sweep_folders(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names
