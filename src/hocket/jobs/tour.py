"""The tour: claims about splitting a model, each tested by running it on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from hocket.jobs.background_load import BackgroundLoad
from hocket.jobs.request import request
from hocket.jobs.tour_runner import MODEL, SIZES, Guide
from hocket.jobs.tour_stops import STOPS, TIMED
from hocket.spec.errors import OptionError, unknown
from hocket.spec.ledger import DISTURBED
from hocket.spec.tour import Stop

ATTEMPTS = 3
"""How often a claim about times is measured before it counts as not seen."""


def tour(
    *,
    only: Sequence[str] = (),
    backend: str = "auto",
    on_stop: Callable[[Stop], None] | None = None,
) -> list[Stop]:
    """Run the stops, in their order.

    Args:
        only: keys of stops; empty: all.
        backend: `auto`, `shm` or `gloo`.
        on_stop: called with each stop as soon as it is done.

    Raises:
        OptionError: an unknown stop.
    """
    for key in only:
        if key not in STOPS:
            message, hint = unknown("stop", key, STOPS)
            raise OptionError(message, hint=hint)
    job = request({"model": MODEL, "device": "cpu", "backend": backend, **SIZES})
    found = []
    with Guide(job) as guide:
        for key, stop in STOPS.items():
            if only and key not in only:
                continue
            done = judge_stop(key, stop, guide)
            found.append(done)
            if on_stop is not None:
                on_stop(done)
    return found


def judge_stop(key: str, stop: Callable[[Guide], Stop], guide: Guide) -> Stop:
    """Run a stop. One that judges times and does not see its claim is measured again, up to
    `ATTEMPTS` times in all; if other programs took cores meanwhile, its verdict is `busy`.
    """
    began = time.monotonic()
    load = BackgroundLoad()
    done = stop(guide)
    for _ in range(ATTEMPTS - 1):
        if done.verdict != "false" or key not in TIMED:
            break
        guide.forget()
        done = stop(guide)
    if done.verdict == "false" and key in TIMED and load.cores() > DISTURBED:
        done = dataclasses.replace(done, verdict="busy")
    return dataclasses.replace(done, seconds=time.monotonic() - began)


def rendered(stop: Stop | None, number: int, language: str, width: int = 100) -> str:
    """A stop as text; without one nothing, if the language is known. Raises OptionError."""
    from hocket.reporting.tour import stop_text, tour_words

    tour_words(language)
    return "" if stop is None else f"\n{stop_text(stop, number, language, width)}\n"


def write_tour(path: str, stops: Sequence[Stop], language: str) -> None:
    """Write the Markdown page of a tour. Raises OSError where it cannot be written."""
    from pathlib import Path

    from hocket.reporting.tour import page_markdown
    from hocket.runtime.host_cores import usable_cores

    Path(path).write_text(page_markdown(stops, usable_cores(), language), encoding="utf-8")
