"""Partial downloads: a large file of the Hub that broke off is continued by the next process.

    blobs/SHA256.partial  -- GET with a range -->  blobs/SHA256, which huggingface_hub finds there

huggingface_hub continues a file within one call and deletes it when the process ends; requests,
headers and storage are its own. What lies in Xet storage is left to it where hf_xet is installed,
which keeps the chunks that it has. Never imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hocket.models.repo_id import RepoId, storage

SMALLEST = 1 << 18
"""Bytes of a file that is worth continuing."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


def complete(repo: RepoId, names: Iterable[str], bars: Any) -> None:
    """Download large files of a repository at a commit into its blobs, from where they broke off.

    Args:
        names: of files; those that the cache holds are passed over.
        bars: a class like tqdm.

    Raises:
        Exception: as huggingface_hub's. What has arrived is kept.
    """
    blobs, snapshot = storage(repo) / "blobs", storage(repo) / "snapshots" / (repo.commit or "")
    for name in names:
        if not (snapshot / name).exists():
            _complete(repo, name, blobs, bars)


def _complete(repo: RepoId, name: str, blobs: Path, bars: Any) -> None:
    from urllib.parse import urlsplit

    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._runtime import is_xet_available

    url = hf_hub_url(repo.id, name, repo_type=repo.kind, revision=repo.commit)
    headers = build_hf_headers()
    found = get_hf_file_metadata(url, headers=headers)
    xet = found.xet_file_data is not None and not constants.HF_HUB_DISABLE_XET
    if found.etag is None or not _SHA256.fullmatch(found.etag) or (xet and is_xet_available()):
        return
    whole, partial = blobs / found.etag, blobs / f"{found.etag}.partial"
    if whole.exists() or found.size is None or found.size < SMALLEST:
        return
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
    blobs.mkdir(parents=True, exist_ok=True)
    if partial.exists() and partial.stat().st_size > found.size:
        partial.unlink()
    with partial.open("ab") as file:  # made, if it is not there
        file.flush()
    with partial.open("r+b") as file:
        there = file.seek(0, os.SEEK_END)
        http_get(
            found.location,
            file,
            resume_size=there,
            headers=headers,
            expected_size=found.size,
            displayed_filename=name,
            tqdm_class=bars,
        )
    partial.rename(whole)
