"""Writable: whether a run folder can be made, before anything is computed for it."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.spec.errors import RunFolderError
from hocket.spec.run import RunFolder


def require_writable(folder: RunFolder, example: str) -> None:
    """Raise where a folder cannot be made.

    Args:
        example: another name for it, relative to the first place that can be written to.

    Raises:
        RunFolderError: it cannot be made.
    """
    if _can_be_made(folder.path):
        return
    above = _nearest(folder.path)
    why = "cannot be written to" if above.is_dir() else "is a file, not a folder"
    home = Path(os.path.expanduser("~"))
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    places = (Path(), home, temporary)
    run = next((place / example for place in places if _can_be_made(place / example)), None)
    hint = f"--run {run}" if run else "--run FOLDER in a volume that this user may write to"
    raise RunFolderError(f"{folder.path} cannot be made: {above} {why}", hint=hint)


def _can_be_made(path: Path) -> bool:
    above = _nearest(path)
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def _nearest(path: Path) -> Path:
    """The path itself where it exists, else the nearest folder above that does."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())
