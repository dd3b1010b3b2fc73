"""RepoId: a repository of the Hugging Face Hub, and its place in the local cache.

The cache is huggingface_hub's. Never imports torch or transformers.
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from pathlib import Path

MODEL, DATASET = "model", "dataset"
_NAME = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PAGES = ("tree", "blob", "resolve", "commit")


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


def parse_repo(text: str, kind: str = MODEL) -> RepoId | None:
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


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def storage(repo: RepoId) -> Path:
    """Where the cache keeps a repository: blobs, refs, snapshots."""
    from huggingface_hub.file_download import repo_folder_name

    return cache_folder() / repo_folder_name(repo_id=repo.id, repo_type=repo.kind)
