"""Upload: the files of a run folder, copied to a slower place while training continues.

    a checkpoint is saved    its files are linked aside, so that they outlive its deletion here
    thread                   run.json, data/, metrics.jsonl ..., as far as they changed
                             checkpoints/step-000200/*.safetensors, then its manifest.json

A folder without a manifest is not a checkpoint, so that half of one is never read. The place is any
folder that is mounted, or a URL that fsspec knows (`s3://bucket/run`). An upload that fails costs
that upload: the next checkpoint is tried, and training continues.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import threading
import time
from pathlib import Path

from hocket.spec.checkpoint import MANIFEST
from hocket.spec.errors import OptionError
from hocket.spec.run import RunFolder, TrainOptions

TRIES, PAUSE = 3, 2.0
"""Of the last upload of a run, and the seconds after the first of them."""
_STEP = re.compile(r"step-[0-9]{6,}")


class Remote:
    """The place that a run is uploaded to.

    Args:
        url: a folder, or a URL.

    Raises:
        OptionError: fsspec does not know it, or it cannot be written.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
            self.files.makedirs(self.root, exist_ok=True)
            self._device = self._mounted()
        except ImportError as error:
            raise OptionError(
                f"--upload {url} needs a package that is not installed: {error}",
                hint="pip install s3fs (s3://), gcsfs (gs://) or adlfs (az://)",
            ) from None
        except Exception as error:
            raise OptionError(
                f"--upload {url} cannot be written to: {error_line(error)}",
                hint="--upload /mnt/slow/run, or s3://BUCKET/RUN and its credentials",
            ) from None

    def _mounted(self) -> int | None:
        """The device that a local folder is on; None: it is no local folder."""
        return os.stat(self.root).st_dev if "file" in self.files.protocol else None

    def put(self, file: Path, name: str) -> None:
        if self._mounted() != self._device:
            raise OSError(f"{self.root} is not the file system that it was")
        target = f"{self.root}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.put_file(str(file), target)

    def checkpoints(self) -> list[str]:
        """Names of the complete checkpoints, the newest first."""
        self.files.invalidate_cache()
        folder = f"{self.root}/checkpoints"
        if not self.files.exists(folder):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self.files.ls(folder, False)]
        steps = sorted((n for n in names if _STEP.fullmatch(n)), key=_step, reverse=True)
        return [name for name in steps if self.files.exists(f"{folder}/{name}/{MANIFEST}")]

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        path = f"{self.root}/checkpoints/{name}"
        for part in (f"{path}/{MANIFEST}", path):
            if self.files.exists(part):
                self.files.rm(part, recursive=part == path)

    def fetch(self, name: str, target: Path) -> None:
        """Read a folder's files into one that is made."""
        path = f"{self.root}/{name}".rstrip("/")
        for found in self.files.find(path):
            inside = str(found)[len(path) :].lstrip("/")
            if ".." in inside.split("/") or (not name and inside.startswith("checkpoints/")):
                continue
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(found, str(target / inside))


class Uploader:
    """Uploads one run's checkpoints as they are saved, the newest alone where several wait."""

    def __init__(self, remote: Remote, folder: RunFolder, options: TrainOptions) -> None:
        self._remote, self._folder, self._options = remote, folder, options
        self._there: dict[str, tuple[int, int]] = {}
        self._waiting: queue.Queue[Path | None] = queue.Queue()
        self.notes: queue.Queue[str] = queue.Queue()
        for left in folder.checkpoints.glob(".upload-*"):
            shutil.rmtree(left, ignore_errors=True)
        self._thread = threading.Thread(target=self._run, daemon=True, name="upload")
        self._thread.start()

    def saved(self, path: Path) -> None:
        """A checkpoint is complete: upload it."""
        aside = path.with_name(f".upload-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            shutil.copytree(path, aside, copy_function=os.link)
        except OSError:  # a file system without links: as far as it is not deleted meanwhile
            shutil.rmtree(aside, ignore_errors=True)
            aside = path
        self._waiting.put(aside)

    def finish(self) -> None:
        """Upload what waits, and what the run's end has written."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        left: Path | None = None
        ending = False
        while not ending:
            heard = [self._waiting.get()]
            while not self._waiting.empty():
                heard.append(self._waiting.get())
            ending = None in heard
            for newer in filter(None, heard):
                _drop(left)
                left = newer
            reason = self._tried(left)
            for number in range(TRIES - 1 if reason and ending else 0):
                time.sleep(PAUSE * 2**number)
                reason = reason and self._tried(left)
            if reason:
                what = left.name.removeprefix(".upload-") if left else "what the run's end wrote"
                again = "" if ending else "; training continues, and the next checkpoint is tried"
                self.notes.put(f"{what} was not uploaded to {self._remote.url}: {reason}{again}")
            if ending or not reason:
                _drop(left)
                left = None

    def _tried(self, path: Path | None) -> str:
        """Upload all that changed, and a checkpoint; why that failed, or nothing."""
        try:
            self._sync()
            if path is not None:
                self._put_checkpoint(path)
        except Exception as error:  # of fsspec's packages each raises its own
            return error_line(error)
        return ""

    def _sync(self) -> None:
        for file in sorted(self._folder.path.rglob("*")):
            name = file.relative_to(self._folder.path).as_posix()
            if name.startswith("checkpoints/") or "/." in f"/{name}" or not file.is_file():
                continue
            state = (status := file.stat()).st_size, status.st_mtime_ns
            if self._there.get(name) != state and self._there_still(file, name):
                self._there[name] = state

    def _there_still(self, file: Path, name: str) -> bool:
        """Put one file; False: it was deleted meanwhile."""
        try:
            self._remote.put(file, name)
        except FileNotFoundError:
            if file.exists():
                raise
            return False
        return True

    def _put_checkpoint(self, path: Path) -> None:
        name = path.name.removeprefix(".upload-")
        self._remote.remove(name)
        for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):
            self._remote.put(file, f"checkpoints/{name}/{file.name}")
        options = self._options
        for old in self._remote.checkpoints()[max(1, options.keep_checkpoints) :]:
            if not options.keep_every or _step(old) % options.keep_every:
                self._remote.remove(old)


def error_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error) or type(error).__name__).split("\n", maxsplit=1)[0]


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _drop(path: Path | None) -> None:
    if path is not None and path.name.startswith("."):
        shutil.rmtree(path, ignore_errors=True)
