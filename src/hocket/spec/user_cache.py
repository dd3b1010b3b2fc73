"""What a user's runs keep for later ones: $XDG_CACHE_HOME/hocket, else ~/.cache/hocket."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hocket


def cache_folder(kind: str) -> Path:
    """Where one kind of things is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hocket" / kind


def computed_file(kind: str, inputs: Any, *packages: str) -> Path:
    """Where what our `packages` computed of `inputs` (a JSON value) is kept. Another version of
    transformers or torch, and any change of the packages' code, computes it again."""
    versions = [hocket.__version__, *(_version(name) for name in ("transformers", "torch"))]
    key = json.dumps([inputs, versions, code_crc32(*packages)], sort_keys=True, default=str)
    return cache_folder(kind) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@functools.cache
def code_crc32(*packages: str) -> int:
    """A checksum of the Python code of some of our packages (`models`)."""
    root, found = Path(hocket.__file__).parent, 0
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            found = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), found))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
