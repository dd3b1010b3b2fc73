"""Run folders next to a name that is none, or in `runs/`: what the user may have meant."""

from __future__ import annotations

from pathlib import Path

from hocket.spec.errors import nearest

DEFAULT = "runs"
"""The folder of runs that were given no name."""

MOST_LISTED = 8
"""Names of a hint."""


def hint_of_runs(path: Path) -> str:
    """The run of nearest name in the same folder, else the names of its runs, else how to make
    one."""
    return nearest_run(path) or f"hocket train MODEL --data DATA --run {path}"


def nearest_run(path: Path) -> str | None:
    """As `hint_of_runs`; None where the folder has no runs."""
    runs = {one.parent.name: one.parent for one in path.parent.glob("*/run.json")}
    runs = runs or {f.parent.name: f.parent for f in path.parent.glob(f"{DEFAULT}/*/run.json")}
    found = nearest(path.name, runs)
    if found is not None:
        return f"did you mean {runs[found]}?"
    if not runs:
        return None
    folder = next(iter(runs.values())).parent
    return f"the runs in {folder}: {', '.join(sorted(runs)[:MOST_LISTED])}"
