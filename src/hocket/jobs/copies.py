"""Copies: who owns the copies of ranks' states in this host's memory, and which of them may go.

    /dev/shm/hocket-UID/KEY/        the copies of one run (`runtime.state_copies`)
    /dev/shm/hocket-UID/KEY.owner   JSON: the process that makes them, as in a run folder's lock

A run deletes its copies at its end. A process that was killed could not: the next run on the host
deletes the copies whose owner on this host is dead, but its own, which it continues from. Ranks of
torchrun and Slurm die and start again with other processes: their copies stay for an hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.jobs.lock import LockOwner
from hocket.spec.errors import RunFolderError
from hocket.spec.files import write_text
from hocket.spec.run import RunFolder, TrainOptions

JOINED = "train, joined"
"""The job of an owner that another launcher has started."""
STARTS_AGAIN = 3600.0
"""Seconds in which another launcher may start the ranks of a run again."""


@contextlib.contextmanager
def own_copies(folder: RunFolder, options: TrainOptions) -> Iterator[None]:
    """Within, the copies of this run in memory are this process's; at the end they are deleted."""
    claim_copies(folder, options, "train")
    try:
        yield
    finally:
        release_copies(folder)


def claim_copies(folder: RunFolder, options: TrainOptions, job: str) -> None:
    """Delete the copies of dead owners, and make this process the owner of those of a run."""
    mine, root = _owner_file(folder.state_copies), folder.state_copies.parent
    with _held(root) as there:
        if not there:
            return
        if options.replicate_state:
            write_text(mine, json.dumps(dataclasses.asdict(LockOwner.me(job))))
        for file in root.glob("*.owner"):
            if file != mine and _left(file):
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
                file.unlink(missing_ok=True)


def release_copies(folder: RunFolder) -> None:
    """Delete the copies of a run that has ended, on this host."""
    with _held(folder.state_copies.parent) as there:
        if there:
            shutil.rmtree(folder.state_copies, ignore_errors=True)
            _owner_file(folder.state_copies).unlink(missing_ok=True)


def _left(file: Path) -> bool:
    """Whether the copies of an owner file have no owner that lives or is started again."""
    try:
        owner = LockOwner.read(file)
        age = time.time() - max(p.stat().st_mtime for p in (file, *file.with_suffix("").glob("*")))
    except (OSError, RunFolderError):
        return False
    return owner is not None and owner.dead and (owner.job != JOINED or age > STARTS_AGAIN)


def _owner_file(copies: Path) -> Path:
    return copies.with_name(f"{copies.name}.owner")


@contextlib.contextmanager
def _held(root: Path) -> Iterator[bool]:
    """Within, no other process claims or deletes copies below `root`, which is there and private;
    without an entry at the end it is removed. False: there is no memory to keep copies in, or
    `root` is another user's, which ranks that are to write there reject."""
    descriptor = -1
    try:
        while descriptor < 0 or not os.fstat(descriptor).st_nlink:  # another process removed it
            if descriptor >= 0:
                os.close(descriptor)
            root.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        mine = os.fstat(descriptor).st_uid == os.getuid()
    except OSError:
        mine = False
    try:
        yield mine
    finally:
        with contextlib.suppress(OSError):
            root.rmdir()  # if it is empty
        if descriptor >= 0:
            os.close(descriptor)
