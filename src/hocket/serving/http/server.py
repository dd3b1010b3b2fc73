"""Front: the HTTP side of a server while it is open: requests on one socket, metrics on another.

front = await Front.open(service, door, metrics_door)
...
await front.close(30.0)      # no new requests; those under way have 30 s, then they are ended
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from hocket.serving.http.app import build_app, build_metrics_app
from hocket.serving.http.connection import Connection
from hocket.serving.http.service import HttpService


class _Server(uvicorn.Server):
    """uvicorn's, without its signals: the command that opened it handles those."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """An open server.

    Attributes:
        failed: gets an exception when a listener ends by itself.
    """

    def __init__(self, service: HttpService, servers: list[_Server]) -> None:
        self.service = service
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._servers = servers
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        service: HttpService,
        door: socket.socket,
        metrics_door: socket.socket | None = None,
        *,
        app: ASGIApp | None = None,
    ) -> Self:
        """Answer on sockets that are bound. `app`: instead of the service's own."""
        most = service.settings.max_connections
        apps = [(app or build_app(service), door, most)]
        if metrics_door is not None:
            apps.append((build_metrics_app(service), metrics_door, 64))
        servers = [_server(one, limit) for one, _, limit in apps]
        front = cls(service, servers)
        for server, (_, socket_, _) in zip(servers, apps, strict=True):
            socket_.setblocking(False)
            task = asyncio.create_task(server.serve(sockets=[socket_]))
            task.add_done_callback(front._ended)
            front._tasks.append(task)
        while not all(server.started for server in servers) and not front.failed.done():
            await asyncio.sleep(0.005)
        return front

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._closing is not None or self.failed.done() or task.cancelled():
            return
        self.failed.set_exception(task.exception() or RuntimeError("the HTTP server has ended"))

    async def close(self, seconds: float) -> None:
        """Take no new request; those under way have so many seconds. May be called again."""
        self.service.closing = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        ended, _ = await asyncio.wait((self._closing,), timeout=seconds)
        if not ended:
            for server in self._servers:
                server.force_exit = True
                for task in list(server.server_state.tasks):
                    task.cancel()
            await asyncio.wait((self._closing,), timeout=5.0)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # heard
        self.failed.cancel()

    async def _close(self) -> None:
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _server(app: ASGIApp, most: int) -> _Server:
    """A uvicorn server for an application."""
    protocol = type("Connection", (Connection,), {"max_connections": most})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a line for every malformed request would let anybody fill the disk
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        backlog=1024,
    )
    return _Server(config)
