"""`hocket tour`: a guided walk through the kinds of parallelism, each claim tested here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import File, parse_flags
from hocket.cli.progress import note

Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="STOP...")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tour:
    """Walk through the kinds of parallelism: a claim, its prediction, its measurement, a verdict.

    Every claim is measured on this machine's CPUs. If a time is not as claimed, it is measured
    again, and not judged while other programs use the cores. Exits 1 if a claim does not hold.

    Attributes:
        lang: language of the text. One of: en, ko.
        stops: only these stops: threads processes layers microbatches columns half_layers three ...
            (default: all).
        out: write the tour to this Markdown file as well.
        backend: communication backend; shm is shared memory. One of: auto, shm, gloo.
        json: print one JSON object: `stops`.
    """

    lang: str = "en"
    stops: Names = ()
    out: File = None
    backend: str = "auto"
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Walk. Returns 1 if a claim that could be judged was not seen to hold, else 0."""
    flags = parse_flags(Tour, "tour", arguments, Tour())
    import json

    from hocket.cli.terminal import terminal
    from hocket.jobs.machine import writable
    from hocket.jobs.tour import rendered, tour, write_tour
    from hocket.jobs.tour_stops import STOPS
    from hocket.spec.tour import Stop

    _, width = terminal()
    walked = [key for key in STOPS if not flags.stops or key in flags.stops]
    numbers = {key: number for number, key in enumerate(walked, 1)}
    rendered(None, 0, flags.lang)  # an unknown language is rejected before anything runs
    if flags.out is not None:
        writable([flags.out], "tour.md")

    def show(stop: Stop) -> None:
        if flags.json:
            note(f"{stop.key} ...")
        else:
            print(rendered(stop, numbers[stop.key], flags.lang, width), flush=True)

    found = tour(only=flags.stops, backend=flags.backend, on_stop=show)
    if flags.json:
        print(json.dumps({"stops": [stop.to_json() for stop in found]}))
    if flags.out is not None:
        write_tour(flags.out, found, flags.lang)
        print(f"{flags.out} written", file=sys.stderr)
    return 0 if all(stop.verdict != "false" for stop in found) else 1
