"""A comparison for people to read: speed, memory by kind, collectives by name; sweeps as curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hocket.reporting.table import table_text
from hocket.spec.comparison import Comparison, Point, StrategyResult
from hocket.spec.units import format_bytes, format_seconds

KINDS = ("parameters", "gradients", "optimizer", "activations")

_NAMES = (
    "broadcast", "scatter", "gather", "all-gather", "reduce", "all-reduce", "reduce-scatter",
    "all-to-all", "send", "receive",
)  # fmt: skip


def comparison_text(found: Comparison) -> str:
    """All tables of a comparison, and below them what they show."""
    parts = [_speed(found), _memory(found), _collectives(found), "\n".join(_remarks(found))]
    refused = [f"{o.strategy.title} was not run: {o.reason}" for o in found.outcomes if not o.ran]
    return "\n\n".join(part for part in [*parts, "\n".join(refused)] if part)


def _speed(found: Comparison) -> str:
    loaded = any(o.loaded_seconds is not None for o in found.outcomes)
    predicted = any("step_seconds" in o.predicted for o in found.outcomes)
    headers = ["", "layout", "ranks", "a step", "tokens/s"]
    headers += ["predicted"] if predicted else []
    headers += ["busy input"] if loaded else []
    headers += ["idle", "equal"]
    rows = []
    for each in _ran(found.outcomes):
        row: list[object] = [
            each.strategy.title,
            each.strategy.layout.axes_text(),
            str(each.strategy.layout.world_size),
            format_seconds(each.step_seconds),
            f"{found.tokens / each.step_seconds:,.0f}",
        ]
        if predicted:
            seconds = each.predicted.get("step_seconds")
            row.append("-" if seconds is None else format_seconds(seconds))
        if loaded:
            seconds = each.loaded_seconds
            row.append("-" if seconds is None else format_seconds(seconds))
        row.append(f"{each.idle:.0%}")
        row.append({True: "yes", False: "NO", None: "-"}[each.equal])
        rows.append(row)
    text = "speed; idle: fraction of a step in which a rank, on average, does not compute\n"
    if loaded:
        text += (
            f"busy input: a step when preparing each sequence takes {found.input_work:g} ms of "
            "Python\n"
        )
    return text + table_text(headers, rows)


def _memory(found: Comparison) -> str:
    predicted = any("peak_bytes" in o.predicted for o in found.outcomes)
    rows = []
    for each in _ran(found.outcomes):
        peak_rank = each.peak_rank
        if not peak_rank:
            continue
        row: list[object] = [each.strategy.title]
        row += [format_bytes(peak_rank[kind]) for kind in KINDS]
        row.append(format_bytes(peak_rank["total"]))
        if predicted:
            peak = each.predicted.get("peak_bytes")
            row.append("-" if peak is None else format_bytes(peak))
        least = min(each.memory, key=lambda r: r["total"])["total"]
        row.append(format_bytes(least) if len(each.memory) > 1 else "-")
        rows.append(row)
    headers = ["", *KINDS, "in all", *(["predicted"] if predicted else []), "least"]
    return "largest and smallest peak memory per rank, in counted tensor bytes\n" + table_text(
        headers, rows
    )


def _collectives(found: Comparison) -> str:
    ran = list(_ran(found.outcomes))
    used = [n for n in _NAMES if any(r["name"] == n for o in ran for r in o.collectives)]
    if not used:
        return ""
    rows = []
    for each in ran:
        cells = []
        for name in used:
            mine = [row for row in each.collectives if row["name"] == name]
            count, nbytes = (sum(row[key] for row in mine) for key in ("count", "bytes"))
            cells.append(f"{count} x, {format_bytes(nbytes)}" if count else "-")
        rows.append([each.strategy.title, *cells])
    title = "collectives of one step, of all ranks together\n"
    return title + table_text(["", *used], rows)


def _remarks(found: Comparison) -> list[str]:
    """What the tables show, in words; nothing is said that the numbers do not hold."""
    by_name = {o.strategy.name: o for o in found.outcomes if o.ran}
    remarks = []
    threads, data, one = (by_name.get(name) for name in ("threads", "data", "one"))
    if threads is not None and len(threads.memory) > 1:
        first, other = threads.memory[0]["total"], threads.memory[1]["total"]
        remarks.append(
            f"DataParallel's first device holds {format_bytes(first)}, each other "
            f"{format_bytes(other)}: it alone keeps the optimizer, and gathers all outputs."
        )
    if threads is not None and data is not None and threads.loaded_seconds and data.loaded_seconds:
        slower = [(o.loaded_seconds or 0.0) - o.step_seconds for o in (threads, data)]
        remarks.append(
            f"A busy input pipeline costs threads {_signed(slower[0])} a step (one interpreter "
            f"lock), processes {_signed(slower[1])}."
        )
    most = max((o.strategy.layout.world_size for o in by_name.values()), default=1)
    if one is not None and most > found.cores:
        remarks.append(
            f"Up to {most} ranks share {found.cores} cores here, so speed beyond {found.cores} "
            "ranks does not predict separate devices; memory, communication and idle time do."
        )
    return remarks


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _ran(outcomes: Iterable[StrategyResult]) -> Iterable[StrategyResult]:
    return (o for o in outcomes if o.ran)


# --- sweeps ------------------------------------------------------------------------------------


def sweep_text(axis: str, points: Sequence[Point], tokens: int, width: int = 100) -> str:
    """A curve for each way: idle share of the pipeline, or tokens/s over devices.

    Args:
        axis: what was swept.
        points: in the order they were run.
        tokens: of one step.
        width: columns of the terminal.
    """
    speed = axis == "devices"
    what = "tokens/s" if speed else "fraction of the pipeline's time that ranks are idle (bubble)"
    lines = [f"{what}, by {axis}"]
    titles = list(dict.fromkeys(p.outcome.strategy.title for p in points))
    ran = [p for p in points if p.outcome.ran]
    most = max((_value(p, tokens, speed) for p in ran), default=1.0) if speed else 1.0
    room = max(10, min(50, width - 40))
    for title in titles:
        lines += ["", title]
        for point in (p for p in points if p.outcome.strategy.title == title):
            if not point.outcome.ran:
                lines.append(f"  {point.at:>4}  not run: {point.outcome.reason}")
                continue
            value = _value(point, tokens, speed)
            bar = "█" * max(1, round(room * value / most)) if value > 0 else ""
            number = f"{value:,.0f}" if speed else f"{value:.1%}"
            theory = "" if speed else _theory(point)
            step = format_seconds(point.outcome.step_seconds)
            lines.append(f"  {point.at:>4}  {number:>9}  {bar} {step}/step{theory}".rstrip())
    return "\n".join(lines)


def _value(point: Point, tokens: int, speed: bool) -> float:
    return tokens / point.outcome.step_seconds if speed else point.outcome.bubble


def _theory(point: Point) -> str:
    """What equal stages would give: (p - 1) / (m + p - 1), Narayanan et al. 2021, section 2.2."""
    layout = point.outcome.strategy.layout
    count = layout.microbatches or 1
    return f"; equal stages: {(layout.pp - 1) / (count + layout.pp - 1):.1%}"
