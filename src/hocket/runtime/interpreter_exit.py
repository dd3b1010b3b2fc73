"""The interpreter's exit in a process whose group is Gloo's.

A worker thread of Gloo frees the tensors of its last collective after the thread that waited for it
has gone on. If the interpreter is being finalized by then, taking its lock ends the worker inside
C++, and the process with SIGABRT ("terminate called without an active exception"): on a busy
machine in 12 of 25 exits. `destroy_process_group` does not wait for workers of a group that is
still referred to. So an exit waits until no thread is running or about to.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time


@functools.cache
def settle_at_exit() -> None:
    """Have this process wait for its other threads before the interpreter is finalized. Once."""
    atexit.register(settle_threads)


def settle_threads(limit: float = 2.0) -> bool:
    """Wait until every other thread of this process sleeps, at two looks in a row.

    Args:
        limit: seconds after which it is given up.

    Returns:
        whether all slept; True where the system does not show its threads (no /proc).
    """
    end, clean = time.monotonic() + limit, 0
    while clean < 2:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)  # without the interpreter's lock, which a thread may be waiting for
        clean = 0 if _running() else clean + 1
    return True


def _running() -> bool:
    """Whether another thread has a processor or is to get one."""
    own = str(threading.get_native_id())
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return False
    return any(thread != own and _state(thread) == "R" for thread in threads)


def _state(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return ""
