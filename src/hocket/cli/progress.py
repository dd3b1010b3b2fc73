"""Progress: a job's events as a bar on a terminal, as plain lines elsewhere, or as JSON.

The live display exists in this process only: ranks are started from a server that has none.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from hocket.spec import downloads
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Event = dict[str, Any]
PLAIN_LINES = 20
"""About so many lines are printed for a whole run where there is no terminal."""
SMALLEST_BAR = 8
"""Columns of the bar that numbers may not take."""


_SILENT = contextvars.ContextVar("silent", default=False)


@contextlib.contextmanager
def silenced(quiet: bool) -> Iterator[None]:
    """Within the block no progress and no notes are printed, if `quiet`."""
    token = _SILENT.set(quiet)
    try:
        yield
    finally:
        _SILENT.reset(token)


def silent() -> bool:
    """Whether --quiet was given."""
    return _SILENT.get()


def note(text: str) -> None:
    """Print one line of progress on stderr, unless --quiet."""
    if not silent():
        print(text, file=sys.stderr, flush=True)


class EventListener(Protocol):
    """Takes events. `heard` is False in a process that is not the one to speak for the job."""

    heard: bool

    def __call__(self, event: Event) -> None: ...


@contextlib.contextmanager
def progress(*, as_json: bool = False) -> Iterator[EventListener]:
    """The listener that suits where the output goes."""
    if as_json:
        from hocket.cli.events import json_events

        with json_events() as events:
            yield events
    elif silent():
        yield Silent()
    elif sys.stdout.isatty():
        with _bar() as bar:
            listener = Bar(bar)
            with downloads.download_listener(listener.download):
                yield listener
    else:
        yield PlainLines()


class DownloadLines:
    """Lines on stderr: one in ten seconds while a download lasts, and one at its end."""

    EVERY = 10.0
    """Seconds between lines of one download."""
    FIRST = 2.0
    """Seconds before its first one."""
    SMALL = 1_000_000
    """Bytes of a download that is over before a line of it could be read."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._next: dict[str, float] = {}

    def __call__(self, download: downloads.Download) -> None:
        if download.total < self.SMALL:
            return
        now, name = time.monotonic(), download.name
        begun = self._begun.setdefault(name, now)
        if download.ended:
            del self._begun[name]
            self._next.pop(name, None)
            if download.brief and now - begun < self.FIRST:
                return
        elif now < self._next.setdefault(name, now + self.FIRST):
            return
        else:
            self._next[name] = now + self.EVERY
        note(download_line(download, now - begun))


@functools.cache
def download_lines() -> DownloadLines:
    """The lines of this process."""
    return DownloadLines()


def progress_of(event: Event) -> downloads.Download:
    """An event of progress, for a download: brief, as it is worth a line only where it takes
    long."""
    done, total = event["done"], event["total"]
    return downloads.Download(event["what"], done, total, ended=done >= total, brief=True)


def download_line(download: downloads.Download, seconds: float) -> str:
    """How far a download is, in one line."""
    if download.ended and download.done >= download.total:
        return f"{download.name}: {format_bytes(download.total)} in {format_seconds(seconds)}"
    return f"{download.name}: {format_bytes(download.done)} of {format_bytes(download.total)}"


class Silent:
    """Prints nothing: --quiet."""

    def __init__(self) -> None:
        self.heard = False

    def __call__(self, event: Event) -> None:
        self.heard = True


class PlainLines:
    """A line for each phase, and for one in so many steps."""

    def __init__(self) -> None:
        self.heard = False
        self._progress = DownloadLines()

    def __call__(self, event: Event) -> None:
        self.heard = True
        if event["event"] == "progress":
            self._progress(progress_of(event))
            return
        line = self.line(event)
        if line is not None:
            print(line, flush=True)

    def line(self, event: Event) -> str | None:
        """What is printed for an event, None for nothing."""
        if event["event"] == "step":
            every = max(1, event["steps"] // PLAIN_LINES)
            if event["step"] in (1, event["steps"]) or event["step"] % every == 0:
                return step_line(event)
            return None
        return said(event)


def step_line(event: Event) -> str:
    """One step in one line."""
    return (
        f"step {event['step']:>{len(str(event['steps']))}}/{event['steps']}  "
        f"loss {event['loss']:.4f}  {event['tokens_per_second']:,.0f} tokens/s  "
        f"{format_seconds(event['step_seconds'])}/step"
        + (f"  grad norm {event['grad_norm']:.2f}" if event.get("grad_norm") is not None else "")
        + _left(event)
    )


def _left(event: Event) -> str:
    seconds = (event["steps"] - event["step"]) * event["step_seconds"]
    return f"  {format_seconds(seconds)} left" if seconds else ""


def said(event: Event) -> str | None:
    """What an event other than a step says in one line, None for nothing."""
    kind = event["event"]
    if kind == "phase":
        return f"{event['name']} ..."
    if kind == "note":
        return str(event["text"])
    if kind == "eval":
        perplexity = event.get("perplexity")
        also = "" if perplexity is None else f", perplexity {perplexity:.4g}"
        return f"held-out loss {event['loss']:.4f}{also} after step {event['step']}"
    if kind == "saved":
        return f"saved {event['path']}"
    return None


class Bar:
    """A live bar: loss, tokens/s, step time and time left; what else is said stays above it."""

    def __init__(self, bar: Progress) -> None:
        self.heard = False
        self._bar = bar
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        self.heard = True
        kind = event["event"]
        if kind == "step":
            self._step(event)
        elif kind == "progress":
            self._tell(download_line(dataclasses.replace(progress_of(event), ended=False), 0.0))
        elif kind == "phase" and self._task is None:
            self._tell(event["name"])
        else:
            text = said(event)
            if text is not None and kind != "phase":
                self._bar.console.print(text, highlight=False, markup=False)

    def download(self, download: downloads.Download) -> None:
        """Show how far a download is."""
        self._tell(download_line(dataclasses.replace(download, ended=False), 0.0))

    def _tell(self, what: str) -> None:
        """Show what goes on before the first step."""
        if not self._bar.tasks:
            self._bar.add_task(what, total=None, numbers="")
        self._bar.update(self._bar.task_ids[0], description=what)

    def _step(self, event: Event) -> None:
        if self._task is None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task("", total=event["steps"], numbers="")
        room = self._bar.console.width - SMALLEST_BAR - 2 * len(str(event["steps"])) - 6
        self._bar.update(self._task, completed=event["step"], numbers=numbers(event, room))


def numbers(event: Event, room: int) -> str:
    """A step in `room` columns: where they are few the speed goes first, and the loss never."""
    parts = [
        f"loss {event['loss']:.3f}",
        f"{event['tokens_per_second']:,.0f} tokens/s",
        f"{format_seconds(event['step_seconds'])}/step",
        _left(event).strip(),
    ]
    while len(parts) > 1 and len("  ".join(parts).rstrip()) > room:
        parts.pop(1)
    return "  ".join(parts).rstrip()


def _bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        refresh_per_second=4,  # the ranks need the cores more
    )
