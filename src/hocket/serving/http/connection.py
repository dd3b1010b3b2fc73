"""Connection: uvicorn's, with bounds on what comes before a request has begun.

uvicorn bounds the time between requests, but not that of a request's first lines, their size, or
the number of connections: one client could hold thousands open with a byte each.

A request that offers to speak another protocol (`Upgrade: h2c`, as Java's HTTP client sends with
every request) is answered as if it did not, as RFC 9110, section 7.8 allows; uvicorn would lose
its body, for its parser stops where the other protocol could begin.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hocket.serving.http.errors import ApiError, error_bytes

_OFFER = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """One connection.

    Class attributes:
        head_seconds: time to send a request's first lines. max_head: their bytes.
        max_connections: that are open at once.
    """

    head_seconds: ClassVar[float] = 20.0
    max_head: ClassVar[int] = 64 << 10
    max_connections: ClassVar[int] = 2048

    _head_timer: asyncio.TimerHandle | None = None
    _head_size = 0
    _in_head = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(ApiError(503, "too many connections are open", code="server_full"))
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_size += len(data)
            if self._head_timer is None:
                self._wait_for_head()
        self._parse(data)
        if self._in_head and self._head_size > self.max_head and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers have more than {self.max_head} bytes"))

    def _parse(self, data: bytes) -> None:
        """As the parent's `data_received`, and no offer of another protocol is taken."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as offer:
                    if (
                        self.parser.get_method() == b"CONNECT"
                    ):  # not an offer: a tunnel is asked for
                        self.send_400_response("this server is not a proxy")
                        return
                    # Its head was passed over; it comes again without the offer, then the rest.
                    data = self._head_without_offer() + data[offer.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            kept = value
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                kept = b", ".join(o for o in options if o.lower() not in _OFFER)
            if kept and name not in _OFFER:
                lines.append(name + b": " + kept)
        return b"\r\n".join((*lines, b"", b""))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_is_here()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head, self._head_size = True, 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        body = error_bytes(error)
        head = (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
        )
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n\r\n" + body)
        self.transport.close()
