"""Hub: repositories of the Hugging Face Hub by name, as folders of the local cache.

    org/name[@revision], or the address of its page  ->  RepoId  ->  snapshot folder, at one commit

Requests, cache and tokens are huggingface_hub's, and with them HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. It compares sizes; SHA-256 of LFS files is compared here, once for each download.
Never imports torch or transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hocket.spec import downloads
from hocket.spec.errors import DataError, HocketError, ModelError, nearest
from hocket.spec.files import MALFORMED, parse_json

MODEL, DATASET = "model", "dataset"
_NAME = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAGES = ("tree", "blob", "resolve", "commit")
_ATTEMPTS = 3
"""Downloads of one call. huggingface_hub itself resumes a file whose connection ends early."""


@dataclasses.dataclass(frozen=True)
class RepoId:
    """A repository of the Hub.

    Attributes:
        id: `org/name`.
        revision: branch, tag or commit; None: the default branch.
        kind: `model` or `dataset`.
    """

    id: str
    revision: str | None = None
    kind: str = MODEL

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The revision, if it is a whole commit hash."""
        return self.revision if _COMMIT.fullmatch(self.revision or "") else None

    @property
    def page(self) -> str:
        """Its address at the endpoint in use."""
        from huggingface_hub import constants

        prefix = "datasets/" if self.kind == DATASET else ""
        return f"{constants.ENDPOINT}/{prefix}{self.id}"

    def at(self, folder: Path) -> RepoId:
        """The repository at the commit of a snapshot folder."""
        return dataclasses.replace(self, revision=folder.name)


def parse(text: str, kind: str = MODEL) -> RepoId | None:
    """The repository that a text names: `org/name`, `org/name@revision`, or the address of its
    page; None for anything else, such as a path."""
    given = text
    if "://" in text:
        found = _of_page(text, kind)
        if found is None:
            return None
        given = found
    match = _ID.fullmatch(given)
    if match is None or any(bad in match[1] for bad in ("--", "..")) or match[1].endswith(".git"):
        return None
    return RepoId(match[1], match[2], kind)


def _of_page(text: str, kind: str) -> str | None:
    """`org/name[@revision]` of an https or hf address."""
    address = urllib.parse.urlsplit(text)
    parts = [urllib.parse.unquote(part) for part in address.path.split("/") if part]
    if address.scheme == "hf":
        parts = [address.netloc, *parts]
    elif address.scheme not in ("http", "https"):
        return None
    if (parts[:1] == ["datasets"]) != (kind == DATASET):
        return None
    if parts[:1] in (["datasets"], ["models"]):
        parts = parts[1:]
    if len(parts) < 2:
        return None
    name, page = "/".join(parts[:2]), parts[2:4]
    return f"{name}@{page[1]}" if len(page) == 2 and page[0] in _PAGES else name


def snapshot(repo: RepoId, patterns: Sequence[str], *, required: Sequence[str] = ()) -> Path:
    """The snapshot folder of a repository with all its files that match, downloaded if need be.

    One process of a host downloads, others wait for it. Without a network, or with
    HF_HUB_OFFLINE=1, the cache answers. Progress goes to `spec.downloads`.

    Args:
        patterns: of file names, as `fnmatch` has them. required: files that must be there.

    Raises:
        ModelError, DataError: by the kind of repository: it is not there, gated, or of no such
            revision; the Hub cannot be reached; a file does not have its SHA-256.
    """
    with _explained(repo), _one_at_a_time(repo):
        with _verified(repo) as verify:
            folder = _downloaded(repo, patterns)
            verify(folder)
        missing = [name for name in required if not (folder / name).exists()]
        if missing:
            raise _lacking(repo, folder, missing)
    return folder


def cached(repo: RepoId) -> Path | None:
    """The snapshot folder of a repository at a commit, if the cache holds it. No network."""
    folder = _storage(repo) / "snapshots" / (repo.commit or "")
    return folder if repo.commit and folder.is_dir() else None


def file_names(repo: RepoId) -> list[str]:
    """All files of a repository, as the Hub lists them; none where it cannot be asked."""
    from huggingface_hub import HfApi

    with suppress(Exception):
        return list(HfApi().list_repo_files(repo.id, revision=repo.revision, repo_type=repo.kind))
    return []


def listed(repo: RepoId) -> dict[str, int]:
    """The files of a repository at a commit and their sizes in bytes, as its listing has them that
    a download leaves in the cache.

    Raises:
        ModelError, DataError: the Hub cannot be asked, and the cache has no listing.
    """
    from huggingface_hub import HfApi

    note = _storage(repo) / "trees" / f"{repo.commit}.json"
    with suppress(OSError, *MALFORMED):
        files = parse_json(note.read_text())["files"]
        return {name: int(file["size"]) for name, file in files.items()}
    with _explained(repo):
        tree = HfApi().list_repo_tree(
            repo.id, revision=repo.revision, repo_type=repo.kind, recursive=True
        )
        return {file.path: int(file.size) for file in tree if hasattr(file, "size")}


def opened(repo: RepoId, name: str) -> Any:
    """A file of a data set at the Hub, opened for reading by byte ranges; nothing is stored.

    Raises:
        DataError: as `snapshot`.
    """
    from huggingface_hub import HfFileSystem

    with _explained(repo):
        return HfFileSystem().open(f"datasets/{repo}/{name}", "rb", block_size=1 << 22)


# --- downloading ---------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _storage(repo: RepoId) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return cache_folder() / repo_folder_name(repo_id=repo.id, repo_type=repo.kind)


def _notes(repo: RepoId) -> Path:
    """Where huggingface_hub keeps the locks of a repository; ours lie there too."""
    storage = _storage(repo)
    return storage.parent / ".locks" / storage.name


@contextmanager
def _one_at_a_time(repo: RepoId) -> Iterator[None]:
    """Within, no other process of this host (or of a shared file system that locks) downloads."""
    from huggingface_hub.utils import WeakFileLock

    folder = _notes(repo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:  # a cache that can only be read
        writable = False
    if not writable:
        yield
        return
    with WeakFileLock(str(folder / "hocket.lock")):
        yield


def _downloaded(repo: RepoId, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(_ATTEMPTS):
        try:
            with without_warnings(), downloads.following(repo.id) as follow:
                folder = snapshot_download(
                    repo.id,
                    revision=repo.revision,
                    repo_type=repo.kind,
                    allow_patterns=list(patterns),
                    tqdm_class=_bars(follow),
                )
            return Path(folder)
        except HfHubHTTPError:
            raise
        except Exception as error:
            if not _broke_off(error) or attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(1.0)
    raise AssertionError


@contextmanager
def without_warnings() -> Iterator[None]:
    """Within, huggingface_hub logs errors alone: what has to be known is said here."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _broke_off(error: BaseException) -> bool:
    """Whether a connection that was there ended: by the names that httpx gives such errors."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"NetworkError", "ProtocolError"}) and "ConnectError" not in names


def _bars(follow: downloads.Follow) -> Any:
    """A class like tqdm that tells bytes instead of drawing: snapshot_download makes three bars,
    of bytes received, of bytes written, and of files."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            super().__init__(*args, **{**kwargs, "file": _Nowhere(), "mininterval": 0.2})

        def update(self, n: float | None = 1) -> bool | None:
            done = super().update(n)
            if self._counts:
                follow(int(self.n), int(self.total or 0))
            return done

    return Bar


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


# --- SHA-256 -------------------------------------------------------------------------------------


@contextmanager
def _verified(repo: RepoId) -> Iterator[Callable[[Path], None]]:
    """Gives the function that compares what was downloaded within, or in an earlier process that
    ended before it had compared.

    The blobs that were there before the first download since are written down for that.
    """
    blobs, note = _storage(repo) / "blobs", _notes(repo) / "hocket.json"
    try:
        before = set(parse_json(note.read_text()))
    except OSError:
        before = set(os.listdir(blobs)) if blobs.is_dir() else set()
        with suppress(OSError):
            note.write_text(json.dumps(sorted(before)))
    except MALFORMED:
        before = set()

    def verify(folder: Path) -> None:
        links = [file for file in sorted(folder.rglob("*")) if file.is_symlink()]
        # The link's own text: what it leads to may be a link again, into storage by other hashes.
        names = {file: os.path.basename(os.readlink(file)) for file in links}
        fresh = {f: n for f, n in names.items() if _SHA256.fullmatch(n) and n not in before}
        total, done = sum(file.stat().st_size for file in fresh), 0
        with downloads.following(f"{repo.id}: SHA-256", brief=True) as follow:
            for file, expected in fresh.items():
                found = hashlib.sha256()
                with file.open("rb") as stream:
                    while part := stream.read(1 << 22):
                        found.update(part)
                        done += len(part)
                        follow(done, total)
                if found.hexdigest() != expected:
                    blob = folder / os.readlink(file)
                    file.unlink()
                    blob.unlink(missing_ok=True)
                    raise _error(repo)(
                        f"{file.name} of {repo.id} arrived damaged: its SHA-256 is "
                        f"{found.hexdigest()[:12]}..., the Hub lists {expected[:12]}...; it was "
                        "removed from the cache",
                        hint="run the command again: this file alone is downloaded again",
                    )
        with suppress(OSError):
            note.unlink()

    yield verify


# --- errors --------------------------------------------------------------------------------------


def _error(repo: RepoId) -> type[HocketError]:
    return DataError if repo.kind == DATASET else ModelError


def _what(repo: RepoId) -> str:
    return "data set" if repo.kind == DATASET else "model"


def _lacking(repo: RepoId, folder: Path, missing: Sequence[str]) -> HocketError:
    from huggingface_hub import constants

    some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if constants.is_offline_mode():
        return _error(repo)(
            f"HF_HUB_OFFLINE is set, and the cache holds {repo.id} without {some} ({folder})",
            hint=_on_another(repo),
        )
    return _error(repo)(f"{_what(repo)} {repo} has no {some}")


def _on_another(repo: RepoId) -> str:
    """The line to run where there is a network."""
    of = " --repo-type dataset" if repo.kind == DATASET else ""
    at = f" --revision {repo.revision}" if repo.revision else ""
    name = repo.id.partition("/")[2]
    return (
        f"where there is a network: hf download {repo.id}{of}{at} --local-dir {name}; then name "
        "that folder"
    )


@contextmanager
def _explained(repo: RepoId) -> Iterator[None]:
    """Within, errors of huggingface_hub become ours.

    Raises:
        ModelError, DataError: see `snapshot`.
    """
    try:
        yield
    except HocketError:
        raise
    except Exception as error:
        raise explanation(repo, error) from error


def explanation(repo: RepoId, error: BaseException) -> HocketError:
    """An error of huggingface_hub (or of datasets, which calls it) as one that can be mended."""
    from huggingface_hub import constants, errors

    kind = _error(repo)
    causes = list(_chain(error))

    def found(of: type[BaseException]) -> Any:
        return next((one for one in causes if isinstance(one, of)), None)

    if found(errors.GatedRepoError):
        return _gated(repo)
    if found(errors.RepositoryNotFoundError):
        return _not_found(repo)
    if found(errors.RevisionNotFoundError):
        near = nearest(repo.revision or "", _revisions(repo))
        return kind(
            f"{_what(repo)} {repo.id} has no revision {repo.revision!r}",
            hint=f"did you mean {repo.id}@{near}?" if near else f"{repo.page}/commits/main",
        )
    where = constants.HF_HUB_CACHE
    if found(errors.OfflineModeIsEnabled) or constants.is_offline_mode():
        return kind(
            f"HF_HUB_OFFLINE is set, and the cache {where} does not hold {_what(repo)} {repo}"
            + (" as a whole" if _storage(repo).is_dir() else ""),
            hint=_on_another(repo),
        )
    http = found(errors.HfHubHTTPError)
    if http is not None:
        status = getattr(http.response, "status_code", None)
        if status in (401, 403):
            return _gated(repo)
        return kind(
            f"{constants.ENDPOINT} answers {status} to the request for {repo}",
            hint="run the command again later; what was downloaded is kept",
        )
    broken = next((one for one in causes if _broke_off(one)), None)
    if broken is not None:
        return kind(
            f"the download of {repo} broke off {_ATTEMPTS} times: {broken}",
            hint="run the command again: files that are complete are kept",
        )
    disk = next((one for one in causes if isinstance(one, OSError) and one.errno), None)
    network = next((one for one in causes if _of_network(one)), None)
    if network is not None:
        return kind(
            f"{constants.ENDPOINT} cannot be reached ({network}), and the cache {where} does not "
            f"hold {_what(repo)} {repo}",
            hint=_on_another(repo),
        )
    if disk is not None:
        return kind(
            f"{repo} cannot be stored in {where}: {disk.strerror}",
            hint=f"HF_HOME=DIRECTORY, on a disk with room for it; it is {constants.HF_HOME} now",
        )
    text = str(error).strip().splitlines()
    return kind(f"{repo} cannot be downloaded: {text[0] if text else type(error).__name__}")


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def _of_network(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError"})


def _gated(repo: RepoId) -> HocketError:
    from huggingface_hub import get_token

    if get_token() is None:
        return _error(repo)(
            f"{_what(repo)} {repo.id} is gated: its licence has to be accepted, and no token was "
            "sent",
            hint=f"accept it at {repo.page}, then: hf auth login",
        )
    return _error(repo)(
        f"{_what(repo)} {repo.id} is gated, and the account of the token in use has no access",
        hint=f"accept its licence at {repo.page}, or another account: hf auth login",
    )


def _not_found(repo: RepoId) -> HocketError:
    from huggingface_hub import constants, get_token

    why = "" if get_token() else ", or it is private and no token was sent (hf auth login)"
    names = _similar(repo)
    near = nearest(repo.id, names) or (names[0] if names else None)
    return _error(repo)(
        f"there is no directory {repo.id} here, and {constants.ENDPOINT} has no {_what(repo)} "
        f"{repo.id}{why}",
        hint=f"did you mean {near}?" if near else f"search at {constants.ENDPOINT}/{repo.kind}s",
    )


def _similar(repo: RepoId) -> list[str]:
    """Names of repositories like one that is not there: of its owner, then of its name."""
    from huggingface_hub import HfApi

    owner, _, name = repo.id.partition("/")
    listed = HfApi().list_datasets if repo.kind == DATASET else HfApi().list_models
    for query in ({"author": owner, "limit": 100}, {"search": name, "limit": 20}):
        with suppress(Exception):
            found = [str(one.id) for one in listed(**query)]
            if found:
                return found
    return []


def _revisions(repo: RepoId) -> list[str]:
    from huggingface_hub import HfApi

    with suppress(Exception):
        refs = HfApi().list_repo_refs(repo.id, repo_type=repo.kind)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []
