"""Replicas: the data-parallel copies of a served model, kept alive.

    starting --ready--> ready --a rank died--> lost --(waits a little)--> starting ...
                          |                      |
                          +------ ending --------+--> ended, or failed: died too often in a row

Each replica is a world of its own on a launcher of its own: what happens to one is nothing to the
others. A thread sits in `Launcher.run` of each; everything else happens on the event loop, which
runs in the main thread, since the kernel ends a fork server with the thread that has started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hocket.jobs.serving.start import folder_prefix, sweep_folders
from hocket.spec.errors import HocketError, RankFailure

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.serving.front.router import Router

Event = dict[str, Any]
Say = Callable[[str], None]

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a second start in a row, doubled for each further one; the first is at once."""

STEADY = 60.0
"""Seconds of answering after which earlier deaths are forgotten."""

STOPPED = 5.0
"""Seconds between asking ranks to leave and ending them."""

LAST_WORDS = 10.0
"""Seconds that ranks have to say why their driver hung up."""

POLL = 0.02
"""Seconds between looks whether a driver's socket is there."""


class DriverConnection(Protocol):
    """A connection to a replica's driver."""

    def submit(self, request: Any) -> Any: ...

    async def drain(self) -> None:
        """Take no request any more; returns when those it had have ended."""

    async def measured(self) -> dict[str, Any]:
        """What the replica has counted: `stats`, and `measured` by step."""

    async def stop(self) -> None:
        """Have the ranks leave."""

    async def close(self) -> None: ...


Connect = Callable[[Path, str], Awaitable[tuple[DriverConnection, dict[str, Any]]]]
"""(socket, token) to a client whose replica is ready, and what it said of its capacity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What one replica is started with.

    Attributes:
        entry: `module:function` of each rank. size: ranks.
        payload: for the ranks, without `socket`, `token`, `replica` and `attempt`.
        startup_timeout, silence_timeout: seconds, of `Launcher.run`.
        logs: folder of what ranks print; None: standard error.
    """

    entry: str
    size: int
    payload: dict[str, Any]
    startup_timeout: float = 600.0
    silence_timeout: float = 120.0
    logs: Path | None = None


@dataclasses.dataclass
class ReplicaProcess:
    """One of them, as it is now.

    Attributes:
        state: `starting`, `ready`, `lost`, `ended` or `failed`.
        starts: how often its ranks were started; failures: deaths in a row.
        since: when it became ready, by the monotonic clock; None while it is not.
        capacity: what its driver said when it was ready.
        error: the last one that ended it.
        reload: done once it is ready with other weights, or has not become so; None: no reload.
        draining: its ranks are about to leave for that.
    """

    number: int
    launcher: Launcher
    state: str = "starting"
    starts: int = 0
    failures: int = 0
    since: float | None = None
    client: DriverConnection | None = None
    capacity: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: HocketError | None = None
    reload: asyncio.Future[None] | None = None
    draining: bool = False

    @property
    def reloads(self) -> bool:
        """Whether it is on its way to other weights."""
        return self.reload is not None and not self.reload.done()


class ReplicaSet:
    """Starts, watches, restarts and ends the replicas of one server.

    Args:
        launchers: one for each replica, made in the main thread.
        world: what each is started with.
        router: is given those that are ready.
        connect: how to speak to a driver.
        relaunch: makes another launcher where one's server has died; called in the main thread.
        say: hears what happens, in sentences.
        max_restarts: deaths in a row that are followed by another start.
    """

    def __init__(
        self,
        launchers: list[Launcher],
        world: ReplicaOptions,
        router: Router,
        connect: Connect,
        *,
        relaunch: Callable[[int], Launcher],
        say: Say,
        max_restarts: int = 8,
    ) -> None:
        self.world = world
        self.router = router
        self.connect = connect
        self.relaunch = relaunch
        self.say = say
        self.max_restarts = max_restarts
        self.replicas = [ReplicaProcess(number, one) for number, one in enumerate(launchers)]
        self.ending = False
        self.restarts = 0
        self._before: ReplicaOptions | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._fatal: asyncio.Future[None] | None = None

    # --- the course of a server --------------------------------------------------------------

    def start(self) -> None:
        sweep_folders(Path(tempfile.gettempdir()))
        self._fatal = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._care(one)) for one in self.replicas]

    async def ready(self, *, all_of_them: bool = True) -> None:
        """Until the replicas are ready, or one of them is.

        Raises:
            HocketError: what kept the first start from succeeding.
        """
        wanted = all if all_of_them else any
        while not wanted(one.state == "ready" for one in self.replicas) and not self.ending:
            changed = asyncio.ensure_future(self._changed())
            await asyncio.wait({self.fatal, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self.fatal.done():
                self.fatal.result()

    @property
    def fatal(self) -> asyncio.Future[None]:
        """Done, with the error, once no replica lives or will live again."""
        assert self._fatal is not None, "not started"
        return self._fatal

    def missing(self) -> list[dict[str, Any]]:
        """The replicas that answer nothing at the moment, by number, and why."""
        return [
            {"replica": one.number, "state": "reloading" if one.reloads else one.state}
            for one in self.replicas
            if one.draining or one.state != "ready"
        ]

    def room(self) -> int | None:
        """Tokens that the cache of a replica holds; None before the first is ready."""
        known = [int(one.capacity.get("cache_tokens", 0)) for one in self.replicas]
        return min((tokens for tokens in known if tokens), default=None)

    async def drain(self, seconds: float) -> bool:
        """Let the requests that are running end, then the ranks. Whether all were done in time."""
        self.ending = True
        self.router.close("the server is ending")
        clients = [one.client for one in self.replicas if one.client is not None]
        drains = [asyncio.ensure_future(client.drain()) for client in clients]
        done = True
        if drains:
            _, late = await asyncio.wait(drains, timeout=seconds)
            done = not late
            for task in late:
                task.cancel()
            await asyncio.gather(*drains, return_exceptions=True)
        await self.end()
        return done

    async def end(self) -> None:
        """End all ranks: asked first, then killed. Returns when nothing is left of them.

        The launchers are their owner's to close.
        """
        self.ending = True
        for one in self.replicas:
            if one.client is None and one.state == "starting":
                one.launcher.kill()
        stops = [asyncio.ensure_future(one.client.stop()) for one in self.replicas if one.client]
        self._notify()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOPPED)
            if late:
                self.kill()
                await asyncio.wait(late)
        for stop in stops:
            stop.cancel()
        await asyncio.gather(*stops, return_exceptions=True)

    async def reload(self, payload: dict[str, Any]) -> int:
        """Start the ranks of every replica again with another payload, one replica after the
        other, each when its requests have ended; how many have it.

        Raises:
            HocketError: the first did not become ready, and starts with the old payload.
        """
        self._before = self.world
        self.world = dataclasses.replace(self.world, payload=payload)
        count = 0
        self.router.swapping += 1
        try:
            for one in self.replicas:
                if one.state in ("failed", "ended") or self.ending:
                    continue
                one.reload = asyncio.get_running_loop().create_future()
                client = one.client
                if client is not None:
                    one.draining = True
                    self.router.remove(one.number)
                    with contextlib.suppress(HocketError):  # it died: it starts again all the same
                        await client.drain()
                        await client.stop()
                ended = asyncio.ensure_future(self._ended())
                await asyncio.wait({one.reload, ended}, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if one.reload.done():
                    one.reload.result()
                    count += 1
                    self._before = None
        finally:
            self._before = None
            self.router.swapping -= 1
        return count

    async def _ended(self) -> None:
        while not self.ending:
            await self._changed()

    def _reloads(self, one: ReplicaProcess, error: HocketError) -> bool:
        """Whether a life that ended is followed by the next of a reload, at once."""
        if one.reload is None or not one.reloads:
            return False
        if one.draining:
            one.draining = False
            return True
        if self._before is None:  # others have the new weights: it is a death like any other
            return False
        self.world, self._before = self._before, None
        self.say(f"replica {one.number} starts with the weights it had: {error.message}")
        one.reload.set_exception(error)
        return True

    def kill(self) -> None:
        """End all ranks at once."""
        self.ending = True
        for one in self.replicas:
            one.launcher.kill()

    # --- one replica -------------------------------------------------------------------------

    async def _care(self, one: ReplicaProcess) -> None:
        try:
            while not self.ending:
                error = await self._live(one)
                if self.ending:
                    break
                if self._reloads(one, error):
                    continue
                one.error = error
                if not await self._goes_on(one):
                    return
        except BaseException as error:  # a mistake of ours must end the server, not hang it
            if not self.fatal.done() and not isinstance(error, asyncio.CancelledError):
                self.fatal.set_exception(error)
            raise
        finally:
            if one.state != "failed":
                one.state = "ended"
            self._notify()

    async def _live(self, one: ReplicaProcess) -> HocketError:
        """One life, from the start of its ranks to their end. What ended it."""
        one.state, one.since = "starting", None
        one.starts += 1
        if not (one.launcher.alive or one.launcher.revive()):
            one.launcher.close()
            one.launcher = self.relaunch(one.number)
        # Made for this life alone: nobody else may enter, and nothing is left once it is joined.
        folder = Path(tempfile.mkdtemp(prefix=f"{folder_prefix()}{os.getpid()}-"))
        socket, token = folder / "driver", secrets.token_hex(32)
        payload = {
            **self.world.payload,
            "socket": str(socket),
            "token": token,
            "replica": one.number,
            "attempt": one.starts - 1,
        }
        logs = self.world.logs
        ranks = in_thread(
            lambda: one.launcher.run(
                self.world.entry,
                self.world.size,
                payload,
                attempt=one.starts - 1,
                logs=None if logs is None else logs / f"replica-{one.number}",
                startup_timeout=self.world.startup_timeout,
                silence_timeout=self.world.silence_timeout,
            )
        )
        joining = asyncio.ensure_future(self._join(one, socket, token))
        try:
            await asyncio.wait({ranks, joining}, return_when=asyncio.FIRST_COMPLETED)
            lost = joining.exception() if joining.done() else None
            if lost is not None:
                # Most often its ranks are about to say why. Those that live on are of no use.
                await asyncio.wait({ranks}, timeout=LAST_WORDS)
                if not ranks.done():
                    one.launcher.kill(for_good=False)
                    await asyncio.wait({ranks})
                    return _as_error(lost)
            await asyncio.wait({ranks})
            error = ranks.exception()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            shutil.rmtree(folder, ignore_errors=True)
            await self._lost(one)
        if error is not None:
            return _as_error(error)
        return RankFailure(f"the ranks of replica {one.number} left without being asked to")

    async def _join(self, one: ReplicaProcess, socket: Path, token: str) -> None:
        while not os.path.exists(socket):
            await asyncio.sleep(POLL)
        end = time.monotonic() + LAST_WORDS
        while True:
            try:
                client, capacity = await self.connect(socket, token)
                break
            except HocketError:  # it does not listen yet, or has died: then the ranks say why
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(POLL)
        shutil.rmtree(socket.parent, ignore_errors=True)
        one.client, one.capacity = client, capacity
        if self.ending:
            await client.stop()
            return
        one.state, one.since = "ready", time.monotonic()
        if one.reload is not None and one.reloads and not one.draining:
            one.reload.set_result(None)
        self.router.add(one.number, client, int(capacity.get("num_blocks", 0)))
        self._notify()

    async def _lost(self, one: ReplicaProcess) -> None:
        """Its ranks are gone: no request may go there, and those that it had have ended."""
        self.router.remove(one.number)
        client, one.client = one.client, None
        if one.state == "ready":
            one.state = "lost"
            self._notify()
        if client is not None:
            with contextlib.suppress(OSError, HocketError):
                await client.close()

    async def _goes_on(self, one: ReplicaProcess) -> bool:
        """Whether a replica that died is started again; waits before it is."""
        assert one.error is not None
        answered = None if one.since is None else time.monotonic() - one.since
        one.failures = 1 if answered is not None and answered > STEADY else one.failures + 1
        name = f"replica {one.number}"
        if self._never_ready():
            # A start that failed before anything was ever served will fail again.
            return self._give_up(one, one.error)
        if one.failures > self.max_restarts:
            self.say(f"{name} died {one.failures} times in a row and is not started again")
            return self._give_up(one, one.error)
        wait = 0.0
        if one.failures > 1:
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (one.failures - 2))
        when = "at once" if not wait else f"in {wait:g} s"
        left = sum(other.state == "ready" for other in self.replicas)
        self.say(
            f"{name} died: {one.error.message.splitlines()[0]}; it is started again {when}, "
            f"{left} of {len(self.replicas)} replicas continue"
        )
        self.restarts += 1
        one.state = "lost"
        end = time.monotonic() + wait
        while not self.ending and (rest := end - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed(), rest)
        return not self.ending

    def _never_ready(self) -> bool:
        return not any(one.capacity for one in self.replicas)

    def _give_up(self, one: ReplicaProcess, error: HocketError) -> bool:
        one.state = "failed"
        first = self._never_ready()
        others = [other for other in self.replicas if other.state not in ("failed", "ended")]
        if (first or not others) and not self.fatal.done():
            self.fatal.set_exception(error)
        return False

    # --- waiting -----------------------------------------------------------------------------

    def _notify(self) -> None:
        self._wake.set()
        self._wake = asyncio.Event()

    def _changed(self) -> Coroutine[Any, Any, Any]:
        # Bound to the event of this moment: what happens before it is awaited is not missed.
        return self._wake.wait()


def _as_error(error: BaseException) -> HocketError:
    if isinstance(error, HocketError):
        return error
    return RankFailure(f"{type(error).__name__}: {error}")


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Done when `work` is, in a thread that the interpreter's end does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def body() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=body, name="hocket-replica", daemon=True).start()
    return future
