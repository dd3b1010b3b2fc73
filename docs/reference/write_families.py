"""Writes the tables of every model type from the rows of `hocket check --matrix --json`.

    .venv/bin/python -m hocket check --matrix --json > rows.jsonl
    .venv/bin/python docs/reference/write_families.py rows.jsonl [MORE ...]

writes families.md, of training, and

    .venv/bin/python -m hocket check --serve --matrix --json > rows.jsonl
    .venv/bin/python docs/reference/write_families.py --serve rows.jsonl [MORE ...]

served-families.md. These rows are put together with those of the run before, which are kept next to
each page as .jsonl (`packed`): a later cell takes an earlier one's place. A test compares the pages
with what this would write.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hocket.spec.matrix import (
    LAYOUTS,
    SERVED_LAYOUTS,
    SWITCHED,
    Cell,
    Matrix,
    TypeRow,
)

PAGE = Path(__file__).with_name("families.md")
ROWS = PAGE.with_suffix(".jsonl")
SERVED_PAGE = Path(__file__).with_name("served-families.md")
SERVED_ROWS = SERVED_PAGE.with_suffix(".jsonl")
SUMMARY = PAGE.parents[2] / "src/hocket/catalogue/data/families.json"
"""Of both, for `hocket models`."""
SERVED_RUN = (
    "2026-11-23 (`ep`, recurrent and latent, no `+`: 11-25; recurrent `+`: 11-26; `cp2.tp2`: "
    "11-26, in steps so short that every context rank computed all tokens, of recurrent types "
    "11-27 and 11-28, in steps that are split; `cp2` and `cp4`: 11-28, in steps that are split)"
)
"""Days of the runs whose rows are kept."""
MARKS = {"equal": "=", "rejected": "-", "different": "X", "crashed": "!"}

HEAD = """\
# Every model type

Written by `docs/reference/write_families.py` from the rows of `hocket check --matrix --json`; do
not edit.

For every type of which the installed transformers has a causal language model, a tiny random model
of its class defaults (four layers or two of each kind, hidden size 64, four heads) trains three
steps at each layout, and its loss, every gradient and every value after the optimizer's step are
compared with what the plain transformers model computes in one process ([what counts as
equal](../how-to/check.md)). A type whose name ends in `+` is the second configuration of its class,
with its optional switches reversed (biases, norms of queries and keys, ties, the router's loss), as
far as the class accepts them together; they are in the last list. A type or a cell that is missing
here has not been run. "Train" means: every layout tried that splits along these axes, or some of
them, is equal. Which cells are rejected before ranks start was looked up for all of them on 30
November 2026; what was equal before was not run again.
"""


SERVED_HEAD = """\
# Every model type, served

Written by `docs/reference/write_families.py --serve` from the rows of
`hocket check --serve --matrix --json`; do not edit.

For every type of which the installed transformers has a causal language model, the server of each
layout is started on a tiny model of its class defaults (the configurations of
[the training matrix](families.md)) with random weights, and its greedy tokens and log-probabilities
are compared with plain transformers: prefill in one piece and in chunks, decode from the paged
cache, batching, prefix reuse and preemption ([what counts as equal](../how-to/check.md#a-server)).
A row whose type ends with `+` has the optional switches of the configuration reversed, as far as
the class accepts them together; they are in the last list.
"""


def served_page(rows: tuple[TypeRow, ...]) -> str:
    """The page of the serving matrix."""
    layouts = tuple(t for t in SERVED_LAYOUTS if any(row.cell(t) for row in rows))
    found = Matrix(layouts=layouts, rows=rows)
    plain = [row for row in rows if not row.kind.endswith(SWITCHED)]
    everywhere = [
        row for row in plain if all(cell.outcome == "equal" for cell in row.cells) and row.cells
    ]
    ratios = [cell.ratio for row in rows for cell in row.cells if cell.outcome == "equal"]
    worst = max((ratio for ratio in ratios if ratio is not None), default=0.0)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes().items())
    lines = [
        SERVED_HEAD,
        f"Run of {SERVED_RUN}, `hocket check --serve --matrix` on two CPU cores: {len(plain)} "
        f"types of transformers {_version()} and {len(rows) - len(plain)} rows with reversed "
        f"switches at {len(layouts)} layouts: {counts}. {len(everywhere)} types are equal at all "
        f"of them. The largest difference that counts as equal here is {worst:.2f} of what is "
        "allowed. A type or a row that is missing here has not been run.",
        "",
        "`=` equal, `-` rejected, `X` different, `!` crashed. *ratio*: the largest difference of "
        "all, relative to what is allowed.",
        "",
        "| type | "
        + " | ".join(f"{_column(i)} `{layout}`" for i, layout in enumerate(layouts))
        + " | ratio |",
        "|---|" + "---|" * (len(layouts) + 1),
        *(_line(row, layouts).removesuffix(" |  |") + " |" for row in rows),
        "",
        "## What is rejected, and why",
        "",
        *(line.replace("rejected: ", "") for line in _reasons(found)),
        "## Reversed switches",
        "",
        *(f"- `{row.kind}`: {_plain(row.switches)}" for row in rows if row.switches),
    ]
    return "\n".join(lines) + "\n"


def page(rows: tuple[TypeRow, ...]) -> str:
    """The whole page."""
    layouts = tuple(t for t in LAYOUTS if any(row.cell(t) for row in rows))
    every = Matrix(layouts=layouts, rows=rows)
    found = Matrix(
        layouts=layouts, rows=tuple(row for row in rows if not row.kind.endswith(SWITCHED))
    )
    second = Matrix(layouts=layouts, rows=tuple(row for row in rows if row.kind.endswith(SWITCHED)))
    split = found.train_under("dp", "pp", "tp", "zero")
    sliced = found.train_under("dp", "pp", "tp", "zero", "sequence")
    inferred = {row.kind for row in rows if row.inferred}
    whole = sum(1 for kind in split for row in rows if row.kind == kind and row.note)
    lines = [
        HEAD,
        f"{len(found.rows)} types of transformers {_version()} at {len(layouts)} layouts: "
        f"{_counts(found)}. {len(second.rows)} of them were run in the second configuration: "
        f"{_counts(second)}.",
        "",
        f"- {len(found.train_under('dp', 'zero'))} types train under data parallelism and ZeRO;",
        f"- {len(found.train_under('dp', 'pp', 'zero'))} under pipeline, data and ZeRO, in every "
        "combination tried;",
        f"- {len(split)} also under tensor parallelism, {len(inferred & set(split))} of them by a "
        f"plan that was inferred from what their tiny model computes. {whole} of the {len(split)} "
        "replicate some blocks on every rank, for the reason given below;",
        f"- {len(sliced)} also with sequence parallelism;",
        f"- {len(found.train_under('cp'))} under context parallelism, "
        f"{len(found.train_under('cp', 'pp', 'tp'))} together with pipeline and tensor "
        "parallelism;",
        f"- {len(found.train_under('dp', 'ep'))} under expert parallelism.",
        "",
        "| | layout |",
        "|---|---|",
        *(f"| {_column(i)} | `{layout}` |" for i, layout in enumerate(layouts)),
        "",
        "`=` equal, `-` rejected, `X` different, `!` crashed. *ratio*: the largest difference of "
        "all, relative to what is allowed. *i*: the tensor plan is inferred.",
        "",
        "| type | " + " | ".join(_column(i) for i in range(len(layouts))) + " | ratio | |",
        "|---|" + "---|" * (len(layouts) + 2),
        *(_line(row, layouts) for row in rows),
        "",
        "## What is rejected, and why",
        "",
        *(line.replace("rejected: ", "") for line in _reasons(every)),
        "## Blocks that tensor parallelism replicates",
        "",
        *(f"- `{row.kind}`: {_plain(row.note)}" for row in rows if row.note and row.kind in split),
        "",
        "## Reversed switches",
        "",
        *(f"- `{row.kind}`: {_plain(row.switches)}" for row in rows if row.switches),
    ]
    return "\n".join(lines) + "\n"


def _counts(found: Matrix) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes().items())


def _line(row: TypeRow, layouts: tuple[str, ...]) -> str:
    cells = [row.cell(layout) for layout in layouts]
    marks = [MARKS[cell.outcome] if cell else " " for cell in cells]
    ratios = [c.ratio for c in cells if c and c.outcome == "equal" and c.ratio is not None]
    ratio = f"{max(ratios):.2f}" if ratios else ""
    return f"| {row.kind} | {' | '.join(marks)} | {ratio} | {'i' if row.inferred else ''} |"


def _reasons(found: Matrix) -> list[str]:
    """The reasons, each with the types and columns it concerns."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in found.rows:
        for index, layout in enumerate(found.layouts):
            cell = row.cell(layout)
            if cell is not None and cell.outcome != "equal":
                kind = row.kind.removesuffix("*")
                reason = cell.reason.replace(repr(kind), "it").replace(kind, "it")
                reason = reason.replace("it (it)", "it")
                reasons[f"{cell.outcome}: {reason}"][row.kind].append(_column(index))
    text = []
    for reason, kinds in sorted(reasons.items(), key=lambda each: (-len(each[1]), each[0])):
        whole = len(found.layouts)
        who = ", ".join(
            f"`{kind}`" + ("" if len(columns) == whole else f" ({''.join(columns)})")
            for kind, columns in kinds.items()
        )
        text += [f"- {_plain(reason)}", f"  {who}", ""]
    return text


def _version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "?"


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", r"\<").replace("|", r"\|")


def _column(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index]


def packed(rows: tuple[TypeRow, ...]) -> str:
    """Rows as they are kept, without how long each cell took: a line of the layouts and the
    reasons, then a line a type. Its cells are [mark, number of the reason, columns, ratios] for
    each outcome and reason, without ratios where nothing was compared; of what a row leaves at its
    default there is nothing."""
    used = {cell.layout for row in rows for cell in row.cells}
    order = next(order for order in (LAYOUTS, SERVED_LAYOUTS) if used <= set(order))
    layouts = [layout for layout in order if layout in used]
    reasons: dict[str, int] = {}
    lines = []
    for row in rows:
        groups: dict[tuple[str, int], list[tuple[str, float | None]]] = defaultdict(list)
        for index, layout in enumerate(layouts):
            if (cell := row.cell(layout)) is not None:
                reason = reasons.setdefault(cell.reason, len(reasons))
                ratio = None if cell.ratio is None else float(f"{cell.ratio:.6g}")
                groups[MARKS[cell.outcome], reason].append((_column(index), ratio))
        cells = []
        for (mark, reason), found in groups.items():
            columns, ratios = zip(*found, strict=True)
            compared = [ratios] if any(ratio is not None for ratio in ratios) else []
            cells.append([mark, reason, "".join(columns), *compared])
        values = {
            field.name: getattr(row, field.name)
            for field in dataclasses.fields(row)
            if field.name != "cells" and getattr(row, field.name) != field.default
        }
        lines.append({**values, "cells": cells})
    head = {"layouts": layouts, "reasons": list(reasons)}
    return "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in (head, *lines))


def unpacked(text: str) -> tuple[TypeRow, ...]:
    """The inverse of `packed`, but for the seventh digit of a ratio."""
    head, *lines = (json.loads(line) for line in text.splitlines())
    layouts, outcomes = head["layouts"], {mark: outcome for outcome, mark in MARKS.items()}
    rows = []
    for line in lines:
        cells = [
            Cell(
                layout=layouts[ord(column) - ord("a")],
                outcome=outcomes[mark],
                reason=head["reasons"][reason],
                ratio=ratios[0][index] if ratios else None,
            )
            for mark, reason, columns, *ratios in line["cells"]
            for index, column in enumerate(columns)
        ]
        cells.sort(key=lambda cell: layouts.index(cell.layout))
        rows.append(TypeRow(**{**line, "cells": tuple(cells)}))
    return tuple(rows)


def merged_rows(rows: Iterable[TypeRow]) -> tuple[TypeRow, ...]:
    """Rows of several runs, one for each type: a later cell of a layout takes the earlier's
    place."""
    found: dict[str, TypeRow] = {}
    for row in rows:
        old = found.get(row.kind)
        if old is not None:
            cells = {cell.layout: cell for cell in (*old.cells, *row.cells)}
            row = dataclasses.replace(row, cells=tuple(cells.values()))
        found[row.kind] = row
    return tuple(found[kind] for kind in sorted(found))


def read(kept: Path, files: Sequence[Path] = ()) -> tuple[TypeRow, ...]:
    """The kept rows, put together with those of files."""
    rows = [TypeRow.from_json(line) for file in files for line in file.read_text().splitlines()]
    return unpacked(packed(merged_rows([*unpacked(kept.read_text()), *rows])))


def summary(trained: tuple[TypeRow, ...], served: tuple[TypeRow, ...]) -> str:
    """What `hocket models` prints of each type: axes under which it is equal, as JSON; of what is
    rejected the reason."""
    found: dict[str, dict[str, object]] = {}
    for row in trained:
        if row.kind.endswith(SWITCHED):
            continue
        axes = ("dp", "pp", "tp", "cp", "ep", "zero", "sequence")
        with_ = {"zero": "dp", "sequence": "tp", "ep": "dp"}
        every = [a for a in axes if row.trains_under(*filter(None, (with_.get(a), a)))]
        why = next(
            (
                cell.reason
                for cell in row.cells
                if cell.outcome != "equal" and "has no experts" not in cell.reason
            ),
            "",
        )
        found[row.kind] = {"trains": every, "why": why}
    for row in served:
        if row.kind.endswith(SWITCHED):
            continue
        one = found.setdefault(row.kind, {"trains": [], "why": ""})
        axes = {"dp1": "dp", "tp2": "tp", "pp2": "pp", "cp2": "cp", "dp2.ep2": "ep"}
        equal = {c.layout for c in row.cells if c.outcome == "equal"}
        one["serves"] = [axis for layout, axis in axes.items() if layout in equal]
        one["why_served"] = next(
            (
                c.reason
                for c in row.cells
                if c.outcome != "equal" and "has no experts" not in c.reason
            ),
            "",
        )
    lines = [f"{json.dumps(kind)}: {json.dumps(found[kind])}" for kind in sorted(found)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    served = "--serve" in sys.argv[1:]
    target, kept = (SERVED_PAGE, SERVED_ROWS) if served else (PAGE, ROWS)
    files = [Path(name) for name in sys.argv[1:] if name != "--serve"]
    found = read(kept, files)
    kept.write_text(packed(found), encoding="utf-8")
    target.write_text((served_page if served else page)(found), encoding="utf-8")
    SUMMARY.write_text(summary(read(ROWS), read(SERVED_ROWS)), encoding="utf-8")
    print(f"wrote {target}, {kept} and {SUMMARY}")
