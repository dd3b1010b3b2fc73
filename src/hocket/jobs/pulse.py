"""The pulse of this machine, taken before a run that is foretold: well under a second."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import RankFailure
from hocket.spec.measured import Measured, Pulse

if TYPE_CHECKING:
    from hocket.launch import Launcher

ENTRY = "hocket.probing.pulse:main"

SECONDS = 0.5
"""Of work in each rank."""

SAID = 0.05
"""How much slower or faster a step must be than when the machine was probed to be worth a word."""


def take(launcher: Launcher, measured: Measured, ranks: int) -> tuple[Pulse, ...]:
    """How fast `ranks` ranks are now, at most one a core; nothing where no probe can be compared.

    Never raises for what goes wrong: the forecast is then as when the machine was probed.
    """
    if not measured.pulses or measured.device != "cpu":
        return ()
    count = max(1, min(ranks, measured.host.cores))
    rows: list[Any] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "pulse":
            rows.extend(event["rows"])

    try:
        launcher.run(ENTRY, count, {"seconds": SECONDS, "quick": measured.quick}, hear)
    except RankFailure:
        return ()
    return tuple(dataclasses.replace(Pulse(**_named(row)), ranks=count) for row in rows)


def said(seconds: float, as_probed: float) -> str | None:
    """The difference in words, where there is one."""
    if not as_probed or abs(seconds / as_probed - 1) < SAID:
        return None
    change = seconds / as_probed - 1
    word = "slower" if change > 0 else "faster"
    return f"the machine is {abs(change):.0%} {word} now than when it was probed"


def _named(row: list[Any]) -> dict[str, Any]:
    from hocket.spec.measured import fields_of

    return dict(zip(fields_of("pulses"), row, strict=True))
