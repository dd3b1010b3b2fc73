"""The record of a training job: what its ranks reported, handed on, and summed up at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.jobs import forecast
from hocket.spec.files import MALFORMED, parse_json
from hocket.spec.forecast import Forecast
from hocket.spec.run import RunFolder

Event = dict[str, Any]
Listener = Callable[[Event], None]


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What a training job came to.

    Attributes:
        run: the run folder.
        steps: optimizer steps done, those of an earlier start included.
        first_loss, loss: of the first and the last step this job did (nats per token).
        held_out_loss, held_out_perplexity: of the last evaluation, None without one.
        tokens_per_second, step_seconds: medians over the steps this job did; the first one, which
            warms up (with torch.compile the first two), counts only where there is no other.
        memory_bytes: peak tensor bytes counted on each rank.
        memory: the same by what they are for, a dictionary a rank: `parameters`, `gradients`,
            `optimizer`, `activations`, `total`.
        forecast: predicted before the run, None where no prediction was tried.
        bubble: measured, of the recorded step; None without one.
        truncated_documents, truncated_tokens: of the data, cut at the length of a row.
        stopped: asked to stop by SIGTERM or SIGUSR1, it saved after `steps` and can be resumed.
        restarts: times that ranks failed and were started again.
        report: the page that was written where hocket chose the layout; None elsewhere.
    """

    run: Path
    steps: int = 0
    first_loss: float | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    held_out_perplexity: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    memory_bytes: tuple[int, ...] = ()
    memory: tuple[dict[str, int], ...] = ()
    forecast: Forecast | None = None
    bubble: float | None = None
    truncated_documents: int = 0
    truncated_tokens: int = 0
    stopped: bool = False
    restarts: int = 0
    report: Path | None = None


class JobRecorder:
    """Hands events on to a listener and keeps what the summary needs.

    Attributes:
        step, saved: the last step reported, and the last step saved or copied by this job.
        failures: message of each failure after which the ranks were restarted.
        recovered: seconds from each such failure to the next step.
        watchers: called with each event after the listener.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener
        self.watchers: list[Listener] = []
        self.steps: list[Event] = []
        self.held_out: list[Event] = []
        self.memory: tuple[dict[str, int], ...] = ()
        self.bubble: float | None = None
        self.stopped = False
        self.step = 0
        self.saved = 0
        self.failures: list[str] = []
        self.recovered: list[float] = []
        self._failed: float | None = None

    def __call__(self, event: Event) -> None:
        if event["event"] == "step":
            if self._failed is not None:
                self.recovered.append(time.monotonic() - self._failed)
                self._failed = None
            while self.steps and self.steps[-1]["step"] >= event["step"]:
                self.steps.pop()  # taken again after a restart
            self.steps.append(event)
            self.step = event["step"]
        elif event["event"] in ("saved", "copied"):
            self.saved = event["step"]
        elif event["event"] == "eval":
            self.held_out.append(event)
        elif event["event"] == "stopped":
            self.stopped = True
        elif event["event"] == "timeline":
            self.bubble = float(event["bubble"])
        elif event["event"] == "memory":
            self.memory = tuple(event["ranks"])
        for hear in (self.listener, *self.watchers):
            if hear is not None:
                hear(event)

    def restarting(self, failed: float) -> None:
        """The ranks that failed at `failed` (`time.monotonic`) are started again."""
        self._failed = failed

    @property
    def stepped(self) -> bool:
        """Whether ranks took a step since they were last started again."""
        return self._failed is None

    def phase(self, name: str) -> None:
        self({"event": "phase", "name": name})

    def note(self, text: str) -> None:
        self({"event": "note", "text": text})

    def tokenized(self, done: int, total: int) -> None:
        self({"event": "progress", "what": "tokenizing", "done": done, "total": total,
              "unit": "bytes"})  # fmt: skip

    def summary(self, folder: RunFolder) -> Summary:
        import statistics

        saved = forecast.read_forecast(folder)
        found = Summary(
            run=folder.path,
            memory=self.memory,
            forecast=None if saved is None else saved[0],
            bubble=self.bubble,
            stopped=self.stopped,
            restarts=len(self.failures),
        )
        with contextlib.suppress(OSError, ValueError):
            data = parse_json((folder.data / "tokens.json").read_text())
            found.truncated_documents = int(data.get("truncated_documents", 0))
            found.truncated_tokens = int(data.get("truncated_tokens", 0))
        if self.held_out:
            found.held_out_loss = float(self.held_out[-1]["loss"])
            found.held_out_perplexity = self.held_out[-1].get("perplexity")
        if not self.steps:
            return found
        found.steps = int(self.steps[-1]["step"])
        found.first_loss = float(self.steps[0]["loss"])
        found.loss = float(self.steps[-1]["loss"])
        warm = self.steps[warm_up_steps(folder) :] or self.steps[-1:]
        found.tokens_per_second = statistics.median(s["tokens_per_second"] for s in warm)
        found.step_seconds = statistics.median(s["step_seconds"] for s in warm)
        found.memory_bytes = tuple(self.steps[-1].get("memory_bytes") or ())
        return found


def warm_up_steps(folder: RunFolder) -> int:
    """Steps at the beginning that warm up: one, and with torch.compile two, which compile."""
    try:
        compiled = parse_json(folder.spec_file.read_text())["options"]["compile"]
    except (OSError, *MALFORMED, KeyError, TypeError):
        return 1
    return 2 if compiled else 1
