"""Call: one HTTP request while it is answered, and the endpoint that makes it.

    body read within bounds -> handler in a task of its own  ->  response, or events as they come
                               meanwhile: is the client there?   gone: the handler is cancelled

A handler that is cancelled ends its Completion, and with it the requests: whether a stream or a
plain response was to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hocket.serving.front.completion import CompletionCall
from hocket.serving.http.body import parsed
from hocket.serving.http.errors import (
    ApiError,
    bad,
    error_bytes,
    error_response,
    http_error,
    refuse_unread,
)
from hocket.serving.http.gate import log_fault
from hocket.serving.http.service import Caller, HttpService

DONE = b"data: [DONE]\n\n"
DEADLINE = "x-deadline-seconds"
"""Header with the seconds after which the client has no use for an answer."""

quoted = json.encoder.encode_basestring_ascii
"""A text as JSON, in C."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]

Handler = Callable[["Call"], Awaitable[Response | None]]


class Call:
    """One request.

    Attributes:
        service: what answers. body: the JSON object. who: the caller.
        sending: since when a part of a stream waits for the client to read; None: none does.
    """

    def __init__(self, service: HttpService, body: dict[str, Any], who: Caller, send: Send) -> None:
        self.service = service
        self.body = body
        self.who = who
        self.sending: float | None = None
        self.created = int(time.time())
        self._send = send

    @contextlib.contextmanager
    def counted(self, completion: CompletionCall) -> Any:
        """Within, a completion is run; at the end its requests are over and it is counted."""
        try:
            yield completion
        except asyncio.CancelledError:
            self.service.metrics.cancelled.inc()
            raise
        finally:
            completion.cancel()
            self.service.metrics.tell(completion, time.monotonic())

    async def stream(self, parts: AsyncIterator[bytes], *, name_errors: bool = False) -> None:
        """Send events as they come.

        Nothing is sent before the first: what goes wrong until then is a response with its
        status; later, it is an event. `name_errors`: events have names, as those of responses.
        """
        try:
            part: bytes | None = await anext(parts, None)
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            )
            try:
                while part is not None:
                    await self._give(part)
                    part = await anext(parts, None)
            except Exception as error:
                found = http_error(error)
                if found.code == "internal_error":
                    log_fault(self.who.id, error)
                name = b"event: error\n" if name_errors else b""
                await self._give(name + b"data: " + error_bytes(found) + b"\n\n" + DONE)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(parts, "aclose", None)
            if close is not None:
                await close()

    async def _give(self, part: bytes) -> None:
        self.sending = time.monotonic()
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self.sending = None


class Endpoint:
    """An ASGI application for one route with a JSON body."""

    def __init__(self, service: HttpService, handler: Handler) -> None:
        self.service = service
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            state = scope.setdefault("state", {})
            who = Caller(state["id"], state.get("user", ""), _deadline(request))
            data = await self.service.bodies.read(request)
        except ClientDisconnect:
            return
        except ApiError as error:
            await refuse_unread(error, scope, receive, send)
            return
        try:
            body = parsed(data, self.service.settings.max_values)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        call = Call(self.service, body, who, send)
        await self._answer(call, scope, receive, send)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self.handler(call))
        watch = asyncio.ensure_future(_gone(call, receive, self.service.settings.send_seconds))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            try:
                response = work.result()
            except Exception as error:
                found = http_error(error)
                if found.code == "internal_error":
                    log_fault(call.who.id, error)
                response = error_response(found)
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)
        if response is not None:
            await response(scope, receive, send)


async def _gone(call: Call, receive: Receive, patience: float) -> None:
    """Returns when the client is gone, or has not read for so many seconds."""
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        while not (await asyncio.wait((listening,), timeout=min(patience, 5.0)))[0]:
            since = call.sending
            if since is not None and time.monotonic() - since > patience:
                return
    finally:
        listening.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _deadline(request: Request) -> float | None:
    given = request.headers.get(DEADLINE)
    if given is None:
        return None
    try:
        seconds = float(given[:40])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 1e9:
        raise bad(f"the header {DEADLINE} must be seconds over 0", DEADLINE)
    return seconds


def json_response(content: Any, status: int = 200) -> Response:
    text = json.dumps(content, separators=(",", ":"))
    return Response(text.encode(), status, media_type="application/json")
