"""The job behind `hocket rehearse --matrix`: every case of the matrix rehearsed, and judged.

Jobs are rehearsed side by side, each by a worker process that executes one job after another; a
worker in which one crashes is replaced.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.jobs.rehearsal_workers import MOST, RehearsalWorkers, StepFailed
from hocket.spec.errors import HocketError, LayoutError, ModelError, OptionError, unknown
from hocket.spec.rehearsal_matrix import (
    CASES,
    CRASHED,
    DIFFERENT,
    HANGS,
    HOST_STEPS,
    LAYERS,
    MEMORY,
    MODELS,
    OK,
    OPTIONS,
    REJECTED,
    ROWS,
    SCHEDULES,
    MatrixJob,
    RehearsalCell,
    RehearsalMatrix,
)

if TYPE_CHECKING:
    from hocket.jobs.rehearse import Rehearsed

Listener = Callable[[RehearsalCell], None]


def chosen_cases(
    models: Sequence[str] = (), schedules: Sequence[str] = (), options: Sequence[str] = ()
) -> tuple[MatrixJob, ...]:
    """The cases of some models, schedules and options; an empty choice takes all.

    Raises:
        OptionError: a name that the matrix does not have; the nearest one is suggested.
    """
    for what, given, known in (
        ("model of the matrix", models, MODELS),
        ("schedule", schedules, SCHEDULES),
        ("option of the matrix", options, tuple(OPTIONS)),
    ):
        for name in given:
            if name not in known:
                message, hint = unknown(what, name, known)
                raise OptionError(message, hint=hint)
    return tuple(
        case
        for case in CASES
        if (not models or case.model in models)
        and (not schedules or case.schedule in schedules)
        and (not options or case.option in options)
    )


def rehearse_matrix(
    cases: Sequence[MatrixJob] = CASES, *, workers: int = MOST, on_cell: Listener | None = None
) -> RehearsalMatrix:
    """Rehearse cases.

    Args:
        workers: processes at once, each about 1 GB.
        on_cell: called with each cell, in the order in which they come.

    Raises:
        OptionError: there is no C++ compiler.
    """
    from datetime import date

    from hocket.jobs.matrix import versions

    begin = time.perf_counter()
    left: queue.SimpleQueue[tuple[int, MatrixJob]] = queue.SimpleQueue()
    for item in enumerate(cases):
        left.put(item)
    events: queue.SimpleQueue[tuple[int, RehearsalCell] | BaseException | None]
    events = queue.SimpleQueue()
    stop = threading.Event()

    def serve() -> None:
        try:
            _rehearse_all(left, events.put, stop)
            events.put(None)
        except BaseException as error:  # raised again by the thread that waits for events
            events.put(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(workers, len(cases)))]
    for thread in threads:
        thread.start()
    cells: dict[int, RehearsalCell] = {}
    running = len(threads)
    try:
        while running:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
                continue
            index, cell = event
            cells[index] = cell
            if on_cell is not None:
                on_cell(cell)
    finally:
        stop.set()
    return RehearsalMatrix(
        cells=tuple(cells[index] for index in sorted(cells)),
        versions=versions(),
        date=date.today().isoformat(),
        seconds=time.perf_counter() - begin,
    )


def _rehearse_all(
    left: queue.SimpleQueue[tuple[int, MatrixJob]],
    put: Callable[[tuple[int, RehearsalCell]], None],
    stop: threading.Event,
) -> None:
    """Rehearse cases until none is left, with one worker process at a time."""
    while not stop.is_set() and not left.empty():
        with RehearsalWorkers(1) as workers:
            while not stop.is_set():
                try:
                    index, case = left.get_nowait()
                except queue.Empty:
                    return
                cell = rehearsed(case, workers)
                put((index, cell))
                if cell.outcome == CRASHED:
                    break  # what the worker still does belongs to that job


def rehearsed(case: MatrixJob, workers: RehearsalWorkers) -> RehearsalCell:
    """Rehearse one case with workers that are there already.

    Raises:
        OptionError: there is no C++ compiler.
    """
    from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job
    from hocket.jobs.request import request

    begin = time.perf_counter()

    def cell(outcome: str, reason: str = "", found: Rehearsed | None = None) -> RehearsalCell:
        return RehearsalCell(
            case=case,
            outcome=outcome,
            reason=" ".join(reason.split()),
            memory=None if found is None else memory_error(found),
            ranks=0 if found is None else found.job.spec.layout.world_size,
            executed=0 if found is None else len(found.executed),
            seconds=round(time.perf_counter() - begin, 2),
        )

    try:
        asked = request({**case.request(), "device": "cuda"})
        job = prepare_rehearsal(asked, layers=max(LAYERS, case.stages), rows=ROWS)
    except HocketError as error:
        return cell(REJECTED, error.message)
    try:
        found = rehearse_job(job, workers=workers)
    except OptionError:
        raise
    except HocketError as error:
        if isinstance(error, LayoutError | ModelError) and not isinstance(error, StepFailed):
            return cell(REJECTED, error.message)
        return cell(CRASHED, _last_line(error.message))
    return cell(*judged(found), found)


def judged(found: Rehearsed) -> tuple[str, str]:
    """Outcome and reason of a rehearsal that every rank has executed."""
    hung = [
        f"{rule}: {len(verdict.waiting)} ranks deadlock: {verdict.waiting[0]}"
        for rule, verdict in found.verdicts.items()
        if not verdict.ends
    ]
    if hung:
        return HANGS, "; ".join(hung)
    reasons = [
        f"{rule}: {verdict.mismatches[0]}"
        for rule, verdict in found.verdicts.items()
        if verdict.mismatches
    ]
    report = found.report
    layout, compiled = found.job.spec.layout, bool(report.generated)
    reasons += report.generated.get("faults", [])
    allowed = max((count for kind, count in HOST_STEPS.items() if layout.offloads(kind)), default=0)
    if layout.ep > 1:  # of every forward of a layer, on the stage with all of them
        allowed += found.job.spec.config["num_hidden_layers"] * (layout.microbatches or 1)
    if sum(row["count"] for row in report.host_reads) > allowed:
        reasons += [
            f"host reads: {row['count']} x {row['what']} at {row['where']}"
            for row in report.host_reads
        ]
    reasons += [
        f"collectives: {row['name']} over {row['axis']} once a {row['phase']}: {row['count']} of "
        f"{row['bytes']} bytes, expected {row['expected_count']} of {row['expected_bytes']}"
        for row in report.collectives
        if row["equal"] is False and not (compiled and row["bytes"] <= row["expected_bytes"])
    ]
    reasons += [f"{kind}: nothing predicted: {why}" for kind, why in found.reasons.items()]
    error = memory_error(found)
    if error is not None and (-error if compiled else abs(error)) > MEMORY:
        reasons.append(f"memory: predicted {error:+.1%} of the rehearsed peak")
    if reasons:
        return DIFFERENT, "; ".join(reasons)
    return OK, ""


def memory_error(found: Rehearsed) -> float | None:
    """Predicted / rehearsed - 1 of the rank where that is furthest from 0, or of compiled layers,
    for which the prediction is an upper limit, least; None: no prediction."""
    report = found.report
    errors: list[float] = [
        predicted / row["total"] - 1
        for predicted, row in zip(report.predicted_peak_bytes, report.peak_bytes, strict=True)
        if predicted is not None
    ]
    if not errors:
        return None
    furthest = min(errors) if report.generated else max((abs(e), e) for e in errors)[1]
    return round(furthest, 4)


def _last_line(text: str) -> str:
    """The rank and the exception of a traceback."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
