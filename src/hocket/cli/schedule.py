"""`hocket schedule`: when each pipeline rank computes what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from hocket.cli.flags import LayoutFlags, explicit, parse, values
from hocket.cli.terminal import draws, shown, terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Print a schedule: rank by time, with a backward twice as long as a forward.

    Attributes:
        parallel: Degrees of parallelism and schedule
        text: print the schedule's text form, which --schedule reads from a file.
        json: print one JSON object.
    """

    parallel: Annotated[LayoutFlags, tyro.conf.arg(name="layout")] = dataclasses.field(
        default_factory=LayoutFlags
    )
    text: bool = False
    json: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print. Returns 0."""
    flags = parse(ScheduleFlags, "schedule", arguments, ScheduleFlags())
    from hocket.jobs.request import layout_of
    from hocket.jobs.schedule import picture, schedule

    layout = layout_of(values(flags.parallel, also=explicit(arguments)))
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
    elif flags.text:
        print(found, end="")
    else:
        color, width = terminal()
        print(shown(picture(found, timeline, color=color, width=width, unicode=draws())))
    return 0
