"""Theory compared with measurement: the collectives that a run's ranks should have made.

The expected rows need the model's plan, so they are made by one rank of the launcher, on the meta
device; the parent stays without torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hocket.spec.run import RunFolder

if TYPE_CHECKING:
    from hocket.launch import Launcher

Row = dict[str, Any]


def expected_communication(launcher: Launcher, folder: RunFolder) -> list[list[Row]]:
    """Per rank, every collective of one training step: name, axis, phase, count and bytes."""
    found: list[Row] = []

    def listen(event: Row) -> None:
        if event["event"] == "theory":
            found.append(event)

    launcher.run(
        "hocket.ranks.expected_communication:main",
        1,
        {"run": str(folder.path.resolve())},
        listen,
        startup_timeout=300.0,
    )
    ranks: list[list[Row]] = found[0]["ranks"]
    return ranks


def compare_communication(launcher: Launcher, folder: RunFolder) -> list[Row]:
    """Recorded and expected collectives of a step, summed over ranks; `equal`: all ranks agree.

    Rows of name, axis, phase, count, bytes, expected_count, expected_bytes, equal.
    """
    from hocket.cost.communication import differences

    recorded = json.loads(folder.communication_file.read_text())["ranks"]
    expected = expected_communication(launcher, folder)
    assert len(recorded) == len(expected)
    sums: dict[tuple[str, str, str], Row] = {}
    for measured, theory in zip(recorded, expected, strict=True):
        for row in differences(measured, theory):
            key = (row["name"], row["axis"], row["phase"])
            into = sums.setdefault(key, {**dict.fromkeys(_COUNTS, 0), "equal": True})
            for name in _COUNTS:
                into[name] += row[name]
            into["equal"] = into["equal"] and row["equal"]
    return [
        {"name": name, "axis": axis, "phase": phase, **row}
        for (name, axis, phase), row in sorted(sums.items(), key=lambda item: _order(item[0]))
    ]


_COUNTS = ("count", "bytes", "expected_count", "expected_bytes")


def _order(key: tuple[str, str, str]) -> tuple[bool, str, str]:
    """What is sent each microbatch before what is sent once a step; then by axis and name."""
    name, axis, phase = key
    return phase != "microbatch", axis, name
