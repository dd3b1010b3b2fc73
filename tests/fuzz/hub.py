"""Replies of a Hub: one download as a file of replies, mutated and then served on loopback.

The file has an entry for each request that a download makes: status, headers and body.
huggingface_hub and the network stack are the real ones; only the server's address can be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.models.hub_limits import LONGEST_WAIT
from tests.fuzz import mutate
from tests.fuzz.kinds import copied, kind, model_folder
from tests.hub_server import TOKEN, Handler, Hub, Repo, isolated, point
from tests.hub_server import folder as files_of

FILE = "replies.json"
STATUSES = (
    0, 99, 100, 103, 200, 201, 204, 206, 300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 408,
    409, 410, 416, 418, 429, 451, 500, 502, 503, 504, 599, 999, -1,
)  # fmt: skip
PATHS = (
    "../../x", "/etc/hocket-fuzz", "a/../../../x", "..\\..\\x", ".", "..", "", "a\x00b", "x" * 300,
    "config.json", "config.json/x", "model.safetensors.index.json/x", "\ud800", ".git/config",
    "refs/main", "\u202egnp.exe", "modeling_x.py",
)  # fmt: skip
HEADERS = {
    "ETag": ('"x"', "", '""', "W/\"x\"", '"' + "0" * 64 + '"', '"' + "0" * 40 + '"', '"../../x"',
             '"a/b"', "\x00"),
    "X-Linked-Etag": ('"x"', "", '"' + "0" * 64 + '"', '"../../x"', '"a/b"'),
    "X-Linked-Size": ("0", "-1", "1", "99999999999999999999", "x", "", "1e3"),
    "Content-Length": ("0", "-1", "1", "99999999999999999999", "x", "", "40000000000"),
    "X-Repo-Commit": ("main", "", "../../x", "0" * 40, "x" * 5000, "a/b"),
    "Location": ("{hub}/", "{storage}/cdn/", "", "../../x", "//127.0.0.1:9/x", "file:///etc/passwd",
                 "http://169.254.169.254/latest", "{hub}/org/name/resolve/main/config.json", "http://[",
                 "\x00", "ftp://x/y"),
    "Link": ('<{hub}/api/models/org/name/tree/main?cursor=1>; rel="next"', "<>; rel=next",
             '<http://169.254.169.254/>; rel="next"', '<{self}>; rel="next"'),
    "Content-Type": ("text/html", "application/json; charset=utf-7", ""),
    "Content-Encoding": ("gzip", "br", "x"),
    "Transfer-Encoding": ("chunked", "gzip"),
    "Retry-After": ("99999999", "-1", "x", "\u00b2", "9" * 5000),
    "RateLimit": ('"api";r=0;t=99999999', '"api";r=0;t=-1', "x"),
    "X-Error-Code": ("GatedRepo", "RepoNotFound", "EntryNotFound", "RevisionNotFound", "x"),
    "Content-Range": ("bytes 5-3/1", "x", "bytes */0"),
    "Set-Cookie": ("a=b", "\x00"),
}  # fmt: skip


class _Replies(Handler):
    """Records the replies of a Hub, or gives those of a file."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def route(self) -> None:
        key, host = f"{self.command} {self.path}", self.headers.get("Host", "")
        if host.startswith("localhost") and self.headers.get("Authorization"):
            self.server.leaked = True
        reply = self.server.given.get(key) if self.server.given is not None else None
        if reply is None:
            return super().route()
        self._give(reply)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("Content-Length", str(len(body)))
        if self.server.given is None and status in (200, 302) and not self.headers.get("Range"):
            text = self.server.placeholders(body.decode("latin-1"))
            is_json = named.get("Content-Type") == "application/json"
            self.server.recorded[f"{self.command} {self.path}"] = {
                "status": status,
                "headers": {k: self.server.placeholders(v) for k, v in named.items()},
                "body": json.loads(text) if is_json else text,
            }
        super().answer(status, body, **headers)

    def _give(self, reply: Any) -> None:
        """Answer by an entry of the file, whatever is in it."""
        self.close_connection = True
        reply = reply if isinstance(reply, dict) else {"status": 200, "body": reply}
        body = reply.get("body")
        data = body.encode("latin-1", "replace") if isinstance(body, str) else mutate.text_of(body)
        headers = reply.get("headers")
        named = dict(headers) if isinstance(headers, dict) else {"X": str(headers)}
        status = reply.get("status")
        if status == 200 and self.headers.get("Range") and isinstance(body, str):
            self.ranged(data)
            return
        if isinstance(body, (dict, list)) and named.get("Content-Length", "").isdigit():
            named["Content-Length"] = str(len(data))
        head = [f"HTTP/1.1 {_text(status)} X", *(f"{k}: {_text(v)}" for k, v in named.items())]
        text = self.server.addresses("\r\n".join([*head, "Connection: close", "", ""]))
        text = text.replace("{self}", self.server.address + self.path)
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode("latin-1", "replace"))
            if self.command != "HEAD":
                self.wfile.write(data)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)[:5000]


class _Server(Hub):
    """`given`: the file's replies, by request; None records. `leaked`: a token reached storage."""

    def __init__(self, *repos: Repo, given: dict[str, Any] | None = None) -> None:
        super().__init__(*repos)
        self.RequestHandlerClass = _Replies
        self.given = given
        self.recorded: dict[str, Any] = {}
        self.leaked = False

    def placeholders(self, text: str) -> str:
        return text.replace(self.address, "{hub}").replace(self.storage, "{storage}")

    def addresses(self, text: str) -> str:
        return text.replace("{hub}", self.address).replace("{storage}", self.storage)

    def handle_error(self, *_: Any) -> None:
        """A client that ends a connection is no news."""


@contextlib.contextmanager
def _served(server: _Server, home: Path) -> Iterator[None]:
    """Within, this process uses that server, a new cache and a token."""
    from huggingface_hub import constants

    thread = threading.Thread(target=server.serve_forever, args=(0.002,), daemon=True)
    thread.start()
    shutil.rmtree(home, ignore_errors=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            isolated(patch, home)
            point(patch, server.address)
            patch.setenv("HF_TOKEN", TOKEN)
            patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 30)
            patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 30)
            patch.setattr(time, "sleep", _waits)
            yield
    finally:
        server.shutdown()
        server.server_close()


def _waits(seconds: float) -> None:
    """Takes no time, and is not as long as a reply may ask."""
    assert seconds <= LONGEST_WAIT + 1, f"a wait of {seconds:,.0f} s"


def _resolved(home: Path) -> None:
    """Download and read a model; what was downloaded has the SHA-256 that the Hub gave."""
    from hocket.models.source import resolve_model

    source = resolve_model("org/name")
    assert source.weights is not None
    for file in source.weights.rglob("*"):
        blob = os.path.basename(os.readlink(file)) if file.is_symlink() else ""
        if len(blob) == 64:
            assert hashlib.sha256(file.read_bytes()).hexdigest() == blob, f"{file.name} is damaged"
        assert home in file.resolve().parents, f"{file} leads outside of the cache"


def _record(folder: Path) -> None:
    (folder / "model").mkdir()
    model_folder(folder / "model")
    repo = Repo("org/name", files_of(folder / "model"))
    shutil.rmtree(folder / "model")
    server = _Server(repo)
    with _served(server, folder / "hf"):
        _resolved((folder / "hf").resolve())
    (folder / FILE).write_text(json.dumps(server.recorded))


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """Replies with one to three changes: to any value, or to what a download goes by."""
    replies = json.loads(data)
    if rng.random() < 0.4:
        return json.dumps(mutate.mutated(replies, rng)).encode()
    for _ in range(rng.choice((1, 1, 2, 3))):
        reply = replies[rng.choice(list(replies))]
        action = rng.randrange(6)
        if action == 0:
            reply["status"] = rng.choice(STATUSES)
        elif action in (1, 2):
            name = rng.choice([k for k in HEADERS if k in reply["headers"]] or list(HEADERS))
            name = name if rng.random() < 0.7 else rng.choice(list(HEADERS))
            reply["headers"][name] = rng.choice(HEADERS[name])
        elif action == 3 and reply["headers"]:
            del reply["headers"][rng.choice(list(reply["headers"]))]
        elif isinstance(reply["body"], str):
            reply["body"] = _damaged(reply["body"], rng)
        else:
            _file(reply["body"], rng)
    return json.dumps(replies).encode()


def _damaged(body: str, rng: random.Random) -> str:
    return mutate.damaged(body.encode("latin-1"), rng).decode("latin-1")


def _file(body: Any, rng: random.Random) -> None:
    """Change a listing of files: a name, a size, a hash, an entry twice."""
    entries = body.get("siblings") if isinstance(body, dict) else body
    if not isinstance(entries, list) or not entries:
        return
    entry = rng.choice(entries)
    if not isinstance(entry, dict):
        return
    action = rng.randrange(5)
    if action == 0:
        entries.append(json.loads(json.dumps(entry)))
    if action <= 2:
        entry["path" if "path" in entry else "rfilename"] = rng.choice(PATHS)
    elif action == 3:
        entry["size"] = rng.choice((0, -1, 1, 2**40, 2**63, 1.5, "7", None))
    else:
        entry["lfs"] = rng.choice(
            ({"oid": "0" * 64, "size": 1, "pointerSize": 1}, {"oid": "../../x"}, None, [], 7)
        )


@kind("Hub's replies", FILE, copied(_record), _mutated, calls=True)
def _download(folder: Path) -> None:
    found = json.loads((folder / FILE).read_bytes())
    server = _Server(given=found if isinstance(found, dict) else {})
    home = (folder / "hf").resolve()
    with _served(server, home):
        _resolved(home)
        assert not server.leaked, "a token reached the storage"
