"""Links of a layout on CPU cores that were measured: the same bytes on what the ranks talk by here.

The bytes are those that the runtime moves (`cost.measured_prices.StepProblem.communication`), the
seconds those of the curves that the probe took; on other links they are predicted as everywhere.
"""

from __future__ import annotations

from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_prices import StepProblem
from hocket.planning.links import OTHERS, AxisLinks, Call, alternative, members, seconds_on
from hocket.spec.layout import Layout
from hocket.spec.links import ring_share

WAYS = {"shm": "shared memory", "gloo": "sockets"}
"""Backend to what its messages cross."""


def axis_links(job: StepProblem, links: MeasuredLinks, rate: float) -> list[AxisLinks]:
    """Every axis of a layout that talks, the one that costs most first.

    Args:
        job: what is priced. links: of the machine. rate: bytes/s between two ranks there.
    """
    found = [_priced(job.layout, axis, calls, links, rate) for axis, calls in _calls(job).items()]
    return sorted(found, key=lambda each: -each.seconds)


def _calls(job: StepProblem) -> dict[str, list[Call]]:
    """Axis to its collectives on the rank that hands over most."""
    found: dict[str, list[Call]] = {}
    for rows in job.communication():
        mine: dict[str, list[Call]] = {}
        for row in rows:
            if row["name"] != "receive":
                call = row["axis"], row["name"], row["count"], float(row["bytes"])
                mine.setdefault(row["axis"], []).append(call)
        for axis, calls in mine.items():
            if sum(c[3] for c in calls) > sum(c[3] for c in found.get(axis, [])):
                found[axis] = calls
    return found


def _priced(
    layout: Layout, axis: str, calls: list[Call], links: MeasuredLinks, rate: float
) -> AxisLinks:
    ranks = len(members(layout, axis)[0])
    seconds = 0.0
    for _, name, count, nbytes in calls:
        each = round(nbytes / count)
        one = links.message(each) if axis == "pp" else links.collective(name, axis, each, ranks)
        seconds += count * (one.give + one.wait + one.take) if one else 0.0
    return AxisLinks(
        axis=axis,
        ranks=ranks,
        messages=sum(count for _, _, count, _ in calls),
        bytes=sum(nbytes for *_, nbytes in calls),
        sent=sum(ring_share(name, ranks) * nbytes for _, name, _, nbytes in calls),
        link=WAYS.get(links.backend, links.backend),
        rate=rate,
        seconds=seconds,
        on={name: seconds_on(alternative(name, ranks), layout, axis, calls)[0] for name in OTHERS},
    )
