"""Every collective of a step by its name, compared with theory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hocket.reporting.table import table_text
from hocket.spec.units import format_bytes

_PER = {"microbatch": "microbatches", "step": "step", "other": "other"}


def collectives_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of collectives.

    Args:
        rows: of name, axis, phase, count and bytes, as a recorder gives them; with
            `expected_count` and `expected_bytes` too, as `cost.communication.differences` gives
            them, theory is printed next to it, and a line says whether all is equal.
    """
    found = list(rows)
    if not found:
        return "no communication"
    theory = all("expected_count" in row for row in found)
    headers = ["collective", "axis", "counted by", "count", "bytes"]
    if theory:  # each number next to its expected one; the whole fits into 80 columns
        headers[4:] = ["in theory", "bytes", "in theory", "equal"]
    lines = []
    for row in found:
        line = [row["name"], row["axis"], _PER[row["phase"]], row["count"], row["bytes"]]
        if theory:
            equal = row.get(
                "equal",
                (row["count"], row["bytes"]) == (row["expected_count"], row["expected_bytes"]),
            )
            line.insert(4, row["expected_count"])
            line += [row["expected_bytes"], "yes" if equal else "NO"]
        lines.append(line)
    text = table_text(headers, lines)
    total = sum(row["bytes"] for row in found)
    text += f"\n{sum(row['count'] for row in found):,} collectives, {format_bytes(total)}"
    if theory:
        wrong = sum(line[-1] == "NO" for line in lines)
        text += (
            f"; {wrong} of {len(lines)} rows differ from theory"
            if wrong
            else "; every count and every byte as in theory"
        )
    return text
