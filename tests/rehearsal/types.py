"""Rehearsals of a tiny model of every type of the installed transformers, in training and serving.

python -m tests.rehearsal.types [TYPE ...]      one JSON line a type, layout and kind of step
python -m tests.rehearsal.types --train dp2:zero=2 tp2      of every type, trained at these layouts
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.jobs.rehearsal_workers import RehearsalWorkers, StepFailed
from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.jobs.serving import rehearse as serving
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout

STEPS = (*(("train", layout) for layout in ("dp2", "tp2", "dp2.ep2", "cp2")), ("serve", "tp2"))
"""Each type's kinds of step and layouts."""
OK, REJECTED, CRASHED = "ok", "rejected", "crashed"


def tiny_model(kind: str, workers: RehearsalWorkers, folder: Path, tokens: int = 64) -> str:
    """Write the configuration of a type's tiny model, once; its directory."""
    where = folder / f"{kind}-{tokens}"
    if not where.exists():
        task = {"task": "call", "entry": "tests.rehearsal.inside:tiny_config"}
        (event,) = workers.run([{**task, "arguments": {"kind": kind}}])
        if tokens > event["value"].get("max_position_embeddings", tokens):
            event["value"]["max_position_embeddings"] = tokens
        where.mkdir()
        (where / "config.json").write_text(json.dumps(event["value"]))
    return str(where)


def rehearsed(
    kind: str, step: str, layout: str, workers: RehearsalWorkers, folder: Path, tokens: int = 64
) -> dict[str, Any]:
    """Rehearse a type's tiny model: `kind`, `step`, `layout`, `outcome`, `why`, `error` (of the
    predicted peak memory), `host_reads`, `different` (collectives). `tokens`: of a sequence."""
    row = {"kind": kind, "step": step, "layout": layout}
    try:
        model = tiny_model(kind, workers, folder, tokens)
        if step == "train":
            return {**row, **_train(model, layout, workers, tokens)}
        return {**row, **_serve(model, layout, workers)}
    except HocketError as error:
        return {**row, **_failed(error)}


def _failed(error: HocketError) -> dict[str, Any]:
    crashed = isinstance(error, StepFailed) or "Traceback" in error.message
    notes = getattr(error, "__notes__", [])
    return {"outcome": CRASHED if crashed else REJECTED, "why": error.message, "trace": notes}


def _train(model: str, layout: str, workers: RehearsalWorkers, tokens: int) -> dict[str, Any]:
    given = {"seq_len": tokens, "dtype": "bf16", "device": "cuda", "model": model, "layout": layout}
    found = rehearse_job(prepare_rehearsal(request(given), rows=1), workers=workers)
    report = found.report
    pairs = zip(report.peak_bytes, report.predicted_peak_bytes, strict=True)
    errors = [p / row["total"] - 1 for row, p in pairs if p is not None]
    return {
        "outcome": OK if report.eager["ends"] and report.lazy["ends"] else "hangs",
        "why": "; ".join(f"{k}: {v}" for k, v in found.reasons.items()),
        "error": max(errors, key=abs, default=None),
        "host_reads": [f"{row['what']} {row['where']}" for row in report.host_reads],
        "different": [row for row in report.collectives if row["equal"] is False],
    }


def _serve(model: str, layout: str, workers: RehearsalWorkers) -> dict[str, Any]:
    found = serving.rehearse_replica(
        serving.replica_spec(model, Layout.parse(layout)), workers=workers
    )
    errors = []
    for rank in found.ranks:
        predicted = found.predicted_peak(rank)
        if predicted is not None:
            errors.append(predicted / found.held(found.ranks[rank]) - 1)
    return {
        "outcome": OK if found.ends else "hangs",
        "why": "",
        "error": max(errors, key=abs, default=None),
        "memory": {rank: one["memory"] for rank, one in found.ranks.items()},
        "predicted": found.predicted,
        "host_reads": sorted({f"{r['what']} {r['where']}" for r in found.host_reads()}),
        "different": _other_caches(found),
    }


def _other_caches(found: serving.ServingReport) -> list[dict[str, Any]]:
    """Stages whose bytes of a cached token are not the predicted ones."""
    rows = []
    for one in found.ranks.values() if found.predicted else ():
        memory, stage = one["memory"], found.predicted[one["stage"]]
        held = memory["cache"] / memory["cache_tokens"]
        if held != stage["token"]:
            rows.append({"stage": one["stage"], "token": held, "predicted": stage["token"]})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    from hocket.models import registry

    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal.types")
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--train", nargs="+", default=())
    parser.add_argument("--serve", nargs="+", default=())
    asked = parser.parse_args(arguments)
    steps = [("train", layout) for layout in asked.train]
    steps += [("serve", layout) for layout in asked.serve]
    steps = steps or [*STEPS]
    with RehearsalWorkers() as workers, tempfile.TemporaryDirectory() as folder:
        for kind in asked.kinds or sorted(registry.causal_classes()):
            for step, layout in steps:
                row = rehearsed(kind, step, layout, workers, Path(folder))
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
