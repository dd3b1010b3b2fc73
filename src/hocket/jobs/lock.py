"""Lock: one writer for each run folder, on network file systems too.

    FOLDER/.lock                  JSON: host, pid, when that process started, what it does
    FOLDER/.lock.TOKEN.alive      a count that the owner TOKEN raises every RENEWED seconds
    FOLDER/.lock.TOKEN.next       the successor of the dead owner TOKEN, for milliseconds

A lock is a complete file that gets its name by `link`, which exactly one of several processes can
do, on NFS as well; flock is not used. An owner on this host is dead when no process has its pid
and its start time. Its successor is the process that creates the file naming the dead owner: so two
processes that find the same dead owner cannot both follow it, and a successor that dies in between
is followed in the same way. An owner on another host is dead when its Slurm job is this one, before
it was queued again: Slurm does so once its processes have ended or its nodes are lost.

Of any other owner elsewhere (a replaced pod, a lost host) only the count is known. It counts as
dead when the count stays as it is for SILENT seconds, by the clock of the process that waits, in
which the file system answers. An owner that is no more, or was frozen, ends itself as soon as it
runs: it reads the lock whenever it raises its count, and its successor writes nothing before an
owner that runs must have read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hocket.spec.errors import RunFolderError
from hocket.spec.files import LOCK, MALFORMED, parse_json, read_text
from hocket.spec.launcher_variables import launcher_number

NAME = LOCK
_MOST_BYTES = 4096
RENEWED = 5.0
"""Seconds between two signs of life of an owner."""
SILENT = 60.0
"""Seconds without a sign of life after which an owner elsewhere counts as dead."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LockOwner:
    """The process that writes a folder.

    Attributes:
        host: its name. boot: of that boot of the machine. namespace: of its process ids.
        pid: its process id. start: clock ticks from boot to its start, from /proc/PID/stat.
        since: when it took the lock, local time with zone. job: what it does, as `train`.
        token: of this lock alone.
        batch: the Slurm job; empty: none. restarts: times that it was queued again before.
        renews: it gives signs of life.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: int
    since: str
    job: str
    token: str
    batch: str = ""
    restarts: int = 0
    renews: bool = False

    @classmethod
    def me(cls, job: str) -> LockOwner:
        """This process."""
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            namespace=pid_namespace(),
            pid=os.getpid(),
            start=_start(os.getpid()) or 0,
            since=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            job=job,
            token=secrets.token_hex(8),
            batch=_batch()[0],
            restarts=_batch()[1],
        )

    @classmethod
    def read(cls, file: Path) -> LockOwner | None:
        """The owner that a lock names; None where there is no lock.

        Raises:
            RunFolderError: the file is not a lock.
        """
        try:
            owner = cls(**parse_json(read_text(file, most_bytes=_MOST_BYTES)))
            texts = (owner.host, owner.boot, owner.namespace, owner.since, owner.job, owner.token)
            if (
                not all(isinstance(text, str) for text in (*texts, owner.batch))
                or not owner.token.isalnum()
            ):
                raise ValueError("its texts are none")
            if not all(type(number) is int for number in (owner.pid, owner.start, owner.restarts)):
                raise ValueError("its pid is not an integer")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except MALFORMED as error:
            raise RunFolderError(
                f"{file} cannot be read as a lock: {error}",
                hint=f"if nothing writes that folder: rm {shlex.quote(str(file))}",
            ) from None
        return owner

    @property
    def here(self) -> bool:
        """Whether it is of this boot of this host, so that its pid can be looked up."""
        mine = (socket.gethostname(), _boot(), pid_namespace())
        return bool(mine[1]) and (self.host, self.boot, self.namespace) == mine

    @property
    def dead(self) -> bool:
        """Whether it has certainly ended."""
        batch, restarts = _batch()
        if batch and self.batch == batch and self.restarts < restarts:
            return True
        return self.here and _start(self.pid) != self.start


def reject_locked(folder: Path) -> None:
    """Refuse a folder that another process writes, without taking it.

    Raises:
        RunFolderError: it is locked; host and pid of the owner.
    """
    file = folder / NAME
    owner = LockOwner.read(file)
    if owner and owner.token not in _mine and not _ended(file, owner) and _still(file, owner):
        raise _locked(folder, file, owner)


@contextlib.contextmanager
def locked(folder: Path, job: str) -> Iterator[None]:
    """Within, no other process writes `folder`, which is made if it is not there; without an
    entry at the end, it is removed again.

    In a process that has the lock already, nothing happens.

    Raises:
        RunFolderError: another process has it; host and pid of it, and how to take over. Or the
            folder cannot be made.
        OSError: it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"the folder {error.filename} cannot be made: {error.strerror}",
            hint="name one in a place that this user may write to, such as runs/first",
        ) from None
    file = folder / NAME
    owner = LockOwner.read(file)
    if owner is not None and owner.token in _mine:
        yield
        return
    me = dataclasses.replace(LockOwner.me(job), renews=True)
    _of(me, "alive", file).write_text("0")
    done = threading.Event()
    renewing = threading.Thread(target=_renew, args=(file, me, done), daemon=True, name="lock")
    try:
        _take(folder, file, me)
        renewing.start()
        _mine.add(me.token)
        yield
    finally:
        done.set()
        if renewing.is_alive():
            renewing.join(RENEWED)  # it may be writing
        _mine.discard(me.token)
        _release(file, me)
        with contextlib.suppress(OSError):
            _of(me, "alive", file).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


@contextlib.contextmanager
def export_locked(to: Path) -> Iterator[None]:
    """Within, no other process writes the directory `to`: the run folder that it is in is locked,
    or the folder that is to hold it, for as long as `to` is made there.

    Raises:
        RunFolderError: as `locked`.
    """
    above = to.absolute().parents
    run = next((path for path in above if (path / "run.json").exists()), None)
    if run is not None:
        with locked(run, "export"):
            yield
        return
    with locked(to.absolute().with_name(f".{to.name}.writing"), "export"):
        yield


_mine: set[str] = set()
"""Tokens of the locks that this process has."""


def _take(folder: Path, file: Path, me: LockOwner) -> None:
    """Create the lock, or follow an owner that is dead."""
    while True:
        if _create(file, me):
            return
        owner, gone = LockOwner.read(file), []
        while owner is not None and _ended(file, owner):
            gone.append(owner)
            after = _of(owner, "next", file)
            if _create(after, me):
                if _still(file, gone[0]) and all(_ended(file, each) for each in gone):
                    _replace(file, me)
                    for each, kind in itertools.product(gone, ("next", "alive")):
                        _of(each, kind, file).unlink(missing_ok=True)
                    if not all(each.dead for each in gone):
                        time.sleep(2 * RENEWED)  # one that was frozen reads the lock, and ends
                    return
                after.unlink(missing_ok=True)  # another was faster and has tidied up, or one lives
                break
            owner = LockOwner.read(after)
        else:
            if owner is not None and (gone or LockOwner.read(file) == owner):
                raise _locked(folder, file, owner)


def _of(owner: LockOwner, kind: str, file: Path) -> Path:
    return file.with_name(f"{NAME}.{owner.token}.{kind}")


def _count(file: Path, owner: LockOwner) -> str:
    """The sign of life that an owner gave last. NFS asks the server, since the file is opened."""
    try:
        return _of(owner, "alive", file).read_text("ascii")
    except FileNotFoundError:
        return ""


def _renew(file: Path, me: LockOwner, done: threading.Event) -> None:
    """Give signs of life, and end this process where the lock has become another one's."""
    count = 0
    while not done.wait(RENEWED):
        # A file system that does not answer is tried again.
        with contextlib.suppress(OSError, RunFolderError):
            count += 1
            if (owner := LockOwner.read(file)) is None and not done.is_set():
                _create(file, me)  # it was removed by hand
            elif owner is not None and owner.token == me.token:
                _of(me, "alive", file).write_text(str(count), "ascii")
            owner = LockOwner.read(file)  # after the sign: who has not seen it has the lock by now
            if owner is not None and owner.token != me.token:
                print(
                    f"process {os.getpid()} ends: it was frozen or cut off from {file.parent}, "
                    f"which process {owner.pid} on host {owner.host} writes now",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                os._exit(1)


_SILENT: dict[str, str] = {}
"""The last signs of life of owners that gave none for too long, by their tokens."""


def _ended(file: Path, owner: LockOwner) -> bool:
    """Whether an owner is dead, or has given no sign of life for `SILENT` seconds of waiting."""
    if owner.dead or owner.here or not owner.renews:
        return owner.dead
    if owner.token in _SILENT:
        return _SILENT[owner.token] == _count(file, owner)
    print(
        f"{file.parent} was being written by process {owner.pid} on host {owner.host}: waiting "
        f"{SILENT:g} s for a sign of life",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    first, silent, looked = _count(file, owner), 0.0, time.monotonic()
    while silent < SILENT:
        time.sleep(RENEWED / 5)
        with contextlib.suppress(OSError):
            if _count(file, owner) != first:
                return False
            # Time in which the file system did not answer is not the owner's silence.
            silent += min(time.monotonic() - looked, RENEWED)
        looked = time.monotonic()
    _SILENT[owner.token] = first
    return True


def _still(file: Path, first: LockOwner) -> bool:
    """Whether the lock is of the owner that it was of when it was read: that one may have left."""
    return LockOwner.read(file) == first


def _create(file: Path, owner: LockOwner) -> bool:
    """Give a file that names `owner` the name `file`, unless it exists: whether it did."""
    aside = _aside(file, owner)
    try:
        try:
            os.link(aside, file)
        except FileExistsError:
            # A reply that NFS lost: the second try finds the link of the first.
            return os.stat(aside).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:  # a file system without hard links
                handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(handle, "w") as out:
                out.write(aside.read_text())
        return True
    finally:
        aside.unlink(missing_ok=True)


def _replace(file: Path, owner: LockOwner) -> None:
    os.replace(_aside(file, owner), file)


def _aside(file: Path, owner: LockOwner) -> Path:
    aside = _of(owner, "new", file)
    aside.write_text(json.dumps(dataclasses.asdict(owner)))
    return aside


def _release(file: Path, me: LockOwner) -> None:
    with contextlib.suppress(OSError, RunFolderError):
        owner = LockOwner.read(file)
        if owner is not None and owner.token == me.token:
            file.unlink()


def _locked(folder: Path, file: Path, owner: LockOwner) -> RunFolderError:
    message = (
        f"{folder} is being written by process {owner.pid} on host {owner.host} "
        f"({owner.job}, since {owner.since})"
    )
    if owner.here:
        return RunFolderError(
            message, hint=f"wait for it, or end it: kill {owner.pid}; or another folder"
        )
    if owner.renews:
        return RunFolderError(
            f"{message}; it gives signs of life",
            hint=f"wait for it, or end it: ssh {owner.host} kill {owner.pid}; or another folder",
        )
    return RunFolderError(
        f"{message}; whether that process lives cannot be seen from here",
        hint=f"if it has ended: rm {shlex.quote(str(file))}",
    )


def _start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _batch() -> tuple[str, int]:
    """The Slurm job of this process, and how often it was queued again."""
    job = os.environ.get("SLURM_JOB_ID")
    name = f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else ""
    return name, launcher_number(os.environ, "SLURM_RESTART_COUNT", 0)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> str:
    """Where this process's id is valid; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
