"""Downloads: how far one is, or the reading of weights, from the code that does it to a listener.

The command line sets a listener, and rank 0 one that sends events to it; without one nothing is
shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

Follow = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any thread."""


@dataclasses.dataclass(frozen=True)
class Download:
    """One moment of a download.

    Attributes:
        name: what is downloaded. done, total: bytes. ended: nothing more of it follows.
        brief: worth showing only where it takes long, as work on what was downloaded.
    """

    name: str
    done: int
    total: int
    ended: bool = False
    brief: bool = False


Listener = Callable[[Download], None]
_listeners: list[Listener] = []


@contextlib.contextmanager
def download_listener(listener: Listener) -> Iterator[None]:
    """Within, this listener hears of every download of this process, and no other one does."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def following(name: str, *, brief: bool = False) -> Iterator[Follow]:
    """Gives the function that tells how far a download is; at the end, that it has ended."""
    last = Download(name, 0, 0)

    def follow(done: int, total: int) -> None:
        nonlocal last
        last = Download(name, done, total, brief=brief)
        report_download(last)

    try:
        yield follow
    finally:
        if last.total:
            report_download(dataclasses.replace(last, ended=True))


def report_download(download: Download) -> None:
    """Report one moment to the listener."""
    for listener in _listeners[-1:]:
        listener(download)
