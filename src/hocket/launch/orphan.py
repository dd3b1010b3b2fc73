"""Orphans: a rank of torchrun or Slurm ends with the process that started it.

    agent (torchrun) or step daemon (Slurm) -> a shell that wraps the command, if any -> rank

A killed agent takes no rank along: its ranks would go on in a run that is being restarted without
them, and hold up the rendezvous of the agent that replaces it. A thread of the rank ends it, which
prints why and notifies the other ranks; where the rank runs no thread, its guard (`launch.guard`)
does. The kernel's own signal at a parent's death (`spec.parent_process.die_with`) would also follow
the thread that started the rank, which in a daemon may end earlier.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from hocket.launch.guard import start_guard

_IDENTITY = ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
"""Variables that one rank's process shares with the shells around it, and not with its launcher."""
_REAPERS = ("systemd", "init")

_WATCHED: list[threading.Thread] = []


def end_with_launcher(on_end: Callable[[str], None] | None = None) -> None:
    """End this process, with a message, when the launcher that started it or a shell between them
    is gone. Does nothing for ranks that no torchrun and no Slurm step started: who starts them by
    hand may leave.

    Args:
        on_end: called with the reason first, for as long as `_LAST` seconds.
    """
    if on_end is not None:
        _ON_END[:] = [on_end]
    if _WATCHED or not _started_by_another(os.environ):
        return
    chain = ancestors()
    if _adopted(chain[-1]):
        _end(f"its launcher ended before rank {_rank()} had begun")
    names = _opened(chain)
    _WATCHED.append(threading.Thread(target=_watch, args=[names], daemon=True, name="launcher"))
    _WATCHED[0].start()
    if names:
        start_guard(_rank(), names)


_ON_END: list[Callable[[str], None]] = []
_LAST = 1.0


def _started_by_another(environment: Mapping[str, str]) -> bool:
    torchrun = "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment
    return torchrun or ("SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment)


def ancestors() -> list[int]:
    """Process ids from this one's parent to the launcher: shells have this rank's own variables,
    the first process without them is the launcher."""
    found = [os.getppid()]
    while _has_identity(found[-1]) and (parent := _parent(found[-1])):
        found.append(parent)
    return found


def _has_identity(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # of another user, as Slurm's step daemon, or gone
        return False
    theirs = set(text.split(b"\0"))
    return all(
        f"{name}={os.environ[name]}".encode() in theirs for name in _IDENTITY if name in os.environ
    )


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, ValueError):
        return 0


def _adopted(pid: int) -> bool:
    """Whether `pid` only took this process over from a launcher that is gone. A container's first
    process may be torchrun itself."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return pid == 1 and os.getppid() == 1
    python = any(word in command for word in (b"python", b"torchrun", b"slurmstepd"))
    return not python and (pid == 1 or name in _REAPERS)


def _opened(chain: list[int]) -> dict[int, str]:
    """A descriptor of each process, and its name."""
    names = {}
    for pid in chain:
        name = f"{_name(pid)} (process {pid})"
        try:
            names[os.pidfd_open(pid)] = name
        except ProcessLookupError:
            _end(f"{name}, which started it, is gone")
        except OSError:  # a kernel or a sandbox without
            continue
    return names


def _watch(names: dict[int, str]) -> None:
    poll = select.poll()
    for fd in names:
        poll.register(fd, select.POLLIN)
    if names and (ended := poll.poll()):
        _end(f"{names[ended[0][0]]}, which started it, is gone")


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"torch.distributed.run" in command or b"torchrun" in command:
            return "the torchrun agent"
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "the launcher"


def _rank() -> str:
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "?")


def _end(why: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"rank {_rank()} ends: {why}", file=sys.stderr, flush=True)
    for call in _ON_END:
        thread = threading.Thread(target=call, args=[why], daemon=True)
        thread.start()
        thread.join(_LAST)
    os._exit(1)
