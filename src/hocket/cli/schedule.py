"""`hocket schedule`: when each pipeline rank computes what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hocket.cli.flags import Count, Text, parse_flags
from hocket.cli.terminal import draws, printable, terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Print a schedule: rank by time, with a backward twice as long as a forward.

    Attributes:
        layout: pipeline stages, as in pp4 (default: dp1, no pipeline).
        schedule: sequential, gpipe, 1f1b, interleaved, zero-bubble, zb-v, or the path of a schedule
            file (default: 1f1b).
        microbatches: microbatches per step (default: twice the pipeline ranks).
        virtual_stages: stages per pipeline rank (default: 1; zb-v: 2).
        format: picture, or text (the form that --schedule reads from a file). One of: picture,
            text.
        json: print one JSON object.
    """

    layout: Text = None
    schedule: Text = None
    microbatches: Count = None
    virtual_stages: Count = None
    format: str = "picture"
    json: bool = False


OF_LAYOUT = ("layout", "schedule", "microbatches", "virtual_stages")


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    flags = parse_flags(ScheduleFlags, "schedule", arguments, ScheduleFlags())
    from hocket.jobs.request import layout_of
    from hocket.jobs.schedule import picture, schedule

    layout = layout_of(
        {name: getattr(flags, name) for name in OF_LAYOUT if getattr(flags, name) is not None}
    )
    found, timeline = schedule(layout)
    if flags.json:
        import json

        lanes = [[str(action) for action in rank] for rank in found.ranks]
        print(
            json.dumps(
                {
                    "name": found.name,
                    "microbatches": found.num_microbatches,
                    "stage_ranks": found.stage_ranks,
                    "ranks": lanes,
                    "bubble": timeline.bubble,
                }
            )
        )
    elif flags.format == "text":
        print(found, end="")
    else:
        color, width = terminal()
        print(printable(picture(found, timeline, color=color, width=width, unicode=draws())))
    return 0
