"""Two timelines of one schedule, side by side: measured and predicted are the same type."""

from __future__ import annotations

from hocket.reporting.table import table_text
from hocket.spec.timeline import Timeline
from hocket.spec.units import format_seconds


def compare_text(measured: Timeline, predicted: Timeline) -> str:
    """A table of what both say: the step's length, its bubble, and each rank's compute."""
    rows: list[list[str]] = [
        ["pipeline", *_both(measured.pipeline_span, predicted.pipeline_span)],
        ["bubble", f"{measured.bubble:.1%}", f"{predicted.bubble:.1%}", ""],
    ]
    for rank in range(max(measured.num_ranks, predicted.num_ranks)):
        for what, kinds in (("forward", "F"), ("backward", "BIW")):
            rows.append(
                [
                    f"rank {rank} {what}",
                    *_both(measured.busy(rank, kinds), predicted.busy(rank, kinds)),
                ]
            )
    return table_text(["", measured.source, predicted.source, "ratio"], rows)


def _both(measured: float, predicted: float) -> list[str]:
    ratio = f"{measured / predicted:.2f}" if predicted else "-"
    return [format_seconds(measured), format_seconds(predicted), ratio]
