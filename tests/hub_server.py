"""A small Hub on loopback: the routes of the Hugging Face Hub that downloads and pushes use.

    with serving(Repo("org/name", files={...})) as hub:   # hub.address is an HF_ENDPOINT

Answers are as the Hub's documented API gives them; huggingface_hub and datasets are the real ones.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

TOKEN = "hf_loopback"


def lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin", ".parquet"))


@dataclasses.dataclass
class Repo:
    """A repository.

    `gated`: "" (open), "licence" (403 even with the token) or "token" (401 without one). `cuts`:
    byte counts after which the next connections for an LFS file are broken off. `busy`: statuses
    that the next requests to the API are answered with. `damaged`: LFS files that arrive with one
    byte changed, once for each mention.
    """

    id: str
    files: dict[str, bytes]
    kind: str = "model"
    gated: str = ""
    branches: tuple[str, ...] = ("main",)
    cuts: list[int] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)
    busy: list[int] = dataclasses.field(default_factory=list)
    private: bool | None = None

    @property
    def commit(self) -> str:
        listed = [(name, hashlib.sha1(data).hexdigest()) for name, data in self.files.items()]
        return hashlib.sha1(repr(sorted(listed)).encode()).hexdigest()

    def etag(self, path: str) -> str:
        data = self.files[path]
        if lfs(path):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, path: str) -> dict:
        data = self.files[path]
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found = {"type": "file", "path": path, "size": len(data), "oid": oid}
        if lfs(path):
            found["lfs"] = {"oid": self.etag(path), "size": len(data), "pointerSize": 134}
        return found


def folder(path: Path, pattern: str = "*") -> dict[str, bytes]:
    """The files of a directory, as a Repo has them."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob(pattern))
        if file.is_file()
    }


class Hub(ThreadingHTTPServer):
    """`requests`: (method, path, Range header) of each, in their order."""

    daemon_threads = True

    def __init__(self, *repos: Repo) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = {(repo.kind, repo.id): repo for repo in repos}
        self.requests: list[tuple[str, str, str | None]] = []
        self.objects: dict[str, bytes] = {}
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage(self) -> str:
        """Where LFS files are: another host, as the Hub has it."""
        return f"http://localhost:{self.server_address[1]}"

    def fetched(self, ending: str) -> list[str | None]:
        """The Range headers of the requests for the bodies of files that end so."""
        oids = {repo.etag(path): path for repo in self.repos.values() for path in repo.files}
        return [
            ranged
            for method, path, ranged in self.requests
            if method == "GET"
            and (path.endswith(ending) or oids.get(path.rpartition("/")[2], "").endswith(ending))
            and ("/cdn/" in path or "/resolve/" in path)
        ]


@contextlib.contextmanager
def serving(*repos: Repo) -> Iterator[Hub]:
    server = Hub(*repos)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        for connection in server.connections:  # those that a client keeps for its next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_args: object) -> None: ...

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def do_PUT(self) -> None:
        body = self.body()
        self.server.requests.append(("PUT", self.path, None))
        self.server.objects[self.path.rpartition("/")[2]] = body
        self.answer(200, b"")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def error(self, status: int, code: str, message: str = "") -> None:
        self.answer(
            status, b"{}", X_Error_Code=code, X_Error_Message=message or code,
            Content_Type="application/json",
        )  # fmt: skip

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def route(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(address.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/cdn/"):
            return self.cdn(path)
        if path in ("/api/models", "/api/datasets"):
            kind = path.removeprefix("/api/").removesuffix("s")
            return self.json(
                [
                    {"id": one.id, "modelId": one.id}
                    for one in self.server.repos.values()
                    if one.kind == kind
                    and one.id.startswith(query.get("author", ""))
                    and query.get("search", "").lower() in one.id.lower()
                ]
            )
        api = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([a-z-]+)(?:/(.+))?)?", path)
        if api:
            return self.api(*api.groups(), query)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            kind = "dataset" if file[1] else "model"
            repo = self.repo(kind, file[2], file[3])
            return None if repo is None else self.resolve(repo, file[4])
        return self.error(404, "RepoNotFound")

    def repo(self, kind: str, name: str, revision: str | None) -> Repo | None:
        """The repository, or None when an error was answered."""
        repo = self.server.repos.get((kind, name))
        if repo is None:
            self.error(404 if self.known else 401, "RepoNotFound")
        elif repo.private and not self.known:
            self.error(401, "RepoNotFound")
        elif revision not in (None, repo.commit, *repo.branches):
            self.error(404, "RevisionNotFound")
        else:
            return repo
        return None

    def api(
        self, kind: str, name: str, what: str | None, rest: str | None, query: dict[str, str]
    ) -> None:
        revision = rest if what in ("revision", "tree", "paths-info") else None
        inside = ""
        if what == "tree" and revision and "/" in revision:
            revision, _, inside = revision.partition("/")
        repo = self.repo(kind, name, revision)
        if repo is None:
            return None
        if repo.busy:
            return self.error(repo.busy.pop(0), "ServiceUnavailable")
        if what in (None, "revision"):
            return self.json(
                {
                    "id": repo.id, "modelId": repo.id, "sha": repo.commit,
                    "private": bool(repo.private), "gated": bool(repo.gated), "tags": [],
                    "siblings": [{"rfilename": name} for name in repo.files],
                }
            )  # fmt: skip
        if what == "refs":
            refs = [
                {"name": b, "ref": f"refs/heads/{b}", "targetCommit": repo.commit}
                for b in repo.branches
            ]
            return self.json({"branches": refs, "tags": [], "converts": []})
        if what == "tree":
            recursive = query.get("recursive", "").lower() in ("true", "1")
            return self.json(self.tree(repo, inside, recursive))
        return self.error(404, "EntryNotFound")

    def tree(self, repo: Repo, inside: str, recursive: bool) -> list[dict]:
        start = f"{inside}/" if inside else ""
        found, folders = [], set()
        for path in repo.files:
            if not path.startswith(start):
                continue
            head, slash, _ = path.removeprefix(start).partition("/")
            if slash and start + head not in folders:
                folders.add(start + head)
                found.append(
                    {"type": "directory", "path": start + head, "size": 0, "oid": "0" * 40}
                )
            if not slash or recursive:
                found.append(repo.entry(path))
        return found

    def resolve(self, repo: Repo, path: str) -> None:
        if repo.gated and not (self.known and repo.gated == "token"):
            return self.error(
                403 if self.known else 401, "GatedRepo", f"Access to {repo.kind} is restricted"
            )
        if path not in repo.files:
            return self.error(404, "EntryNotFound")
        data, etag = repo.files[path], repo.etag(path)
        if lfs(path):
            return self.answer(
                302, b"", Location=f"{self.server.storage}/cdn/{repo.kind}/{repo.id}/{etag}",
                X_Repo_Commit=repo.commit, X_Linked_Etag=f'"{etag}"',
                X_Linked_Size=str(len(data)),
            )  # fmt: skip
        return self.ranged(data, ETag=f'"{etag}"', X_Repo_Commit=repo.commit)

    def cdn(self, path: str) -> None:
        _, _, kind, owner, name, oid = path.split("/")
        repo = self.server.repos[kind, f"{owner}/{name}"]
        file = next(f for f in repo.files if lfs(f) and repo.etag(f) == oid)
        data = repo.files[file]
        if self.command == "GET" and file in repo.damaged:
            repo.damaged.remove(file)
            data = data[:-1] + bytes([data[-1] ^ 1])
        cut = repo.cuts.pop(0) if repo.cuts and self.command == "GET" else None
        self.ranged(data, cut=cut, ETag=f'"{oid}"')

    def ranged(self, data: bytes, *, cut: int | None = None, **headers: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status, total = 200, len(data)
        if match and int(match[1]) < total:
            first, last = int(match[1]), int(match[2] or total - 1)
            data, status = data[first : last + 1], 206
            headers["Content_Range"] = f"bytes {first}-{min(last, total - 1)}/{total}"
        if cut is None:
            return self.answer(status, data, Accept_Ranges="bytes", **headers)
        self.answer(status, data[:cut], Content_Length=str(len(data)), **headers)
        self.close_connection = True
        return None

    # --- what is written ---------------------------------------------------------------------

    def do_POST(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.requests.append(("POST", path, None))
        body = self.body()
        if match := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            return self.paths_info(match[1], match[2], match[3], body)
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if not self.known:
            return self.error(401, "", "Invalid user token.")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            if ("model", name) in self.server.repos:
                return self.json({"error": "exists", "url": f"{self.server.address}/{name}"}, 409)
            private = asked.get("private") or asked.get("visibility") == "private"
            self.server.repos["model", name] = Repo(name, {}, private=bool(private))
            return self.json({"url": f"{self.server.address}/{name}", "name": name})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {
                    "path": file["path"], "shouldIgnore": False,
                    "uploadMode": "lfs" if lfs(file["path"]) else "regular",
                }
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self.json({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": one["oid"], "size": one["size"],
                    "actions": {"upload": {"href": f"{self.server.address}/up/{one['oid']}"}},
                }
                for one in json.loads(body)["objects"]
            ]  # fmt: skip
            return self.json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self.commit(self.server.repos["model", match[1]], body)
        return self.error(404, "EntryNotFound")

    def paths_info(self, kind: str, name: str, revision: str, body: bytes) -> None:
        repo = self.repo(kind, name, revision)
        if repo is None:
            return
        if self.headers.get("Content-Type", "").startswith("application/json"):
            asked = json.loads(body)["paths"]
        else:
            asked = urllib.parse.parse_qs(body.decode()).get("paths", [])
        found: list[dict] = []
        for path in asked:
            if path in repo.files:
                found.append(repo.entry(path))
            elif any(file.startswith(f"{path}/") for file in repo.files):
                found.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        self.json(found)

    def commit(self, repo: Repo, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repo.files[value["path"]] = self.server.objects[value["oid"]]
        page = f"{self.server.address}/{repo.id}/commit/{repo.commit}"
        self.json({"success": True, "commitUrl": page, "commitOid": repo.commit})


@pytest.fixture
def loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., contextlib.AbstractContextManager[Hub]]:
    """`with loopback(repo, ...) as hub`: a Hub that this process and its children use, with an
    empty cache, no token and no Xet."""
    isolated(monkeypatch, tmp_path / "hf")

    @contextlib.contextmanager
    def with_repos(*repos: Repo) -> Iterator[Hub]:
        with serving(*repos) as server:
            point(monkeypatch, server.address)
            yield server

    return with_repos


def isolated(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """An empty cache in `home`, no token, no Xet, no pause between attempts."""
    from huggingface_hub import constants

    names = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_TOKEN_PATH": home / "token"}
    for name, path in names.items():
        monkeypatch.setenv(name, str(path))
        monkeypatch.setattr(constants, name, str(path))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "harnesses.json"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    offline(monkeypatch, False)


def point(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Use another Hub."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def offline(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """HF_HUB_OFFLINE, as a process has it from its start."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if on else "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", on)
