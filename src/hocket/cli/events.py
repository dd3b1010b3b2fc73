"""Events: what train, serve, check and probe print with --json, one object a line.

    {"schema": 1, "event": "step", "step": 3, "steps": 100, "loss": 2.4, ...}

Every line has `schema` and `event`; docs/reference/json.md lists the events and their keys. A
reader ignores events and keys that it does not know: a release may add some, and raises `SCHEMA`
where one is removed or changes its meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from hocket.cli.progress import DownloadLines, Event, note, progress_of, silent
from hocket.spec import downloads

SCHEMA = 1
Listener = Callable[[Event], None]

EVENTS = {
    "phase": "what begins: `name`; of a matrix also `done` and `of`",
    "progress": "how far long work is: `what`, `done`, `total`, `unit` (bytes)",
    "note": "a line for a person: `text`",
    "step": "one optimizer step: `step`, `steps`, `loss`, `lr`, `grad_norm`, `step_seconds`, "
    "`tokens_per_second`, `loss_tokens`, `num_input_tokens_seen` (since the run's first step, "
    "without padding), `memory_bytes` (per rank), `layout`; where they apply `mfu`, "
    "`expert_imbalance`",
    "eval": "an evaluation: `step`, `loss`, `perplexity`",
    "saved": "a checkpoint: `step`, `path`",
    "copied": "all ranks' states are in memory, by --replicate-state: `step`, `path`",
    "memory": "peak tensor bytes by kind: `ranks`, one object per rank",
    "timeline": "a recorded step: `step`, `path`, `seconds`, `bubble`",
    "restart": "ranks failed and are started again: `rank`, `cause`, `step` (done before), "
    "`restarts` (in a row), `time` of the detection (seconds since the epoch)",
    "stopped": "a signal ended the run after `step`",
    "done": "all `steps` are taken and the model is exported",
    "ready": "a server answers: `address`, `metrics`, `model`, `layout`, `replicas`, `seconds`, "
    "`run`",
    "ended": "a server has ended: `drained`, `run`",
    "result": "the last line of train, check and probe: what came out",
    "error": "the command failed: `error` with `message`, `hint`, `exit_code`",
}
"""Every event, and its keys."""

_OF_WORK = ("phase", "progress", "note")
"""Events that --quiet leaves out."""
_EVERY = 1.0
"""Seconds between two events of progress of one thing."""


class JsonEvents:
    """Prints events as they come. `heard`: as of `cli.progress.EventListener`."""

    def __init__(self) -> None:
        self.heard = False
        self._next: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        self.heard = True
        kind = event["event"]
        if kind not in EVENTS or (silent() and kind in _OF_WORK):
            return
        if kind == "progress" and not self._due(event):
            return
        print_event(event)

    def _due(self, event: Event) -> bool:
        now, what = time.monotonic(), event["what"]
        if event["done"] < event["total"] and now < self._next.get(what, 0.0):
            return False
        self._next[what] = now + _EVERY
        return True

    def download(self, download: downloads.Download) -> None:
        """A download as an event of progress."""
        if download.total and not (download.brief and not download.ended):
            self(
                {
                    "event": "progress", "what": download.name, "done": download.done,
                    "total": download.total, "unit": "bytes",
                }
            )  # fmt: skip


@contextlib.contextmanager
def json_events() -> Iterator[JsonEvents]:
    """The listener of --json; within, downloads are events too."""
    listener = JsonEvents()
    with downloads.download_listener(listener.download):
        yield listener


@contextlib.contextmanager
def progress_of_phases(*, as_json: bool) -> Iterator[Listener]:
    """The listener of work that reports phases: events, or lines on stderr."""
    if as_json:
        with json_events() as events:
            yield events
        return

    def tell(event: Event) -> None:
        if event["event"] == "phase":
            note(f"{event['name']} ...")
        elif event["event"] == "progress":
            lines(progress_of(event))

    lines = DownloadLines()
    yield tell


def print_event(event: Event) -> None:
    """Print one event."""
    own = {key: value for key, value in event.items() if key != "rank"}
    print(json.dumps({"schema": SCHEMA, **own}, default=str), flush=True)


def print_result(values: Any) -> None:
    """Print the last event, of a dictionary or a dataclass."""
    found = dataclasses.asdict(values) if dataclasses.is_dataclass(values) else values  # type: ignore[arg-type]
    print_event({"event": "result", **found})
