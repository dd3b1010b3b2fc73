"""Gate: what every request passes before any route sees it, and every response after.

    id -> name of the host -> origin -> key -> room -> route
    security headers, the id, the count by status  <-  response

Denied by default: a route that is not named open needs a key where there are keys, whether it
exists or not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.serving.http.errors import ApiError, error_response, refuse_unread
from hocket.serving.http.metrics import ServerMetrics
from hocket.serving.http.settings import HttpSettings, is_loopback

log = logging.getLogger("hocket.http")

OPEN = frozenset(("/health", "/ready", "/docs"))
"""Routes that need no key: they show nothing of the model, nor of hocket's version."""
PAGE = "/"
"""Answered without a key by a page that asks for one, with status 401."""
REQUEST_ID = b"x-request-id"

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_FAULT_SECONDS = 10.0
_faults = {"since": 0.0, "left": 0}


def log_fault(name: str, error: BaseException) -> None:
    """A fault of ours, with its traceback; at most some in ten seconds, so that a client
    that finds one cannot fill the disk with it.
    """
    now = time.monotonic()
    if now - _faults["since"] > _FAULT_SECONDS:
        _faults.update(since=now, left=5)
    if _faults["left"] > 0:
        _faults["left"] -= 1
        log.error("request %s failed", name, exc_info=error)


class Gate:
    """ASGI middleware.

    Args:
        metrics: what counts the responses; None: nothing does.
    """

    def __init__(
        self, app: ASGIApp, settings: HttpSettings, metrics: ServerMetrics | None = None
    ) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the server hangs up
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID, b"")
        name = given if _ID.match(given) else secrets.token_hex(12).encode()
        # Two requests of one client may have the same id; the engine's must be its own.
        scope["state"] = {"id": secrets.token_hex(12), "user": ""}
        added = [(REQUEST_ID, name), *_SECURITY, *self._cors(headers)]
        status = 0

        async def dressed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        self.under_way += 1
        try:
            try:
                self._check(scope, headers)
            except ApiError as error:
                await refuse_unread(error, scope, receive, dressed)
                return
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await _preflight(dressed)
                return
            await self.app(scope, receive, dressed)
        except asyncio.CancelledError:  # the server ends first; uvicorn would log a traceback
            if status == 0:
                found = ApiError(503, "the server is ending", retry_after=1.0)
                await error_response(found)(scope, receive, dressed)
        except Exception as error:
            log_fault(str(scope["state"]["id"]), error)
            if status == 0:
                found = ApiError(500, "the server failed; see its log")
                await error_response(found)(scope, receive, dressed)
        finally:
            self.under_way -= 1
            if self.metrics is not None:
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.metrics.responses.labels(path, str(status or "gone")).inc()
                self.metrics.under_way.set(self.under_way)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError for a request that goes no further."""
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise ApiError(400, "a request names one host")  # proxies may have judged another
        host = headers.get(b"host", b"").decode("latin-1")
        if self.settings.loopback and not is_loopback(_hostname(host)):
            raise ApiError(403, f"this server answers to localhost, not to {host[:100]!r}")
        self._check_origin(headers, host)
        path = scope["path"]
        keys = self.settings.keys
        if keys is not None and path not in OPEN:
            user = keys.user(headers.get(b"authorization"))
            preflight = scope["method"] == "OPTIONS" and b"origin" in headers
            if user is None and path == PAGE and scope["method"] in ("GET", "HEAD"):
                scope["state"]["stranger"] = True
            elif user is None and not preflight:
                raise ApiError(
                    401,
                    "a key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["state"]["user"] = user or ""
        if self.under_way > self.settings.max_requests and path not in OPEN:
            raise ApiError(
                429,
                f"{self.settings.max_requests} requests are under way",
                code="server_full",
                retry_after=1.0,
            )

    def _check_origin(self, headers: dict[bytes, bytes], host: str) -> None:
        """A page of another site may not ask in its visitor's name.

        Browsers tell the origin with every request that could change something.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._allowed(origin) or self.settings.keys is not None:
            return
        if origin.split("://", 1)[-1].lower() != host.lower():
            raise ApiError(403, f"pages of {origin[:100]!r} may not use this server")

    def _allowed(self, origin: str) -> bool:
        return origin in self.settings.origins or "*" in self.settings.origins

    def _cors(self, headers: MutableMapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        origin = headers.get(b"origin", b"")
        if not origin or not self._allowed(origin.decode("latin-1")):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


async def _preflight(send: Any) -> None:
    """What a browser asks before it sends what a page of an allowed site wants."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host.split("]", 1)[0][1:]
    return host.rsplit(":", 1)[0]
