"""Figures: what the rounds measured, reduced to medians and ratios, and printed as a table."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from benchmarks.groups import Contender
from benchmarks.workload import Workload

LOSS_TOLERANCE = 2e-3
"""Losses of the same training on other layouts stay this near; other training leaves it at once."""


@dataclasses.dataclass
class Measured:
    """One contender's figures: step times in seconds by round, losses by step, peak bytes,
    processor seconds of a step over all ranks by round, processors used by others by round."""

    contender: Contender
    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    base_bytes: list[int] = dataclasses.field(default_factory=list)
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    processor_seconds: list[float] = dataclasses.field(default_factory=list)
    disturbed: list[float] = dataclasses.field(default_factory=list)
    absent: str = ""
    failed: str = ""

    @property
    def times(self) -> list[float]:
        return [t for r in self.rounds for t in r]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def spread(self) -> float:
        """Half the distance between the quartiles of the step time, as a share of the median."""
        if len(self.times) < 2:
            return 0.0
        quartiles = statistics.quantiles(self.times, n=4)
        return (quartiles[2] - quartiles[0]) / 2 / self.median

    def loss_error(self, reference: list[float]) -> float:
        """Largest distance from the reference's losses over the steps that both took."""
        return max(abs(a - b) for a, b in zip(self.losses, reference, strict=False))

    def row(self, workload: Workload, best_peer: float | None, reference: list[float]) -> Any:
        """A JSON object: a status alone where nothing was measured."""
        base = {"name": self.contender.name, "axis": self.contender.axis}
        base |= {"ranks": self.contender.world_size, "threads": self.contender.threads}
        if self.absent or self.failed or not self.times:
            status = "absent" if self.absent else "failed"
            return {**base, "status": status, "why": self.absent or self.failed}
        error = self.loss_error(reference) if reference else None
        same = error is None or error <= LOSS_TOLERANCE
        return {
            **base,
            "status": "measured" if same else "computes something else",
            "step_seconds": self.median,
            "fastest_step_seconds": min(self.times),
            "spread": self.spread(),
            "tokens_per_second": workload.tokens / self.median,
            "ratio_to_best_peer": best_peer / self.median if best_peer else None,
            "processor_seconds": statistics.median(self.processor_seconds),
            "processors_used_by_others": statistics.median(self.disturbed),
            "peak_bytes_per_rank": self.peak_bytes,
            "peak_bytes_above_imports": [
                p - b for p, b in zip(self.peak_bytes, self.base_bytes, strict=True)
            ],
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "loss_error": error,
            "rounds": self.rounds,
            "processors_used_by_others_by_round": self.disturbed,
            "losses": self.losses,
        }


def best_peer(measured: list[Measured], axis: str, reference: list[float]) -> float | None:
    """Median step seconds of the fastest peer of an axis that computes the same; None: none."""
    times = [
        m.median
        for m in measured
        if m.contender.axis == axis
        and not m.contender.ours
        and m.times
        and not m.failed
        and (not reference or m.loss_error(reference) <= LOSS_TOLERANCE)
    ]
    return min(times, default=None)


def machine() -> dict[str, Any]:
    """The machine, and how busy it is now."""
    return {
        "processors": os.cpu_count(),
        "model": _processor(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load": os.getloadavg(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(rows: list[dict[str, Any]], title: str) -> str:
    """One axis as text; `x best peer` above 1 is faster than the best peer of this run."""
    head = (
        "",
        "step ms",
        "+-",
        "tokens/s",
        "x best peer",
        "cpu ms",
        "others",
        "peak MB",
        "above imports",
        "loss",
    )
    lines = [head]
    for row in rows:
        if "step_seconds" not in row:
            why = row["why"].strip().splitlines()[-1][:60]
            lines.append((row["name"], row["status"], *[""] * 7, why))
            continue
        ratio = row["ratio_to_best_peer"]
        note = f"{row['first_loss']:.5f} .. {row['last_loss']:.5f}"
        if row["status"] != "measured":
            note += f"  NOT THE SAME TRAINING (off by {row['loss_error']:.3g})"
        lines.append(
            (
                row["name"],
                f"{row['step_seconds'] * 1e3:.1f}",
                f"{row['spread'] * 100:.0f}%",
                f"{row['tokens_per_second']:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                f"{row['processor_seconds'] * 1e3:.0f}",
                f"{row['processors_used_by_others']:.1f}",
                f"{max(row['peak_bytes_per_rank']) / 1e6:.0f}",
                f"{max(row['peak_bytes_above_imports']) / 1e6:.0f}",
                note,
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [title]
    for line in lines:
        first = line[0].ljust(widths[0])
        middle = [c.rjust(w) for c, w in zip(line[1:-1], widths[1:-1], strict=True)]
        text.append("  ".join(["  " + first, *middle, line[-1]]).rstrip())
    return "\n".join(text)
