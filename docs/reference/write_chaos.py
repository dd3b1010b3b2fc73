"""Write the table of chaos.md from chaos.jsonl, the `--json` of one `hocket chaos` a line.

.venv/bin/python docs/reference/write_chaos.py
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "chaos.md"
RESULTS = FOLDER / "chaos.jsonl"
END = "<!-- end -->\n"


def table(rows: Path) -> str:
    """What became of all faults of a file, by layout and by kind."""
    runs = [json.loads(line) for line in rows.read_text().splitlines()]
    faults = [(run, fault) for run in runs for fault in run["faults"]]
    ends = [equal for run in runs for equal in run["jobs_equal"]]
    named = [f["named"] for _, f in faults if f["named"] is not None]
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    lines = [
        f"{len(faults)} faults, seeds {seeds}: {sum(f['survived'] for _, f in faults)} found and "
        f"survived, {sum(named)} of {len(named)} named rightly; {sum(ends)} of {len(ends)} jobs "
        "end as the undisturbed run, bit by bit.",
        "",
        "| layout | survived | named | | kind | survived | "
        "seconds to detection, median and largest |",
        "|---|---|---|---|---|---|---|",
    ]
    left = [
        f"| `{_short(layout)}` | {_count(found, 'survived')} | {_count(found, 'named')} |"
        for layout, found in _groups([(run["layout"], fault) for run, fault in faults])
    ]
    right = [
        f" | `{kind}` | {_count(found, 'survived')} | {_seconds(found)} |"
        for kind, found in _groups([(fault["kind"], fault) for _, fault in faults])
    ]
    for one, other in itertools.zip_longest(left, right, fillvalue="|  |  |  |"):
        lines.append(one + other)
    return "\n".join(lines) + "\n"


def _short(layout: str) -> str:
    """A layout without its microbatches."""
    return re.sub(r"microbatches=\d+,?", "", layout).rstrip(":")


def _groups(rows: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(name for name, _ in rows)
    return [(name, [fault for key, fault in rows if key == name]) for name in names]


def _count(rows: list[dict[str, Any]], key: str) -> str:
    judged = [row[key] for row in rows if row[key] is not None]
    return f"{sum(judged)} of {len(judged)}"


def _seconds(rows: list[dict[str, Any]]) -> str:
    known = [row["detected_seconds"] for row in rows if row["detected_seconds"] is not None]
    return f"{statistics.median(known):.2f}, {max(known):.2f}" if known else ""


def page() -> str:
    """The page with the table."""
    before, begin, rest = PAGE.read_text().partition(f"<!-- from {RESULTS.name} -->\n")
    return before + begin + "\n" + table(RESULTS) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
