"""The body of a request: read within bounds, then JSON of bounded size, depth and numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from hocket.serving.http.errors import ApiError, bad
from hocket.serving.http.settings import HttpSettings


class Bodies:
    """Reads bodies; knows how many bytes of all of them are held."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.held = 0

    async def read(self, request: Request) -> bytes:
        """The bytes that a request holds.

        Raises:
            ApiError: too many, too slow, or of a wrong kind; the rest is unread.
            ClientDisconnect: the client went away.
        """
        with self._room(request) as room:
            try:
                async with asyncio.timeout(self.settings.body_seconds):
                    return await room.read(request)
            except TimeoutError:
                seconds = self.settings.body_seconds
                raise ApiError(
                    408,
                    f"the body did not come within {seconds:g} s",
                    headers={"Connection": "close"},
                ) from None

    @contextlib.contextmanager
    def _room(self, request: Request) -> Iterator[_Room]:
        room = _Room(self)
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip()
        if kind.lower() not in ("application/json", ""):
            raise ApiError(415, f"the body is {kind[:100]}; it must be application/json")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.settings.max_body:
            raise self.too_large(length[:20])
        try:
            yield room
        finally:
            self.held -= room.size

    def too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes; at most {self.settings.max_body} are read",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class _Room:
    """What one body takes of the bytes that all may hold."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.size = 0

    async def read(self, request: Request) -> bytes:
        parts: list[bytes] = []
        limit = self.bodies.settings
        async for part in request.stream():
            self.size += len(part)
            self.bodies.held += len(part)
            if self.size > limit.max_body:
                raise self.bodies.too_large(f"more than {self.size}")
            if self.bodies.held > limit.max_bodies:
                raise ApiError(
                    429,
                    f"{self.bodies.held} bytes of requests are being read; "
                    f"at most {limit.max_bodies}",
                    code="bodies_full",
                    retry_after=1.0,
                    headers={"Connection": "close"},
                )
            parts.append(part)
        return b"".join(parts)


def parsed(data: bytes, max_values: int) -> dict[str, Any]:
    """The object in some JSON, without null fields, which mean absent ones. Raises ApiError.

    The parser bounds depth and the digits of numbers and takes no half of a surrogate pair; the
    number of values is bounded before it runs by that of commas, so that a body of empty lists
    cannot become a hundred times its size.
    """
    if not data:
        raise bad("the body is empty; it must be a JSON object")
    if data.count(b",") >= max_values:
        raise ApiError(413, f"the body holds more than {max_values} values", code="body_too_large")
    try:
        found = from_json(data, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise bad(f"the body is a JSON {_KINDS.get(type(found), 'null')}; it must be an object")
    return {name: value for name, value in found.items() if value is not None}


_KINDS = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}

__all__ = ["Bodies", "ClientDisconnect", "parsed"]
