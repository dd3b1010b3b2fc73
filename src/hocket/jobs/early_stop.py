"""Early stop: SIGTERM and SIGUSR1 to a training job of which no rank takes steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stopping_early(code: int, on_event: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within, both signals end the process with exit code `code`, as batch systems expect of a
    job that is to be queued again: while data are tokenized, ranks start, or results are written.
    Ranks that take steps are asked to save instead (`Launcher.run`).
    """
    from hocket.launch import Terminated

    def handler(number: int, frame: object) -> None:
        ended = Terminated(number)
        ended.code = code
        raise ended

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler.raises = True  # type: ignore[attr-defined]
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    except Terminated as ended:
        if ended.code == code:
            text = "stopped while no step was computed; the same command continues"
            on_event({"event": "note", "text": text})
        raise
    finally:
        for number, old in before:
            signal.signal(number, old)
