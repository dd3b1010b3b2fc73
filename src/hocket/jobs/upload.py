"""Upload: a run whose checkpoints are uploaded, and one that continues from where they are."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.checkpoint import LATEST, verify_checkpoint
from hocket.spec.errors import CheckpointError
from hocket.spec.run import RunFolder, RunSpec

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.jobs.request import JobRequest


def fetch_run(request: JobRequest, record: JobRecorder) -> None:
    """Fetch the run from where it was uploaded to, where its run folder is empty or missing.

    Raises:
        OptionError: as `Remote`.
    """
    from hocket.runtime.upload import Remote, error_line

    url, run = request.options.upload, request.run
    if url is None or run is None or (run.exists() and any(run.iterdir())):
        return
    remote = Remote(url)
    for name in remote.checkpoints():
        aside = run.with_name(f".{run.name}.fetched-{os.getpid()}")
        target = aside / "checkpoints" / name
        try:
            record.phase(f"reading {name} from {url}")
            remote.fetch(f"checkpoints/{name}", target)
            verify_checkpoint(target)
            remote.fetch("", aside)
            (aside / "checkpoints" / LATEST).write_text(f"{name}\n")
            with contextlib.suppress(FileNotFoundError):
                run.rmdir()
            os.rename(aside, run)
            record.note(f"{run} was empty: {name} is from {url}")
            return
        except (CheckpointError, OSError) as error:
            record.note(f"{name} in {url} is not used: {error_line(error)}")
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def uploads(folder: RunFolder, spec: RunSpec, record: JobRecorder) -> Iterator[None]:
    """Within, checkpoints that `record` hears of are uploaded; at the end all of the run is."""
    if spec.options.upload is None:
        yield
        return
    from hocket.runtime.upload import Remote, Uploader

    remote = Remote(spec.options.upload)
    upload = Uploader(remote, folder, spec.options)
    listener = record.listener

    def tell() -> None:
        while not upload.notes.empty():
            if listener is not None:
                listener({"event": "note", "text": upload.notes.get()})

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "saved":
            upload.saved(Path(event["path"]))
        if listener is not None:
            listener(event)
        tell()

    record.listener = hear
    try:
        try:
            yield
            record.phase(f"uploading to {remote.url}")
        except Exception:
            upload.finish()  # a checkpoint to continue from
            raise
        upload.finish()
    finally:
        record.listener = listener
        tell()
