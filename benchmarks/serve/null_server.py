"""A server that computes nothing: streams as many tokens as were asked for, one event each.

It answers what the client could measure at best: `python -m benchmarks.serve.null_server PORT`. All
requests that are being answered get their next token in one write each, then the loop looks for
new ones, as a server that batches does.
"""

from __future__ import annotations

import asyncio
import json
import sys

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


def event(reason: str | None) -> bytes:
    choice = {"index": 0, "text": "000", "logprobs": None, "finish_reason": reason}
    line = b"data: " + json.dumps({"id": "null", "choices": [choice]}).encode() + b"\n\n"
    return chunk(line)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TOKEN, LAST = event(None), event("length") + chunk(b"data: [DONE]\n\n") + chunk(b"")


class Stream(asyncio.Protocol):
    def __init__(self, running: dict[Stream, int], asked: asyncio.Event) -> None:
        self.running, self.asked, self.received = running, asked, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length:")[1].split()[0]):
            self.transport.write(HEAD)
            self.running[self] = json.loads(body)["max_tokens"]
            self.asked.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.running.pop(self, None)


async def main(port: int) -> None:
    running: dict[Stream, int] = {}
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Stream(running, asked), "127.0.0.1", port)
    while await asked.wait():
        for stream, left in list(running.items()):
            stream.transport.write(TOKEN if left > 1 else LAST)
            if left > 1:
                running[stream] = left - 1
            else:
                del running[stream]
                stream.transport.close()
        if not running:
            asked.clear()
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
