"""Writes docs/reference/rehearsals.md from the cells of `hocket rehearse --matrix --json`.

    .venv/bin/python -m hocket rehearse --matrix --json > cells.jsonl
    .venv/bin/python docs/reference/write_rehearsals.py cells.jsonl [MORE ...]

Cells of several files are merged: a later one replaces an earlier one of the same job. The cells
are stored next to the page, in rehearsals.jsonl; a test compares the page with what this would
write.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from hocket.spec.rehearsal_matrix import (
    CASES,
    LAYERS,
    MEMORY,
    MODELS,
    OPTIONS,
    ROWS,
    SCHEDULES,
    SEQ_LEN,
    MatrixJob,
    RehearsalCell,
    RehearsalMatrix,
    flat_layouts,
    pipelined_layouts,
)

PAGE = Path(__file__).with_name("rehearsals.md")
CELLS = PAGE.with_suffix(".jsonl")
MARKS = {"ok": "", "rejected": "-", "different": "X", "hangs": "H", "crashed": "!"}

HEAD = f"""\
# Rehearsal matrix

Written by `docs/reference/write_rehearsals.py` from the output of `hocket rehearse --matrix
--json`; do not edit.

Each job is one training step of a tiny model ({LAYERS} layers, or as many as there are stages;
{ROWS} sequences of {SEQ_LEN} tokens a microbatch), executed rank by rank on fake CUDA tensors of an
H100 by the code that trains. No GPU has executed any of them yet. A job is *ok* if

- it completes under both rules of NCCL's communicators (`eager`: one queue for a group; `lazy`: one
  queue for a pair) and no rank calls a collective differently;
- its collectives are those that theory expects, in count and bytes, on every executed rank;
- the host never waits for the device within the step. With `offload=optimizer` it waits once, for
  the gradients that the optimizer steps on the host; with `offload=params` four times; with experts
  over ranks once a forward of a layer, for the sizes of uneven all-to-alls;
- predicted peak memory is within {MEMORY:.0%} of the rehearsed peak, on every rank.

With `compile` both predictions are those of uncompiled layers, and upper limits: Inductor keeps
fewer activations, and with sequence parallelism gathers some inputs once instead of twice. Every
kernel that is generated must fit the GPU.

All options are in bf16 unless they name another dtype. Ranks that are equal share one execution.
"""


def page(found: RehearsalMatrix) -> str:
    """The whole page."""
    cells = {cell.case: cell for cell in found.cells}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes().items())
    ranks = sum(cell.ranks for cell in found.cells)
    executed = sum(cell.executed for cell in found.cells)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    lines = [
        HEAD,
        f"{found.date}, {versions}: {len(found.cells)} of {len(CASES)} jobs, {counts}. They have "
        f"{ranks} ranks, of which {executed} were executed.",
        "",
        "A number is predicted / rehearsed - 1 of the rank whose peak memory the prediction misses "
        "most. `X`: a difference, listed below; `-`: rejected; `H`: hangs; `!`: crashed. A blank "
        "cell is not in the matrix or has not been run.",
        "",
        "## Without a pipeline",
        "",
        f"| model | layout | {' | '.join(OPTIONS)} |",
        "|---" * (len(OPTIONS) + 2) + "|",
    ]
    for model in MODELS:
        for layout in flat_layouts(model):
            row = [
                _mark(cells.get(MatrixJob(model=model, layout=layout, schedule="", option=option)))
                for option in OPTIONS
            ]
            lines.append(f"| {model} | `{layout}` | {' | '.join(row)} |")
    lines += [
        "",
        "## With a pipeline",
        "",
        f"Each cell has one option; the next cell has the next one, so that {MODELS[0]} is under "
        "every schedule with every option, and each other model under most.",
        "",
        f"| model | layout | {' | '.join(SCHEDULES)} |",
        "|---" * (len(SCHEDULES) + 2) + "|",
    ]
    piped = {(c.case.model, c.case.layout, c.case.schedule): c for c in found.cells}
    for model in MODELS:
        for layout in pipelined_layouts(model):
            row = []
            for schedule in SCHEDULES:
                cell = piped.get((model, layout, schedule))
                row.append("" if cell is None else f"{cell.case.option} {_mark(cell)}")
            lines.append(f"| {model} | `{layout}` | {' | '.join(row)} |")
    return "\n".join([*lines, "", "## What is not ok, and why", "", *_reasons(found)]) + "\n"


def _mark(cell: RehearsalCell | None) -> str:
    if cell is None:
        return ""
    error = "" if cell.memory is None else f"{cell.memory:+.1%}"
    return f"{MARKS[cell.outcome]} {error}".strip() or "?"


def _reasons(found: RehearsalMatrix) -> list[str]:
    """The reasons, each with its jobs; all differences of memory alone together."""
    reasons: dict[str, list[RehearsalCell]] = defaultdict(list)
    for cell in found.cells:
        if cell.reason:
            alone = cell.reason.startswith("memory: predicted")
            reason = f"memory alone, by more than {MEMORY:.0%}" if alone else cell.reason
            reasons[f"{cell.outcome}: {reason}"].append(cell)
    text: list[str] = []
    for reason, cells in sorted(reasons.items(), key=lambda each: (-len(each[1]), each[0])):
        jobs = sorted(cells, key=lambda cell: -abs(cell.memory or 0))
        shown = [
            f"`{c.case.model} {c.case.layout}` "
            + " ".join(filter(None, (c.case.schedule, c.case.option, _mark(c).lstrip("X "))))
            for c in jobs
        ]
        text += [f"- {_plain(reason)} ({len(jobs)}): {'; '.join(shown)}", ""]
    return text or ["Nothing.", ""]


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", r"\<").replace("|", r"\|")


def read(files: list[Path]) -> RehearsalMatrix:
    """The cells of files, merged, without their seconds; what made them as the last file has it."""
    cells: dict[MatrixJob, RehearsalCell] = {}
    made: dict[str, Any] = {}
    for file in files:
        for line in file.read_text().splitlines():
            data = json.loads(line)
            if "case" not in data:
                made = data
                continue
            cell = RehearsalCell.from_json(line)
            if cell.reason.endswith("is not installed"):
                raise SystemExit(f"{cell.case}: {cell.reason}; rehearse it where it is")
            cells[cell.case] = cell
    return RehearsalMatrix(cells=tuple(cells[case] for case in CASES if case in cells), **made)


if __name__ == "__main__":
    found = read([Path(name) for name in sys.argv[1:]] or [CELLS])
    lines = [*(cell.to_json() for cell in found.cells), found.to_json()]
    CELLS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"wrote {PAGE} and {CELLS}")
