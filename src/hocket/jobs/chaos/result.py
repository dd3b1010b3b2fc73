"""Results of `hocket chaos`: what became of each fault, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(kw_only=True)
class FaultResult:
    """What became of one fault.

    Attributes:
        kind: of `kinds.ALL`. injected_at: `job`, `step` and `phase`. rank: that it happened to.
        detected_by: what found it; None: nothing. detected_seconds: until then.
        named: the message names the right rank, file or parameter; None where there is none.
        recovered_seconds: from the detection to the next step, or to the end of the job.
        steps_lost: steps that were taken again.
        survived: it was found, and the job continued. remark: why not; of a flipped bit, its place
            and the rejection; of a rank named wrongly, the message.
    """

    kind: str
    injected_at: dict[str, Any]
    rank: int
    detected_by: str | None = None
    detected_seconds: float | None = None
    named: bool | None = None
    recovered_seconds: float | None = None
    steps_lost: int = 0
    survived: bool = False
    remark: str = ""

    def __str__(self) -> str:
        at = self.injected_at
        text = f"{self.kind:<11} rank {self.rank}  step {at['step']:>3} {at['phase']:<10}  "
        if self.detected_seconds is None:
            return f"{text}NOT FOUND: {self.remark}"
        text += f"{self.detected_by} after {self.detected_seconds:.2f} s"
        if self.named is not None:
            text += ", named" if self.named else ", NAMED WRONGLY"
        if self.recovered_seconds is None:
            return f"{text}, NOT RECOVERED: {self.remark}"
        return f"{text}, recovered after {self.recovered_seconds:.2f} s, {self.steps_lost} steps"


@dataclasses.dataclass(kw_only=True)
class ChaosResult:
    """All faults of one call. `jobs_equal`: of each job, whether its end is as it should be."""

    model: str
    layout: str
    seed: int
    faults: list[FaultResult] = dataclasses.field(default_factory=list)
    jobs_equal: list[bool] = dataclasses.field(default_factory=list)

    @property
    def survived(self) -> int:
        return sum(fault.survived for fault in self.faults)

    @property
    def equal(self) -> bool:
        return all(self.jobs_equal)

    @property
    def ok(self) -> bool:
        """Every fault was survived and named, and every end is equal."""
        named = all(fault.named is not False for fault in self.faults)
        return self.equal and named and self.survived == len(self.faults)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layout": self.layout,
            "seed": self.seed,
            "total": len(self.faults),
            "survived": self.survived,
            "equal": self.equal,
            "jobs_equal": self.jobs_equal,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
        }


def fault_table(faults: Sequence[FaultResult]) -> list[str]:
    """Counts and seconds by kind."""
    head = ("kind", "total", "survived", "named", "detected s", "recovered s", "steps lost")
    lines = ["{:<11} {:>5} {:>8} {:>7} {:>17} {:>17} {:>10}".format(*head)]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        rows = [fault for fault in faults if fault.kind == kind]
        judged = [fault.named for fault in rows if fault.named is not None]
        named = f"{sum(judged)}/{len(judged)}" if judged else "-"
        lost = sum(fault.steps_lost for fault in rows)
        lines.append(
            f"{kind:<11} {len(rows):>5} {sum(f.survived for f in rows):>8} {named:>7} "
            f"{_span([f.detected_seconds for f in rows]):>17} "
            f"{_span([f.recovered_seconds for f in rows]):>17} {lost:>10}"
        )
    return lines


def _span(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.2f}, max {max(known):.2f}"
