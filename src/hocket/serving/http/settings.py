"""HttpSettings: how the HTTP side of a server behaves, and every bound on what it reads."""

from __future__ import annotations

import dataclasses
import ipaddress

from hocket.serving.http.auth import Keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Everything that the operator may choose.

    Attributes:
        host: the address that is bound. Loopback: only requests that name it are answered, so
            that no web page can reach the server under a name of its own (DNS rebinding).
        keys: None: everybody may ask.
        origins: of web pages on other sites that may ask (CORS); `*` is every one.
        deadline: seconds after which any request is ended; a request may ask for less.
        max_body: bytes of one request; max_bodies: of all that are being read.
        max_values: values in the JSON of one request.
        body_seconds: time to send a body; send_seconds: time to read a part of an answer.
        max_requests: that are under way, waiting ones included; max_connections: open ones.
        max_answers: prompts times n of one request. max_alternatives: of log-probabilities.
        max_stop: stop strings, and max_stop_characters: in all of them.
        max_rendered: characters that a chat template may write; render_seconds: its time.
        workers: threads that render and tokenize; max_jobs: that wait for one.
    """

    host: str = "127.0.0.1"
    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    deadline: float | None = None
    max_body: int = 8 << 20
    max_bodies: int = 256 << 20
    max_values: int = 1_000_000
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    max_requests: int = 1024
    max_connections: int = 2048
    max_answers: int = 128
    max_alternatives: int = 20
    max_stop: int = 16
    max_stop_characters: int = 4096
    max_rendered: int = 16 << 20
    render_seconds: float = 5.0
    workers: int = 2
    max_jobs: int = 256

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        return is_loopback(self.host)

    def for_metrics(self) -> HttpSettings:
        """Of the metrics' port: the same keys, which Prometheus sends too."""
        return dataclasses.replace(self, origins=())


def is_loopback(host: str) -> bool:
    """Whether an address is one of this machine's own."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
