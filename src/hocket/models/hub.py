"""Hub: repositories of the Hugging Face Hub by name, as folders of the local cache.

    org/name[@revision], or the address of its page  ->  RepoId  ->  snapshot folder, at one commit

Requests, cache and tokens are huggingface_hub's, and with them HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. It compares sizes; SHA-256 of LFS files is compared here, once for each download.
Never imports torch or transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hocket.models import hub_partial
from hocket.models.hub_errors import ATTEMPTS, _repo_errors, broke_off, busy, explained, lacking
from hocket.models.repo_id import RepoId, storage
from hocket.spec import downloads
from hocket.spec.errors import HocketError
from hocket.spec.files import MALFORMED, parse_json

_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    with explained(repo), _one_at_a_time(repo):
        with _verified(repo) as verify:
            folder = _downloaded(repo, patterns, required)
            verify(folder)
        missing = [name for name in required if not (folder / name).exists()]
        if missing:
            raise lacking(repo, folder, missing)
    return folder


def cached(repo: RepoId) -> Path | None:
    """The snapshot folder of a repository at a commit, if the cache holds it. No network."""
    folder = storage(repo) / "snapshots" / (repo.commit or "")
    return folder if repo.commit and folder.is_dir() else None


def file_names(repo: RepoId) -> list[str]:
    """All files of a repository at a commit; none where there is no listing of it."""
    with suppress(HocketError):
        return list(listed(repo))
    return []


def listed(repo: RepoId) -> dict[str, int]:
    """The files of a repository at a commit and their sizes in bytes, as its listing has them that
    a download leaves in the cache.

    Raises:
        ModelError, DataError: the Hub cannot be asked, and the cache has no listing.
    """
    from huggingface_hub import HfApi

    note = storage(repo) / "trees" / f"{repo.commit}.json"
    with suppress(OSError, *MALFORMED):
        files = parse_json(note.read_text())["files"]
        return {name: int(file["size"]) for name, file in files.items()}
    with explained(repo), without_warnings():
        tree = HfApi().list_repo_tree(
            repo.id, revision=repo.revision, repo_type=repo.kind, recursive=True
        )
        return {file.path: int(file.size) for file in tree if hasattr(file, "size")}


def hub_file_opened(repo: RepoId, name: str) -> Any:
    """A file of a data set at the Hub, opened for reading by byte ranges; nothing is stored.

    Raises:
        DataError: as `snapshot`.
    """
    from huggingface_hub import HfFileSystem

    with explained(repo):
        return HfFileSystem().open(f"datasets/{repo}/{name}", "rb", block_size=1 << 22)


# --- downloading ---------------------------------------------------------------------------------


def _notes(repo: RepoId) -> Path:
    """Where huggingface_hub keeps the locks of a repository; ours lie there too."""
    place = storage(repo)
    return place.parent / ".locks" / place.name


@contextmanager
def _one_at_a_time(repo: RepoId) -> Iterator[None]:
    """Within, no other process of this host (or of a shared file system that locks) downloads."""
    from huggingface_hub.utils._fixes import WeakFileLock

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


def _downloaded(repo: RepoId, patterns: Sequence[str], required: Sequence[str]) -> Path:
    from huggingface_hub import constants, snapshot_download

    for attempt in range(ATTEMPTS):
        try:
            with without_warnings(), downloads.following(repo.id) as follow:
                if repo.commit and not constants.is_offline_mode():
                    hub_partial.complete(repo, required, _bars(follow, every=True))
                folder = snapshot_download(
                    repo.id,
                    revision=repo.revision,
                    repo_type=repo.kind,
                    allow_patterns=list(patterns),
                    tqdm_class=_bars(follow),
                )
            return Path(folder)
        except Exception as error:
            if not (busy(error) or broke_off(error)) or attempt + 1 == ATTEMPTS:
                raise
            time.sleep(2.0**attempt)
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


def _bars(follow: downloads.Follow, *, every: bool = False) -> Any:
    """A class like tqdm that tells bytes instead of drawing: snapshot_download makes three bars,
    of bytes received, of bytes written, and of files. `every`: all bars count."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg,misc]
        monitor_interval = 0  # no thread that redraws: nothing is drawn, and forks inherit locks

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = every or str(kwargs.get("desc", "")).startswith("Reconstructing")
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
    blobs, note = storage(repo) / "blobs", _notes(repo) / "hocket.json"
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
                    raise _repo_errors(repo)(
                        f"{file.name} of {repo.id} arrived damaged: its SHA-256 is "
                        f"{found.hexdigest()[:12]}..., the Hub lists {expected[:12]}...; it was "
                        "removed from the cache",
                        hint="run the command again: this file alone is downloaded again",
                    )
        with suppress(OSError):
            note.unlink()

    yield verify
