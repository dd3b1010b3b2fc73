"""What a folder comes to as one line of the ledger: a run's, and a server's.

Of a server is compared what was measured with the same in a step: of rounds of tokens and of steps
of prompts those sizes that occurred, as its report does. Throughput is that of rounds, at the
number of requests at which it was highest: how much was asked for is not a server's doing.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.ledger import Figures, LedgerEntry, ServedEntry, ServedFigures

if TYPE_CHECKING:
    from hocket.reporting.record import RunRecord
    from hocket.reporting.served import ServedFigure
    from hocket.spec.run import RunSpec


def of_run(record: RunRecord) -> LedgerEntry | None:
    """The line of one run; None where it took no step or its spec is gone."""
    spec = record.spec
    if spec is None or record.step_seconds is None:
        return None
    fullest = max((row["total"] for row in record.memory), default=None)
    if fullest is None and record.measured is not None:
        fullest = max(record.measured.peak_bytes, default=None)
    pipelined = spec.layout.pp > 1
    measured = Figures(
        step_seconds=record.step_seconds,
        memory=fullest,
        bubble=record.measured.bubble if record.measured is not None and pipelined else None,
    )
    predicted = None
    if record.forecast is not None:
        predicted = Figures(
            step_seconds=record.forecast.step_seconds,
            memory=max(record.forecast.peak_bytes, default=None),
            bubble=record.forecast.bubble if pipelined else None,
        )
    return LedgerEntry(
        **_told_by(spec, record.path),
        steps=_steps(record),
        seq_len=spec.workload.seq_len,
        global_batch=spec.workload.global_batch,
        measured=measured,
        predicted=predicted,
    )


def _steps(record: RunRecord) -> int:
    """Steps in the layout that the run has now, which its figures are of."""
    _, first, last = record.stretches[-1]
    return last - first + 1


def of_server(folder: Path) -> ServedEntry | None:
    """The line of one server; None where it was never ready or its spec is gone."""
    from hocket.reporting import served

    found = served.read(folder)
    spec, counted = found.spec, found.measured
    cache = _figure(served.figures(found), "tokens")
    if spec is None or counted is None or not counted.seconds or cache[1] is None:
        return None
    pairs = {
        "decode_seconds": _mean(served.rounds(found)),
        "prefill_seconds": _mean(served.prompts(found)),
        "tokens_per_second": _figure(served.figures(found), "rate"),
        "cache_tokens": cache,
    }
    then = {name: pair[0] for name, pair in pairs.items() if pair[0]}
    return ServedEntry(
        **_told_by(spec, folder),
        measured=ServedFigures(**{name: pair[1] for name, pair in pairs.items() if pair[1]}),
        predicted=ServedFigures(**then) if found.forecast is not None else None,
        requests=counted.requests,
        output_tokens=counted.output_tokens,
        seconds=counted.seconds,
    )


def _figure(rows: Sequence[ServedFigure], unit: str) -> tuple[float | None, float | None]:
    """Predicted and measured of the one row of a unit that was measured."""
    for row in rows:
        if row.unit == unit and row.measured is not None:
            return row.predicted, row.measured
    return None, None


def _mean(rows: Sequence[ServedFigure]) -> tuple[float | None, float | None]:
    """Predicted and measured seconds, each row as often as it was measured."""
    counted = [row for row in rows if row.measured is not None and row.count]
    total = sum(row.count for row in counted)
    if not total:
        return None, None
    now = sum((row.measured or 0.0) * row.count for row in counted) / total
    if any(row.predicted is None for row in counted):
        return None, now
    return sum((row.predicted or 0.0) * row.count for row in counted) / total, now


def _told_by(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """What every line holds besides figures, of a run that ends now."""
    from hocket import __version__

    words = machine_words(spec.options.device)
    if spec.options.emulate_links is not None:
        words += f", links as {spec.options.emulate_links}"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "run": str(folder.resolve()),
        "command": spec.command,
        "model": spec.model,
        "layout": str(spec.layout),
        "machine": words,
        "fingerprint": hashlib.sha256(words.encode()).hexdigest()[:8],
        "ranks": spec.layout.world_size,
        "dtype": spec.workload.dtype,
    }


def machine_words(device: str = "auto") -> str:
    """This machine in words: its GPUs where runs use them, else its cores."""
    from hocket.jobs.probe import present

    here = present(device)
    cpu = f"{here.host.cores} cores of {here.host.cpu}"
    names = [found.name for found in here.found.devices] if here.kind == "cuda" else []
    gpus = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join([*gpus, cpu])
