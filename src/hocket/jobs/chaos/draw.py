"""Draw: faults from a seed, grouped into jobs, each fault in a stretch of steps of its own.

    step     1    4    8    12   16
    fault    |  0 |  1 |  2 |  3 |      a checkpoint ends each stretch

So at most one fault happens between two checkpoints, and each is attributed to what found it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from hocket.jobs.chaos.kinds import ALL, BY_NAME, FaultKind
from hocket.spec.errors import LayoutError, OptionError, unknown
from hocket.spec.layout import Layout

STRETCH = 6
"""Steps between two checkpoints, and between two evaluations."""
FIRST = 2
"""Stretches of a job before its faults: a damaged checkpoint has one before it."""
IN_A_JOB = 8
"""Faults of one job at most."""
SETTLED = 4
"""Steps of an attempt after which a hang is found within seconds."""
SLOW_STEPS = 360
"""Steps of a job with a slow rank: seven of them are recorded, of which four of six are enough that
agree. Of fewer, other work on the machine spoils one too many."""
SLOW_SECONDS, SLOW_TIMES = 0.004, 2.0
"""Sleep of a slow rank before each action: at least so long, and so many times what it did since
the last sleep, whatever else a busy machine does."""


@dataclasses.dataclass(frozen=True)
class ChaosFault:
    """One fault that is to happen.

    Attributes:
        number: within all faults. kind: of `kinds`. rank: that it happens to.
        step: at or after which (1 is the first). phase: of the rank.
        place: where in files or weights, 0 to 1.
    """

    number: int
    kind: FaultKind
    rank: int
    step: int
    phase: str
    place: float

    def row(self, log: str, filler: str) -> dict[str, Any]:
        """The fault as `training.faults` reads it."""
        row = {
            "id": self.number, "log": log, "kind": self.kind.brought, "rank": self.rank,
            "step": self.step, "phase": self.phase, "place": self.place,
        }  # fmt: skip
        if self.kind.name == "nan":
            row["again"] = True
        elif self.kind.name == "slow":
            row |= {"again": True, "seconds": SLOW_SECONDS, "longer": SLOW_TIMES}
        elif self.kind.name == "full":
            row["filler"] = filler
        return row


@dataclasses.dataclass(frozen=True)
class ChaosJob:
    """One training job: its steps, its backend and its faults in the order of their steps."""

    steps: int
    backend: str
    faults: tuple[ChaosFault, ...]


def chosen_kinds(names: Sequence[str], layout: Layout) -> list[FaultKind]:
    """The kinds to draw from; without names all that the layout allows.

    Raises:
        OptionError: an unknown kind. LayoutError: a kind that the layout has no ranks for.
    """
    found = []
    for name in names:
        if name not in BY_NAME:
            message, hint = unknown("kind of fault", name, BY_NAME)
            raise OptionError(message, hint=hint)
        kind = BY_NAME[name]
        if kind.ranks > layout.world_size:
            raise LayoutError(
                f"{name} needs {kind.ranks} ranks; the layout {layout} has {layout.world_size}",
                hint=f"--layout dp{kind.ranks}",
            )
        if not _allows(kind, layout):
            raise LayoutError(
                f"{name} needs two data-parallel replicas of the weights (dp2, zero below 3); the "
                f"layout {layout} has none",
                hint="--layout dp2",
            )
        found.append(kind)
    return found or [
        kind for kind in ALL if kind.ranks <= layout.world_size and _allows(kind, layout)
    ]


def _allows(kind: FaultKind, layout: Layout) -> bool:
    return not kind.replicas or (layout.dp > 1 and layout.zero < 3)


def draw_faults(
    seed: int, count: int, kinds: Sequence[FaultKind], layout: Layout
) -> list[ChaosJob]:
    """`count` faults of these kinds, in jobs. The same for equal arguments."""
    rng = random.Random(f"{seed} {layout}")
    jobs, number = [], 0
    while number < count:
        backend = rng.choice(("shm", "gloo")) if layout.world_size > 1 else "auto"
        faults: list[ChaosFault] = []
        used: set[str] = set()  # phases that a job has once
        while len(faults) < IN_A_JOB and number < count:
            kind = rng.choice(kinds)
            if kind.name == "slow":
                if not faults:
                    step = rng.randint(1, STRETCH)
                    rank = rng.randrange(layout.world_size)
                    faults = [ChaosFault(number, kind, rank, step, "forward", 0.0)]
                    number += 1
                    break
                continue
            if kind.name == "cut":
                backend = "gloo"
            stretch = FIRST + len(faults)
            fault = _fault(rng, number, kind, stretch, used)
            faults.append(dataclasses.replace(fault, rank=rng.randrange(layout.world_size)))
            number += 1
        slow = any(fault.kind.name == "slow" for fault in faults)
        steps = SLOW_STEPS if slow else (FIRST + len(faults)) * STRETCH
        faults = [
            dataclasses.replace(fault, step=steps) if fault.phase == "export" else fault
            for fault in faults
        ]
        jobs.append(ChaosJob(steps, backend, tuple(sorted(faults, key=lambda f: f.step))))
    return jobs


def _fault(
    rng: random.Random, number: int, kind: FaultKind, stretch: int, used: set[str]
) -> ChaosFault:
    once = {"build", "export"}
    phase = rng.choice([phase for phase in kind.phases if phase not in used])
    used |= {phase} & once
    first, last = stretch * STRETCH + 1, (stretch + 1) * STRETCH
    if kind.name == "stuck":
        first += SETTLED
    step = rng.randint(first, last - 1)  # its own stretch's checkpoint comes after it
    if phase in ("save", "evaluate"):
        step = last
    elif phase == "build":
        step = 1
    return ChaosFault(number, kind, 0, step, phase, rng.random())
