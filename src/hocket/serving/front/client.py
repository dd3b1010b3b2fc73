"""ReplicaClient: one replica as the parent's event loop sees it.

    client = await ReplicaClient.connect(path, token)       # returns when the replica is ready
    stream = client.submit(request)
    async for output in stream: ...                         # the last has its `finish`

Whatever ends a stream before its request has ended (`cancel`, the task being cancelled, the stream
being dropped) aborts the request, so that its memory is free at once. A stream that nobody reads
keeps one output, into which later ones are merged: its size is that of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import stat
import weakref
from pathlib import Path
from typing import Any, Self

from hocket.serving.front.frames import (
    MAX_COMMAND,
    MAX_EVENT,
    FrameReader,
    Message,
    decode_frame,
    encode,
    hello,
)
from hocket.serving.request import Output, Request, RequestRefused, TokenLogprobs
from hocket.spec.errors import HocketError

MAX_UNSENT = 1 << 26
"""Bytes of commands that wait for a driver to read them; then requests are refused."""
_CHUNK = 1 << 18


class ReplicaLost(HocketError):
    """The replica died, or hung up, before the request had ended."""


class ClientStream:
    """Outputs of one request, in order; an async iterator for one reader.

    Raises, while iterated:
        RequestRefused: the replica did not take it.
        ReplicaLost: the replica died.
    """

    def __init__(self, client: ReplicaClient, request: Request) -> None:
        self.id = request.id
        self._client = client
        self._next: Output | None = None
        self._error: HocketError | None = None
        self._over = False  # nothing will come any more
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while True:
            if self._next is not None:
                found, self._next = self._next, None
                return found
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._over:
                raise StopAsyncIteration
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                self._waiter = None

    def cancel(self) -> None:
        """End the request; its memory is free at once. Nothing else comes."""
        if not self._over:
            self._over = True
            self._client._abort(self.id)
        self._next = self._error = None
        self._wake()

    def __del__(self) -> None:
        if not self._over:
            self._over = True
            self._client._abort(self.id)

    def _give(self, output: Output) -> None:
        if output.finish_reason is not None:
            self._over = True
        self._next = output if self._next is None else _merged_outputs(self._next, output)
        self._wake()

    def _fail(self, error: HocketError) -> None:
        self._over = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ReplicaClient:
    """The connection to one replica's driver.

    Attributes:
        capacity: what the driver said when it was ready: `num_blocks`, `block_size` ...
        stats: its newest figures; empty before its first.
        lost: why the replica answers no more; None while it lives.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.capacity: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.lost: ReplicaLost | None = None
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = reader, writer
        self._frames = FrameReader(MAX_EVENT)
        self._streams: dict[str, weakref.ref[ClientStream]] = {}
        self._answers: dict[str, list[asyncio.Future[Message]]] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, path: str | os.PathLike[str], token: str | bytes) -> Self:
        """Connect to the driver that listens at `path`; returns when its replica is ready.

        Args:
            path: of its Unix socket, or of a file with `HOST PORT` of a driver on another host.
            token: the secret, 32 bytes or their hexadecimal form.

        Raises:
            ReplicaLost: nobody listens, the token is not known, or the replica died before.
        """
        secret = bytes.fromhex(token) if isinstance(token, str) else token
        try:
            if stat.S_ISREG(os.stat(path).st_mode):
                host, port = Path(path).read_text(encoding="utf-8").split()
                reader, writer = await asyncio.open_connection(host, int(port))
                connected: socket.socket = writer.get_extra_info("socket")
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            else:
                reader, writer = await asyncio.open_unix_connection(os.fspath(path))
        except OSError as error:
            raise ReplicaLost(f"the replica cannot be reached: {error}") from None
        client = cls(reader, writer)
        writer.write(hello(secret))
        ready = client._expect("ready")
        client._task = asyncio.create_task(client._listen())
        try:
            client.capacity = await ready
        except BaseException:
            await client.close()
            raise
        return client

    # --- requests ----------------------------------------------------------------------------

    def submit(self, request: Request) -> ClientStream:
        """Send a request.

        Raises:
            RequestRefused: it is larger than any that is read, or too many wait to be sent.
            ReplicaLost: the replica is gone.
        """
        assert request.id not in self._streams, f"two requests named {request.id}"
        frame = encode({"do": "add", "request": request.to_json()})
        if len(frame) > MAX_COMMAND:
            raise RequestRefused(
                f"the request has {len(frame)} bytes; at most {MAX_COMMAND} are read",
                kind="too_long",
            )
        if self.lost is None and self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            raise RequestRefused("the replica does not read", kind="full", retry_after=1.0)
        self._write(frame)
        stream = ClientStream(self, request)
        self._streams[request.id] = weakref.ref(stream)
        return stream

    def _abort(self, name: str) -> None:
        """May be called from any thread: a stream may be dropped in one."""
        if self._loop.is_closed():
            return

        def abort() -> None:
            if self._streams.pop(name, None) is not None and self.lost is None:
                self._writer.write(encode({"do": "abort", "ids": [name]}))

        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            abort()
        else:
            self._loop.call_soon_threadsafe(abort)

    # --- the replica as a whole --------------------------------------------------------------

    async def drain(self) -> None:
        """Take no request any more; returns when those it had have ended. Raises ReplicaLost."""
        await self._ask({"do": "drain"}, "drained")

    async def measured(self) -> dict[str, Any]:
        """The replica's figures at this moment: `stats` and what it `measured`."""
        return await self._ask({"do": "stats"}, "stats")

    async def record(self, steps: int) -> dict[str, Any]:
        """Have every rank record its next `steps` steps; returns the Timeline's JSON form."""
        found = await self._ask({"do": "record", "steps": steps}, "timeline")
        timeline: dict[str, Any] = found["timeline"]
        return timeline

    async def stop(self) -> None:
        """Have the ranks leave; returns when they hang up."""
        if self.lost is None:
            self._writer.write(encode({"do": "stop"}))
            if self._task is not None:
                await asyncio.wait({self._task})

    async def close(self) -> None:
        """Hang up; a replica whose parent hangs up leaves too. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(ReplicaLost("the connection to the replica was closed"))

    async def _ask(self, command: Message, event: str) -> Message:
        answer = self._expect(event)
        self._write(encode(command))
        return await answer

    def _expect(self, event: str) -> asyncio.Future[Message]:
        answer: asyncio.Future[Message] = self._loop.create_future()
        self._answers.setdefault(event, []).append(answer)
        return answer

    def _write(self, frame: bytes) -> None:
        if self.lost is not None:
            raise ReplicaLost(self.lost.message)
        self._writer.write(frame)

    # --- what arrives ------------------------------------------------------------------------

    async def _listen(self) -> None:
        why = "the replica has ended"
        try:
            while data := await self._reader.read(_CHUNK):
                for payload in self._frames.feed(data):
                    self._hear(decode_frame(payload))
        except OSError as error:
            why = f"the replica is gone: {error}"
        finally:
            self._end(ReplicaLost(why))
            # The streams keep a reset for a caller that asks how they closed, else print it.
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _hear(self, message: Message) -> None:
        match message["event"]:
            case "outputs":
                if "stats" in message:
                    self.stats = message["stats"]
                for one in message["outputs"]:
                    self._deliver(Output.from_json(one))
            case "refused":
                stream = self._take(message["id"])
                if stream is not None:
                    stream._fail(
                        RequestRefused(
                            message["message"],
                            kind=message["kind"],
                            retry_after=message["retry_after"],
                            hint=message.get("hint"),
                        )
                    )
            case event:
                if event == "stats":
                    self.stats = message["stats"]
                for answer in self._answers.pop(event, []):
                    if not answer.done():
                        answer.set_result(message)

    def _deliver(self, output: Output) -> None:
        # One that is unknown was cancelled; its last outputs were on their way.
        weak = self._streams.get(output.id)
        stream = None if weak is None else weak()
        if stream is not None:
            stream._give(output)
        if output.finish_reason is not None:
            self._streams.pop(output.id, None)

    def _take(self, name: str) -> ClientStream | None:
        weak = self._streams.pop(name, None)
        return None if weak is None else weak()

    def _end(self, error: ReplicaLost) -> None:
        if self.lost is not None:
            return
        self.lost = error
        with contextlib.suppress(RuntimeError, OSError):
            self._writer.close()
        weak, self._streams = list(self._streams.values()), {}
        for stream in (one() for one in weak):
            if stream is not None:
                stream._fail(ReplicaLost(error.message))
        for answers in self._answers.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(ReplicaLost(error.message))
        self._answers = {}


def _merged_outputs(first: Output, second: Output) -> Output:
    """Two outputs of one request, one after the other, as one."""
    return dataclasses.replace(
        second,
        tokens=first.tokens + second.tokens,
        logprobs=_joined(first.logprobs, second.logprobs),
        prompt_logprobs=_joined(first.prompt_logprobs, second.prompt_logprobs),
        cached=max(first.cached, second.cached),
    )


def _joined(
    first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    return second if first is None else first + (second or [])
