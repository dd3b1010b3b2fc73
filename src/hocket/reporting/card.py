"""The report card as text: a line for each check, with the command that repeats it."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.spec.doctor import CANNOT, CardLine, ReportCard, Value

_UNITS = (
    ("flops_per_second", 1e12, "TFLOP/s"),
    ("bytes_per_second", 1e9, "GB/s"),
    ("tokens_per_second", 1.0, "tokens/s"),
    ("seconds", 1e-3, "ms"),
    ("bytes", 1e6, "MB"),
)
"""Ends of names, what values are divided by, and the unit that is printed."""

SHOWN = 6
"""Figures of a line in text; all of them are in the JSON."""


def heading(line: CardLine, before: CardLine | None) -> str:
    """The group of a line that begins one, else nothing."""
    return "" if before is not None and before.group == line.group else line.group


def line_text(line: CardLine, width: int) -> list[str]:
    """One check: status, id, seconds and command; below it the reason or the figures.

    Args:
        line: the check.
        width: of the ids.
    """
    seconds = f"{line.seconds:.1f} s" if line.seconds else ""
    found = [f"  {line.status:<6}  {line.id:<{width}}  {seconds:>7}  {line.command}"]
    if line.reason:
        found += [f"          {text}" for text in line.reason.splitlines()]
    figures = [
        f"{name} {text}{f' (predicted {predicted})' if predicted else ''}"
        for name, text, predicted in formatted(line.values, line.predicted)
    ]
    if figures and line.status != CANNOT:
        found.append(f"          {', '.join(figures[:SHOWN])}")
    return found


def formatted(
    values: Mapping[str, Value], predicted: Mapping[str, Value]
) -> list[tuple[str, str, str]]:
    """Name, value and prediction of each figure, with units; the last is empty without one."""
    return [
        (
            _short(name),
            _value(name, value),
            _value(name, predicted[name]) if name in predicted else "",
        )
        for name, value in values.items()
    ]


def _short(name: str) -> str:
    for end, _, _ in _UNITS:
        if name.endswith(end) and name != end:
            name = name.removesuffix(end).rstrip("_")
            break
    return name.replace("_", " ")


def _value(name: str, value: Value) -> str:
    if isinstance(value, str | bool):
        return str(value).lower() if isinstance(value, bool) else value
    for end, scale, unit in _UNITS:
        if name.endswith(end):
            return f"{value / scale:,.3g} {unit}" if abs(value / scale) < 1e3 else (
                f"{value / scale:,.0f} {unit}"
            )  # fmt: skip
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def card_counts(card: ReportCard) -> str:
    """The counts, and whether a GPU executed the checks."""
    counts = card.counts
    text = (
        f"{len(card.lines)} check{'s' * (len(card.lines) != 1)}: "
        f"{counts['pass']} pass, {counts['fail']} fail, "
        f"{counts['cannot']} cannot"
    )
    if card.executed_on_gpu:
        return f"{text}; {card.seconds:.0f} s"
    waiting = sum(line.status == CANNOT for line in card.lines)
    if not waiting:
        return f"{text}; {card.seconds:.0f} s"
    return (
        f"{text} ({card.rehearsed} of them rehearsed: ok); {card.seconds:.0f} s\n"
        f"Waiting for a GPU: {waiting} of them."
    )
