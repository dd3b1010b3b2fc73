"""Early stop: SIGTERM and SIGUSR1 to a training job of which no rank takes steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hocket.spec.errors import stopped_code


@contextlib.contextmanager
def stopping_early(on_event: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within, both signals end the process with `spec.errors.stopped_code`, as batch systems expect
    of a job that is to be queued again: while data are tokenized, ranks start, or results are
    written. Ranks that take steps are asked to save instead (`Launcher.run`). Of another launcher's
    ranks it is rank 0 that reports it: the launcher ends the others, too, where rank 0 has rejected
    the job, which nothing continues.

    A handler from before the job, with an attribute `before_run`, does not come back: both signals
    are ignored from then on, so that the exit code is that of the job.
    """
    from hocket.launch import Terminated, launched_ranks

    def handler(number: int, frame: object) -> None:
        ended = Terminated(number)
        ended.code = stopped_code(number)
        early.append(ended)
        handler.lost = ended  # type: ignore[attr-defined]
        raise ended

    early: list[Terminated] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler.raises = True  # type: ignore[attr-defined]
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    except Terminated as ended:
        rank, world_size = launched_ranks()
        if ended in early and rank == 0:  # which prepares the job, and prints why it is rejected
            unless = "unless another rank failed, " if world_size > 1 else ""
            text = f"stopped while no step was computed; {unless}the same command continues"
            on_event({"event": "note", "text": text})
        raise
    finally:
        for number, old in before:
            over = getattr(old, "before_run", False)
            signal.signal(number, signal.SIG_IGN if over else old)
