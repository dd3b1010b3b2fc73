"""A timeline in the terminal: rank by time.

    rank 0 |F0░░F1░░F2░░······B0████████B1████████|
           | >    >    >      <                   |

The upper line of a rank is its compute, the lower one its communication (left out where there is
none). Each kind has its own mark, so that colour adds comfort and no information.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.spec.schedule import COMPUTE, RECEIVES, SENDS
from hocket.spec.timeline import Event, Timeline
from hocket.spec.units import format_seconds

# What fills a span of each kind; "" is rest.
_FILL = {"F": "░", "B": "█", "I": "▓", "W": "▒", "optimizer": "o", "": "·"}
_PLAIN = {"F": "-", "B": "#", "I": "%", "W": "+", "optimizer": "o", "": "."}
_COLOUR = {"F": "34", "B": "32", "I": "36", "W": "35", "optimizer": "33"}
_WORDS = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights",
    "optimizer": "optimizer",
}  # fmt: skip
_COMMUNICATION, _IDLE_COLOUR = "33", "2"

Cell = tuple[str, str]
"""A character and its ANSI colour ("" for none)."""


def timeline_text(
    timeline: Timeline,
    width: int = 100,
    *,
    theoretical: float | None = None,
    title: str | None = None,
    color: bool = False,
    unicode: bool = True,
    unit: str = "",
) -> str:
    """Draw a timeline.

    Args:
        timeline: measured or predicted.
        width: columns of the terminal; at least 40 are used.
        theoretical: the schedule's own bubble (`simulation.theoretical_bubble`), printed next to
            the timeline's.
        title: the first line's beginning. None: the timeline's source.
        color: add ANSI colours.
        unicode: False draws in ASCII alone.
        unit: of the times, where they are no seconds.
    """
    head = f"{title or timeline.source + ' timeline'}: "
    head += f"{timeline.duration:g} {unit}" if unit else format_seconds(timeline.duration)
    if any(e.kind in COMPUTE for e in timeline.events):
        head += f", bubble {timeline.bubble:.1%}"
        if theoretical is not None:
            head += f" (the schedule's own: {theoretical:.1%})"
    if not timeline.events:
        return head + ", nothing recorded"
    margin = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(40, width) - margin - len("||100%")
    fill = _FILL if unicode else _PLAIN
    lines = [head, " " * margin + " " + _ruler(timeline.duration, columns, unit)]
    for rank in range(timeline.num_ranks):
        events = [e for e in timeline.events if e.rank == rank]
        compute = [e for e in events if e.lane == "compute"]
        talk = [e for e in events if e.lane == "communication"]
        stages = {e.stage for e in compute if e.stage is not None}
        cells = _compute(compute, timeline.duration, columns, fill, len(stages) > 1)
        share = timeline.busy(rank) / timeline.duration if timeline.duration else 0.0
        lines.append(f"rank {rank}".ljust(margin) + _row(cells, color) + f"{share:4.0%}")
        if talk:
            row = _communication(talk, timeline.duration, columns)
            lines.append(" " * margin + _row(row, color))
    lines += _legend(timeline, fill, width)
    return "\n".join(line.rstrip() for line in lines)


def _compute(
    events: Sequence[Event],
    duration: float,
    columns: int,
    fill: dict[str, str],
    with_stage: bool,
) -> list[Cell]:
    """The compute lane: each cell shows what fills most of it, if more than half of it is busy."""
    owner: list[Event | None] = []
    for covers in _coverage(events, duration, columns):
        busy = sum(covers.values())
        best = max(covers, key=lambda i: covers[i], default=None)
        owner.append(events[best] if best is not None and busy > 0.5 else None)
    idle = (fill[""], _IDLE_COLOUR)
    cells = [idle if e is None else (fill.get(e.kind, "?"), _COLOUR.get(e.kind, "")) for e in owner]
    column = 0
    while column < columns:
        event = owner[column]
        end = column + 1
        while end < columns and owner[end] is event:
            end += 1
        if event is not None and event.microbatch is not None:
            for label in (
                f"{event.stage}{event.kind}{event.microbatch}" if with_stage else "",
                f"{event.kind}{event.microbatch}",
                f"{event.microbatch}",
            ):
                # One more cell than the label keeps neighbours apart and the kind visible.
                if label and len(label) < end - column:
                    for offset, letter in enumerate(label):
                        cells[column + offset] = (letter, _COLOUR.get(event.kind, "") + ";1")
                    break
        column = end
    return cells


def _communication(events: Sequence[Event], duration: float, columns: int) -> list[Cell]:
    """The communication lane: short messages stay visible."""
    cells: list[Cell] = []
    for covers in _coverage(events, duration, columns):
        best = max(covers, key=lambda i: covers[i], default=None)
        cells.append((" ", "") if best is None else (_mark(events[best].kind), _COMMUNICATION))
    return cells


def _mark(kind: str) -> str:
    return ">" if kind in (*SENDS, "send") else "<" if kind in (*RECEIVES, "receive") else "="


def _coverage(events: Sequence[Event], duration: float, columns: int) -> list[dict[int, float]]:
    """For each column, which share of it each event covers."""
    found: list[dict[int, float]] = [{} for _ in range(columns)]
    scale = columns / duration if duration else 0.0
    for index, event in enumerate(events):
        start, end = event.start * scale, max(event.end * scale, event.start * scale + 1e-6)
        for column in range(min(int(start), columns - 1), min(int(end), columns - 1) + 1):
            share = min(end, column + 1) - max(start, column)
            if share > 0:
                found[column][index] = share
    return found


def _row(cells: Sequence[Cell], color: bool) -> str:
    text, now = "", ""
    for letter, style in cells:
        if color and style != now:
            text += ("\x1b[0m" if now else "") + (f"\x1b[{style}m" if style else "")
            now = style
        text += letter
    return "|" + text + ("\x1b[0m" if now else "") + "|"


def _ruler(duration: float, columns: int, unit_name: str) -> str:
    """Times above the columns, at a round distance of about 20 columns."""
    if duration <= 0:
        return ""
    rough = duration * 20 / columns
    unit = 10.0 ** (len(f"{int(rough)}") - 1) if rough >= 1 else 1.0
    while unit > rough:
        unit /= 10
    step = next(unit * n for n in (10, 5, 2, 1) if unit * n <= rough)
    text = ""
    count = 0
    while True:
        column = round(count * step / duration * columns)
        label = f"{count * step:g}" if unit_name or not count else format_seconds(count * step)
        if column + len(label) > columns:
            return text
        text = text.ljust(column) + label
        count += 1


def _legend(timeline: Timeline, fill: dict[str, str], width: int) -> list[str]:
    kinds = {e.kind for e in timeline.events}
    words = [f"{fill[k]} {_WORDS[k]}" for k in _WORDS if k in kinds]
    marks = {_mark(e.kind) for e in timeline.events if e.lane == "communication"}
    meaning = {">": "send", "<": "receive", "=": "collective"}
    words += [f"{mark} {meaning[mark]}" for mark in meaning if mark in marks]
    lines = [""]
    for word in [*words, f"{fill['']} idle", "at the right: time computing"]:
        if lines[-1] and len(lines[-1]) + 3 + len(word) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + word
    return lines
