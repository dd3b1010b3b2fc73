"""Client: one small HTTP client for all servers, on one thread, that counts tokens and seconds.

While a turn runs it only notes when which bytes came; what they say is read afterwards, so that the
client takes as little as possible of the processors that the server needs. `null_server` says how
fast it is when the server costs next to nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.serve.workload import tokens

SILENT = 300.0
"""Seconds after which a request without an answer counts as failed."""


class ServerError(Exception):
    """A server answered something else than what was asked."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request: where it goes and its JSON body."""

    path: str
    body: dict[str, Any]

    def wire(self) -> bytes:
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclasses.dataclass
class Answer:
    """One request's answer. Times are seconds from the moment it was sent.

    Attributes:
        tokens: generated ids.
        first: until its first token was there.
        last: until its last token was there.
        done: until the connection was closed.
    """

    tokens: list[int]
    first: float
    last: float
    done: float

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.last - self.first) / max(1, len(self.tokens) - 1)


class Exchange(asyncio.Protocol):
    """One connection: sends one request, keeps what comes with its time until it is closed."""

    def __init__(self, wire: bytes) -> None:
        self.wire = wire
        self.pieces: list[tuple[float, bytes]] = []
        self.sent = 0.0
        self.ended = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.sent = time.perf_counter()
        transport.write(self.wire)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = time.perf_counter()
        if not self.closed.done():
            self.closed.set_result(None)


def drive(port: int, asks: Sequence[Ask], clients: int) -> tuple[float, list[Answer]]:
    """Send all of `asks`, at most `clients` at a time; seconds of the whole, and the answers.

    Raises:
        ServerError: any of them was not answered with a whole stream.
    """
    exchanges: list[Exchange | None] = [None] * len(asks)
    wires = [ask.wire() for ask in asks]
    gc.collect()
    gc.freeze()
    seconds = asyncio.run(_drive(port, wires, clients, exchanges))
    gc.unfreeze()
    return seconds, [read(exchange) for exchange in exchanges if exchange is not None]


async def _drive(
    port: int, wires: list[bytes], clients: int, exchanges: list[Exchange | None]
) -> float:
    loop = asyncio.get_running_loop()
    waiting = iter(range(len(wires)))

    async def ask() -> None:
        for number in waiting:
            transport, exchange = await loop.create_connection(
                lambda number=number: Exchange(wires[number]), "127.0.0.1", port
            )
            exchanges[number] = exchange
            try:
                await asyncio.wait_for(exchange.closed, SILENT)
            except TimeoutError:
                transport.abort()
                raise ServerError(f"a request was not answered within {SILENT:.0f} s") from None

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return time.perf_counter() - began


def read(exchange: Exchange) -> Answer:
    """What the bytes of one exchange said.

    Raises:
        ServerError: not 200, an error in the stream, no whole stream, or not cut off by length.
    """
    whole = b"".join(data for _, data in exchange.pieces)
    head, _, body = whole.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ServerError(whole[:2000].decode(errors="replace") or "closed without an answer")
    if b"transfer-encoding: chunked" in head.lower():
        body = unchunked(body)
    written, reasons = "", []
    for line in body.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ServerError(line)
        for choice in event.get("choices", []):
            written += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("finish_reason"):
                reasons.append(choice["finish_reason"])
    if reasons != ["length"]:
        raise ServerError(f"finished by {reasons}, after {written!r}")
    times = [at for at, data in exchange.pieces if carries_text(data)]
    return Answer(
        tokens=tokens(written),
        first=times[0] - exchange.sent,
        last=times[-1] - exchange.sent,
        done=exchange.ended - exchange.sent,
    )


def carries_text(data: bytes) -> bool:
    """Whether some bytes of a stream hold generated text, and not only a role or a usage."""
    for mark in (b'"text":', b'"content":'):
        for piece in data.split(mark)[1:]:
            start = piece.lstrip()
            if start.startswith(b'"') and not start.startswith(b'""'):
                return True
    return False


def unchunked(body: bytes) -> bytes:
    """A body without the framing of chunked transfer.

    Raises:
        ServerError: it ends before its last chunk.
    """
    whole, at = b"", 0
    while True:
        line_end = body.find(b"\r\n", at)
        if line_end < 0:
            raise ServerError("the stream was cut off")
        size = int(body[at:line_end].split(b";")[0], 16)
        if size == 0:
            return whole
        at = line_end + 2
        whole += body[at : at + size]
        at += size + 2
