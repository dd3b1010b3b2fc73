"""Figures: the report as one picture, drawn by matplotlib.

matplotlib draws without a display or a browser, and writes every kind of picture; a page in a
headless browser would need one to be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.reporting.decomposition import PARTS
from hocket.reporting.payload import run_parts, run_verdict
from hocket.reporting.record import RunRecord
from hocket.spec.errors import OptionError
from hocket.spec.forecast import KINDS
from hocket.spec.install import install_line
from hocket.spec.schedule import RECEIVES, SENDS
from hocket.spec.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of the page (Okabe and Ito, 2008), which eyes that see no red or green tell apart.
COLOURS = {
    "forward": "#0072b2", "backward": "#009e73", "weight gradient": "#cc79a7",
    "optimizer": "#3f444c", "send": "#e69f00", "receive": "#56b4e9", "collective": "#d55e00",
    "idle": "#e4e4df",
}  # fmt: skip
_PARTS = ("#0072b2", "#d55e00", "#606670", "#cc79a7", "#e4e4df")
_KINDS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00")


def category(kind: str) -> str:
    """What an event is drawn as."""
    if kind in ("F", "optimizer"):
        return "forward" if kind == "F" else kind
    if kind in ("B", "I", "OVERLAP_F_B"):
        return "backward"
    if kind == "W":
        return "weight gradient"
    if kind in (*SENDS, "send"):
        return "send"
    return "receive" if kind in (*RECEIVES, "receive") else "collective"


def save_run_figure(
    records: Sequence[RunRecord], own_bubbles: Sequence[float | None], path: Path
) -> None:
    """Draw one or two runs into a picture; its form follows the name's ending.

    Raises:
        OptionError: matplotlib is not installed, or writes no such form.
    """
    boards = [
        (record, timeline)
        for record in records
        for timeline in (record.predicted, record.measured)
        if timeline is not None
    ]
    tall = [0.9 + 0.24 * timeline.num_ranks for _, timeline in boards]
    figure = new_figure(13, 1.5 + sum(tall) + 3.4)
    title = " and ".join(f"{r.name} ({r.layout})" for r in records)
    figure.suptitle(no_formula(title), fontsize=14, fontweight="bold", x=0.01, ha="left")
    grid = figure.add_gridspec(len(boards) + 1, 3, height_ratios=[*tall, 3.4])
    longest = max((timeline.duration for _, timeline in boards), default=1.0) or 1.0
    for row, (record, timeline) in enumerate(boards):
        name = timeline.source if len(records) == 1 else f"{record.name}: {timeline.source}"
        _timeline(figure.add_subplot(grid[row, :]), timeline, longest, name, last=row == 0)
    _parts(figure.add_subplot(grid[-1, 0]), records, own_bubbles)
    _memory(figure.add_subplot(grid[-1, 1]), records)
    _loss(figure.add_subplot(grid[-1, 2]), records)
    write_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty picture, in inches. Raises OptionError: matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "--format png needs the package matplotlib", hint=install_line("report")
        ) from None
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write in the form that the name's ending asks for. Raises OptionError: it has none."""
    try:
        figure.savefig(path, format=path.suffix.lstrip(".") or "png")
    except ValueError as error:
        raise OptionError(f"{path}: {error}", hint=f"--out {path.with_suffix('.png')}") from None


def _timeline(ax: Axes, timeline: Timeline, longest: float, name: str, *, last: bool) -> None:
    bars: dict[tuple[str, float], list[tuple[float, float, int]]] = {}
    for event in timeline.events:
        high = 0.62 if event.lane == "compute" else 0.24
        bars.setdefault((category(event.kind), high), []).append(
            (event.start * 1e3, (event.end - event.start) * 1e3, event.rank)
        )
    for rank in range(timeline.num_ranks):
        ax.broken_barh([(0, timeline.duration * 1e3)], (rank, 0.62), color=COLOURS["idle"])
    for (kind, high), spans in bars.items():
        for rank in range(timeline.num_ranks):
            mine = [(start, wide) for start, wide, at in spans if at == rank]
            if mine:
                low = rank if high > 0.5 else rank + 0.64
                ax.broken_barh(mine, (low, high), color=COLOURS[kind], linewidth=0)
    ax.set_xlim(0, longest * 1e3)
    ax.set_ylim(timeline.num_ranks, -0.2)
    ax.set_yticks([rank + 0.45 for rank in range(timeline.num_ranks)])
    ax.set_yticklabels([f"rank {rank}" for rank in range(timeline.num_ranks)], fontsize=8)
    ax.tick_params(length=0)
    ax.set_title(no_formula(f"{name}: {timeline.duration * 1e3:.4g} ms"), loc="left", fontsize=11)
    ax.set_xlabel("milliseconds", fontsize=8)
    _bare(ax)
    if last:
        handles: list[Any] = [_patch(c) for c in COLOURS.values()]
        ax.legend(
            handles, list(COLOURS), ncols=len(COLOURS), fontsize=8, frameon=False,
            loc="lower right", bbox_to_anchor=(1, 1), handlelength=1,
        )  # fmt: skip


def _parts(ax: Axes, records: Sequence[RunRecord], own_bubbles: Sequence[float | None]) -> None:
    rows = []
    said = ""
    for record, own in zip(records, own_bubbles, strict=True):
        parts = run_parts(record, own)
        said = said or run_verdict(parts)
        for found, name in ((parts.predicted, "predicted"), (parts.measured, "measured")):
            if found is not None:
                rows.append((name if len(records) == 1 else f"{record.name} {name}", found.mean))
    _stack(ax, rows, PARTS, _PARTS, 1e3)
    ax.set_title("where that step's time goes (ms)", loc="left", fontsize=11)


def _memory(ax: Axes, records: Sequence[RunRecord]) -> None:
    rows = []
    for record in records:
        prefix = "" if len(records) == 1 else f"{record.name} "
        then = record.forecast.memory if record.forecast else ()
        for rank, row in enumerate(record.memory[:8]):
            if rank < len(then):
                predicted = {k: float(then[rank].get(k, 0)) for k in KINDS}
                rows.append((f"{prefix}rank {rank} predicted", predicted))
            now = " measured" if then else ""
            rows.append((f"{prefix}rank {rank}{now}", {k: float(row[k]) for k in KINDS}))
    _stack(ax, rows, KINDS, _KINDS, 1e-6)
    ax.set_title("peak tensor memory (MB), first 8 ranks", loc="left", fontsize=11)


def _stack(
    ax: Axes,
    rows: Sequence[tuple[str, dict[str, float]]],
    names: Sequence[str],
    colours: Sequence[str],
    scale: float,
) -> None:
    left = [0.0] * len(rows)
    for name, colour in zip(names, colours, strict=True):
        wide = [values[name] * scale for _, values in rows]
        ax.barh(range(len(rows)), wide, left=left, color=colour, label=name, height=0.7)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    ax.set_yticks(range(len(rows)), [no_formula(label) for label, _ in rows], fontsize=8)
    ax.invert_yaxis()
    ax.tick_params(length=0)
    _bare(ax)
    if rows:
        ax.legend(
            fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3
        )
    else:
        ax.text(0.5, 0.5, "not known", ha="center", transform=ax.transAxes, fontsize=9)


def _loss(ax: Axes, records: Sequence[RunRecord]) -> None:
    for record, colour in zip(records, ("#0072b2", "#d55e00"), strict=False):
        points = [(row["step"], row["loss"]) for row in record.metrics if "loss" in row]
        ax.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            color=colour,
            label=no_formula(record.name),
        )
        held = [
            (row["step"], row["held_out_loss"])
            for row in record.metrics
            if row.get("held_out_loss") is not None
        ]
        ax.plot([p[0] for p in held], [p[1] for p in held], "o", color=colour, markersize=4)
    ax.set_title("loss (dots: held out)", loc="left", fontsize=11)
    ax.set_xlabel("step", fontsize=8)
    _bare(ax)
    if len(records) > 1:
        ax.legend(fontsize=8, frameon=False)


def _bare(ax: Axes) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(labelsize=8)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)


def no_formula(text: str) -> str:
    """Dollar signs as they are: a name is no formula."""
    return text.replace("$", r"\$")
