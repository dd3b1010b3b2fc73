"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}.

ApiError          what a route raises, with its HTTP status
error_of          the ApiError that anything else raised means
error_response    its response; error_bytes: its body alone, for a stream that has begun
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hocket.serving.front.one_answer import AnswerFailed, DeadlinePassed
from hocket.serving.request import RequestRefused
from hocket.spec.errors import HocketError, OptionError

LINGER = 1.0
"""Seconds in which the rest of a body that is not read may still come."""
MOST_SHOWN = 1000
"""Characters of a message; what a caller sent may stand in it."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""By status. BackgroundLoad: of 4xx as 400, of 5xx `server_error`."""


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP. code: a word for programs. param: the field at fault.
        retry_after: seconds, for those who may ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MOST_SHOWN else message[:MOST_SHOWN] + " ..."
        self.code = code
        self.param = None if param is None else param[:200]
        self.retry_after = retry_after
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        return TYPES.get(self.status, usual)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


_REFUSED = {
    "full": (429, "queue_full"),
    "too_long": (400, "context_length_exceeded"),
    "never_fits": (400, "cache_size_exceeded"),
    "bad": (400, None),
}


def http_error(error: BaseException) -> ApiError:
    """What an exception of ours means to the client; anything unknown is a fault of ours, 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestRefused):
        status, code = _REFUSED[error.kind]
        after = (error.retry_after or 1.0) if status == 429 else None
        return ApiError(status, _text(error), code=code, retry_after=after)
    if isinstance(error, OptionError):
        return ApiError(400, _text(error))
    if isinstance(error, DeadlinePassed):
        return ApiError(504, _text(error), code="deadline_exceeded")
    if isinstance(error, AnswerFailed):
        return ApiError(500, _text(error), code="answer_failed")
    if isinstance(error, HocketError):
        return ApiError(503, _text(error), code="service_unavailable", retry_after=1.0)
    return ApiError(500, "the server failed; see its log", code="internal_error")


def _text(error: HocketError) -> str:
    return error.message if error.hint is None else f"{error.message} (hint: {error.hint})"


def error_bytes(error: ApiError) -> bytes:
    """The body."""
    body = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": body}).encode()


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return Response(error_bytes(error), error.status, headers, media_type="application/json")


async def refuse_unread(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read to its end.

    A connection that is closed while data still comes is reset, and then the client may never
    see the answer: the rest is thrown away before the answer ends, for a little while.
    """

    async def held(message: Message) -> None:
        await send({**message, "more_body": True} if "body" in message else message)

    await error_response(error)(scope, receive, held)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
