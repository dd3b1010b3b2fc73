"""A real server on a loopback socket, in a thread of its own, before a fake replica."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hocket.models.chat_template import ChatTemplates
from hocket.serving.http.server import Front
from hocket.serving.http.service import HttpService, ServedModel
from hocket.serving.http.settings import HttpSettings
from tests.serving.http_fake import FakeReplica

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% if enable_thinking %}(think){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MODEL = "fake-model"


def words() -> Any:
    from hocket.serving.front.words import TokenizerFace
    from hocket.training.tokenizer import byte_tokenizer

    return TokenizerFace(byte_tokenizer().to_json())


@dataclasses.dataclass
class Door:
    """Where a server listens on this machine."""

    port: int

    def raw(self, data: bytes, *, read: bool = True) -> bytes:
        """Send bytes; what comes back until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as door:
            door.sendall(data)
            found = b""
            while read and (part := door.recv(65536)):
                found += part
        return found

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, *, data: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        data = data or json.dumps(body).encode()
        lines = {"Host": f"127.0.0.1:{self.port}", "Content-Type": "application/json"}
        lines |= {"Content-Length": str(len(data)), "Connection": "close", **(headers or {})}
        head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        return split(self.raw(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data))

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        lines = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", **headers}
        head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        return split(self.raw(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()))


@dataclasses.dataclass
class Live(Door):
    """A server of this process, and what stands behind it."""

    url: str
    metrics: str
    replica: FakeReplica
    service: HttpService
    loop: asyncio.AbstractEventLoop
    front: Front

    def run(self, call: Any) -> Any:
        """Await something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(60)

    def idle(self) -> bool:
        """Whether the replica has become idle, soon."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.replica.idle:
                return True
            time.sleep(0.005)
        return False


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """The parts of a response; chunks are joined."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            count = int(size, 16)
            whole, body = whole + body[:count], body[count + 2 :]
        body = whole
    return int(lines[0].split(" ")[1]), headers, body


def events(body: bytes) -> list[Any]:
    """The data of a stream; the last is "[DONE]"."""
    found = []
    for block in body.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                found.append(text if text == "[DONE]" else json.loads(text))
    return found


def error(body: bytes) -> dict[str, Any]:
    """The error of a response, in OpenAI's form."""
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}, found
    return found


@contextlib.contextmanager
def live(
    replica: FakeReplica | None = None,
    *,
    template: str | None = TEMPLATE,
    max_model_len: int = 512,
    check_structure: Callable[[str], object] | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """A server, until the end of the block."""
    replica = replica or FakeReplica()
    doors = [socket.socket(), socket.socket()]
    for door in doors:
        door.bind(("127.0.0.1", 0))
    ports = [door.getsockname()[1] for door in doors]
    begun: list[Live] = []
    open_ = threading.Event()
    end: list[asyncio.Event] = []

    async def main() -> None:
        service = HttpService(
            replica,
            words(),
            ServedModel(name=MODEL, max_model_len=max_model_len, vocab_size=257, stop=(256,)),
            None if template is None else ChatTemplates({"default": template}),
            HttpSettings(**settings),
            room=lambda: replica.num_blocks * replica.block_size,
            check_structure=check_structure,
        )
        front = await Front.open(service, doors[0], doors[1])
        end.append(asyncio.Event())
        begun.append(
            Live(
                url=f"http://127.0.0.1:{ports[0]}",
                port=ports[0],
                metrics=f"http://127.0.0.1:{ports[1]}",
                replica=replica,
                service=service,
                loop=asyncio.get_running_loop(),
                front=front,
            )
        )
        open_.set()
        await end[0].wait()
        await front.close(2.0)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert open_.wait(60)
    try:
        yield begun[0]
    finally:
        begun[0].loop.call_soon_threadsafe(end[0].set)
        thread.join(60)
        assert not thread.is_alive()
