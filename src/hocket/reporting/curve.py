"""A curve in the terminal: a column is the mean of a few values, filled from below.

7.64 |▇▅▃
     |███▇▅▄▃▂▂▁
4.58 |██████████▇▇▆▆▆▅▅▅▅
      1                 300
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FILL = " ▁▂▃▄▅▆▇█"


def curve_text(values: Sequence[float], width: int = 80, height: int = 5) -> str:
    """Draw values over their number, counted from 1.

    The axis does not begin at zero: the lowest column is filled by one eighth of a line, the
    highest one to the top. Values that are not finite leave their column to the others of it.

    Args:
        values: at least one finite one, else nothing is drawn.
        width: columns of the terminal.
        height: lines that the curve may fill.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    margin = max(len(f"{bound:.3g}") for bound in (min(finite), max(finite))) + 2
    columns = max(1, min(len(values), width - margin))
    means = []
    for column in range(columns):
        first, last = (len(values) * c // columns for c in (column, column + 1))
        part = [v for v in values[first:last] if math.isfinite(v)]
        means.append(sum(part) / len(part) if part else None)
    low = min(m for m in means if m is not None)
    high = max(m for m in means if m is not None)
    eighths = [
        0 if m is None else 1 + round((m - low) / (high - low or 1.0) * (8 * height - 1))
        for m in means
    ]
    lines = []
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.3g}", 0: f"{low:.3g}"}.get(row, "")
        cells = "".join(_FILL[min(8, max(0, e - 8 * row))] for e in eighths)
        lines.append(f"{label:>{margin - 2}} |{cells}".rstrip())
    end = str(len(values)).rjust(columns - 1) if columns > 1 else ""
    return "\n".join([*lines, " " * margin + "1" + end])
